"""Names of weights: every weight of a model has a name in Hugging Face's convention, and the way back is exact."""

import pytest

from mindllm.config import ModelConfig
from mindllm.errors import UserError
from mindllm.models import build_model
from mindllm.models.families.llama import HUGGING_FACE
from mindllm.models.weights import trained_weights


def test_every_weight_translates_and_back():
    config = ModelConfig(
        vocab_size=7, hidden_size=8, num_layers=12, num_heads=2, intermediate_size=8, seq_length=4, qkv_has_bias=True
    )
    names = list(trained_weights(build_model(config)))
    theirs = [HUGGING_FACE.theirs(name) for name in names]
    assert len(set(theirs)) == len(names)
    assert [HUGGING_FACE.ours(name) for name in theirs] == names
    assert "model.layers.11.mlp.gate_proj.weight" in theirs


def test_table_is_one_to_one():
    assert len(set(HUGGING_FACE.table.values())) == len(HUGGING_FACE.table)


@pytest.mark.parametrize("name", ["model.layers.3.attention.wx.weight", "model.layers.x.attention.wq.weight", "weight"])
def test_unknown_names_are_errors(name):
    with pytest.raises(UserError, match=f"unknown weight {name}"):
        HUGGING_FACE.theirs(name)


def test_the_nearest_name_is_told():
    with pytest.raises(UserError, match=r"did you mean 'model\.layers\.3\.self_attn\.q_proj\.weight'"):
        HUGGING_FACE.ours("model.layers.3.self_attn.query_proj.weight")
