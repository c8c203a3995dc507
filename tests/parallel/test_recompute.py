"""Recomputation marks what its patterns name, refuses patterns that name nothing, and changes no result."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from small_cluster import cluster_run

from mindllm.errors import UserError
from mindllm.models.weights import initialise, trained_weights
from mindllm.parallel import build_parallel_model
from mindllm.parallel.operators import operators
from mindllm.parallel.recompute import match
from mindllm.train.optimizers.adamw import AdamW
from mindllm.train.step import TrainStep


def run(model=None, **recompute):
    return cluster_run(
        use_parallel=False,
        context={"device_target": "CPU"},
        model={"compute_dtype": "float32", **(model or {})},
        recompute_config=recompute,
    )


def built(model=None, **recompute):
    return build_parallel_model(run(model, **recompute)).model


def marked(model, attribute="recompute"):
    return {path: op.attrs[attribute] for path, op in operators(model).items() if attribute in op.attrs}


@pytest.fixture(scope="module")
def layer():
    return built().model.layers[0]


@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        (r"feed_forward\.mul", ["feed_forward.mul"]),
        (r"feed_forward\.w1\.activation\.silu", ["feed_forward.w1.activation.silu"]),
        (r".*\.norm", ["attention_norm.norm", "ffn_norm.norm"]),
        (r"feed_forward\.w[13]\.matmul", ["feed_forward.w1.matmul", "feed_forward.w3.matmul"]),
        (r".*_add", ["attention_add", "ffn_add"]),
        ("feed_forward", ["feed_forward"]),
        (r"attention\.rotary", ["attention.rotary"]),
        (r".*\.mul_cos", []),  # one level deeper: ".*" does not span levels
        (r"feed_forward\.mu", []),  # a level must match as a whole
        ("feed_forward.mul", []),  # a dot alone is any character of a name
    ],
)
def test_patterns_match_level_by_level(layer, pattern, paths):
    assert [found.path for found in match(layer, pattern)] == paths


def test_defaults_mark_the_activation_of_the_first_layers():
    model = built(select_recompute=[1], select_comm_recompute=[1])
    assert marked(model) == {
        "model.layers.0.feed_forward.mul": True,
        "model.layers.0.feed_forward.w1.activation.silu": True,
    }
    assert marked(model, "recompute_comm_op") == {
        "model.layers.0.attention_norm.norm": True,
        "model.layers.0.ffn_norm.norm": True,
    }


EXPERTS = {
    "model_type": "qwen2_moe",
    "qkv_has_bias": True,
    "expert_num": 4,
    "num_experts_chosen": 2,
    "moe_shared_expert_intermediate_size": 32,
    "use_shared_expert_gating": True,
    "moe_layer_freq": [0, 1],
}


GELU = {
    "model_type": "gemma",
    "layernorm_zero_centered_gamma": True,
    "scale_embeddings": True,
    "hidden_act": "gelu_tanh",
}
PLAIN = {
    **{
        "model_type": "gpt2",
        "normalization": "LayerNorm",
        "position_embedding_type": "learned_absolute",
        "n_kv_heads": 4,
    },
    **{"gated_linear_unit": False, "qkv_has_bias": True, "attn_proj_has_bias": True, "mlp_has_bias": True},
}


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (GELU, ["mul", "w1.activation.gelu"]),
        ({**PLAIN, "hidden_act": "gelu_tanh"}, ["w1.activation.gelu"]),
        ({**PLAIN, "hidden_act": "quick_gelu"}, ["w1.activation.quick_gelu"]),
    ],
)
def test_defaults_mark_any_activation_and_no_product_that_is_not_there(model, names):
    marks = marked(built(model, select_recompute=[1]))
    assert marks == {f"model.layers.0.feed_forward.{name}": True for name in names}


def test_a_product_that_is_named_alone_must_be_there():
    with pytest.raises(UserError, match="matches no operator of a layer"):
        built({**PLAIN, "hidden_act": "gelu_tanh"}, select_recompute=[r"feed_forward\.mul"])


def test_defaults_mark_the_activations_of_experts_too():
    model = built(EXPERTS, select_recompute=True)
    assert marked(model) == {
        "model.layers.0.feed_forward.mul": True,
        "model.layers.0.feed_forward.w1.activation.silu": True,
        "model.layers.1.feed_forward.experts.activation.silu": True,
        "model.layers.1.feed_forward.experts.mul": True,
        "model.layers.1.feed_forward.shared.mul": True,
        "model.layers.1.feed_forward.shared.w1.activation.silu": True,
    }


def test_a_pattern_may_name_something_in_layers_of_one_kind_only():
    chosen = r"feed_forward\.experts\.w1\.matmul"
    assert marked(built(EXPERTS, select_recompute=[chosen])) == {"model.layers.1.feed_forward.experts.w1.matmul": True}
    with pytest.raises(UserError, match="matches no operator of a layer"):
        built(EXPERTS, select_recompute={chosen: [1]})  # the first layer alone, which is dense


def test_excludes_come_last():
    pattern = r"feed_forward\.w2\.matmul"
    model = built(recompute=[1], select_recompute_exclude={pattern: [1]}, select_comm_recompute_exclude={pattern: True})
    assert marked(model) == {"model.layers.0.feed_forward.w2.matmul": False}
    communication = marked(model, "recompute_comm_op")
    assert communication.pop("model.layers.0.feed_forward.w2.matmul") is False
    assert communication.pop("model.layers.1.feed_forward.w2.matmul") is False
    assert set(communication.values()) == {True}  # mp_comm_recompute of the recomputed layer


def test_communication_of_recomputed_layers_can_be_kept():
    communication = marked(built(recompute=[1], mp_comm_recompute=False), "recompute_comm_op")
    assert set(communication.values()) == {False}
    assert all(path.startswith("model.layers.0.") for path in communication)


@pytest.mark.parametrize(
    ("key", "pattern", "message"),
    [
        (
            "select_recompute",
            r"feed_forward\.W3\.reshape",
            r"matches no operator of a layer; did you mean 'feed_forward\\",
        ),
        ("select_recompute", r"attention\.flash attention", "matches no operator of a layer"),
        ("select_comm_recompute", r"attention_normi.rcast", "matches no operator of a layer"),
        ("select_comm_recompute", "feed_forward", "names a cell, not an operator; .*feed_forward"),
        ("select_recompute_exclude", "attention_norm", "names a cell, not an operator"),
    ],
)
def test_patterns_that_mindformers_skips_silently_are_errors(key, pattern, message):
    """The first three stand in MindFormers' own examples."""
    with pytest.raises(UserError, match=f"recompute_config.{key}: pattern .*{message}"):
        built(**{key: [pattern]})


@pytest.mark.parametrize(
    "recompute",
    [{"recompute": True}, {"select_recompute": True, "select_recompute_exclude": [r"feed_forward\.w2\.matmul"]}],
)
def test_training_on_one_device_computes_the_same(recompute):
    assert np.allclose(losses(**recompute), losses(), rtol=1e-6, atol=0)


def losses(**recompute):
    config = run(**recompute)
    model = build_parallel_model(config).model
    weights = trained_weights(model)
    initialise(weights, seed=1)
    step = TrainStep(model, AdamW(list(weights.values()), config.optimizer), max_grad_norm=1.0).set_train()
    random = np.random.default_rng(0)
    ids, labels = (Tensor(random.integers(0, 128, (2, 32)), ms.int32) for _ in range(2))
    rest = Tensor(np.ones((2, 32), np.float32)), Tensor(1e-2, ms.float32), Tensor(1.0, ms.float32)
    return [float(step(ids, labels, *rest)[0].asnumpy()) for _ in range(3)]
