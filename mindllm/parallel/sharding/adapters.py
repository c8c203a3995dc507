"""Layouts of adapters, which follow from those of their projection, and of projections in codes.

If a projection is split by its output, so is the second matrix; every device has the whole first one. If it is split by its
input, so is the first matrix: its products, which are only as wide as the LoRA rank, are summed over devices.

Codes, scales and zero points are split like their matrix. They are ``[out, groups, ...]``: rows of the matrix split their rows,
columns their groups. ``config/checks/layers.py`` rejects matrices that cannot be split. Replicas, outside of the devices that
share a matrix, have copies, so layouts name axes.
"""

from __future__ import annotations

from mindllm.finetune.adapters import LoraAdapter, RowLengths
from mindllm.models.dequantize import DequantizedWeight
from mindllm.parallel.layout import Dimension, Layout
from mindllm.parallel.sharding.dropout import dropout
from mindllm.parallel.sharding.table import Table, on

TOKENS: Dimension = ("dp", "cp")
SCALAR: Layout = ()
NOT_SPLIT: Layout = (None, None)
INNER: Layout = (TOKENS, "tp")


def adapt_split_output(at: str, cell: LoraAdapter, rows: Dimension = "tp") -> Table:
    """Return layouts for a weight ``[out, in]`` that is split by ``rows`` (None: not split)."""
    low: Layout = (TOKENS, None)
    product: Layout = (TOKENS, rows)
    table = {
        f"{at}.down": on(low, NOT_SPLIT),
        f"{at}.scale": on(low, SCALAR),
        f"{at}.up": on(low, (rows, None)),
        f"{at}.add": on(product, product),
    }
    if cell.has_values:
        table[f"{at}.values"] = on(low, (None,))
    if cell.drops:
        table |= dropout(f"{at}.dropout", TOKENS)
    if cell.has_lengths:
        table |= _lengths(f"{at}.lengths", cell.lengths, (rows, None), NOT_SPLIT, rows)
        table |= {f"{at}.divide": on((rows,), (rows,), named=True), f"{at}.rescale": on(product, (rows,))}
    return table


def adapt_split_input(at: str, cell: LoraAdapter, rows: Dimension) -> Table:
    """Return layouts for a weight that is split by columns; ``rows``: the split of tokens after it."""
    low: Layout = (rows, None)
    table = {
        f"{at}.down": on(INNER, (None, "tp"), out=low),
        f"{at}.scale": on(low, SCALAR),
        f"{at}.up": on(low, NOT_SPLIT),
        f"{at}.add": on(low, low),
    }
    if cell.has_values:
        table[f"{at}.values"] = on(low, (None,))
    if cell.drops:
        table |= dropout(f"{at}.dropout", TOKENS, "tp")
    if cell.has_lengths:
        columns: Layout = (None, "tp")
        table |= _lengths(f"{at}.lengths", cell.lengths, columns, columns, None)
        table |= {f"{at}.divide": on((None,), (None,), named=True), f"{at}.rescale": on(low, (None,))}
    return table


def bottleneck(at: str, rows: Dimension) -> Table:
    """Return layouts of a bottleneck after a part of a layer whose tokens are split by ``rows``. Its weights are not split."""
    tokens: Layout = (rows, None)
    table = {f"{at}.add": on(tokens, tokens), f"{at}.down.activation.gelu": on(tokens)}
    for name in ("down", "up"):
        table |= {f"{at}.{name}.matmul": on(tokens, NOT_SPLIT), f"{at}.{name}.bias_add": on(tokens, (None,))}
    return table


def _lengths(at: str, cell: RowLengths, weight: Layout, first: Layout, out: Dimension) -> Table:
    """Return layouts of row lengths. Sums over split columns are added over devices; ``out``: the split of a value per row."""
    by_row: Layout = (out, None)
    return {
        f"{at}.square": on(weight, named=True),
        f"{at}.sum": on(weight, (None, weight[1]), named=True),
        f"{at}.along": on(weight, first, named=True),
        f"{at}.products": on(first, first, named=True),
        f"{at}.mix": on(by_row, NOT_SPLIT, named=True),
        f"{at}.twice": on(by_row, SCALAR, named=True),
        f"{at}.scaled": on(by_row, SCALAR, named=True),
        f"{at}.both": on(by_row, by_row, named=True),
        f"{at}.against": on(by_row, by_row, named=True),
        f"{at}.sum_cross": on(by_row, out=by_row, named=True),
        f"{at}.total": on(by_row, by_row, named=True),
        f"{at}.root": on(by_row, named=True),
    }


def codes_split_by_rows(at: str, cell: DequantizedWeight, rows: Dimension = "tp") -> Table:
    """Return layouts of codes whose output is split by ``rows`` (None: not split). All rows have one order of columns."""
    split: Layout = (rows, None)
    table = _codes(at, cell, split)
    return table | ({f"{at}.place": on(split, (None,), out=split, named=True)} if cell.ordered else {})


def codes_split_by_columns(at: str, cell: DequantizedWeight) -> Table:
    """Return layouts of codes whose input is split."""
    return _codes(at, cell, (None, "tp"))


def _codes(at: str, cell: DequantizedWeight, split: Layout) -> Table:
    """Return layouts of codes. ``split``: rows and groups, the first dimensions of codes ``[out, groups, bytes]``, their values
    ``[out, groups, bytes, codes of a byte]``, and scales ``[out, groups, 1, 1]``.
    """
    values: Layout = (*split, None, None)
    table = {f"{at}.look_up": on((None, None), (*split, None), out=values, named=True)}
    table[f"{at}.multiply"] = on(values, values, named=True)
    return table | ({f"{at}.subtract": on(values, values, named=True)} if cell.has_zeros else {})
