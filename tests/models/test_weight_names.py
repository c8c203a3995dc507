"""Names of weights: every weight of a model has a name in Hugging Face's convention, and the way back is exact."""

import math

import pytest

from mindllm.config import ModelConfig
from mindllm.errors import UserError
from mindllm.families.llama import WEIGHTS as HUGGING_FACE
from mindllm.models import build_model
from mindllm.models.weights import trained_weights


def test_every_weight_translates_and_back():
    config = ModelConfig(
        vocab_size=7,
        hidden_size=8,
        num_layers=12,
        num_heads=2,
        intermediate_size=8,
        seq_length=4,
        qkv_has_bias=True,
        attn_proj_has_bias=True,
    )
    names = list(trained_weights(build_model(config)))
    theirs = [HUGGING_FACE.theirs(name) for name in names]
    assert len(set(theirs)) == len(names)
    assert [HUGGING_FACE.ours(name) for name in theirs] == names
    assert "model.layers.11.mlp.gate_proj.weight" in theirs


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_kv_heads": 1, "head_dim": 6, "tie_word_embeddings": True},
        {"qkv_has_bias": True},
        {"qkv_has_bias": True, "attn_proj_has_bias": True},
    ],
)
def test_shapes_known_without_the_model_are_those_of_the_model(changes):
    fields = {"vocab_size": 7, "hidden_size": 8, "num_layers": 2, "num_heads": 2, "intermediate_size": 12}
    config = ModelConfig(**(fields | {"seq_length": 4} | changes))
    built = {name: tuple(parameter.shape) for name, parameter in trained_weights(build_model(config)).items()}
    assert config.architecture.weight_shapes() == built
    assert sum(math.prod(shape) for shape in built.values()) == config.parameter_count()


def test_table_is_one_to_one():
    assert len(set(HUGGING_FACE.table.values())) == len(HUGGING_FACE.table)


@pytest.mark.parametrize("name", ["model.layers.3.attention.wx.weight", "model.layers.x.attention.wq.weight", "weight"])
def test_unknown_names_are_errors(name):
    with pytest.raises(UserError, match=f"unknown weight {name}"):
        HUGGING_FACE.theirs(name)


def test_the_nearest_name_is_told():
    with pytest.raises(UserError, match=r"did you mean 'model\.layers\.3\.self_attn\.q_proj\.weight'"):
        HUGGING_FACE.ours("model.layers.3.self_attn.query_proj.weight")
