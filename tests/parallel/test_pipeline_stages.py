"""Cells on pipeline stages, and gradients in messages: none is forgotten, whatever an architecture is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
from mindspore import nn
from small_cluster import cluster_run

from mindllm.config import RunConfig
from mindllm.config.tuning import PreferenceConfig
from mindllm.finetune.preference import PreferenceLoss, make_reference
from mindllm.finetune.transform import tune
from mindllm.models.causal_lm import CausalLM
from mindllm.models.decoder import Decoder
from mindllm.models.kernels import Kernels
from mindllm.parallel.layer_plan import make_plan
from mindllm.parallel.pipeline import crossings, fuse_gradient_communication, place_on_stages, place_pairs_on_stages

PLAIN = {
    **{"gated_linear_unit": False, "tie_word_embeddings": True, "normalization": "LayerNorm", "n_kv_heads": 4},
    **dict.fromkeys(("mlp_has_bias", "qkv_has_bias", "attn_proj_has_bias"), True),
}
FORMS = {
    "llama": {},
    "a tied head": {"tie_word_embeddings": True},
    "dropout": {"hidden_dropout": 0.1, "attention_dropout": 0.1, "embedding_dropout": 0.1},
    "noise": {"pet_config": {"neftune_noise_alpha": 5.0, "lora_rank": 4}},
    "a head of unit rows": {"model_type": "baichuan", "norm_head": True, "n_kv_heads": 4},
    "a norm of embeddings": {
        **{
            "model_type": "bloom",
            "position_embedding_type": "alibi",
            "embedding_norm": True,
            "hidden_act": "gelu_tanh",
        },
        **{"intermediate_size": 256, **PLAIN},
    },
    "learned positions": {
        **{"model_type": "gpt2", "position_embedding_type": "learned_absolute", "hidden_act": "gelu_tanh", **PLAIN},
        "intermediate_size": 256,
    },
}


def built(form: str) -> tuple[RunConfig, CausalLM, Kernels]:
    """A run on two stages and its model."""
    run = cluster_run(pp=2, micro=2, model=FORMS[form])
    kernels = Kernels.choose(run.model.config, "Ascend")
    return run, CausalLM(run.model.config, kernels), kernels


def unplaced(cell: nn.Cell) -> Iterator[nn.Cell]:
    """Cells with operators that neither have a stage nor are in one that has; model and decoder only join others."""
    if hasattr(cell, "pipeline_stage"):
        return
    if cell._primitives and not isinstance(cell, CausalLM | Decoder):
        yield cell
    for child in cell.cells():
        yield from unplaced(child)


@pytest.mark.parametrize("form", FORMS)
def test_every_cell_with_operators_is_on_a_stage(form):
    run, lm, kernels = built(form)
    assert list(unplaced(lm))
    place_on_stages(lm, make_plan(run), run.model.config, kernels)
    assert not list(unplaced(lm))


def placed_beside_reference() -> PreferenceLoss:
    """What learns from pairs on two stages of two layers each."""
    run = cluster_run(pp=2, micro=2, model={"num_layers": 4, "pet_config": {"lora_rank": 4}})
    plan, kernels = make_plan(run), replace(Kernels.choose(run.model.config, "Ascend"), document_masks=True)
    policy = CausalLM(run.model.config, kernels)
    tune(policy, run.model.config, kernels)
    place = partial(place_on_stages, plan=plan, model=run.model.config, kernels=kernels)
    place(policy)
    reference = make_reference(policy, run.model.config, kernels, place)
    whole = PreferenceLoss(policy, reference, PreferenceConfig(), run.model.config.seq_length, crossings(plan))
    place_pairs_on_stages(whole, plan)
    return whole


def test_the_reference_is_on_the_stages_of_its_policy_with_the_same_parameters():
    whole = placed_beside_reference()
    assert not [cell for cell in unplaced(whole) if cell is not whole]
    for ours, theirs in zip(whole.policy.model.layers, whole.reference.model.layers, strict=True):
        assert ours.pipeline_stage == theirs.pipeline_stage
    assert {id(item) for item in whole.reference.get_parameters()} <= {
        id(item) for item in whole.policy.get_parameters()
    }


def test_both_models_states_go_from_each_stage_to_the_next_together():
    whole = placed_beside_reference()
    assert whole.crossings == (2,)
    assert [cell.pipeline_stage for cell in whole.joins] == [0]
    assert [cell.pipeline_stage for cell in whole.parts] == [1]
    assert whole.pairs.pipeline_stage == 1


@pytest.mark.parametrize("form", FORMS)
def test_every_gradient_of_a_stage_is_in_its_message(form):
    run, lm, _ = built(form)
    fuse_gradient_communication(lm, make_plan(run), 4)
    assert {item.name for item in lm.get_parameters() if item.requires_grad and item.comm_fusion != 2} == set()
