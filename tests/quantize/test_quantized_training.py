"""Adapters beside weights in codes: the losses and updates of adapters beside the dequantized weights."""

import numpy as np
import pytest
from tiny_quantized import MODEL, save

from mindllm.config import load_config
from mindllm.finetune.transform import initial_weights
from mindllm.models.weights import quantized_parameters
from mindllm.train.engine import ReplicaEngine
from mindllm.weight_files import find_pretrained

YAML = """
lr_schedule: {{type: ConstantWarmUpLR, learning_rate: 1e-2}}
train_dataset: {{data_loader: {{config: {{data_path: unused}}}}}}
context: {{enable_graph_kernel: false, compile_cache: false}}
runner_config: {{batch_size: 4}}
use_parallel: false
load_checkpoint: {directory}
model: {{model_config: {{seq_length: 16, pet_config: {{lora_rank: 4{pet}}}}}}}
"""


def engine(directory, *overrides, pet=""):
    with open("run.yaml", "w", encoding="utf-8") as file:
        file.write(YAML.format(directory=directory, pet=pet))
    config = load_config("run.yaml", overrides)
    made = ReplicaEngine(config)
    made.load_state(find_pretrained(config).run_weights(config))
    return made


def batch(seed):
    random = np.random.default_rng(seed)
    tokens = random.integers(0, MODEL.vocab_size, (4, 17)).astype(np.int32)
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": np.ones((4, 16), np.float32)}


@pytest.mark.parametrize(
    "kind", ["act-order", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gptq", "int8", "nf4", "fp8"))]
)
def test_steps_are_those_beside_dequantized_weights(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "base", kind)
    codes, floats = engine("base"), engine("base", "--model.model_config.quantized_base=dequantize")
    assert not quantized_parameters(floats.model)
    held = quantized_parameters(codes.model)
    assert len(held) == 14 * (2 + (kind in ("gptq", "act-order", "int8")) + (kind == "act-order"))
    before = {name: item.asnumpy().copy() for name, item in held.items()}
    for count in range(3):
        one, other = (item.step(batch(count), 1e-2, 1.0) for item in (codes, floats))
        assert one.loss == pytest.approx(other.loss, rel=1e-5), count
    for name, weight in codes.weights.items():
        np.testing.assert_allclose(weight.asnumpy(), floats.weights[name].asnumpy(), atol=2e-5, err_msg=name)
    assert all(np.array_equal(item.asnumpy(), before[name]) for name, item in held.items())


def test_what_ranks_begin_with_has_the_codes_of_one_device(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "base", "gptq")
    made = engine("base")
    drawn = ReplicaEngine(made.config, training=False)
    found, held = initial_weights(made.config), quantized_parameters(drawn.model)
    assert held
    for name, item in {**drawn.weights, **held}.items():
        assert found[name].dtype == item.asnumpy().dtype, name
        np.testing.assert_array_equal(found[name], item.asnumpy(), err_msg=name)
