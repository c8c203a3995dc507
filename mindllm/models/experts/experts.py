"""A mixture of experts in static shapes: tokens are gathered for each expert, and its results gathered for each token.

A group of tokens that compete for an expert's capacity is a sequence, whatever devices or micro batches sequences fall on: what
is dropped does not depend on the layout (GShard: Lepikhin et al., 2020, has groups by device). With a capacity of the whole
sequence nothing is ever dropped.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore import ops as P

from mindllm.architecture.experts import ExpertsSpec, capacity_of
from mindllm.architecture.parts import FeedForwardSpec
from mindllm.models.experts.expert_load import ExpertLoad
from mindllm.models.experts.grouped_experts import GroupedFeedForward
from mindllm.models.experts.router import Router
from mindllm.models.feed_forward import FeedForward
from mindllm.models.kernels import Kernels
from mindllm.models.linear import ACTIVATIONS, Linear, Operand
from mindllm.models.weights import InitStd, normal_parameter


class ExpertLinear(nn.Cell):
    """A projection of every expert, ``[batch, experts, tokens, in] -> [batch, experts, tokens, out]``; weight
    ``[experts, out, in]``.

    The product broadcasts the weight over the batch. The CPU back end has no such product: there the sequences of an expert
    are concatenated.
    """

    def __init__(self, experts: int, shape: tuple[int, int], kernels: Kernels, std: float) -> None:
        super().__init__()
        self.weight = normal_parameter("weight", (experts, *shape), std, kernels.weights)
        self.matmul = P.BatchMatMul(transpose_b=True)
        self.operand = Operand(kernels)
        self.behind_each_other = kernels.cpu
        if self.behind_each_other:
            self.transpose = P.Transpose()
        self.reshape = P.Reshape()

    def construct(self, x: Tensor) -> Tensor:
        weight = self.operand.of_weight(self.weight, x)
        if not self.behind_each_other:
            return self.matmul(self.operand(x), weight)
        batch, experts, tokens, _ = x.shape
        x = self.reshape(self.transpose(x, (1, 0, 2, 3)), (experts, batch * tokens, -1))
        y = self.reshape(self.matmul(self.operand(x), weight), (experts, batch, tokens, -1))
        return self.transpose(y, (1, 0, 2, 3))


class ExpertFeedForward(nn.Cell):
    """The feed-forwards of all experts, ``[batch, experts, tokens, hidden]`` -> the same."""

    def __init__(self, experts: int, spec: FeedForwardSpec, kernels: Kernels, spread: InitStd) -> None:
        super().__init__()
        inner, outer = (spec.intermediate_size, spec.hidden_size), (spec.hidden_size, spec.intermediate_size)
        self.w1 = ExpertLinear(experts, inner, kernels, spread.inner)
        self.activation = ACTIVATIONS[spec.activation]()
        self.w3 = ExpertLinear(experts, inner, kernels, spread.inner)
        self.mul = P.Mul()
        self.w2 = ExpertLinear(experts, outer, kernels, spread.output)

    def construct(self, x: Tensor) -> Tensor:
        return self.w2(self.mul(self.activation(self.w1(x)), self.w3(x)))


class Dispatch(nn.Cell):
    """Which token is in which place of an expert, from the router's choice: int32 ``[batch, experts, capacity]`` and, for the
    way back, the place of each choice ``[batch, seq · chosen]`` and whether there was one, fp32 ``[batch, seq, chosen]``.

    Places go to the first tokens of a sequence. In places nobody wants lies any token, whose result nobody reads.
    """

    def __init__(self, spec: ExpertsSpec, length: int) -> None:
        super().__init__()
        self.experts = spec.router.experts
        self.transpose = P.Transpose()
        self.earlier_first = P.Mul()
        self.earliest = P.TopK(sorted=True)
        self.count = P.CumSum()
        self.place = P.GatherD()
        self.first_is_zero = P.Sub()
        self.fits = P.Less()
        self.clip = P.Minimum()
        self.of_expert = P.Mul()
        self.add = P.Add()
        self.cast = P.Cast()
        self.reshape = P.Reshape()
        self.order = Tensor(np.arange(length, 0, -1, dtype=np.float32).reshape(1, 1, length))

    def construct(self, chosen: Tensor, mask: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, _ = chosen.shape
        order = self.order if length == self.order.shape[2] else descending(length)
        choices = self.earlier_first(self.transpose(mask, (0, 2, 1)), order)
        tokens = self.earliest(choices, capacity)[1]
        before = self.first_is_zero(self.place(self.count(mask, 1), 2, chosen), 1.0)
        placed = self.cast(self.fits(before, float(capacity)), ms.float32)
        before = self.cast(self.clip(before, float(capacity - 1)), ms.int32)
        places = self.add(self.of_expert(chosen, capacity), before)
        return tokens, self.reshape(places, (batch, -1)), placed


most_tokens = ms.constexpr(capacity_of)


@ms.constexpr
def descending(length: int) -> Tensor:
    """``length … 1`` as fp32 ``[1, 1, length]``."""
    return Tensor(np.arange(length, 0, -1, dtype=np.float32).reshape(1, 1, length))


class Experts(nn.Cell):
    """``[batch · seq, hidden] -> [batch · seq, hidden]``, and what each sequence adds to the loss, fp32 ``[batch]``."""

    def __init__(self, spec: ExpertsSpec, kernels: Kernels, spread: InitStd, length: int) -> None:
        super().__init__()
        self.count = count = spec.router.experts
        self.balances = spec.router.adds_to_loss
        self.router = Router(spec.router, spec.hidden_size, spread.inner)
        self.load = ExpertLoad(spec.router)
        if self.balances:
            self.add_load = P.Add()
        self.grouped = spec.grouped
        if spec.grouped:
            self.experts = GroupedFeedForward(count, spec.expert, kernels, spread, spec.sends)
            self.kept = P.GatherD()
        else:
            self.top_k, self.capacity_factor = spec.router.top_k, spec.capacity_factor
            self.dispatch = Dispatch(spec, length)
            self.gather_tokens = P.Gather(1)
            self.depart = P.Mul()  # by one: all products with tokens take them from one exchange
            self.experts = ExpertFeedForward(count, spec.expert, kernels, spread)
            self.arrive = P.Mul()  # by one: where results are back at their tokens' devices
            self.collect = P.Gather(1)
            self.weigh = P.Mul()
            self.keep = P.Mul()
            self.sum = P.ReduceSum()
        self.has_shared = spec.shared is not None
        if spec.shared is not None:
            self.shared = FeedForward(spec.shared, kernels, spread)
            self.shared_add = P.Add()
        self.gated = spec.shared_gate
        if spec.shared_gate:
            self.shared_gate = Linear(spec.hidden_size, 1, kernels, spread.inner)
            self.sigmoid = P.Sigmoid()
            self.gate_mul = P.Mul()
        self.output_dtype = kernels.activation
        self.cast = P.Cast()
        self.reshape = P.Reshape()

    def construct(
        self, x: Tensor, batch: int, may_drop: bool = True, random: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        chosen, weights, mask, added = self.router(x, batch)
        if self.grouped:
            y, placed = self.experts(x, chosen, weights), self.kept(mask, 2, chosen)  # ones
        else:
            y, placed = self.routed(x, chosen, weights, mask, may_drop)
        if self.has_shared:
            y = self.shared_add(y, self.shared_output(x, random))
        counted = self.load(mask, placed)
        return y, self.add_load(added, counted) if self.balances else counted

    def routed(self, x: Tensor, chosen: Tensor, weights: Tensor, mask: Tensor, may_drop: bool) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of experts' results, ``[batch · seq, hidden]``, and a mask of choices with a place."""
        batch, length, count = chosen.shape
        hidden, experts, capacity = x.shape[-1], self.count, length
        if may_drop and self.capacity_factor is not None:
            capacity = most_tokens(self.capacity_factor, self.top_k, length, experts)
        tokens, places, placed = self.dispatch(chosen, mask, capacity)
        rows = self.gather_tokens(self.reshape(x, (batch, length, hidden)), tokens, 1)
        y = self.arrive(self.experts(self.depart(rows, 1.0)), 1.0)
        y = self.collect(self.reshape(y, (batch, experts * capacity, hidden)), places, 1)
        weights = self.cast(self.keep(weights, placed), self.output_dtype)
        y = self.weigh(
            self.reshape(y, (batch, length, count, hidden)), self.reshape(weights, (batch, length, count, 1))
        )
        return self.reshape(self.sum(y, 2), (batch * length, hidden)), placed

    def shared_output(self, x: Tensor, random: Tensor | None) -> Tensor:
        """Return the shared expert's result."""
        y = self.shared(x, random)
        return self.gate_mul(y, self.sigmoid(self.shared_gate(x))) if self.gated else y
