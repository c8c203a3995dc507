"""Without products that broadcast, which a CPU keeps indices of, a model computes what it computes with them."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindllm.config import ModelConfig
from mindllm.models import CausalLM, Kernels
from mindllm.models.cpu_broadcast import OuterProduct, TileToShape
from mindllm.models.weights import assign, trained_weights
from mindllm.train.step import ForwardBackward

SIZES = {"vocab_size": 61, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "n_kv_heads": 2, "intermediate_size": 24}
FORMS = {
    "llama": {},
    "norms of heads": {"qk_layernorm": True},
    "Gemma's norms": {"layernorm_zero_centered_gamma": True, "sandwich_norm": True, "attn_logit_softcapping": 30.0},
    "a long sequence": {"seq_length": 384},
    "ALiBi": {"position_embedding_type": "alibi"},
    "norms in half precision": {"layernorm_compute_type": "float16"},
}


def computed(fuses, fields):
    config = ModelConfig(**{**SIZES, "seq_length": 16, **fields})
    kernels = Kernels.choose(config, "CPU", fuses)
    assert kernels.same_shapes != fuses
    model, random = CausalLM(config, kernels), np.random.default_rng(0)
    weights = trained_weights(model)
    assign(weights, {key: random.normal(0, 0.2, item.shape).astype(np.float32) for key, item in weights.items()})
    step = ForwardBackward(model, ms.ParameterTuple(model.trainable_params()))
    tokens = random.integers(0, 61, (2, config.seq_length + 1)).astype(np.int32)
    mask = np.ones((2, config.seq_length), np.float32)
    loss, _, gradients = step(*map(Tensor, (tokens[:, :-1], tokens[:, 1:], mask)), Tensor(1.0))
    return float(loss.asnumpy()), [gradient.asnumpy() for gradient in gradients]


@pytest.mark.parametrize("form", FORMS)
def test_loss_and_gradients_are_the_same(form):
    loss, gradients = computed(False, FORMS[form])
    expected, others = computed(True, FORMS[form])
    assert loss == pytest.approx(expected, rel=1e-6)
    for gradient, other in zip(gradients, others, strict=True):
        np.testing.assert_allclose(gradient, other, rtol=1e-4, atol=1e-5 * np.abs(other).max())


def test_a_table_is_repeated_exactly():
    class Both(nn.Cell):
        def __init__(self):
            super().__init__()
            self.repeated, self.outer = TileToShape(), OuterProduct()

        def construct(self, table, column):
            return self.repeated(table, (2, 3, 4, 5)), self.outer(column, table)

    table = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
    table[0, 0] = np.finfo(np.float32).min
    column = np.array([1.0, -0.5, 3.0], np.float32)
    repeated, outer = (found.asnumpy() for found in Both()(Tensor(table), Tensor(column)))
    np.testing.assert_array_equal(repeated, np.broadcast_to(table, (2, 3, 4, 5)))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(outer, np.outer(column, table))
