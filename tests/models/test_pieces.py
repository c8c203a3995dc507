"""What pieces of a sequence keep for those behind them, on one device."""

import mindspore as ms
import numpy as np
from mindspore import Tensor

from mindllm.models.pieces import EarlierPieces, InPieces, PieceTables

PIECES, ROWS, HEADS, SEQUENCE, WIDTH = 4, 2, 2, 8, 4
LENGTH = SEQUENCE // PIECES


def own_places(piece):
    places = np.arange(SEQUENCE) // LENGTH == piece
    return Tensor(places.astype(np.float32).reshape(1, 1, SEQUENCE, 1))


def passed(cell, keys):
    """What every piece of ``keys`` ``[rows, heads, seq, d]`` attends to, one after another."""
    found = []
    for piece in range(PIECES):
        part = Tensor(keys[:, :, piece * LENGTH : (piece + 1) * LENGTH])
        found.append(cell(part, own_places(piece), Tensor(piece, ms.int32))[0].asnumpy())
    return found


def test_a_piece_sees_its_own_keys_behind_those_of_earlier_pieces():
    cell = EarlierPieces(InPieces(PIECES, ROWS, 1, 1), HEADS, SEQUENCE, WIDTH, ms.float32)
    random = np.random.default_rng(1)
    for _ in range(2):  # a second micro-batch sees nothing of the first one
        keys = random.standard_normal((ROWS, HEADS, SEQUENCE, WIDTH)).astype(np.float32)
        for piece, seen in enumerate(passed(cell, keys)):
            end = (piece + 1) * LENGTH
            np.testing.assert_array_equal(seen[:, :, :end], keys[:, :, :end])
            assert not seen[:, :, end:].any()
        assert not cell.held.asnumpy().any()


def test_what_is_not_finite_does_not_stay_for_the_next_step():
    cell = EarlierPieces(InPieces(PIECES, ROWS, 1, 1), HEADS, SEQUENCE, WIDTH, ms.float32)
    keys = np.full((ROWS, HEADS, SEQUENCE, WIDTH), np.inf, np.float32)
    passed(cell, keys)
    assert not cell.held.asnumpy().any()


def test_a_piece_reads_the_rows_of_its_places():
    tables = PieceTables(PIECES, SEQUENCE, False, ms.float32)
    rows = np.arange(SEQUENCE * WIDTH, dtype=np.float32).reshape(SEQUENCE, WIDTH)
    mask = np.triu(np.ones((SEQUENCE, SEQUENCE), np.float32), 1)
    for piece in range(PIECES):
        own_rows = slice(piece * LENGTH, (piece + 1) * LENGTH)
        number = Tensor(piece, ms.int32)
        (cos, sin, own, _), own_mask = tables(number, (Tensor(rows), Tensor(-rows)), Tensor(mask))
        np.testing.assert_array_equal(cos.asnumpy(), rows[own_rows])
        np.testing.assert_array_equal(sin.asnumpy(), -rows[own_rows])
        np.testing.assert_array_equal(own_mask.asnumpy(), mask[own_rows])
        np.testing.assert_array_equal(own.asnumpy(), own_places(piece).asnumpy())
