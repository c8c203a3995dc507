"""Cross entropy in chunks computes the same loss and gradients, and the logits of all tokens never exist together."""

import json
import subprocess
import sys
from dataclasses import replace

import mindspore as ms
import numpy as np
import pytest
from mindspore import ParameterTuple, Tensor

from mindllm.config import ModelConfig
from mindllm.models import CausalLM, Kernels
from mindllm.models.weights import initialise, trained_weights
from mindllm.train.step import ForwardBackward

BATCH, LENGTH, VOCABULARY = 2, 24, 53


def loss_and_gradients(chunks, on_one_cpu=True, **fields):
    """Of a model whose weights are a function of their names, on a batch with some tokens masked."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 24}
    config = ModelConfig(**sizes, seq_length=LENGTH, loss_chunks=chunks, initializer_range=0.5, **fields)
    model = CausalLM(config, replace(Kernels.choose(config, "CPU"), cpu=on_one_cpu))
    weights = trained_weights(model)
    initialise(weights, seed=3)
    random = np.random.default_rng(0)
    tokens = random.integers(0, VOCABULARY, (BATCH, LENGTH + 1)).astype(np.int32)
    mask = (random.random((BATCH, LENGTH)) < 0.8).astype(np.float32)
    step = ForwardBackward(model, ParameterTuple(list(weights.values())))
    loss, _, gradients = step(*map(Tensor, (tokens[:, :-1], tokens[:, 1:], mask)), Tensor(1.0, ms.float32))
    return float(loss), {name: value.asnumpy() for name, value in zip(weights, gradients, strict=True)}


@pytest.mark.parametrize("on_one_cpu", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("fields", "tolerance"),
    [({}, 1e-6), ({"tie_word_embeddings": True}, 1e-6), ({"compute_dtype": "float16"}, 5e-3)],
)
def test_chunks_change_neither_loss_nor_gradients(fields, tolerance, on_one_cpu):
    loss, gradients = loss_and_gradients(1, **fields)
    for chunks in (2, 8):
        in_chunks, found = loss_and_gradients(chunks, on_one_cpu, **fields)
        assert in_chunks == pytest.approx(loss, rel=max(tolerance, 1e-6))
        for name, gradient in gradients.items():
            scale = np.abs(gradient).max()
            np.testing.assert_allclose(found[name], gradient, atol=5 * tolerance * scale, err_msg=f"{name}, {chunks}")


PEAK = """
import json, sys
import mindspore as ms
import numpy as np
from mindspore import ParameterTuple, Tensor
from mindllm.config import ModelConfig
from mindllm.models import build_model
from mindllm.train.step import ForwardBackward

ms.set_context(mode=ms.GRAPH_MODE)
ms.set_device("CPU")
sizes = dict(vocab_size=40000, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=64, seq_length=1024)
model = build_model(ModelConfig(**sizes, loss_chunks=int(sys.argv[1])))
tokens = Tensor(np.ones((2, 1024), np.int32))
step = ForwardBackward(model, ParameterTuple(model.trainable_params()))
step(tokens, tokens, Tensor(np.ones((2, 1024), np.float32)), Tensor(1.0, ms.float32))[0].asnumpy()
status = open("/proc/self/status").read()
print(json.dumps(int(status.split("VmHWM:")[1].split()[0]) / 1024))
"""


@pytest.mark.slow
def test_memory_falls_by_more_than_the_logits():
    """2048 tokens x 40000 in fp32 are 312 MiB."""

    def peak(chunks):
        done = subprocess.run([sys.executable, "-c", PEAK, str(chunks)], capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    assert peak(1) - peak(8) > 312
