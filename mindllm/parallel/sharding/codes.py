"""Layouts of projections that are held in codes: codes, scales and zero points are split as the matrix they make.

They are ``[out, groups, ...]``: a matrix that is split by rows splits their rows, one that is split by columns their groups.
``config/checks/quantized.py`` says which cannot be split. Replicas, outside of the devices that share a matrix, have copies; so
layouts name axes.
"""

from __future__ import annotations

from mindllm.models.dequantize import DequantizedWeight
from mindllm.parallel.layout import Dimension, Layout
from mindllm.parallel.sharding.table import Table, on


def codes_split_by_rows(at: str, cell: DequantizedWeight, rows: Dimension = "tp") -> Table:
    """Of a projection whose output is split by ``rows`` (None: whole); an order of columns is the same for all rows."""
    split: Layout = (rows, None)
    table = _codes(at, cell, split)
    return table | ({f"{at}.place": on(split, (None,), out=split, named=True)} if cell.ordered else {})


def codes_split_by_columns(at: str, cell: DequantizedWeight) -> Table:
    """Of a projection whose input is split."""
    return _codes(at, cell, (None, "tp"))


def _codes(at: str, cell: DequantizedWeight, split: Layout) -> Table:
    """``split``: rows and groups, the first dimensions of codes ``[out, groups, bytes]``, of what they mean
    ``[out, groups, bytes, codes of a byte]``, and of scales ``[out, groups, 1, 1]``.
    """
    values: Layout = (*split, None, None)
    table = {f"{at}.look_up": on((None, None), (*split, None), out=values, named=True)}
    table[f"{at}.multiply"] = on(values, values, named=True)
    return table | ({f"{at}.subtract": on(values, values, named=True)} if cell.has_zeros else {})
