"""For the graph of one stage the layers of others are thin, with the norms, sums and names they had."""

import pytest
from small_cluster import cluster_run

from mindllm.config import override_config
from mindllm.parallel import build_parallel_model
from mindllm.parallel.thin_layers import can_be_thin

EXPERTS = {"model_type": "mixtral", "num_layers": 8, "expert_num": 4, "num_experts_chosen": 2}


def built(config, alone=None):
    return build_parallel_model(config, alone).model


@pytest.mark.parametrize("model", [{"num_layers": 8}, EXPERTS], ids=["dense", "experts"])
def test_layers_of_other_stages_keep_what_neighbours_see(model):
    config = cluster_run(pp=4, micro=4, model=model)
    whole, thin = built(config), built(config, alone=1)
    names = [parameter.name for parameter in thin.get_parameters()]
    assert len(set(names)) == len(names)
    assert set(names) < {parameter.name for parameter in whole.get_parameters()}
    of_layers = [{name for name in names if name.startswith(f"model.layers.{number}.")} for number in range(8)]
    assert all(len(of_layer) == len(of_layers[2]) for of_layer in of_layers[2:4])
    rest = {"attention_norm.weight", "ffn_norm.weight"} | (
        {"feed_forward.router.weight"} if "expert_num" in model else set()
    )
    for number in (0, 1, 4, 7):
        left = {name.removeprefix(f"model.layers.{number}.") for name in of_layers[number]}
        assert {name for name in left if "probe" not in name} == rest
    assert [layer.pipeline_stage for layer in thin.model.layers] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_what_exchanges_matrices_of_all_layers_keeps_them():
    config = cluster_run(pp=2, micro=2)
    assert can_be_thin(config)
    assert not can_be_thin(override_config(config, {"optimizer.type": "Muon"}))
    assert not can_be_thin(override_config(config, {"model.model_config.pet_config.pet_type": "lora"}))
    whole = built(override_config(config, {"optimizer.type": "Muon"}), alone=0)
    assert "attention.wq.weight" in " ".join(parameter.name for parameter in whole.model.layers[1].get_parameters())
