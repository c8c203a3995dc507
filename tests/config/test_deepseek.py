"""Files of DeepSeek: which layers have experts, which methods of choice are known, and layers that are passed over."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_families import TINY

from mindllm.config import read_model_config
from mindllm.errors import UserError
from mindllm.families import family_of
from mindllm.families.deepseek import V3
from mindllm.weight_files import read_hugging_face
from mindllm.weight_files.family_weights import FamilyWeights


def read(tmp_path, name="deepseek_v3", **changes):
    (tmp_path / "config.json").write_text(json.dumps({**TINY[name], **changes}))
    return read_model_config(tmp_path)


@pytest.mark.parametrize("layers", [[0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 1, 1]])
def test_any_pattern_of_layers_comes_back(tmp_path, layers):
    model = read(tmp_path, num_hidden_layers=4).model_copy(
        update={"moe_layer_freq": tuple(layers), "first_k_dense_replace": 0}
    )
    assert family_of(model) is V3
    assert read(tmp_path, **V3.content(model)).architecture == model.architecture


def test_groups_count_where_the_method_is_limited_by_them(tmp_path):
    assert read(tmp_path, "deepseek_v2").n_group == 4
    assert read(tmp_path, "deepseek_v2", topk_method="greedy").n_group == 1


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method: must be greedy or group_limited_greedy"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func: .* supported: sigmoid"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq: must be 1, or 1 or 0 for each layer"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads: must be num_attention_heads 4"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp9"}}, "quant_method: this method is not read"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path, name, changes, message):
    with pytest.raises(UserError, match=message):
        read(tmp_path, name, **changes)


def test_layers_behind_the_last_one_are_passed_over(tmp_path):
    model = read(tmp_path)
    shapes = {**FamilyWeights(model).shapes(), "model.layers.2.eh_proj.weight": (32, 64)}
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    assert "model.layers.1.attention.wk_rotary.weight" in read_hugging_face(tmp_path, model)
