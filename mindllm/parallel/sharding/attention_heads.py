"""The split of heads ``[batch, heads, seq, channels]`` in attention, and the communication for it.

Tensor parallelism splits heads. If devices share sequences as well (context parallelism), either every device has its part of
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
    """The split of heads, and of the ``rows`` of scores (those of the queries), where scores are computed."""

    heads: Dimension
    rows: Dimension

    @property
    def queries(self) -> Layout:
        """Layout of queries, and of scores ``[batch, heads, q, k]``."""
        return (BATCH, self.heads, self.rows, None)

    @property
    def keys(self) -> Layout:
        """Layout of keys and values, which have the whole sequence."""
        return (BATCH, self.heads, None, None)

    @property
    def row_masks(self) -> Layout:
        """Layout of masks ``[batch, 1, q, k]``."""
        return (BATCH, None, self.rows, None)

    def largest_logits(self, at: str) -> Table:
        """Return layouts without communication: each device has the maximum over its own rows of its heads, ``[heads]``."""
        heads: Layout = (self.heads,)
        return {
            f"{at}.reduce_max": on(self.queries, out=heads, named=True),
            f"{at}.maximum": on(heads, heads, out=heads, named=True),
            f"{at}.assign": on(heads, heads, out=heads, named=True),
        }


def split_heads(parallel: ParallelConfig) -> SplitHeads:
    """Return the split that ``context_parallel_algo`` selects."""
    return SplitHeads(("tp", SEQUENCE), None) if parallel.exchanges_heads else SplitHeads("tp", SEQUENCE)
