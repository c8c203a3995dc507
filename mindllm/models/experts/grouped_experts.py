"""Experts without a capacity: tokens sorted by their expert, and a matrix product for the group of each.

Every choice of a token is a row, ``tokens · chosen`` in total, so that no choice is dropped and no unused place is computed
(MegaBlocks: Gale et al., 2022). Shapes are static, but the rows of a group depend on the step: Ascend's operators take the ends
of the groups as a tensor. Elsewhere rows are in blocks of one expert each, as in that paper, and the last block of an expert is
padded.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore import ops as P
from mindspore.ops.auto_generate import GroupedMatmul, InnerMoeTokenUnpermute, MoeTokenPermute, Swiglu

from mindllm.architecture.parts import FeedForwardSpec
from mindllm.models.experts.sent_tokens import SentTokens
from mindllm.models.kernels import Kernels
from mindllm.models.linear import ACTIVATIONS, Operand
from mindllm.models.weights import InitStd, normal_parameter

SINGLE_TENSOR, ROW_GROUPS = 3, 0
"""Values of ``split_item`` and ``group_type`` of GroupedMatmul: rows of all groups stand in one tensor."""
MARKS = frozenset({"recompute", "offload", "backward_prefetch"})
"""Attributes of an operator that say what becomes of its result until the backward pass."""
LARGEST_BLOCK, SMALLEST_BLOCK = 128, 8
MIN_EXPERT_BLOCKS = 2  # that an even share of the rows fills at least


class ExpertMatrices(nn.Cell):
    """The matrices of all experts, weight ``[experts, out, in]``."""

    def __init__(self, experts: int, shape: tuple[int, int], kernels: Kernels, std: float) -> None:
        super().__init__()
        self.weight = normal_parameter("weight", (experts, *shape), std, kernels.weights)
        self.operand = Operand(kernels)

    def matrices(self) -> Tensor:
        """Return the weight as operand of the product."""
        return self.operand(self.weight)


class GroupedProduct(ExpertMatrices):
    """Rows of each expert by its matrix: ``[rows, in] -> [rows, out]``."""

    def __init__(self, experts: int, shape: tuple[int, int], kernels: Kernels, std: float) -> None:
        super().__init__(experts, shape, kernels, std)
        self.transpose = P.Transpose()
        self.matmul = GroupedMatmul(SINGLE_TENSOR, ROW_GROUPS)

    def construct(self, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """Multiply grouped rows. ``ends`` int64 ``[experts]``: the end of each expert's group."""
        weight = self.transpose(weight, (0, 2, 1))
        return self.matmul((self.operand(rows),), (weight,), None, None, None, None, None, ends)[0]


class Choices(nn.Cell):
    """Chosen experts int32 ``[tokens, chosen]`` -> a mask fp32 ``[tokens, experts]``; ``experts`` itself is nobody."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = experts
        self.onehot = P.OneHot()
        self.mark = P.ReduceSum()
        self.on = Tensor(1.0, ms.float32)
        self.off = Tensor(0.0, ms.float32)

    def construct(self, chosen: Tensor) -> Tensor:
        return self.mark(self.onehot(chosen, self.experts, self.on, self.off), 1)


class SortedTokens(nn.Cell):
    """Rows of tokens in the order of their experts, by Ascend's operators: ``[tokens, hidden]`` and the chosen experts int32
    ``[tokens, chosen]`` -> rows ``[tokens · chosen, hidden]``, the row of each choice int32 ``[tokens · chosen]``, and the ends
    of the groups int64 ``[experts]``.

    ``shared``: some choices are of other ranks' experts and have the number ``experts``. Their rows are after all groups,
    where products leave memory uninitialized.
    """

    def __init__(self, experts: int, shared: bool = False) -> None:
        super().__init__()
        self.shared = shared
        self.mask = Choices(experts)
        self.permute = MoeTokenPermute()
        self.unpermute = InnerMoeTokenUnpermute()
        self.count = P.ReduceSum()
        self.running = P.CumSum()
        if shared:
            self.last = P.StridedSlice()
            self.behind = P.GreaterEqual()
            self.clear = P.MaskedFill()
        self.cast = P.Cast()

    def construct(self, x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, places = self.permute(x, chosen)
        ends = self.cast(self.running(self.count(self.mask(chosen), 0), 0), ms.int64)
        return self.cleared(rows, ends), places, ends

    def cleared(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Return ``rows`` with zeros after all groups, and likewise their gradient."""
        if not self.shared:
            return rows
        count = ends.shape[0]
        end = self.last(ends, (count - 1,), (count,), (1,))
        return self.clear(rows, self.behind(row_numbers(rows.shape[0]), end), 0.0)

    def weighted_sum(self, y: Tensor, places: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        """Sum the rows of each token with weights ``[tokens, chosen]``: ``[tokens, hidden]``."""
        return self.unpermute(self.cleared(y, ends), places, weights, False, None)


class BlockProduct(ExpertMatrices):
    """:class:`GroupedProduct` of rows in blocks, ``[blocks, rows, in] -> [blocks, rows, out]``, with a copy of its expert's
    matrix for each block. ``owners`` int32 ``[blocks]`` are the experts of the blocks.
    """

    def __init__(self, experts: int, shape: tuple[int, int], kernels: Kernels, std: float) -> None:
        super().__init__(experts, shape, kernels, std)
        self.of_block = P.Gather()
        self.matmul = P.BatchMatMul(transpose_b=True)

    def construct(self, rows: Tensor, weight: Tensor, owners: Tensor) -> Tensor:
        return self.matmul(self.operand(rows), self.of_block(weight, owners, 0))


class TokensInBlocks(nn.Cell):
    """:class:`SortedTokens` with operators that every back end has: the rows of each expert begin with a block.

    Rows are ``[blocks, rows of a block, hidden]``, and instead of ends there is the expert of each block. There are as many
    blocks as the worst choice needs. In rows nobody wants lies the first token, whose result nobody reads; where choices are
    ``shared``, those of other ranks' experts have the last row of one more block, with weights of zero.
    """

    def __init__(self, experts: int, shared: bool = False) -> None:
        super().__init__()
        self.experts = experts
        self.shared = shared
        self.mask = Choices(experts)
        self.running = P.CumSum()
        self.earlier = P.GatherD()
        self.first_is_zero = P.Sub()
        self.count = P.ReduceSum()
        self.add_rest = P.Add()
        self.blocks = P.FloorDiv()
        self.ends = P.CumSum()
        self.first_block = P.Sub()
        self.first_row = P.Mul()
        self.row = P.Gather()
        self.add = P.Add()
        if shared:
            self.is_foreign = P.GreaterEqual()
            self.inside = P.Minimum()
            self.last_row = P.MaskedFill()
            self.first_token = P.MaskedFill()
        self.tokens_of_rows = P.UnsortedSegmentSum()
        self.is_behind = P.GreaterEqual()
        self.owner = P.ReduceSum()
        self.last = P.Minimum()
        self.gather_tokens = P.Gather()
        self.collect = P.Gather()
        self.weigh = P.Mul()
        self.sum = P.ReduceSum()
        self.cast = P.Cast()
        self.reshape = P.Reshape()

    def construct(self, x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens, count = chosen.shape
        size = block_rows(tokens * count, self.experts)
        blocks = most_blocks(tokens * count, self.experts, size) + self.shared
        mask = self.mask(chosen)
        ends, first_rows = self.groups(mask, size)
        places, token = self.places(chosen, self.running(mask, 0), first_rows, blocks * size)
        sources = self.tokens_of_rows(token, places, blocks * size)
        after_block = self.cast(self.is_behind(block_numbers(blocks), self.reshape(ends, (1, -1))), ms.float32)
        owners = self.cast(self.last(self.owner(after_block, 1), float(self.experts - 1)), ms.int32)
        rows = self.reshape(self.gather_tokens(x, sources, 0), (blocks, size, x.shape[1]))
        return rows, places, owners

    def groups(self, mask: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Behind which block each expert ends and with which row it begins, both fp32 ``[experts]``."""
        blocks = self.blocks(self.add_rest(self.count(mask, 0), float(size - 1)), float(size))
        ends = self.ends(blocks, 0)
        return ends, self.first_row(self.first_block(ends, blocks), float(size))

    def places(self, chosen: Tensor, running: Tensor, first_rows: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """The row of each choice and the token that lies there, both int32 ``[tokens · chosen]``; ``running`` fp32
        ``[tokens, experts]`` are the tokens of an expert up to each.
        """
        tokens, count = chosen.shape
        token = choice_tokens(tokens, count)
        local = self.inside(chosen, self.experts - 1) if self.shared else chosen
        before = self.first_is_zero(self.earlier(running, 1, local), 1.0)
        places = self.add(before, self.row(first_rows, local, 0))
        if self.shared:
            foreign = self.is_foreign(chosen, self.experts)
            places = self.last_row(places, foreign, float(rows - 1))
            token = self.first_token(token, self.reshape(foreign, (tokens * count,)), 0)
        return self.reshape(self.cast(places, ms.int32), (tokens * count,)), token

    def weighted_sum(self, y: Tensor, places: Tensor, weights: Tensor, owners: Tensor) -> Tensor:
        """Sum the rows of each token with weights ``[tokens, chosen]``: ``[tokens, hidden]``."""
        (tokens, count), hidden = weights.shape, y.shape[2]
        y = self.collect(self.reshape(y, (y.shape[0] * y.shape[1], hidden)), places, 0)
        y = self.reshape(y, (tokens, count, hidden))
        return self.sum(self.weigh(y, self.reshape(weights, (tokens, count, 1))), 1)


class SharedExperts(nn.Cell):
    """The tokens of all ranks that share the experts, each of which has ``count`` experts from ``first`` on: hidden states
    ``[tokens, hidden]``, chosen experts and weights ``[tokens, chosen]`` of this rank -> those of all, where choices of others'
    experts have the number ``count`` and no weight. :meth:`back` returns sums over the ranks of each rank's tokens.

    A rank computes only the choices of its own experts. It has rows for all choices, the maximum that can arrive.
    """

    def __init__(self, group: str, first: int, count: int) -> None:
        super().__init__()
        self.first, self.own = first, count
        self.gather_tokens, self.gather_chosen, self.gather_weights = (P.AllGather(group) for _ in range(3))
        self.scatter = P.ReduceScatter(P.ReduceOp.SUM, group)
        self.from_first = P.Sub()
        self.is_before = P.Less()
        self.is_behind = P.GreaterEqual()
        self.foreign = P.LogicalOr()
        self.nobody = P.MaskedFill()
        self.no_weight = P.MaskedFill()

    def construct(self, x: Tensor, chosen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        chosen = self.from_first(self.gather_chosen(chosen), self.first)
        foreign = self.foreign(self.is_before(chosen, 0), self.is_behind(chosen, self.own))
        weights = self.no_weight(self.gather_weights(weights), foreign, 0.0)
        return self.gather_tokens(x), self.nobody(chosen, foreign, self.own), weights

    def back(self, y: Tensor) -> Tensor:
        """``[all tokens, hidden] -> [tokens, hidden]``."""
        return self.scatter(y)


class GroupedFeedForward(nn.Cell):
    """Hidden states ``[tokens, hidden]``, the chosen experts int32 and their weights fp32, both ``[batch, seq, chosen]`` -> the
    weighted sum of the experts' results, ``[tokens, hidden]``.

    On several devices each of them sorts the tokens it has (:meth:`split`): the compiler sees one operator, which is opened
    when all tensors are those of a device.
    """

    def __init__(
        self, experts: int, spec: FeedForwardSpec, kernels: Kernels, spread: InitStd, sends: bool = False
    ) -> None:
        super().__init__()
        inner, outer = (spec.intermediate_size, spec.hidden_size), (spec.hidden_size, spec.intermediate_size)
        product = GroupedProduct if kernels.fused else BlockProduct
        self.experts, self.hidden_size, self.sends = experts, spec.hidden_size, sends
        self.order = SortedTokens(experts) if kernels.fused else TokensInBlocks(experts)
        self.w1 = product(experts, inner, kernels, spread.inner)
        self.activation = ACTIVATIONS[spec.activation]()
        self.w3 = product(experts, inner, kernels, spread.inner)
        self.mul = P.Mul()
        self.w2 = product(experts, outer, kernels, spread.output)
        self.is_split = self.is_shared = self.is_sent = False
        self.dtype = kernels.activation
        self.cast = P.Cast()
        self.reshape = P.Reshape()

    def split(self, group: str, ranks: int, place: int, balanced: bool = False) -> None:
        """Make one operator of the computation of a device. ``ranks`` devices, which communicate as ``group``, share the experts;
        this one has the part at ``place``.
        """
        if ranks > 1 and self.sends:
            self.order = SentTokens(self.experts, self.hidden_size, group, ranks, place, balanced)
            self.join, self.swiglu = P.Concat(1), Swiglu()
            for name in MARKS & self.mul.attrs.keys():  # its result equals the product
                self.swiglu.add_prim_attr(name, self.mul.attrs[name])
            self.is_sent = True
        elif ranks > 1:
            count = self.experts // ranks
            self.shared = SharedExperts(group, place * count, count)
            self.order = type(self.order)(count, shared=True)
            self.is_shared = True
        self.exchanging = self.shared if self.is_shared else self.order
        self.on_parts = P.Morph(self.mixture, first_input, first_input)
        self.is_split = True

    def construct(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        shape = (x.shape[0], chosen.shape[2])
        chosen, weights = self.reshape(chosen, shape), self.reshape(weights, shape)
        w1, w3, w2 = self.w1.matrices(), self.w3.matrices(), self.w2.matrices()
        if self.is_split:
            return self.on_parts(x, chosen, weights, w1, w3, w2)
        return self.mixture(x, chosen, weights, w1, w3, w2)

    def mixture(self, x: Tensor, chosen: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
        """Compute the mixture for choices ``[tokens, chosen]`` and matrices ``[experts, out, in]`` in the dtype of operands."""
        if self.is_shared:
            x, chosen, weights = self.shared(x, chosen, weights)
        rows, places, groups = self.order(x, chosen)
        y = self.w2(self.inner(rows, w1, w3, groups), w2, groups)
        y = self.order.weighted_sum(y, places, self.cast(weights, self.dtype), groups)
        return self.shared.back(y) if self.is_shared else y

    def inner(self, rows: Tensor, w1: Tensor, w3: Tensor, groups: Tensor) -> Tensor:
        """Return the input of the down projection for rows ``[rows, hidden]`` (or in blocks): ``[rows, width]``.

        How many rows are sent is not known before the step runs, and the gradient of a product of two tensors asks. That of the
        fused operator, of both projections side by side, does not.
        """
        if self.is_sent:
            return self.swiglu(self.w1(rows, self.join((w1, w3)), groups), -1)
        return self.mul(self.activation(self.w1(rows, w1, groups)), self.w3(rows, w3, groups))


def first_input(*inputs):
    """Shape or type of the result: that of the first input."""
    return inputs[0]


def block_rows(rows: int, experts: int) -> int:
    """Return a power of two for which an even share of ``rows`` fills some blocks.
    less in vain.
    """
    share = rows // (MIN_EXPERT_BLOCKS * experts)
    return max(SMALLEST_BLOCK, min(LARGEST_BLOCK, 1 << max(share, 1).bit_length() - 1))


def most_blocks(rows: int, experts: int, size: int) -> int:
    """Blocks of ``size`` that ``rows`` fill, however they fall on the experts."""
    used = min(rows, experts)  # experts with any row
    return (rows + used * (size - 1)) // size


@ms.constexpr
def choice_tokens(tokens: int, count: int) -> Tensor:
    """Return the token of each of its choices: int32 ``[tokens · count]``."""
    return Tensor(np.repeat(np.arange(tokens, dtype=np.int32), count))


@ms.constexpr
def block_numbers(blocks: int) -> Tensor:
    """``0 … blocks - 1`` as fp32 ``[blocks, 1]``."""
    return Tensor(np.arange(blocks, dtype=np.float32).reshape(blocks, 1))


@ms.constexpr
def row_numbers(rows: int) -> Tensor:
    """``0 … rows - 1`` as int64 ``[rows, 1]``."""
    return Tensor(np.arange(rows, dtype=np.int64).reshape(rows, 1))
