"""Small programs of somebody, for the tests of the offline tool: nothing in them knows of mindllm."""

import sys
import textwrap

HEAD = """
    import numpy as np
    import mindspore as ms
    from mindspore import nn, ops
    from mindspore.communication import init
"""
TRAINS = """
    ms.set_context(mode=ms.GRAPH_MODE, device_target="Ascend", max_device_memory="{limit}", jit_config={{"jit_level": "O0"}})
    init()
    ms.set_auto_parallel_context(
        parallel_mode="semi_auto_parallel", device_num=4, full_batch=True, pipeline_stages=1, enable_parallel_optimizer=False)

    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.first = nn.Dense(64, 4096, has_bias=False)
            self.second = nn.Dense(4096, 64, has_bias=False)
            self.first.matmul.shard(((2, 1), (2, 1)))
            self.second.matmul.shard(((2, 2), (1, 2)))
            self.mean = ops.ReduceMean()

        def construct(self, x):
            return self.mean(self.second(self.first(x)))

    net = Net()
    step = nn.TrainOneStepCell(net, nn.Momentum(net.trainable_params(), 0.1, 0.9))
    step.set_train()
    for number in range(1000):
        step(ms.Tensor(np.ones((8, 64), np.float32)))
        print("step", number)
"""
JIT = """
    ms.set_device("Ascend")
    net = nn.Dense(64, 4096, has_bias=False)
    optimizer = nn.SGD(net.trainable_params(), 0.1)

    def forward(x):
        return net(x).sum()

    gradient = ms.value_and_grad(forward, None, net.trainable_params())

    @ms.jit
    def step(x):
        loss, gradients = gradient(x)
        return ops.depend(loss, optimizer(gradients))

    for number in range(1000):
        step(ms.Tensor(np.ones((8, 64), np.float32)))
        print("step", number)
"""
PYNATIVE = """
    ms.set_context(mode=ms.PYNATIVE_MODE, device_target="Ascend")
    net = nn.Dense(4, 4)
    forward = ms.value_and_grad(lambda x: net(x).sum(), None, net.trainable_params())
    forward(ms.Tensor(np.ones((2, 4), np.float32)))
"""
NEVER_TRAINS = """
    ms.set_context(mode=ms.GRAPH_MODE, device_target="Ascend")
    print("nothing to do")
"""
CUDA = """
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
"""
NEEDS_CANN = "import acl"
FAILS = "raise ValueError('no corpus at /data')"


def program(path, body, **values):
    """Writes a program that imports MindSpore, or one of a line; returns its command."""
    text = textwrap.dedent(HEAD) + textwrap.dedent(body).format(**values) if "\n" in body else body
    path.write_text(text, encoding="utf-8")
    return [sys.executable, str(path)]
