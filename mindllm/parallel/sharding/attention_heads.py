"""How heads ``[batch, heads, seq, channels]`` are split where attention is computed, and what is exchanged for it.

Tensor parallelism splits heads. Where devices share sequences as well (context parallelism), either every device has its part of
the queries and gathers keys and values of the whole sequence, or the parts of the sequence are exchanged for heads
(DeepSpeed-Ulysses; Jacobs et al., 2023): then a device has some heads of the whole sequence. The compiler inserts the AllGather
or AlltoAll from the difference to :data:`HEADS`, the layout before and after attention.
"""

from __future__ import annotations

from dataclasses import dataclass

from mindllm.config.parallel import ParallelConfig
from mindllm.parallel.layout import Dimension, Layout
from mindllm.parallel.sharding.table import Table, on

BATCH, SEQUENCE = "dp", "cp"
HEADS: Layout = (BATCH, "tp", SEQUENCE, None)  # [batch, heads, seq, channels]
SHARED_HEADS: Layout = (BATCH, SEQUENCE, "tp", None)  # [batch, seq, heads, channels]


@dataclass(frozen=True)
class SplitHeads:
    """Where scores are computed: what heads are split over, and the ``rows`` of scores, those of the queries."""

    heads: Dimension
    rows: Dimension

    @property
    def queries(self) -> Layout:
        """Of queries, and of scores ``[batch, heads, q, k]``."""
        return (BATCH, self.heads, self.rows, None)

    @property
    def keys(self) -> Layout:
        """Of keys and values, which have the whole sequence."""
        return (BATCH, self.heads, None, None)

    @property
    def mask_of_rows(self) -> Layout:
        """Of masks ``[batch, 1, q, k]``."""
        return (BATCH, None, self.rows, None)

    def largest_logits(self, at: str) -> Table:
        """Each device keeps the maximum over its own rows of its heads, ``[heads]``, and exchanges nothing."""
        kept: Layout = (self.heads,)
        return {
            f"{at}.reduce_max": on(self.queries, out=kept, named=True),
            f"{at}.maximum": on(kept, kept, out=kept, named=True),
            f"{at}.assign": on(kept, kept, out=kept, named=True),
        }


def split_heads(parallel: ParallelConfig) -> SplitHeads:
    """As ``context_parallel_algo`` says."""
    return SplitHeads(("tp", SEQUENCE), None) if parallel.exchanges_heads else SplitHeads("tp", SEQUENCE)
