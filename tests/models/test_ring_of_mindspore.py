"""MindSpore's own ring attention, as in docs/context_parallel.md: if one of these fails, a newer MindSpore may support it."""

import signal
import subprocess
import sys

import pytest

from mindllm.compiled.device.front_end import environment

PROGRAM = """
import sys
from mindllm.compiled.device import front_end
front_end.pretend_device(0, 2)
import mindspore as ms, numpy as np
from mindspore import nn, ops, Parameter, Tensor
ms.set_context(mode=ms.GRAPH_MODE)
ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=2, global_rank=0, full_batch=True)

class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.ones((64, 64)), ms.float16), name="weight")
        self.matmul = ops.MatMul().shard(((2, 1), (1, 1)))
        self.attention = ops.operations.nn_ops.FlashAttentionScore(4, 1.0, 0.25, input_layout="BSH", sparse_mode=0)
        for mark in sys.argv[1:]:
            self.attention.add_prim_attr(mark, True)
        self.attention.shard(((1, 2, 1),) * 3)
        self.sum = ops.ReduceSum().shard(((1, 2, 1),))

    def construct(self, x):
        rows = ops.reshape(self.matmul(x, self.weight), (1, 64, 64))
        return self.sum(self.attention(rows, rows, rows, None, None, None, None, None)[3])

class Gradient(nn.Cell):
    def __init__(self, net):
        super().__init__()
        self.net, self.weights, self.of = net, ms.ParameterTuple([net.weight]), ops.GradOperation(get_by_list=True)

    def construct(self, x):
        return self.of(self.net, self.weights)(x)

front_end.compile_cell(Gradient(Net()).set_train(), Tensor(np.ones((64, 64)), ms.float16))
"""


def compiled(tmp_path, monkeypatch, *marks):
    for name, value in environment(0, 2).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "program.py").write_text(PROGRAM)
    return subprocess.run(
        [sys.executable, "program.py", *marks], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
def test_as_mindformers_asks_for_it_the_compiler_crashes(tmp_path, monkeypatch):
    assert compiled(tmp_path, monkeypatch, "enable_ring_attention", "enable_ra_send_recv").returncode == -signal.SIGSEGV


@pytest.mark.slow
def test_otherwise_its_graph_cannot_be_exported(tmp_path, monkeypatch):
    done = compiled(tmp_path, monkeypatch, "enable_ring_attention")
    assert done.returncode == 1
    assert "SetSequenceToAttributeProto" in done.stderr
