"""Documents of one row do not see each other: the loss and the gradients of a pack are the sums of those of its rows alone."""

from dataclasses import replace

import mindspore as ms
import numpy as np
import pytest

from mindllm.config import ModelConfig
from mindllm.data.rows import Row, assemble
from mindllm.models import CausalLM, Kernels
from mindllm.models.decoder import DocumentMask
from mindllm.models.weights import assign, trained_weights
from mindllm.train.step import ForwardBackward

LENGTH = 384  # three blocks of queries on a CPU
APART = ("segment_starts", "position_ids")


def random_model(document_masks, length=LENGTH, cpu=True, **fields):
    sizes = {"vocab_size": 61, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "n_kv_heads": 2}
    config = ModelConfig(**(sizes | {"intermediate_size": 24, "seq_length": length} | fields))
    model = CausalLM(config, replace(Kernels.choose(config, "CPU"), document_masks=document_masks, cpu=cpu))
    random, weights = np.random.default_rng(0), trained_weights(model)
    assign(weights, {key: random.normal(0, 0.2, item.shape).astype(np.float32) for key, item in weights.items()})
    return model


class Measured:
    """Summed loss, number of tokens, and gradients of the summed loss, of one sample at a time."""

    def __init__(self, *options, **fields):
        self.step = ForwardBackward(
            model := random_model(*options, **fields), ms.ParameterTuple(model.trainable_params())
        )

    def __call__(self, sample):
        names = ("input_ids", "labels", "loss_mask")
        columns, apart = ([ms.Tensor(sample[name][None]) for name in part if name in sample] for part in (names, APART))
        scale = ms.Tensor(float(columns[0].shape[1]), ms.float32)  # the step divides it by the places of the batch
        loss, tokens, gradients = self.step(*columns, scale, *apart)
        return float(loss.asnumpy()), float(tokens.asnumpy()), [gradient.asnumpy() for gradient in gradients]


def random_rows(lengths, seed=1):
    random = np.random.default_rng(seed)
    return [Row(random.integers(0, 61, n).astype(np.int32), random.random(n) < 0.7) for n in lengths]


@pytest.mark.parametrize("cpu", [True, False], ids=["blocks", "whole"])
def test_a_pack_is_the_sum_of_its_rows(cpu):
    rows = random_rows([150, 60, 97, 2, 40])
    packed = assemble(rows, LENGTH, packed=True)
    loss, tokens, gradients = Measured(True, cpu=cpu)(packed)
    plain = Measured(False, cpu=cpu)
    alone = [plain(assemble([row], LENGTH, packed=False)) for row in rows]
    assert tokens == sum(part[1] for part in alone) == sum(row.trained[1:].sum() for row in rows)
    assert loss == pytest.approx(sum(part[0] for part in alone), rel=1e-5)
    for index, gradient in enumerate(gradients):
        np.testing.assert_allclose(gradient, sum(part[2][index] for part in alone), atol=2e-4, err_msg=str(index))


def test_a_change_in_one_row_reaches_no_other():
    rows = random_rows([10, 12, 9])
    measured = Measured(True, 32)
    first = assemble(rows, 32, packed=True)
    first["loss_mask"][9:] = 0.0
    changed = assemble([rows[0], *random_rows([12, 9], seed=2)], 32, packed=True)
    changed["loss_mask"][9:] = 0.0
    assert measured(first)[0] == measured(changed)[0]
    last = assemble(rows, 32, packed=True)
    last["loss_mask"][:20] = 0.0
    moved = assemble([random_rows([10], seed=3)[0], random_rows([12], seed=3)[0], rows[2]], 32, packed=True)
    moved["loss_mask"][:20] = 0.0
    assert measured(last)[0] == measured(moved)[0]


def test_one_document_is_the_causal_model():
    row = random_rows([33])
    plain = Measured(False, 32)(assemble(row, 32, packed=False))
    apart = Measured(True, 32)(assemble(row, 32, packed=True))
    assert apart[0] == pytest.approx(plain[0], rel=1e-6)


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("apart", [True, False])
def test_the_fused_kernel_of_an_accelerator_gets_a_whole_mask_of_bytes(window, apart):
    starts = np.array([[0, 0, 2, 2, 2], [0, 0, 0, 3, 3]], np.int32)
    mask = DocumentMask(5, window, fused=True)(ms.Tensor(starts) if apart else None).asnumpy()
    assert (mask.dtype, mask.shape) == (np.uint8, (2 if apart else 1, 1, 5, 5))
    query, key = np.arange(5)[:, None], np.arange(5)[None]
    near = (key <= query) & (key > query - (window or 5))
    for row in range(len(mask)):
        assert np.array_equal(mask[row, 0] == 0, near & (key >= starts[row][:, None]) if apart else near)


def test_no_tensor_of_the_model_grows_with_the_square_of_the_sequence():
    model = random_model(True, 512)
    assert max(item.size for item in model.get_parameters()) < 512 * 512
