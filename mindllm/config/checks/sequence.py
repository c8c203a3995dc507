"""Cross checks of split sequences: context parallelism, row interleaving inside layers, and pipelines of sequence pieces."""

from __future__ import annotations

from collections.abc import Iterator

from mindllm.architecture.decoder import Architecture
from mindllm.architecture.layer import LayerSpec
from mindllm.architecture.layer_counts import IN_PIECES, SEQPIPE
from mindllm.architecture.parts import AlibiSpec, AttentionSpec, FeedForwardSpec, LatentAttentionSpec, RotarySpec
from mindllm.axes import CONTEXT
from mindllm.config.callbacks import LOGIT
from mindllm.config.checks import MESH, MODEL, Finding
from mindllm.config.parallel import RING, ULYSSES
from mindllm.config.reading.document import KeyPath
from mindllm.config.run import RunConfig


def check_context_parallel(config: RunConfig) -> Iterator[Finding]:
    """Yield sizes that the ranks of a sequence do not divide, and features that cannot be computed on parts of a sequence."""
    model, sizes = config.model.config, config.parallel_config
    if sizes.context_parallel == 1:
        for name, values in (("context_parallel_algo", (ULYSSES, RING)), ("context_parallel_balanced", (True,))):
            if (value := getattr(sizes, name)) in values:
                yield (*MESH, name), f"requires context_parallel above 1 (value {value})"
        return
    parts, divisor = sizes.context_parallel, f"context_parallel {sizes.context_parallel}"
    if sizes.use_seq_parallel and sizes.model_parallel > 1:
        parts *= sizes.model_parallel
        divisor += f" x model_parallel {sizes.model_parallel} (use_seq_parallel)"
    if sizes.context_parallel_balanced and parts % (2 * sizes.context_parallel):
        parts *= 2
        divisor += " x 2 (context_parallel_balanced)"
    if model.seq_length % parts:
        below = model.seq_length // parts * parts
        advice = f"{below} or {below + parts}" if below else f"{parts}"
        yield (*MODEL, "seq_length"), f"is not divisible by {divisor} (value {model.seq_length}); write {advice}"
    yield from _heads(config)
    yield from _ring(config)
    yield from _balanced(config)
    size, key = sizes.context_parallel, (*MESH, "context_parallel")
    if config.is_preference_tuning:
        yield key, f"the preference loss is a sum over complete sequences (value {size}); write 1"
    if (model.seq_length // size) % model.loss_chunks:
        message = (
            f"must divide the {model.seq_length // size} tokens of each rank of a sequence (value {model.loss_chunks})"
        )
        yield (*MODEL, "loss_chunks"), message


def _heads(config: RunConfig) -> Iterator[Finding]:
    """Check that the exchange for heads divides heads, and that no table is per head."""
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
    """Check that the fused kernel can compute ring attention: it supports the causal mask only."""
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
        yield "with masks of documents a query may have no key in a block, for which the kernel has no defined result"
    if any(kind.attention.window is not None and kind.attention.window < model.seq_length for kind in kinds):
        yield "with a window a query may have no key in a block, for which the kernel has no defined result"
    if optimizer.qk_clip_threshold is not None or LOGIT in config.monitor_config.watched():
        yield "the largest logits of a ring are not kept (qk_clip_threshold, monitor_config.max_attention_logit_format)"
    if config.swap_config.swap:
        yield "results inside a ring are not moved to the host (swap_config)"
    if model.fine_grain_interleave > 1:
        yield "exchanges of a ring are not interleaved with those of rows in parts (fine_grain_interleave)"


def _balanced(config: RunConfig) -> Iterator[Finding]:
    """Check that balanced pieces save work, which they do only for a causal triangle that is not computed in full."""
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


MOST = 2  # the compiler does not order more than two parts
KEY: KeyPath = ("model", "model_config", "fine_grain_interleave")


def check_interleaved_rows(config: RunConfig) -> Iterator[Finding]:
    """Check that interleaved rows have communication to overlap, equal parts, and no dependency outside attention."""
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
        message = f"{rows} tokens of a micro-batch (batch_size x seq_length) cannot be split into equal parts{of}"
        yield KEY, f"{message} (value {parts}); write 1, or another seq_length"


def can_be_cut(architecture: Architecture) -> bool:
    """Return True if all layers of an architecture can process their tokens in parts."""
    return not any(_layers_without_parts(architecture))


def _not_cut(config: RunConfig) -> Iterator[str]:
    yield from _layers_without_parts(config.model.config.architecture)
    if config.parallel_config.shares_sequences:
        yield f"parts of sequences that ranks share ({CONTEXT.key}) are not taken in parts again"
    if config.micro_batch_interleave_num > 1:
        yield "micro_batch_interleave_num already overlaps the communication of copies"
    if config.is_preference_tuning:
        yield "the reference of preference tuning is not split into parts"


def _layers_without_parts(architecture: Architecture) -> Iterator[str]:
    kinds = architecture.specifications()
    if any(not isinstance(kind.feed_forward, FeedForwardSpec) for kind in kinds):
        yield "tokens of experts compete within their sequence: they are not taken in parts"
    if any(isinstance(kind.attention, LatentAttentionSpec) for kind in kinds):
        yield "latent attention is not taken in parts yet"
    if any(kind.drops for kind in kinds):
        yield "dropout is drawn for whole sequences, not for parts of them"
    if any(kind.is_mtp for kind in kinds):
        yield "layers that predict ahead are given tokens in their order"


PIECES_KEY: KeyPath = (*MESH, "seq_split_num")


def check_pieces(config: RunConfig) -> Iterator[Finding]:
    """Check the schedule of sequence pieces, their sizes, and that the features of the run are proved with pieces."""
    sizes, scheduler = config.parallel_config, config.parallel.pipeline_config.pipeline_scheduler
    pieces, stages = sizes.seq_split_num, sizes.pipeline_stage
    if pieces == 1:
        return
    if stages == 1:
        yield PIECES_KEY, f"requires pipeline_stage above 1 (value {pieces}); write 1"
        return
    if scheduler not in IN_PIECES:
        message = f"{scheduler} orders whole sequences (value {pieces}); write 1, or pipeline_scheduler {SEQPIPE}"
        yield PIECES_KEY, message
        return
    # pieces must be equal, also on tensor-parallel ranks, and fill the stages of the schedule
    sizes, model = config.parallel_config, config.model.config
    scheduler, stages = config.parallel.pipeline_config.pipeline_scheduler, sizes.pipeline_stage
    ranks = sizes.model_parallel if sizes.use_seq_parallel else 1
    if model.seq_length % (pieces * ranks):
        of = f" of each of {ranks} ranks (use_seq_parallel)" if ranks > 1 else ""
        yield PIECES_KEY, f"must divide the tokens{of} of seq_length {model.seq_length} (value {pieces})"
    if scheduler != SEQPIPE and model.pp_interleave_num == 1:
        key = ("parallel", "pipeline_config", "pipeline_scheduler")
        yield key, f"orders the pieces of several chunks per stage (value {scheduler}); write {SEQPIPE}"
    elif scheduler != SEQPIPE and pieces > stages:
        message = f"with {scheduler} there are at most as many pieces as stages, {stages} (value {pieces})"
        yield PIECES_KEY, f"{message}; write {stages}, or pipeline_scheduler {SEQPIPE}"
    for reason in _not_proved(config):
        yield PIECES_KEY, f"{reason} (value {pieces}); write 1"


def _not_proved(config: RunConfig) -> Iterator[str]:
    """Yield features that are not proved to compute the same with sequence pieces."""
    if config.parallel_config.shares_sequences:
        yield f"pieces of sequences that ranks share ({CONTEXT.key}) are not cut again"
    if config.uses_position_ids:
        yield "documents of a row are not kept apart in pieces"
    if config.micro_batch_interleave_num > 1:
        yield "micro_batch_interleave_num makes copies, which do not come in pieces"
    if config.is_preference_tuning or config.model.config.pet_config is not None:
        yield "fine-tuning by pairs of answers or by adapters does not come in pieces"
    if config.do_eval or config.run_mode == "eval":
        yield "text is not evaluated in pieces: evaluate checkpoints by themselves"
    if config.swap_config.swap:
        yield "what pieces keep is not moved to the host (swap_config)"
    if config.parallel.parallel_optimizer_config.gradient_accumulation_shard:
        yield "gradient_accumulation_shard reduces gradients with every part, and was not tried with pieces"
    if LOGIT in config.monitor_config.watched():
        yield "the largest attention logit is not watched in pieces"
    model, architecture = config.model.config, config.model.config.architecture
    if model.loss_chunks > 1:
        yield "the loss of a piece cannot be computed in chunks (model.model_config.loss_chunks)"
    if model.fine_grain_interleave > 1:
        yield "layers of pieces do not take their rows in parts (model.model_config.fine_grain_interleave)"
    if model.num_nextn_predict_layers:
        yield "layers that predict ahead need the next token, which may be in the next piece"
    embedding = architecture.embedding
    if architecture.drops or embedding.noise is not None:
        yield "dropout and noise are drawn for whole sequences"
    if embedding.learned_positions is not None:
        yield "learned positions are looked up for whole sequences"
    reasons = (reason for spec in architecture.specifications() for reason in _layer_not_proved(spec))
    yield from dict.fromkeys(reasons)


def _layer_not_proved(spec: LayerSpec) -> Iterator[str]:
    attention = spec.attention
    if not isinstance(spec.feed_forward, FeedForwardSpec):
        yield "tokens of experts compete, and are balanced, within their sequence: experts do not take pieces"
    if not isinstance(attention, AttentionSpec):
        yield "latent attention keeps no earlier pieces yet"
        return
    if not isinstance(attention.position, RotarySpec):
        yield "pieces support rotary positions only"
    if attention.window is not None:
        yield "windows of attention are not moved with pieces"
