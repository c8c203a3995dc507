"""Cross checks of context parallelism: sequences, and with the exchange for heads the heads, that its ranks divide."""

from __future__ import annotations

from collections.abc import Iterator

from mindllm.architecture.parts import AlibiSpec
from mindllm.config.checks import MESH, MODEL, Finding
from mindllm.config.monitor import LOGIT
from mindllm.config.parallel import RING, ULYSSES
from mindllm.config.run import RunConfig


def check_context_parallel(config: RunConfig) -> Iterator[Finding]:
    """What ranks of one sequence divide, and what is not computed on parts of a sequence."""
    sizes = config.parallel_config
    if sizes.context_parallel == 1:
        for key, wanted in (("context_parallel_algo", (ULYSSES, RING)), ("context_parallel_balanced", (True,))):
            if (value := getattr(sizes, key)) in wanted:
                yield (*MESH, key), f"sequences are whole (value {value}); write context_parallel, too"
        return
    yield from _sequence(config)
    yield from _heads(config)
    yield from _ring(config)
    yield from _balanced(config)
    yield from _not_computed(config)


def _sequence(config: RunConfig) -> Iterator[Finding]:
    model, sizes = config.model.config, config.parallel_config
    parts, of = sizes.context_parallel, f"context_parallel {sizes.context_parallel}"
    if sizes.use_seq_parallel and sizes.model_parallel > 1:
        parts *= sizes.model_parallel
        of += f" x model_parallel {sizes.model_parallel} (use_seq_parallel)"
    if sizes.context_parallel_balanced and parts % (2 * sizes.context_parallel):
        parts *= 2
        of += " x 2 (context_parallel_balanced)"
    if model.seq_length % parts:
        below = model.seq_length // parts * parts
        advice = f"{below} or {below + parts}" if below else f"{parts}"
        yield (*MODEL, "seq_length"), f"is not divisible by {of} (value {model.seq_length}); write {advice}"


def _heads(config: RunConfig) -> Iterator[Finding]:
    """Every rank of an exchange for heads gets some of them, and no table that goes by heads."""
    model, sizes = config.model.config, config.parallel_config
    if not sizes.exchanges_heads:
        return
    if any(isinstance(spec.attention.position, AlibiSpec) for spec in model.architecture.specifications()):
        message = f"parts of ALiBi's slopes by heads that are shared twice are not proved (value {ULYSSES})"
        yield (*MESH, "context_parallel_algo"), f"{message}; write colossalai_cp"
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


def _ring(config: RunConfig) -> Iterator[Finding]:
    """Keys that come round are attended to by the fused kernel, under no mask but the causal one."""
    sizes = config.parallel_config
    if not sizes.passes_keys:
        return
    reason = next(_not_in_a_ring(config), None)
    if reason is not None:
        yield (*MESH, "context_parallel_algo"), f"{reason} (value {RING}); write colossalai_cp"


def _not_in_a_ring(config: RunConfig) -> Iterator[str]:
    model, optimizer = config.model.config, config.optimizer
    kinds = model.architecture.specifications()
    fused = all(kind.attention.can_be_fused for kind in kinds) and config.context.device_target != "CPU"
    if not fused or model.use_flash_attention is False:
        yield "composed attention has no statistics that blocks of keys are merged by"
    if config.train_dataset.document_columns:
        yield "a query may see none of a block where documents are kept apart, and what the kernel says then is not known"
    if any(kind.attention.window is not None and kind.attention.window < model.seq_length for kind in kinds):
        yield "a query may see none of a block under a window, and what the kernel says then is not known"
    if optimizer.qk_clip_threshold is not None or LOGIT in config.monitor_config.watched():
        yield "the largest logits of a ring are not kept (qk_clip_threshold, monitor_config.max_attention_logit_format)"
    if config.swap_config.swap:
        yield "results inside a ring are not moved to the host (swap_config)"
    if model.fine_grain_interleave > 1:
        yield "exchanges of a ring are not interleaved with those of rows in parts (fine_grain_interleave)"


def _balanced(config: RunConfig) -> Iterator[Finding]:
    """Pieces of both halves are for a causal triangle that is not computed whole."""
    model, sizes = config.model.config, config.parallel_config
    if not sizes.context_parallel_balanced:
        return
    key = (*MESH, "context_parallel_balanced")
    kinds = model.architecture.specifications()
    fused = all(kind.attention.can_be_fused for kind in kinds) and config.context.device_target != "CPU"
    if sizes.exchanges_heads:
        yield key, f"with {ULYSSES} every rank has whole sequences (value True); write false"
    elif config.train_dataset.document_columns:
        yield key, "masks of documents are computed whole, which takes every rank as long (value True); write false"
    elif sizes.pipeline_stage > 1:
        yield key, "masks are computed whole in a pipeline, which takes every rank as long (value True); write false"
    elif not fused or model.use_flash_attention is False:
        yield key, "composed attention computes every score, on every rank as many (value True); write false"
    elif any(kind.attention.window is not None and kind.attention.window < model.seq_length for kind in kinds):
        yield key, "windows are as long everywhere in a sequence (value True); write false"
    elif model.expert_num > 1 and model.capacity_factor is not None:
        yield (
            key,
            "experts take the first tokens of a sequence, which stands in another order then (value True); write false",
        )


def _not_computed(config: RunConfig) -> Iterator[Finding]:
    model, size = config.model.config, config.parallel_config.context_parallel
    key = (*MESH, "context_parallel")
    if config.is_preference_tuning:
        yield key, f"what a pair is judged by is a sum over whole sequences (value {size}); write 1"
    if (model.seq_length // size) % model.loss_chunks:
        message = (
            f"must divide the {model.seq_length // size} tokens of each rank of a sequence (value {model.loss_chunks})"
        )
        yield (*MODEL, "loss_chunks"), message
