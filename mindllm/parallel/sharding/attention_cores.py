"""Attention proper, between its projections: from each form of it to the layouts of its operators."""

from __future__ import annotations

from collections.abc import Callable

from mindspore import nn

from mindllm.models.attention.attention import ComposedAttention
from mindllm.models.attention.flash_attention import BalancedFlashAttention, FlashAttention
from mindllm.models.attention.ring_attention import RingAttention
from mindllm.models.linear import SoftCap
from mindllm.parallel.layout import Layout
from mindllm.parallel.sharding.attention_heads import BATCH, HEADS, SplitHeads
from mindllm.parallel.sharding.dropout import attention_dropout
from mindllm.parallel.sharding.table import Table, on

SCALAR: Layout = ()


def _flash_attention(at: str, cell: FlashAttention, heads: SplitHeads) -> Table:
    """Query, key, value, and the mask: one for every row, or compressed and for all."""
    mask = heads.row_masks if cell.masks_of_rows else (None, None)
    largest = heads.largest_logits(f"{at}.largest") if cell.watched else {}
    return {f"{at}.flash_attention": on(heads.queries, heads.keys, heads.keys, mask), **largest}


def _balanced_flash_attention(at: str, cell: BalancedFlashAttention, heads: SplitHeads) -> Table:
    """Pieces ``[batch, heads, ranks, 2, piece, head_dim]`` of queries are split over ranks, those of keys are whole."""
    pieces: Layout = (BATCH, heads.heads, heads.rows, None, None, None)
    key_pieces: Layout = (BATCH, heads.heads, None, None, None, None)
    scored = on(heads.queries, heads.keys, heads.keys, (None, None))
    return {
        **(heads.largest_logits(f"{at}.largest") if cell.watched else {}),
        f"{at}.split_query": on(pieces),
        f"{at}.split_key": on(key_pieces),
        f"{at}.split_value": on(key_pieces),
        f"{at}.join_keys": on(heads.keys, heads.keys),
        f"{at}.join_values": on(heads.keys, heads.keys),
        f"{at}.early": scored,
        f"{at}.late": scored,
        f"{at}.join": on(pieces, pieces),
    }


def _ring_attention(at: str, cell: RingAttention, heads: SplitHeads) -> Table:
    """Return layouts without an exchange of queries, keys and values. The compressed mask is not split."""
    return {f"{at}.on_parts": on(HEADS, HEADS, HEADS, (None, None), (None,), out=HEADS, named=True)}


def _composed_attention(at: str, cell: ComposedAttention, heads: SplitHeads) -> Table:
    """Return layouts of attention from elementary operators. ALiBi's bias is ``[1, heads, 1, seq]``."""
    queries = heads.queries
    table = {
        f"{at}.mul": on(queries, SCALAR),
        f"{at}.scores": on(queries, heads.keys),
        f"{at}.add": on(queries, heads.row_masks if cell.masks_of_rows else (heads.rows, None)),
        f"{at}.softmax": on(queries),
        f"{at}.context": on(queries, heads.keys),
    }
    if cell.biased:
        table[f"{at}.add_bias"] = on(queries, (None, heads.heads, None, None))
    table |= heads.largest_logits(f"{at}.largest") if cell.watched else {}
    if cell.drops:
        table |= attention_dropout(f"{at}.dropout", queries)
    return table | (soft_cap(f"{at}.soft_cap", cell.soft_cap, queries) if cell.capped else {})


ATTENTION_CORES: dict[type[nn.Cell], Callable[..., Table]] = {
    FlashAttention: _flash_attention,
    BalancedFlashAttention: _balanced_flash_attention,
    RingAttention: _ring_attention,
    ComposedAttention: _composed_attention,
}


def soft_cap(at: str, cell: SoftCap, x: Layout) -> Table:
    """Operators of a soft cap on a tensor of one layout."""
    return {f"{at}.divide": on(x, SCALAR), f"{at}.tanh": on(x), f"{at}.multiply": on(x, SCALAR)}
