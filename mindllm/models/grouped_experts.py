"""Experts without a capacity: tokens sorted by their expert, and a matrix product for the group of each.

Every choice of a token is a row, ``tokens · chosen`` of them in all, so nothing is dropped, and nothing is computed for places
that nobody wants (MegaBlocks: Gale et al., 2022). Shapes are static, and how many rows a group has is known when the step runs:
Ascend's operators take the ends of the groups as a tensor. Elsewhere rows lie in blocks that belong to one expert each, as in
that paper, and what is left of the last block of an expert is computed in vain.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore import ops as P
from mindspore.ops.auto_generate import GroupedMatmul, InnerMoeTokenUnpermute, MoeTokenPermute

from mindllm.config.layers import FeedForwardSpec
from mindllm.models.kernels import Kernels
from mindllm.models.linear import ACTIVATIONS, Operand
from mindllm.models.weights import Spread, normal_parameter

ONE_TENSOR, GROUPS_OF_ROWS = 3, 0
"""Values of ``split_item`` and ``group_type`` of GroupedMatmul: rows of all groups stand in one tensor."""
LARGEST_BLOCK, SMALLEST_BLOCK = 128, 8
BLOCKS_OF_EXPERT = 2  # that an even share of the rows fills at least


class GroupedProduct(nn.Cell):
    """Rows of each expert by its matrix: ``[rows, in] -> [rows, out]``; fp32 weight ``[experts, out, in]``."""

    def __init__(self, experts: int, shape: tuple[int, int], kernels: Kernels, std: float) -> None:
        super().__init__()
        self.weight = normal_parameter("weight", (experts, *shape), std)
        self.operand = Operand(kernels)
        self.transpose = P.Transpose()
        self.matmul = GroupedMatmul(ONE_TENSOR, GROUPS_OF_ROWS)

    def matrices(self) -> Tensor:
        """The weight as operand of the product."""
        return self.operand(self.weight)

    def construct(self, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """``ends`` int64 ``[experts]``: behind which row the group of each ends."""
        weight = self.transpose(weight, (0, 2, 1))
        return self.matmul((self.operand(rows),), (weight,), None, None, None, None, None, ends)[0]


class SortedTokens(nn.Cell):
    """Rows of tokens in the order of their experts, by Ascend's operators: ``[tokens, hidden]``, chosen experts int32
    ``[tokens, chosen]`` and the same as a mask fp32 ``[tokens, experts]`` -> rows ``[tokens · chosen, hidden]``, the row of each
    choice int32 ``[tokens · chosen]``, and the ends of the groups int64 ``[experts]``.
    """

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self.permute = MoeTokenPermute()
        self.unpermute = InnerMoeTokenUnpermute()
        self.count = P.ReduceSum()
        self.running = P.CumSum()
        self.cast = P.Cast()

    def construct(self, x: Tensor, chosen: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, places = self.permute(x, chosen)
        ends = self.running(self.count(P.stop_gradient(mask), 0), 0)
        return rows, places, self.cast(ends, ms.int64)

    def weighted_sum(self, y: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        """The rows of each token, weighted by ``[tokens, chosen]`` and added up: ``[tokens, hidden]``."""
        return self.unpermute(y, places, weights, False, None)


class BlockProduct(nn.Cell):
    """:class:`GroupedProduct` of rows in blocks, ``[blocks, rows, in] -> [blocks, rows, out]``, with a copy of its expert's
    matrix for each block. ``owners`` int32 ``[blocks]`` are the experts of the blocks.
    """

    def __init__(self, experts: int, shape: tuple[int, int], kernels: Kernels, std: float) -> None:
        super().__init__()
        self.weight = normal_parameter("weight", (experts, *shape), std)
        self.operand = Operand(kernels)
        self.of_block = P.Gather()
        self.matmul = P.BatchMatMul(transpose_b=True)

    def matrices(self) -> Tensor:
        """The weight as operand of the product."""
        return self.operand(self.weight)

    def construct(self, rows: Tensor, weight: Tensor, owners: Tensor) -> Tensor:
        return self.matmul(self.operand(rows), self.of_block(weight, owners, 0))


class TokensInBlocks(nn.Cell):
    """:class:`SortedTokens` with operators that every back end has: the rows of each expert begin with a block.

    Rows are ``[blocks, rows of a block, hidden]``, and instead of ends there is the expert of each block. There are as many
    blocks as the worst choice needs. In rows nobody wants lies the first token, whose result nobody reads.
    """

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
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

    def construct(self, x: Tensor, chosen: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (tokens, count), experts = chosen.shape, mask.shape[1]
        size = rows_of_block(tokens * count, experts)
        blocks = most_blocks(tokens * count, experts, size)
        mask = P.stop_gradient(mask)
        ends, first_rows = self.groups(mask, size)
        before = self.first_is_zero(self.earlier(self.running(mask, 0), 1, chosen), 1.0)
        places = self.cast(self.add(before, self.row(first_rows, chosen, 0)), ms.int32)
        places = self.reshape(places, (tokens * count,))
        sources = self.tokens_of_rows(token_of_choice(tokens, count), places, blocks * size)
        behind = self.cast(self.is_behind(numbers_of_blocks(blocks), self.reshape(ends, (1, experts))), ms.float32)
        owners = self.cast(self.last(self.owner(behind, 1), float(experts - 1)), ms.int32)
        rows = self.reshape(self.gather_tokens(x, sources, 0), (blocks, size, x.shape[1]))
        return rows, places, owners

    def groups(self, mask: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Behind which block each expert ends and with which row it begins, both fp32 ``[experts]``."""
        blocks = self.blocks(self.add_rest(self.count(mask, 0), float(size - 1)), float(size))
        ends = self.ends(blocks, 0)
        return ends, self.first_row(self.first_block(ends, blocks), float(size))

    def weighted_sum(self, y: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        """The rows of each token, weighted by ``[tokens, chosen]`` and added up: ``[tokens, hidden]``."""
        (tokens, count), hidden = weights.shape, y.shape[2]
        y = self.collect(self.reshape(y, (y.shape[0] * y.shape[1], hidden)), places, 0)
        y = self.reshape(y, (tokens, count, hidden))
        return self.sum(self.weigh(y, self.reshape(weights, (tokens, count, 1))), 1)


class GroupedFeedForward(nn.Cell):
    """Hidden states ``[tokens, hidden]``, the chosen experts int32, their weights fp32, both ``[batch, seq, chosen]``, and a mask
    of the chosen ones fp32 ``[batch, seq, experts]`` -> the weighted sum of the experts' results, ``[tokens, hidden]``.

    On several devices each of them sorts the tokens it has (:meth:`split`): the compiler sees one operator, which is opened
    when all tensors are those of a device.
    """

    def __init__(self, experts: int, spec: FeedForwardSpec, kernels: Kernels, spread: Spread) -> None:
        super().__init__()
        inner, outer = (spec.width, spec.hidden_size), (spec.hidden_size, spec.width)
        product, order = (GroupedProduct, SortedTokens) if kernels.fused else (BlockProduct, TokensInBlocks)
        self.order = order(kernels)
        self.w1 = product(experts, inner, kernels, spread.inner)
        self.activation = ACTIVATIONS[spec.activation]()
        self.w3 = product(experts, inner, kernels, spread.inner)
        self.mul = P.Mul()
        self.w2 = product(experts, outer, kernels, spread.output)
        self.is_split = False
        self.dtype = kernels.activation
        self.cast = P.Cast()
        self.reshape = P.Reshape()

    def split(self) -> None:
        """Makes one operator of what each device computes of its own tokens."""
        self.on_parts = P.Morph(self.mixture, first_of, first_of)
        self.is_split = True

    def construct(self, x: Tensor, chosen: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
        w1, w3, w2 = self.w1.matrices(), self.w3.matrices(), self.w2.matrices()
        if self.is_split:
            return self.on_parts(x, chosen, weights, mask, w1, w3, w2)
        return self.mixture(x, chosen, weights, mask, w1, w3, w2)

    def mixture(
        self, x: Tensor, chosen: Tensor, weights: Tensor, mask: Tensor, w1: Tensor, w3: Tensor, w2: Tensor
    ) -> Tensor:
        """The same with the matrices ``[experts, out, in]`` in the dtype of operands."""
        tokens = x.shape[0]
        chosen = self.reshape(chosen, (tokens, chosen.shape[2]))
        weights = self.cast(self.reshape(weights, chosen.shape), self.dtype)
        rows, places, groups = self.order(x, chosen, self.reshape(mask, (tokens, mask.shape[2])))
        inner = self.mul(self.activation(self.w1(rows, w1, groups)), self.w3(rows, w3, groups))
        return self.order.weighted_sum(self.w2(inner, w2, groups), places, weights)


def first_of(*inputs):
    """Shape or type of the result: that of the first input."""
    return inputs[0]


def rows_of_block(rows: int, experts: int) -> int:
    """A power of two, of which an even share of ``rows`` fills some: longer blocks copy matrices less often, shorter ones compute
    less in vain.
    """
    share = rows // (BLOCKS_OF_EXPERT * experts)
    return max(SMALLEST_BLOCK, min(LARGEST_BLOCK, 1 << max(share, 1).bit_length() - 1))


def most_blocks(rows: int, experts: int, size: int) -> int:
    """Blocks of ``size`` that ``rows`` fill, however they fall on the experts."""
    used = min(rows, experts)  # experts with any row
    return (rows + used * (size - 1)) // size


@ms.constexpr
def token_of_choice(tokens: int, count: int) -> Tensor:
    """The token of each of its choices: int32 ``[tokens · count]``."""
    return Tensor(np.repeat(np.arange(tokens, dtype=np.int32), count))


@ms.constexpr
def numbers_of_blocks(blocks: int) -> Tensor:
    """``0 … blocks - 1`` as fp32 ``[blocks, 1]``."""
    return Tensor(np.arange(blocks, dtype=np.float32).reshape(blocks, 1))
