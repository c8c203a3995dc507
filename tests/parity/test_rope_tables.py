"""Random rotary keys of ``config.json``: the tables here are those of transformers, or an error names the key."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tiny_families import TINY  # noqa: E402
from transformers.models.deepseek_v3 import modeling_deepseek_v3  # noqa: E402
from transformers.models.gemma3 import modeling_gemma3  # noqa: E402
from transformers.models.glm4 import modeling_glm4  # noqa: E402
from transformers.models.llama import modeling_llama  # noqa: E402
from transformers.models.mixtral import modeling_mixtral  # noqa: E402

from mindllm.architecture.rotary_tables import rotary_tables  # noqa: E402
from mindllm.config import read_model_config  # noqa: E402
from mindllm.errors import UserError  # noqa: E402

LENGTH = 96  # longer than the 64 positions of the tiny models
EMBEDDINGS = {
    "llama": modeling_llama.LlamaRotaryEmbedding,
    "mixtral": modeling_mixtral.MixtralRotaryEmbedding,
    "glm4": modeling_glm4.Glm4RotaryEmbedding,
    "deepseek_v3": modeling_deepseek_v3.DeepseekV3RotaryEmbedding,
    "gemma3": modeling_gemma3.Gemma3RotaryEmbedding,
}
VALUES = {
    "factor": (1.0, 2.0, 4.0, 8.0, 0.5, None),
    "low_freq_factor": (1.0, 2.0),
    "high_freq_factor": (4.0, 1.0),
    "original_max_position_embeddings": (16, 4, 32, 64, None),
    "beta_fast": (32.0, 4.0, 1.0, None),
    "beta_slow": (1.0, 2.0, 8.0),
    "attention_factor": (1.0, 0.8, None),
    "mscale": (1.0, 0.7),
    "mscale_all_dim": (1.0, 0.7),
    "rope_theta": (1e4, 5e5, 100.0),
    "partial_rotary_factor": (1.0, 0.5),
    "truncate": (True, False, None),
    "finetuned": (True,),
    "mrope_section": ([1, 1, 2],),
}
KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def rope_object(draw: random.Random) -> dict:
    """Return an object ``rope_scaling`` or ``rope_parameters``, mostly of keys that go together."""
    kind = draw.choice(KINDS)
    often = {"linear": 1, "dynamic": 1, "yarn": 2, "llama3": 4}.get(kind, 0)
    named = list(VALUES)[:often] if kind != "yarn" else ["factor", "original_max_position_embeddings"]
    named = ["factor", "low_freq_factor", "high_freq_factor"] if kind == "llama3" else named
    keys = [key for key in named if draw.random() < 0.95]
    keys += [key for key in VALUES if draw.random() < (0.15 if key not in ("truncate", "mrope_section") else 0.03)]
    content = {key: draw.choice(VALUES[key]) for key in keys}
    return {draw.choice(("rope_type", "type")): kind, **content}


def rotary_keys(draw: random.Random, family: str) -> dict:
    """Return the rotary keys of a ``config.json``."""
    content: dict = {}
    for layout in ("rope_scaling", "rope_parameters"):
        if draw.random() < 0.5:
            content[layout] = draw.choice((rope_object(draw), rope_object(draw), rope_object(draw), None, {}))
    if family == "gemma3" and draw.random() < 0.7:
        content["rope_parameters"] = {
            "full_attention": rope_object(draw),
            "sliding_attention": {"rope_type": "default"},
        }
    for key in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        if draw.random() < 0.3:
            content[key] = draw.choice([value for value in VALUES[key] if value is not None])
    return content


def tables_of_transformers(directory, family):
    """Return the tables of both kinds of layers (Gemma 3), or of all; None where transformers takes no such configuration."""
    try:
        config = transformers.AutoConfig.from_pretrained(directory)
        embedding = EMBEDDINGS[family](config)
        positions, hidden = torch.arange(LENGTH)[None], torch.zeros(1, LENGTH, 1)
        types = ("full_attention", "sliding_attention") if family == "gemma3" else (None,)
        found = []
        for kind in types:
            tables = embedding(hidden, positions, kind) if kind else embedding(hidden, positions)
            found.append([table[0].numpy() for table in tables])
    except Exception:  # of many types
        return None
    return found if all(np.isfinite(table).all() for pair in found for table in pair) else None


def tables_here(directory, family):
    layers = read_model_config(directory).architecture.layers
    windows = [layer.attention.context.window is not None for layer in layers]
    chosen = [layers[windows.index(False)], layers[windows.index(True)]] if family == "gemma3" else layers[:1]
    found = []
    for layer in chosen:
        rotary = layer.attention.position
        width = rotary.rotary_dim
        found.append(list(rotary_tables(rotary, width, LENGTH)))
    return found


def write(directory, family, keys):
    content = {key: value for key, value in TINY[family].items() if not key.startswith(("rope", "partial"))}
    if family == "gemma3":
        content |= {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}
    content |= {"head_dim": 8} if family == "mixtral" else {}  # without it transformers cannot compute scaled tables
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**content, **keys}))
    return directory


@pytest.mark.parametrize(
    ("family", "count"), [("llama", 400), *((name, 120) for name in EMBEDDINGS if name != "llama")]
)
def test_random_keys_make_the_tables_of_transformers_or_an_error(family, count, tmp_path):
    transformers.logging.set_verbosity(50)
    draw = random.Random(0)
    same = 0
    for number in range(count):
        keys = rotary_keys(draw, family)
        directory = write(tmp_path / "model", family, keys)
        expected = tables_of_transformers(directory, family)
        try:
            found = tables_here(directory, family)
        except UserError as error:
            assert "config.json" in str(error), (number, keys)  # noqa: PT017 (either outcome is right)
            continue
        if expected is None:
            continue
        for ours, theirs in zip(found, expected, strict=True):
            for mine, other in zip(ours, theirs, strict=True):
                np.testing.assert_allclose(mine, other, atol=2e-4, err_msg=f"{number}: {keys}")
        same += 1
    assert same > count / 5


NAMED = {
    "rope_scaling goes before rope_parameters": {
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    },
    "original length next to the object": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        "original_max_position_embeddings": 16,
    },
    "dynamic ignores it": {
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16},
    },
    "llama3 without it": {
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    },
    "yarn of a very short context": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4}
    },
    "no base": {},
}


@pytest.mark.parametrize("family", EMBEDDINGS)
@pytest.mark.parametrize("case", NAMED)
def test_named_cases(family, case, tmp_path):
    transformers.logging.set_verbosity(50)
    directory = write(tmp_path / "model", family, NAMED[case])
    if family == "gemma3" and "rope_parameters" in NAMED[case]:
        with pytest.raises(UserError, match="rope_parameters: must hold full_attention"):
            tables_here(directory, family)
        return
    expected = tables_of_transformers(directory, family)
    for ours, theirs in zip(tables_here(directory, family), expected, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(mine, other, atol=2e-4)


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}, "rope_parameters.mrope_section"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters.full_attention"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": None}}, "rope_scaling.truncate"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}}, "low_freq_factor"),
    ],
)
def test_other_keys_are_refused_by_name(keys, key, tmp_path):
    with pytest.raises(UserError, match=rf"config.json: .*{key}"):
        read_model_config(write(tmp_path / "model", "llama", keys))
