"""Layers as values: what keys describe, what tells layers apart, which combinations are nobody's model."""

import json

import pytest
from small_models import SIZES

from mindllm.config import ModelConfig, keys_for_layers, load_config
from mindllm.errors import UserError
from mindllm.families import family_of

WINDOWS = {"model_type": "qwen2", "qkv_has_bias": True, "sliding_window": 8}


def model(**changes):
    return ModelConfig(**{**SIZES, **changes})


def test_a_pattern_gives_every_so_manieth_layer_no_window():
    layers = model(sliding_window=8, sliding_window_pattern=2).architecture.layers
    assert [layer.attention.window for layer in layers] == [8, None, 8, None]
    assert len({*layers}) == 2


def test_layers_that_are_alike_are_of_one_kind():
    assert len(model().architecture.specifications()) == 1
    assert len(model(sliding_window=8).architecture.specifications()) == 1
    kinds = model(sliding_window=8, sliding_window_pattern=3, rope_local_base_freq=50.0).architecture.specifications()
    assert [kind.attention.position.theta for kind in kinds] == [50.0, 10000.0]
    assert [kind.name for kind in kinds] == ["window", "global"]


def test_a_model_can_be_cut_to_any_of_its_layers():
    whole = model(sliding_window=8, sliding_window_pattern=2)
    kept = [whole.architecture.layers[number] for number in (1, 0, 1)]
    cut = whole.model_copy(update={**keys_for_layers(whole, kept)})
    assert list(cut.architecture.layers) == kept
    assert keys_for_layers(model(), model().architecture.layers[:2]) == {"num_layers": 2}


def test_a_window_bounds_what_attention_costs():
    assert model(sliding_window=8).flops_per_token() == model(seq_length=8).flops_per_token()
    assert model(sliding_window=64).flops_per_token() == model().flops_per_token()


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "llama"),
        ({"qkv_has_bias": True}, "qwen2"),
        ({"qkv_has_bias": True, "attn_proj_has_bias": True}, "llama"),
        ({"sliding_window": 8}, "mistral"),
        ({"norm_head": True}, "baichuan"),
        ({"model_type": "aquila"}, "aquila"),
    ],
)
def test_a_model_is_of_the_first_family_that_has_it(changes, name):
    assert family_of(model(**changes)).name == name


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attn_proj_has_bias": True}, "no family has this combination; the nearest, "),
        ({"normalization": "LayerNorm"}, "has not normalization LayerNorm"),
        ({"model_type": "llama", "qk_layernorm": True}, "no llama model has qk_layernorm True"),
        ({"model_type": "lama"}, "unknown (value lama); did you mean 'llama'?"),
        ({"position_embedding_type": "alibi", "sliding_window": 8}, "no family has this combination"),
    ],
)
def test_a_combination_that_no_family_has_is_refused(changes, words):
    with pytest.raises(UserError) as error:
        family_of(model(**changes))
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("layer_types", "[full_attention]", "must hold 8 entries, one for each layer (num_layers), not 1"),
        ("sliding_window_pattern", "2", "is about layers with a window (value 2); write sliding_window"),
        ("model_type", "bert", "unknown (value bert)"),
    ],
)
def test_mistakes_name_the_key(refused, key, value, words):
    message = refused(f"--model.model_config.{key}={value}")
    assert f"model.model_config.{key}: {words}" in message


def test_lists_of_layers_are_written_as_json_without_a_warning(recwarn):
    changes = {
        "parallel.pipeline_config.pipeline_interleave": True,
        "model.model_config.pp_interleave_num": 2,
        "model.model_config.offset": [[1, 0, 0, -1, 0, 0, 0, 0], [0] * 8],
        "recompute_config": {"recompute": [[1] * 8, [2] * 8], "select_recompute": {r"feed_forward\.mul": [1] * 8}},
    }
    config = load_config("configs/llama2/pretrain_llama2_70b_64p.yaml", changes)
    written = json.loads(config.model_dump_json(by_alias=True))
    assert written["model"]["model_config"]["offset"] == changes["model.model_config.offset"]
    assert {name: written["recompute_config"][name] for name in changes["recompute_config"]} == changes[
        "recompute_config"
    ]
    assert [str(warning.message) for warning in recwarn] == []
