"""Layouts of what training draws: dropout, and noise on embeddings."""

from __future__ import annotations

from mindllm.parallel.layout import Dimension, Layout
from mindllm.parallel.sharding.table import Table, on

SCALAR: Layout = ()


def dropout(at: str, rows: Dimension, columns: Dimension = None) -> Table:
    """``[tokens, width]`` by a number for each of its tokens, and one for each of the channels."""
    return {f"{at}.bits": on((rows, None), (None, columns)), **_drop(f"{at}.drop", (rows, columns))}


def attention_dropout(at: str, heads: Layout) -> Table:
    """Return layouts for weights ``[batch, heads, q, k]``."""
    return {
        f"{at}.of_heads": on((heads[0], None, heads[2], None), (None, heads[1], None, None)),
        f"{at}.bits": on(heads, (None, None, None, None)),
        **_drop(f"{at}.drop", heads),
    }


def embedding_noise(at: str, rows: Dimension) -> Table:
    """Noise on ``[tokens, hidden]``."""
    hidden: Layout = (rows, None)
    return {
        f"{at}.bits": on(hidden, (None, None)),
        f"{at}.scale": on(hidden, SCALAR),
        f"{at}.add": on(hidden, hidden),
    }


def _drop(at: str, x: Layout) -> Table:
    return {f"{at}.kept.compare": on(x, SCALAR), f"{at}.mul": on(x, x), f"{at}.rescale": on(x, SCALAR)}
