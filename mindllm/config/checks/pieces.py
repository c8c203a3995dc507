"""Cross checks of sequences that go through a pipeline in pieces (``seq_split_num``): the schedule, sizes, and what is proved."""

from __future__ import annotations

from collections.abc import Iterator

from mindllm.architecture.layer import LayerSpec
from mindllm.architecture.layer_counts import IN_PIECES, SEQPIPE
from mindllm.architecture.parts import AttentionSpec, FeedForwardSpec, RotarySpec
from mindllm.axes import CONTEXT
from mindllm.config.checks import MESH, Finding
from mindllm.config.monitor import LOGIT
from mindllm.config.reading.document import KeyPath
from mindllm.config.run import RunConfig

KEY: KeyPath = (*MESH, "seq_split_num")


def check_pieces(config: RunConfig) -> Iterator[Finding]:
    """A pipeline and a schedule that has pieces, equal pieces, and a model and run whose pieces are proved."""
    sizes, scheduler = config.parallel_config, config.parallel.pipeline_config.pipeline_scheduler
    pieces, stages = sizes.seq_split_num, sizes.pipeline_stage
    if pieces == 1:
        return
    if stages == 1:
        yield KEY, f"there is no pipeline that pieces could fill (value {pieces}); write 1"
        return
    if scheduler not in IN_PIECES:
        message = f"{scheduler} orders whole sequences (value {pieces}); write 1, or pipeline_scheduler {SEQPIPE}"
        yield KEY, message
        return
    yield from _check_sizes(config, pieces)
    for reason in _not_proved(config):
        yield KEY, f"{reason} (value {pieces}); write 1"


def _check_sizes(config: RunConfig, pieces: int) -> Iterator[Finding]:
    """Pieces are equal, also on tensor-parallel ranks, and fill the stages as the schedule has it."""
    sizes, model = config.parallel_config, config.model.config
    scheduler, stages = config.parallel.pipeline_config.pipeline_scheduler, sizes.pipeline_stage
    ranks = sizes.model_parallel if sizes.use_seq_parallel else 1
    if model.seq_length % (pieces * ranks):
        of = f" of each of {ranks} ranks (use_seq_parallel)" if ranks > 1 else ""
        yield KEY, f"must divide the tokens{of} of seq_length {model.seq_length} (value {pieces})"
    if scheduler != SEQPIPE and model.pp_interleave_num == 1:
        key = ("parallel", "pipeline_config", "pipeline_scheduler")
        yield key, f"orders the pieces of several chunks per stage (value {scheduler}); write {SEQPIPE}"
    elif scheduler != SEQPIPE and pieces > stages:
        message = f"with {scheduler} there are at most as many pieces as stages, {stages} (value {pieces})"
        yield KEY, f"{message}; write {stages}, or pipeline_scheduler {SEQPIPE}"


def _not_proved(config: RunConfig) -> Iterator[str]:
    """What nobody has shown to compute the same in pieces."""
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
    yield from _not_proved_of_model(config)


def _not_proved_of_model(config: RunConfig) -> Iterator[str]:
    model, architecture = config.model.config, config.model.config.architecture
    if model.loss_chunks > 1:
        yield "the loss of a piece is computed at once (model.model_config.loss_chunks)"
    if model.fine_grain_interleave > 1:
        yield "layers of pieces do not take their rows in parts (model.model_config.fine_grain_interleave)"
    if model.num_nextn_predict_layers:
        yield "layers that predict ahead need the next token, which may be in the next piece"
    embedding = architecture.embedding
    if architecture.drops or embedding.noise is not None:
        yield "dropout and noise are drawn for whole sequences"
    if embedding.learned_positions is not None:
        yield "learned positions are looked up for whole sequences"
    reasons = (reason for spec in architecture.specifications() for reason in _not_proved_of_layer(spec))
    yield from dict.fromkeys(reasons)


def _not_proved_of_layer(spec: LayerSpec) -> Iterator[str]:
    attention = spec.attention
    if not isinstance(spec.feed_forward, FeedForwardSpec):
        yield "tokens of experts compete, and are balanced, within their sequence: experts do not take pieces"
    if not isinstance(attention, AttentionSpec):
        yield "latent attention keeps no earlier pieces yet"
        return
    if not isinstance(attention.position, RotarySpec):
        yield "pieces have rotary positions alone"
    if attention.window is not None:
        yield "windows of attention are not moved with pieces"
