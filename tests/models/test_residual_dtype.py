"""Hidden states between layers in float32 beside layers that compute in float16."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import ParameterTuple, Tensor

from mindllm.config import ModelConfig
from mindllm.config.parallel import ParallelConfig
from mindllm.models import CausalLM, Kernels
from mindllm.models.weights import initialise, trained_weights
from mindllm.parallel.layout import Mesh
from mindllm.parallel.operators import operators
from mindllm.parallel.sharding import FOLLOWERS, apply_sharding, sharding_table
from mindllm.train.step import ForwardBackward

SIZES = {"vocab_size": 53, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 24, "seq_length": 8}
EVERYTHING = {
    "scale_embeddings": True,
    "embedding_norm": True,
    "sandwich_norm": True,
    "position_embedding_type": "learned_absolute",
}


def model_of(**fields):
    config = ModelConfig(**SIZES, **fields)
    return CausalLM(config, Kernels.choose(config, "CPU"))


@pytest.mark.parametrize(("wide", "kept"), [(True, 1000.125), (False, 1000.0)])
def test_small_sums_are_kept_in_float32(wide, kept):
    layer = model_of(compute_dtype="float16", fp32_residual_connection=wide).model.layers[0]
    dtype = ms.float32 if wide else ms.float16
    hidden = layer.after_attention(Tensor([[1000.0]], dtype), Tensor([[0.125]], ms.float16))
    assert hidden.dtype == dtype
    assert float(hidden.asnumpy()[0, 0]) == kept


def loss_and_gradients(**fields):
    model = model_of(**fields)
    weights = trained_weights(model)
    initialise(weights, seed=3)
    tokens = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, SIZES["seq_length"] + 1)).astype(np.int32)
    mask = np.ones((2, SIZES["seq_length"]), np.float32)
    step = ForwardBackward(model, ParameterTuple(list(weights.values())))
    loss, _, gradients = step(*map(Tensor, (tokens[:, :-1], tokens[:, 1:], mask)), Tensor(1.0, ms.float32))
    return float(loss), [gradient.asnumpy() for gradient in gradients]


def test_a_model_with_every_part_computes_what_float32_does():
    loss, gradients = loss_and_gradients(**EVERYTHING)
    wide, found = loss_and_gradients(compute_dtype="float16", fp32_residual_connection=True, **EVERYTHING)
    assert wide == pytest.approx(loss, rel=1e-3)
    for mine, exact in zip(found, gradients, strict=True):
        assert mine.dtype == np.float32
        np.testing.assert_allclose(mine, exact, atol=2e-2 * np.abs(exact).max())


def test_its_operators_are_sharded():
    config = ModelConfig(**SIZES, compute_dtype="float16", fp32_residual_connection=True, **EVERYTHING)
    model = CausalLM(config, Kernels.choose(config, "Ascend"))
    table = sharding_table(model, ParallelConfig(use_seq_parallel=True, vocab_emb_dp=True, model_parallel=2))
    assert set(table) == {path for path, op in operators(model).items() if op.name not in FOLLOWERS}
    apply_sharding(model, table, Mesh(1, 2))
