"""What the processes of a job have gathered, added up in the compiled step."""

from __future__ import annotations

from itertools import accumulate

from mindspore import ParameterTuple, Tensor, nn
from mindspore import ops as P


class SumOverRanks(nn.Cell):
    """Loss, tokens and gradients (all fp32) of all processes added up, in one message; every rank gets the same bits.

    One, because MindSpore 2.10 can add fp32 over all processes of a CPU job and nothing else, and each message waits for the
    slowest rank.
    """

    def __init__(self, weights: ParameterTuple) -> None:
        super().__init__(auto_prefix=False)
        self.shapes = tuple(tuple(weight.shape) for weight in weights)
        self.sizes = tuple(weight.size for weight in weights)
        self.starts = (0, *accumulate(self.sizes))
        self.all_reduce = P.AllReduce()
        self.concat = P.Concat()
        self.slice = P.Slice()

    def construct(self, loss: Tensor, tokens: Tensor, gradients: tuple[Tensor, ...]):
        pieces = [gradient.reshape((-1,)) for gradient in gradients]
        summed = self.all_reduce(self.concat((*pieces, loss.reshape((1,)), tokens.reshape((1,)))))
        gradients = tuple([self.part(summed, index) for index in range(len(self.shapes))])
        total = self.starts[-1]
        return summed[total], summed[total + 1], gradients

    def part(self, summed: Tensor, index: int) -> Tensor:
        return self.slice(summed, (self.starts[index],), (self.sizes[index],)).reshape(self.shapes[index])
