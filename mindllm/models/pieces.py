"""Sequences that pass through a pipeline in pieces: a piece attends to the keys and values of earlier pieces.

Every layer stores the keys and values of a micro-batch, ``[batch, kv heads, seq, d]``, from its first piece to its last. A piece
adds its own at its places and attends to all, of which later places are zero and masked. The last piece leaves zeros.

In the backward pass pieces have the opposite order. A piece's keys get gradients from its own queries and from those of later
pieces, which are stored as well, from the last piece to the first. MindSpore's compiler does this: if keys are added to a
parameter whose name has ``key_cache`` or ``value_cache``, it looks for a parameter with the suffix ``_grad``, and for the number
of the piece in the condition of the stored selection. Operators, their order and names are therefore those it recognizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore import ops as P
from mindspore.common.initializer import initializer


@dataclass(frozen=True)
class InPieces:
    """The pieces of sequences in a pipeline, and the sizes of a micro-batch of all replicas.

    Attributes:
        count: the number of pieces.
        rows: sequences of a micro-batch, over all replicas.
        replicas: the number of replicas that share these.
        tensor_ranks: the number of ranks that share the heads.
    """

    count: int
    rows: int
    replicas: int
    tensor_ranks: int


def _empty(name: str, shape: tuple[int, ...], dtype: ms.dtype) -> Parameter:
    """Zeros that belong to the graph and are neither trained nor saved."""
    parameter = Parameter(initializer("zeros", shape, dtype), name=name, requires_grad=False)
    parameter.is_constant = True
    return parameter


class EarlierPieces(nn.Cell):
    """Keys, or values, of a piece added to those of earlier pieces.

    ``held_grad`` has the shape of a device's part of ``held``: no operator of the model reads it, so the compiler does not cut
    it.
    """

    def __init__(self, pieces: InPieces, heads: int, seq_length: int, width: int, dtype: ms.dtype) -> None:
        super().__init__()
        self.held = _empty("held", (pieces.rows, heads, seq_length, width), dtype)
        part = (pieces.rows // pieces.replicas, heads // pieces.tensor_ranks, seq_length, width)
        self.held_grad = _empty("held_grad", part, dtype)
        self.pieces = pieces.count
        self.last = Tensor(pieces.count - 1, ms.int32)
        self.tile = P.Tile()
        self.at_own_places = P.Mul()
        self.join = P.Add()
        self.less = P.Less()
        self.cast = P.Cast()
        self.dtype = dtype
        self.is_any = P.NotEqual()
        self.goes_on = P.NotEqual()
        self.keeps = P.Mul()
        self.select = P.Select()
        self.assign = P.Assign()

    def construct(self, x: Tensor, own: Tensor, piece: Tensor) -> tuple[Tensor, Tensor]:
        """Add ``x`` ``[batch, heads, seq / pieces, d]``; return all so far ``[batch, heads, seq, d]``, and a tensor to wait for.

        ``own``: 1 at the places of the piece, else 0, ``[1, 1, seq, 1]`` in the dtype of ``x``. ``piece``: its number, ``[]``.
        """
        x = self.at_own_places(self.tile(x, (1, 1, self.pieces, 1)), own)
        zeros = P.stop_gradient(
            self.cast(self.less(x, x), self.dtype)
        )  # also for values that are not finite, which no product makes zero
        keeps = self.keeps(self.is_any(zeros, -1), self.goes_on(piece, self.last))
        whole = self.join(x, self.held)
        return whole, self.assign(self.held, P.stop_gradient(self.select(keeps, whole, zeros)))


class PieceTables(nn.Cell):
    """The tables and the mask of a piece: the rows of its places in those of whole sequences.

    The fused kernel uses the compressed mask unchanged: the compiler derives the masked band from the number of the piece.
    """

    def __init__(self, count: int, seq_length: int, fused: bool, dtype: ms.dtype) -> None:
        super().__init__()
        self.length = seq_length // count
        self.cuts_mask = not fused
        self.in_piece = Tensor(np.arange(self.length, dtype=np.int32))
        self.piece_of_place = Tensor(
            (np.arange(seq_length, dtype=np.int32) // self.length).reshape(1, 1, seq_length, 1)
        )
        self.dtype = dtype
        self.first_place = P.Mul()
        self.places = P.Add()
        self.own = P.Equal()
        self.cast = P.Cast()
        self.cos, self.sin = P.Gather(), P.Gather()
        if self.cuts_mask:
            self.mask = P.Gather()

    def construct(self, piece: Tensor, tables: tuple[Tensor, ...], mask: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Rotary tables of the piece, its ``own`` places and its number, and its mask."""
        places = self.places(self.in_piece, self.first_place(piece, self.length))
        cos, sin = self.cos(tables[0], places, 0), self.sin(tables[1], places, 0)
        own = self.cast(self.own(self.piece_of_place, piece), self.dtype)
        return (cos, sin, own, piece), self.mask(mask, places, 0) if self.cuts_mask else mask
