"""Cross checks of layers that take their tokens in parts (``fine_grain_interleave``): what is exchanged, and which layers can."""

from __future__ import annotations

from collections.abc import Iterator

from mindllm.architecture.decoder import Architecture
from mindllm.architecture.parts import FeedForwardSpec, LatentAttentionSpec
from mindllm.axes import CONTEXT
from mindllm.config.checks import Finding
from mindllm.config.reading.document import KeyPath
from mindllm.config.run import RunConfig

MOST = 2  # the compiler's passes leave more than two parts as they are, in an order of chance
KEY: KeyPath = ("model", "model_config", "fine_grain_interleave")


def check_interleaved_rows(config: RunConfig) -> Iterator[Finding]:
    """Something must be exchanged, parts must be equal, and rows must not depend on each other outside attention."""
    parts = config.model.config.fine_grain_interleave
    if parts == 1:
        return
    sizes = config.parallel_config
    if sizes.model_parallel == 1:
        yield KEY, f"tensor-parallel ranks alone exchange inside a layer, and there are none (value {parts}); write 1"
        return
    if parts > MOST:
        yield KEY, f"MindSpore orders two parts, and no more (value {parts}); write {MOST}"
    for reason in _not_cut(config):
        yield KEY, f"{reason} (value {parts}); write 1"
    ranks = sizes.model_parallel if sizes.use_seq_parallel else 1
    rows = config.runner_config.batch_size * config.model.config.seq_length
    if rows % (parts * ranks):
        of = f" for each of {ranks} ranks that split them (use_seq_parallel)" if ranks > 1 else ""
        message = f"{rows} tokens of a micro-batch (batch_size x seq_length) do not make so many equal parts{of}"
        yield KEY, f"{message} (value {parts}); write 1, or another seq_length"


def can_be_cut(architecture: Architecture) -> bool:
    """Whether all layers of an architecture can take their tokens in parts."""
    return not any(_whole_layers(architecture))


def _not_cut(config: RunConfig) -> Iterator[str]:
    yield from _whole_layers(config.model.config.architecture)
    if config.parallel_config.shares_sequences:
        yield f"parts of sequences that ranks share ({CONTEXT.key}) are not taken in parts again"
    if config.micro_batch_interleave_num > 1:
        yield "micro_batch_interleave_num makes whole copies, whose exchanges hide behind each other already"
    if config.is_preference_tuning:
        yield "pairs of answers are learnt beside a reference, whose layers are not cut"


def _whole_layers(architecture: Architecture) -> Iterator[str]:
    kinds = architecture.specifications()
    if any(not isinstance(kind.feed_forward, FeedForwardSpec) for kind in kinds):
        yield "tokens of experts compete within their sequence: they are not taken in parts"
    if any(isinstance(kind.attention, LatentAttentionSpec) for kind in kinds):
        yield "latent attention is not taken in parts yet"
    if any(kind.drops for kind in kinds):
        yield "dropout is drawn for whole sequences, not for parts of them"
    if any(kind.is_mtp for kind in kinds):
        yield "layers that predict ahead are given tokens in their order"
