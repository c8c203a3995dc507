"""One rank of :mod:`toolkit.benchmark.starts`: connects to the others as a run does, adds one number with them, and ends."""

from __future__ import annotations

import os

os.environ.setdefault("GLOG_v", "3")

import mindspore as ms
import numpy as np
from mindspore import ops as P
from mindspore.communication import init

from mindllm.launch.meeting import RendezvousClient
from mindllm.process.exit_hooks import leave, skip_exit_functions


class Sum(ms.nn.Cell):
    """The first message a step sends."""

    def __init__(self) -> None:
        super().__init__()
        self.all_reduce = P.AllReduce()

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return self.all_reduce(x)


def main() -> None:
    """Connects, compiles, meets and adds; a wrong sum is an error."""
    ms.set_device("CPU", 0)
    ms.set_context(mode=ms.GRAPH_MODE)
    init()
    seat, program = RendezvousClient.inherited(), Sum()
    count, one = int(os.environ["MS_WORKER_NUM"]), ms.Tensor(np.ones(1 << 16, np.float32))
    assert seat is not None
    program.compile(one)
    seat.sum([])
    found = program(one).asnumpy()
    if not (found == count).all() or seat.sum([1.0]) != [count]:
        raise SystemExit("the ranks did not add what they gave")
    skip_exit_functions()
    leave(0)


if __name__ == "__main__":
    main()
