"""Cross checks of context parallelism: sequences, and with the exchange for heads the heads, that its ranks divide."""

from __future__ import annotations

from collections.abc import Iterator

from mindllm.config.document import KeyPath
from mindllm.config.parallel import ULYSSES
from mindllm.config.run import RunConfig

Finding = tuple[KeyPath, str]
MODEL: KeyPath = ("model", "model_config")
MESH: KeyPath = ("parallel_config",)


def check_context_parallel(config: RunConfig) -> Iterator[Finding]:
    """What ranks of one sequence divide, and what is not computed on parts of a sequence."""
    if config.parallel_config.context_parallel == 1:
        if config.parallel_config.context_parallel_algo == ULYSSES:
            yield (
                (*MESH, "context_parallel_algo"),
                f"sequences are whole (value {ULYSSES}); write context_parallel, too",
            )
        return
    yield from _sequence(config)
    yield from _heads(config)
    yield from _not_computed(config)


def _sequence(config: RunConfig) -> Iterator[Finding]:
    model, sizes = config.model.config, config.parallel_config
    parts, of = sizes.context_parallel, f"context_parallel {sizes.context_parallel}"
    if sizes.use_seq_parallel and sizes.model_parallel > 1:
        parts *= sizes.model_parallel
        of += f" x model_parallel {sizes.model_parallel} (use_seq_parallel)"
    if model.seq_length % parts:
        below = model.seq_length // parts * parts
        advice = f"{below} or {below + parts}" if below else f"{parts}"
        yield (*MODEL, "seq_length"), f"is not divisible by {of} (value {model.seq_length}); write {advice}"


def _heads(config: RunConfig) -> Iterator[Finding]:
    """Every rank of an exchange for heads gets some of them."""
    model, sizes = config.model.config, config.parallel_config
    if not sizes.exchanges_heads:
        return
    ranks = sizes.model_parallel * sizes.context_parallel
    for key in ("num_heads", "n_kv_heads"):
        heads = getattr(model, key)
        if heads % ranks:
            most = max(n for n in range(1, heads + 1) if heads % (n * sizes.model_parallel) == 0 or n == 1)
            yield (
                (*MODEL, key),
                f"is not divisible by model_parallel {sizes.model_parallel} x context_parallel {sizes.context_parallel}, which "
                f"ulysses_cp shares heads over (value {heads}); write context_parallel {most}, or colossalai_cp",
            )


def _not_computed(config: RunConfig) -> Iterator[Finding]:
    model, size = config.model.config, config.parallel_config.context_parallel
    key = (*MESH, "context_parallel")
    if model.expert_num > 1:
        yield (
            key,
            f"tokens compete for experts within whole sequences (value {size}); write 1, and a larger data_parallel",
        )
    if model.kv_lora_rank is not None:
        yield key, f"latent attention is not computed on parts of a sequence yet (value {size}); write 1"
    if model.loss_chunks > 1:
        message = f"slices of the loss are those of whole sequences (value {model.loss_chunks})"
        yield (*MODEL, "loss_chunks"), f"{message}; write 1: context_parallel {size} splits the logits already"
