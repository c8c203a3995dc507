"""Compiles a feed-forward as published models write it, with a Reshape in every linear layer; run by test_ir_inspect_recompute.

``python ir_inspect_net.py OUTPUT PATTERN...``: operators of the layer that PATTERNs name are recomputed.
"""

import sys

from mindllm.compiled.device import front_end

front_end.pretend_device(0, 1)
import mindspore as ms  # noqa: E402
import numpy as np  # noqa: E402
from mindspore import Parameter, Tensor, nn  # noqa: E402
from mindspore import ops as P  # noqa: E402

from mindllm.parallel.recompute import match  # noqa: E402

BATCH, SEQUENCE, HIDDEN, WIDTH = 2, 32, 64, 96


class Activation(nn.Cell):
    def __init__(self):
        super().__init__()
        self.silu = P.auto_generate.SiLU()

    def construct(self, x):
        return self.silu(x)


class Linear(nn.Cell):
    def __init__(self, inputs, outputs, activated=False):
        super().__init__()
        self.weight = Parameter(Tensor(np.ones((outputs, inputs)), ms.float16))
        self.rows = (-1, inputs)
        self.shape = (BATCH, SEQUENCE, outputs)
        self.reshape = P.Reshape()
        self.matmul = P.MatMul(transpose_b=True)
        self.back = P.Reshape()
        self.activation = Activation() if activated else None

    def construct(self, x):
        y = self.matmul(self.reshape(x, self.rows), self.weight)
        y = self.back(y, self.shape)
        return y if self.activation is None else self.activation(y)


class FeedForward(nn.Cell):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = Linear(HIDDEN, WIDTH, activated=True), Linear(HIDDEN, WIDTH)
        self.w2 = Linear(WIDTH, HIDDEN)
        self.mul = P.Mul()

    def construct(self, x):
        return self.w2(self.mul(self.w1(x), self.w3(x)))


class Layer(nn.Cell):
    def __init__(self):
        super().__init__()
        self.feed_forward = FeedForward()
        self.add = P.Add()

    def construct(self, x):
        return self.add(x, self.feed_forward(x))


class Model(nn.Cell):
    def __init__(self):
        super().__init__()
        self.layers = nn.CellList([Layer()])
        self.square, self.sum = P.Square(), P.ReduceSum()

    def construct(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.sum(self.square(P.cast(x, ms.float32)))


class Step(nn.Cell):
    def __init__(self, model):
        super().__init__(auto_prefix=False)
        self.model, self.weights = model, ms.ParameterTuple(model.trainable_params())
        self.gradient = P.value_and_grad(model, None, self.weights)

    def construct(self, x):
        return self.gradient(x)


def main(output, *patterns):
    ms.set_context(mode=ms.GRAPH_MODE)
    model = Model()
    for pattern in patterns:
        for found in match(model.layers[0], pattern):
            found.target.add_prim_attr("recompute", True)
    graph = front_end.compile_cell(Step(model).set_train(), Tensor(np.ones((BATCH, SEQUENCE, HIDDEN)), ms.float16))
    with open(output, "wb") as file:
        file.write(graph.mind_ir)


if __name__ == "__main__":
    main(*sys.argv[1:])
