"""Layouts of adapters: they follow from those of the projection they stand beside.

Where a projection is split by its output, so is the second matrix; the first one is whole, and every device multiplies by it.
Where it is split by its input, so is the first matrix: its products, of the rank's width only, are added over the devices.
"""

from __future__ import annotations

from mindspore import nn

from mindllm.parallel.layout import Dimension, Layout, Mesh
from mindllm.parallel.sharding.dropout import dropout
from mindllm.parallel.sharding.table import Table, on
from mindllm.tune.adapter import LoraAdapter, RowLengths

TOKENS: Dimension = "dp"
SCALAR: Layout = ()
WHOLE: Layout = (None, None)
INNER: Layout = (TOKENS, "tp")


def copy_lengths(lm: nn.Cell, mesh: Mesh) -> None:
    """Lets DoRA's lengths of rows be computed where devices hold copies of parts of a weight: integers cannot say of an operator
    without tokens that its copies lie outside of its parts. Call it before there is a table.
    """
    if mesh.data_parallel == 1 or mesh.model_parallel == 1:
        return
    for _, cell in lm.cells_and_names():
        if isinstance(cell, LoraAdapter) and cell.has_lengths:
            cell.compute_in_copies(mesh.data_parallel)


def beside_split_output(at: str, cell: LoraAdapter) -> Table:
    """Of a weight ``[out, in]`` that is split by rows."""
    low: Layout = (TOKENS, None)
    table = {
        f"{at}.down": on(low, WHOLE),
        f"{at}.scale": on(low, SCALAR),
        f"{at}.up": on(low, ("tp", None)),
        f"{at}.add": on(INNER, INNER),
    }
    if cell.drops:
        table |= dropout(f"{at}.dropout", TOKENS)
    if cell.has_lengths and cell.copies > 1:
        table |= _copied_lengths(f"{at}.lengths", ("tp", None), WHOLE, "tp")
        rows: Layout = (TOKENS, None, "tp")
        table |= {f"{at}.divide": on(("tp",), INNER), f"{at}.rescale": on(rows, rows)}
    elif cell.has_lengths:
        table |= _lengths(f"{at}.lengths", cell.lengths, ("tp", None), WHOLE, "tp")
        table |= {f"{at}.divide": on(("tp",), ("tp",)), f"{at}.rescale": on(INNER, ("tp",))}
    return table


def beside_split_input(at: str, cell: LoraAdapter, rows: Dimension) -> Table:
    """Of a weight that is split by columns; ``rows``: how tokens are split behind it."""
    low: Layout = (rows, None)
    table = {
        f"{at}.down": on(INNER, (None, "tp"), out=low),
        f"{at}.scale": on(low, SCALAR),
        f"{at}.up": on(low, WHOLE),
        f"{at}.add": on(low, low),
    }
    if cell.drops:
        table |= dropout(f"{at}.dropout", TOKENS, "tp")
    columns: Layout = (None, "tp")
    if cell.has_lengths and cell.copies > 1:
        table |= _copied_lengths(f"{at}.lengths", columns, columns, None)
        inside: Dimension = "tp" if rows != TOKENS else None
        factors: Layout = (TOKENS, None, None)
        table |= {f"{at}.divide": on((None,), (TOKENS, None)), f"{at}.rescale": on((TOKENS, inside, None), factors)}
    elif cell.has_lengths:
        table |= _lengths(f"{at}.lengths", cell.lengths, columns, columns, None)
        table |= {f"{at}.divide": on((None,), (None,)), f"{at}.rescale": on(low, (None,))}
    return table


def _lengths(at: str, cell: RowLengths, weight: Layout, first: Layout, out: Dimension) -> Table:
    """Sums over columns that are split are added over the devices; ``out``: how what has one number for each row is split."""
    by_row: Layout = (out, None)
    return {
        f"{at}.square": on(weight),
        f"{at}.sum": on(weight),
        f"{at}.along": on(weight, first),
        f"{at}.products": on(first, first),
        f"{at}.mix": on(by_row, WHOLE),
        f"{at}.twice": on(by_row, SCALAR),
        f"{at}.scaled": on(by_row, SCALAR),
        f"{at}.both": on(by_row, by_row),
        f"{at}.against": on(by_row, by_row),
        f"{at}.sum_cross": on(by_row),
        f"{at}.total": on((out,), (out,)),
        f"{at}.root": on((out,)),
    }


def _copied_lengths(at: str, weight: Layout, first: Layout, out: Dimension) -> Table:
    """The same where data-parallel devices hold copies of the parts: each computes its own."""
    ones: Layout = (TOKENS, None, None)
    weights, firsts, seconds = (TOKENS, *weight), (TOKENS, *first), (TOKENS, out, None)
    lengths: Layout = (TOKENS, out)
    return {
        f"{at}.copy_weight": on(ones, weight),
        f"{at}.copy_first": on(ones, first),
        f"{at}.copy_second": on(ones, (out, None)),
        f"{at}.square": on(weights),
        f"{at}.sum": on(weights),
        f"{at}.along": on(weights, firsts),
        f"{at}.products": on(firsts, firsts),
        f"{at}.mix": on(seconds, ones),
        f"{at}.twice": on(seconds, SCALAR),
        f"{at}.scaled": on(seconds, SCALAR),
        f"{at}.both": on(seconds, seconds),
        f"{at}.against": on(seconds, seconds),
        f"{at}.sum_cross": on(seconds),
        f"{at}.total": on(lengths, lengths),
        f"{at}.root": on(lengths),
    }
