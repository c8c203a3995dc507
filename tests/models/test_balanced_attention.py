"""Balanced halves of a sequence: where tokens stand, that two compressed masks hide what positions do, and equal work."""

import numpy as np
import pytest

from mindllm.compiled.execute.attention import Settings, hidden_scores
from mindllm.models.attention.flash_attention import BAND_BY_COMPRESSED_MASK, CAUSAL_BY_COMPRESSED_MASK
from mindllm.models.attention.sequence_order import balanced_order

COMPRESSED = np.triu(np.ones((2048, 2048), np.uint8), k=1)


def hidden(mode, rows, columns, before=0, after=0):
    return hidden_scores(COMPRESSED, Settings(1, 1.0, 1.0, before, after, 0, 1, mode), rows, columns)


def test_a_rank_has_the_same_piece_from_both_ends():
    assert balanced_order(16, 2).tolist() == [0, 1, 2, 3, 15, 14, 13, 12, 4, 5, 6, 7, 11, 10, 9, 8]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_two_compressed_masks_are_that_of_the_positions(ranks):
    """For all queries, and for those of each rank by the bounds that MindSpore's compiler gives it."""
    length, piece = 4 * 2 * ranks, 4
    pieces = balanced_order(length, ranks).reshape(ranks, 2, piece)
    early, late = pieces[:, 0].ravel(), pieces[:, 1].ravel()
    keys = np.concatenate([late, early])
    half = length // 2
    assert (hidden(CAUSAL_BY_COMPRESSED_MASK, half, half) == (early > early[:, None])).all()
    assert (hidden(BAND_BY_COMPRESSED_MASK, half, length, half, length) == (keys > late[:, None])).all()
    for rank in range(ranks):
        shift, own = (ranks - rank - 1) * piece, late[rank * piece : (rank + 1) * piece]
        found = hidden(BAND_BY_COMPRESSED_MASK, piece, length, half + shift, length - shift)
        assert (found == (keys > own[:, None])).all()


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_sees_as_many_keys(ranks):
    seen = (balanced_order(64, ranks).reshape(ranks, -1) + 1).sum(axis=1)
    assert len(set(seen.tolist())) == 1
