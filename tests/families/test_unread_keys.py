"""Keys of ``config.json`` that nothing reads: refused where they may change what a model computes."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from tiny_families import TINY

from mindllm.errors import UserError
from mindllm.families import BY_TYPE
from mindllm.families.family import COMPUTES, WITHOUT_EFFECT, ReadKeys

PATH = Path("config.json")
CLASSES = sorted({content["model_type"] for content in TINY.values()})


def model(content):
    return BY_TYPE[content["model_type"]].model(PATH, content)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("no_rope_layers", [1, 0]),
        ("rope_interleave", True),
        ("mrope_section", [1, 1, 2]),
        ("attention_multiplier", 0.5),
        ("residual_multiplier", 0.2),
        ("use_qk_norm", True),
        ("attention_sinks", 4),
    ],
)
def test_a_key_that_changes_the_model_is_refused_by_name(key, value):
    with pytest.raises(UserError, match=f"config.json: {key}: unknown for llama .*remove the key"):
        model({**TINY["llama"], key: value})


@pytest.mark.parametrize(
    "keys",
    [
        {"unsloth_version": "2025.1", "_name_or_path": "x", "torch_dtype": "bfloat16", "use_cache": True},
        {"attention_sinks": 0, "use_qk_norm": False, "no_rope_layers": None},
        {"pretraining_tp": 2, "sliding_window": 4096, "_attn_implementation": "sdpa"},
    ],
)
def test_keys_without_effect_and_unset_ones_are_read_over(keys):
    assert model({**TINY["llama"], **keys}) == model(TINY["llama"])


def test_the_rotary_object_of_internlm_gives_the_base():
    content = {**TINY["llama"], "model_type": "internlm", "rope_theta": None, "num_key_value_heads": None}
    assert model({**content, "rotary": {"base": 5000, "type": "dynamic"}}).theta == 5000
    with pytest.raises(UserError, match=r"config.json: rotary: must be an object of type origin or dynamic"):
        model({**content, "rotary": {"type": "yarn"}})


@pytest.mark.parametrize("kind", CLASSES)
def test_every_key_of_transformers_is_read_or_known(kind):
    """What a class of transformers computes with is read here; a new release of it may add more."""
    transformers = pytest.importorskip("transformers")
    configured = type(transformers.AutoConfig.for_model(kind))
    read = set()
    for content in (content for content in TINY.values() if content["model_type"] == kind):
        recorded = ReadKeys(content)
        family = BY_TYPE[kind]
        family.read(PATH, recorded)
        read |= (
            recorded.read | {theirs for theirs, _ in family.keys.values()} | family.only.keys() | family.fixed.keys()
        )
    unread = {item.name for item in fields(configured)} - read - WITHOUT_EFFECT
    assert {key for key in unread if COMPUTES.search(key)} <= {"chunk_size_feed_forward", "num_mtp_layers"}


@pytest.mark.parametrize("name", TINY)
def test_what_transformers_saves_is_read(name):
    """Its files hold attributes that follow from others, too."""
    transformers = pytest.importorskip("transformers")
    content = dict(TINY[name])
    saved = transformers.AutoConfig.for_model(content.pop("model_type"), **content).to_dict()
    assert BY_TYPE[TINY[name]["model_type"]].model(PATH, saved).hidden_size == model(TINY[name]).hidden_size
