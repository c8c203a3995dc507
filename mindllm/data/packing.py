"""Which rows share a sample: best fit, longest first (the histogram-free form of Krell et al., 2021, algorithm 1)."""

from __future__ import annotations

import numpy as np

from mindllm.data.order import PACKS, permutation


def pack(places: np.ndarray, capacity: int, seed: int) -> list[list[int]]:
    """Returns groups of row numbers whose ``places`` (int [rows]) sum to at most ``capacity``: every row in exactly one.

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
