"""Samples made of rows: token sequences with marked trained tokens; one row per sample, or several packed.

A row of n tokens takes n - 1 places: its last token is a label only. Packed rows do not attend to each other and have separate
positions, so the loss of a pack is the sum of the losses of its rows (Krell et al., 2021, section 3.2). Packs are found by best
fit, longest first (the histogram-free form of Krell et al., 2021, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from mindllm.data.documents import PACKS, SAMPLES, permutation, positions

BLOCK = 64  # samples per read: sources that open files are slow for single rows


def pack(places: np.ndarray, capacity: int, seed: int) -> list[list[int]]:
    """Return groups of row numbers whose ``places`` (int [rows]) sum to at most ``capacity``: every row in exactly one.

    Each row, longest first, goes where it leaves least room. Rows of one length are taken in an order drawn from ``seed``, so
    that neighbours in a file do not stay together; which rows share a sample has no influence on their losses. Raises
    ValueError for a row that does not fit.
    """
    if len(places) and int(places.max()) > capacity:
        raise ValueError(f"a row of {int(places.max())} places does not fit {capacity}")
    order = permutation(len(places), seed, 0, PACKS)
    order = order[np.argsort(-places[order], kind="stable")]
    packs: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # packs by the room they have
    rooms = 0  # bit r is set where some pack has room r
    for row in order.tolist():
        need = int(places[row])
        fitting = rooms >> need
        if fitting and need:
            room = need + (fitting & -fitting).bit_length() - 1
            index = with_room[room].pop()
            if not with_room[room]:
                rooms &= ~(1 << room)
            packs[index].append(row)
        else:
            room, index = capacity, len(packs)
            packs.append([row])
        if room > need:
            with_room[room - need].append(index)
            rooms |= 1 << (room - need)
    return packs


@dataclass(frozen=True)
class Row:
    """One sequence: ``tokens`` int32 [n], ``trained`` bool [n]: whether the loss of predicting that token counts."""

    tokens: np.ndarray
    trained: np.ndarray

    @property
    def places(self) -> int:
        """Return the places it takes in a sample."""
        return max(0, len(self.tokens) - 1)


class RowSource(Protocol):
    """Rows by number, none longer than ``seq_length`` + 1 tokens."""

    def __len__(self) -> int: ...

    def rows(self, numbers: Sequence[int]) -> list[Row]:
        """Return the rows of these numbers, in this order."""


class Packs:
    """Which rows share a sample: ``packs[i]`` is an int array of row numbers."""

    def __init__(self, rows: np.ndarray, ends: np.ndarray) -> None:
        self.row_numbers = rows
        self._ends = ends

    @staticmethod
    def single(numbers: np.ndarray) -> Packs:
        """Return packs of one row each."""
        return Packs(numbers, np.arange(1, len(numbers) + 1))

    @staticmethod
    def of(groups: Sequence[np.ndarray]) -> Packs:
        """Return packs of the given groups."""
        return Packs(np.concatenate(groups), np.cumsum([len(group) for group in groups]))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.row_numbers[self._ends[index - 1] if index else 0 : self._ends[index]]


class RowDataset:
    """Samples of ``packs`` without end: epochs, each in a different order drawn from ``seed``.

    ``packed`` samples have segment_starts and position_ids of their rows; others are one row with padding after it, which causal
    attention does not see.
    """

    sample_count = None  # endless

    def __init__(self, source: RowSource, packs: Packs, seq_length: int, seed: int, *, packed: bool = False) -> None:
        self.source = source
        self.packs = packs
        self.seq_length = seq_length
        self.seed = seed
        self.packed = packed
        self._order = lru_cache(maxsize=2)(self._draw_order)
        self._block = lru_cache(maxsize=4)(self._read_block)

    @property
    def samples_per_epoch(self) -> int:
        """Return the samples of one pass."""
        return len(self.packs)

    def rows_of(self, index: int) -> np.ndarray:
        """Return the numbers of the rows in sample ``index``."""
        epoch, place = divmod(index, len(self.packs))
        return self.packs[int(self._order(epoch)[place])]

    def sample(self, index: int) -> dict[str, np.ndarray]:
        """Return sample ``index``: input_ids, labels int32, loss_mask float32, and if packed segment_starts and position_ids."""
        block, place = divmod(index, BLOCK)
        return self._block(block)[place]

    def _draw_order(self, epoch: int) -> np.ndarray:
        return permutation(len(self.packs), self.seed, epoch, SAMPLES)

    def _read_block(self, block: int) -> list[dict[str, np.ndarray]]:
        return self._samples([self.rows_of(block * BLOCK + place) for place in range(BLOCK)])

    def _samples(self, groups: Sequence[np.ndarray]) -> list[dict[str, np.ndarray]]:
        rows = iter(self.source.rows(np.concatenate(groups).tolist()))
        return [assemble([next(rows) for _ in group], self.seq_length, packed=self.packed) for group in groups]


class HeldOutRows:
    """Rows for evaluation, each in a separate sample, in order. Rows past the end are padding without loss."""

    def __init__(self, source: RowSource, numbers: Sequence[int], seq_length: int) -> None:
        self.source = source
        self.numbers = numbers
        self.seq_length = seq_length

    @property
    def sample_count(self) -> int:
        """Return the number of rows."""
        return len(self.numbers)

    def sample(self, index: int) -> dict[str, np.ndarray]:
        """Return input_ids, labels int32, loss_mask float32, each [seq_length]."""
        rows = self.source.rows([self.numbers[index]]) if index < len(self.numbers) else []
        return assemble(rows, self.seq_length, packed=False)


def assemble(rows: Sequence[Row], seq_length: int, *, packed: bool) -> dict[str, np.ndarray]:
    """Place rows one after another in a sample of ``seq_length`` places; raise ValueError if they do not fit."""
    if sum(row.places for row in rows) > seq_length:
        raise ValueError(f"rows of {[row.places for row in rows]} places in a sample of {seq_length}")
    input_ids, labels, starts = (np.zeros(seq_length, dtype=np.int32) for _ in range(3))
    loss_mask = np.zeros(seq_length, dtype=np.float32)
    start = 0
    for row in rows:
        places = slice(start, start + row.places)
        input_ids[places] = row.tokens[:-1]
        labels[places] = row.tokens[1:]
        loss_mask[places] = row.trained[1:]
        starts[places] = start
        start = places.stop
    starts[start:] = start
    sample = {"input_ids": input_ids, "labels": labels, "loss_mask": loss_mask}
    if packed:
        sample |= {"segment_starts": starts, "position_ids": positions(starts)}
    return sample
