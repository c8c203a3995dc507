"""A config.json with absurd values is one line that names file, key and value: nothing is computed from it."""

import json

import pytest

from mindllm.config import read_model_config
from mindllm.errors import UserError

GOOD = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def nested(depth):
    value = 1
    for _ in range(depth):
        value = {"a": [value]}
    return value


def read(directory, content):
    text = content if isinstance(content, str) else json.dumps(content)
    (directory / "config.json").write_text(text, encoding="utf-8")
    return read_model_config(directory)


def test_a_plausible_one_is_read(tmp_path):
    assert read(tmp_path, {**GOOD, "sliding_window": None, "task": {"a": {"b": [1]}}}).num_layers == 2


@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "intermediate_size"]
)
@pytest.mark.parametrize(
    "value", [0, -1, 10**12, 10**400, 1.5, True, "32", [32], {"a": 32}, float("nan"), "x" * 10_000]
)
def test_sizes_are_whole_numbers_of_models(tmp_path, key, value):
    with pytest.raises(UserError, match=rf"config.json: {key}: must be a whole number from 1 to \d+ \(value ") as error:
        read(tmp_path, {**GOOD, key: value})
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_hidden_layers": 10_001}, "num_hidden_layers: must be a whole number from 1 to 10000 "),
        ({"num_key_value_heads": -8}, "num_key_value_heads: must be a whole number"),
        ({"max_position_embeddings": 10**15}, "max_position_embeddings: must be a whole number"),
        ({"rms_norm_eps": float("inf")}, r"rms_norm_eps: must be a number above 0 \(value inf\)"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps: must be a number above 0"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps: must be a number above 0"),
        ({"rope_theta": [1]}, "rope_theta: must be a number above 0"),
        ({"rope_theta": 10**300}, "rope_theta: must be a number above 0"),
        (
            {"hidden_size": 10**9, "intermediate_size": 10**9},
            r"num_hidden_layers 2, hidden_size 1000000000, .*: make about 8\.0e\+18",
        ),
        ({"task": nested(30)}, "task: is nested over 20 deep|a: is nested over 20 deep"),
        ({"rope_scaling": 7}, "rope_scaling: must be an object"),
        ({"model_type": ["llama"]}, r"model_type: this model is not supported \(value \['llama'\]\)"),
        ({"model_type": {"a": "x" * 9999}}, r"model_type: this model is not supported \(value .*…\)"),
    ],
)
def test_other_values(tmp_path, change, says):
    with pytest.raises(UserError, match=says) as error:
        read(tmp_path, {**GOOD, **change})
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("text", ["", "[]", "3", "null", "{", "[" * 100_000, '{"a": ' + "9" * 5000 + "}", "\x00"])
def test_what_is_no_object(tmp_path, text):
    with pytest.raises(UserError, match=r"config\.json: (not JSON|holds no object)") as error:
        read(tmp_path, text)
    assert "\n" not in str(error.value)


def test_what_is_not_utf_8(tmp_path):
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(UserError, match=r"config\.json: not JSON"):
        read_model_config(tmp_path)
