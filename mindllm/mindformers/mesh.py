"""The device mesh, the batch and the pipeline of MindFormers: sizes that count only together.

What its trainer does with them is followed (``BaseTrainer``): without ``use_parallel`` no size counts; accumulation and micro
batches exclude each other; the copies of ``micro_batch_interleave_num`` each take a batch.
"""

from __future__ import annotations

from typing import Any

from mindllm.architecture.layer_counts import IN_PIECES, StageLayers, layer_counts
from mindllm.config.parallel import FOREIGN_CONTEXT_ALGORITHMS, RING
from mindllm.config.parallel import GATHER as GATHERED
from mindllm.errors import nearest
from mindllm.mindformers.reading import Reading, shown

SIZES = ("data_parallel", "model_parallel", "pipeline_stage")
MODES = {
    "0": 0,
    "1": 1,
    "2": 1,
    "3": 1,
    "data_parallel": 0,
    "semi_auto_parallel": 1,
    "auto_parallel": 1,
    "hybrid_parallel": 1,
    "stand_alone": 1,
    "manual_parallel": 1,
}
UNSPLIT_SEQUENCES = "context_parallel is 1: every device has whole sequences"
RING_REASON = "by separate communication; MindSpore 2.10 crashes on enable_ra_send_recv"
SINGLE = "use_parallel is false: one device"
UNCUT_SEQUENCES = (
    "seq_split_num and pp_interleave_num are 1: neither sequences nor stages are cut, and the order is that of 1f1b"
)
ALWAYS_SPLIT = "use_legacy is false: such networks split the table of tokens over model_parallel, whatever is written"


def translate_mesh(reading: Reading) -> None:
    """Translate sizes of the mesh, the parallel mode, and how the batch is read and split."""
    distributed = bool(reading.get("use_parallel", False))
    for name in SIZES:
        _size(reading, f"parallel_config.{name}", distributed)
    # how a sequence is shared: keys that mean something only where devices share one
    size, algorithm = "parallel_config.context_parallel", "parallel_config.context_parallel_algo"
    ring, both = "model.model_config.use_ring_attention", "parallel_config.ulysses_degree_in_cp"
    shares = distributed and reading.count(size) > 1
    if reading.has(size) and reading.get(size) is None:
        reading.idle(size, UNSPLIT_SEQUENCES)
    else:
        _size(reading, size, distributed)
    for key in filter(reading.has, (algorithm, ring, both)):
        if not shares:
            reading.idle(key, UNSPLIT_SEQUENCES)
        elif key == ring and reading.get(ring) and reading.get(algorithm, GATHERED) != GATHERED:
            reading.refuse(ring, f"ring attention over heads is not supported; write {algorithm}: {GATHERED}")
        elif key == ring and reading.get(ring):
            reading.translate(ring, algorithm, RING, RING_REASON)
        elif key != algorithm:
            reading.idle(key, "context_parallel_algo decides")
        elif reading.get(ring):
            reading.idle(algorithm, "use_ring_attention decides")
        elif reading.get(algorithm) in FOREIGN_CONTEXT_ALGORITHMS:
            reading.refuse(algorithm, FOREIGN_CONTEXT_ALGORITHMS[reading.word(algorithm)])
        else:
            reading.use(algorithm)
    _sequence_parallel(reading, distributed)
    # whether ranks split the table of tokens: networks of the new kind always do (TransformerConfig.__post_init__)
    key, ranks = "parallel_config.vocab_emb_dp", reading.count("parallel_config.model_parallel")
    split = distributed and ranks > 1 and reading.get("use_legacy", True) is False
    splittable = reading.count("model.model_config.vocab_size") % ranks == 0
    if split and splittable and reading.has(key):
        reading.translate(key, key, False, ALWAYS_SPLIT)
    elif split and splittable:
        reading.set_omitted(key, key, False, ALWAYS_SPLIT)
    elif reading.has(key):
        reading.use(key)
    _mode(reading)
    _slices(reading)
    _optimizer_share(reading)
    stages = reading.count("parallel_config.pipeline_stage") if distributed else 1
    _batch(reading, stages)
    _schedule(reading, stages)


def _size(reading: Reading, key: str, distributed: bool) -> None:
    if not reading.has(key):
        return
    if distributed or reading.get(key) == 1:
        reading.use(key)
    else:
        reading.idle(key, SINGLE)


def _sequence_parallel(reading: Reading, distributed: bool) -> None:
    key = "parallel_config.use_seq_parallel"
    if not reading.has(key):
        return
    if distributed and reading.count("parallel_config.model_parallel") > 1:
        reading.use(key)
    else:
        reading.idle(key, "model_parallel is 1: there is nothing to split a sequence over")


def _mode(reading: Reading) -> None:
    key = "parallel.parallel_mode"
    if not reading.has(key):
        return
    name = reading.word(key).lower()
    if name not in MODES:
        reading.refuse(key, f"no kind of parallelism{nearest(name, MODES)}")
    elif name in ("1", "semi_auto_parallel"):
        reading.use(key)
    elif MODES[name] == 0:
        reading.translate(key, key, 1, "with model_parallel and pipeline_stage 1 this is data parallelism")
    else:
        reading.translate(key, key, 1, "strategies are declared, not searched")


def _slices(reading: Reading) -> None:
    """Translate ``full_batch`` and ``dataset_strategy``, whose columns differ from those of mindllm."""
    full, strategy = "parallel.full_batch", "parallel.dataset_strategy"
    if reading.has(full):
        reading.use(full)
    if not reading.has(strategy):
        return
    rows, replicas = reading.get(strategy), reading.get("parallel_config.data_parallel", 1)
    if reading.get(full, True):
        reading.idle(strategy, "full_batch is true: every rank reads the whole batch")
    elif isinstance(rows, list) and all(isinstance(row, list) and row and row[0] == replicas for row in rows):
        reading.idle(strategy, "a batch is split over data_parallel, whatever its columns")
    else:
        instead = f"write {strategy}: {shown(with_replicas(rows, replicas))}, or {full}: true without it"
        reading.refuse(strategy, f"a batch is split over data_parallel {replicas} here; {instead}")


def with_replicas(rows: Any, replicas: Any) -> Any:
    """Return a ``dataset_strategy`` whose columns are split over this number of replicas."""
    if isinstance(rows, list) and rows and all(isinstance(row, list) and row for row in rows):
        return [[replicas, *row[1:]] for row in rows]
    return [[replicas, 1]]


def _optimizer_share(reading: Reading) -> None:
    """Translate the optimizer share. MindSpore ignores one that does not divide the replicas of a weight."""
    key = "parallel.parallel_optimizer_config.optimizer_weight_shard_size"
    if not reading.has(key):
        return
    share, replicas = reading.get(key), reading.count("parallel_config.data_parallel")
    copies = replicas * reading.count("parallel_config.model_parallel")  # of weights that tensor parallel leaves whole
    if isinstance(share, int) and share > 0 and copies % share:
        reading.translate(key, key, -1, f"does not divide data_parallel {replicas}: MindSpore takes all replicas then")
    else:
        reading.use(key)


def _batch(reading: Reading, stages: int) -> None:
    """Translate the samples per replica and micro batch, and their multipliers."""
    batch, copies = "runner_config.batch_size", "micro_batch_interleave_num"
    batch_size, factor = reading.get(batch, 1), reading.get(copies, 1)
    is_valid = is_count(batch_size) and is_count(factor)
    if reading.has(batch):
        reason = f"batch_size x {copies} {factor}" if factor != 1 else ""
        reading.translate(batch, batch, batch_size * factor if is_valid else batch_size, reason)
    if reading.has(copies):
        if factor == 1:
            reading.idle(copies, "one copy")
        elif is_valid:
            reading.put(batch, batch_size * factor)
            if any(reading.get(f"parallel_config.{key}", 1) != 1 for key in ("model_parallel", "expert_parallel")):
                reading.use(copies)
            else:
                reading.idle(
                    copies, "no layer exchanges anything that another copy could hide; the samples join the batch"
                )
        else:
            reading.refuse(copies, "must be a number of copies")
    elsewhere = "train_dataset.batch_size"
    if reading.has(elsewhere):
        reading.idle(elsewhere, "runner_config.batch_size decides")
    steps, micro = "runner_config.gradient_accumulation_steps", "parallel_config.micro_batch_num"
    if reading.has(steps):
        if stages > 1 and reading.get(steps) != 1:
            reading.idle(steps, "a pipeline accumulates over micro_batch_num; MindFormers sets this to 1 there")
        else:
            reading.use(steps)
    if reading.has(micro):
        if stages > 1 or reading.get(micro) == 1:
            reading.use(micro)
        else:
            reading.idle(micro, "pipeline_stage is 1, and MindFormers splits batches in a pipeline only")


def _schedule(reading: Reading, stages: int) -> None:
    """Translate the pipeline schedule, chunks and the placement of layers."""
    interleave = "parallel.pipeline_config.pipeline_interleave"
    scheduler = "parallel.pipeline_config.pipeline_scheduler"
    chunks, offset = "model.model_config.pp_interleave_num", "model.model_config.offset"
    pieces = "parallel_config.seq_split_num"
    is_interleaved = stages > 1 and bool(reading.get(interleave, False))
    if reading.has(pieces):
        if stages > 1 and reading.get(pieces) is not None:
            reading.use(pieces)
        else:
            reading.idle(pieces, "sequences stay whole" if stages > 1 else "pipeline_stage is 1")
    if reading.has(interleave):
        if stages > 1:
            reading.use(interleave)
        else:
            reading.idle(interleave, "pipeline_stage is 1")
    if reading.has(scheduler):
        is_unsplit = reading.get(pieces, 1) in (1, None)
        in_one_chunk = not is_interleaved or reading.get(chunks, 1) == 1
        if stages > 1 and reading.get(scheduler) in IN_PIECES and is_unsplit and in_one_chunk:
            reading.translate(scheduler, scheduler, "1f1b", UNCUT_SEQUENCES)
        elif stages > 1:
            reading.use(scheduler)
        else:
            reading.idle(scheduler, "pipeline_stage is 1")
    if reading.has(chunks):
        if is_interleaved or reading.get(chunks) == 1:
            reading.use(chunks)
        else:
            reading.idle(chunks, "pipeline_interleave is off: MindFormers sets this to 1 without a word")
    if reading.has(offset):
        if stages > 1:
            reading.use(offset)
        else:
            reading.idle(offset, "pipeline_stage is 1")


def planned_layers(reading: Reading) -> StageLayers | None:
    """Return the number of layers per ``[chunk][stage]`` translated so far; None if it is invalid."""
    model = reading.ours.data.get("model", {}).get("model_config", {})
    stages = reading.ours.data.get("parallel_config", {}).get("pipeline_stage", 1)
    chunks, layers = model.get("pp_interleave_num", 1), model.get("num_layers")
    if not all(map(is_count, (stages, chunks, layers))):
        return None
    try:
        return layer_counts(layers + model.get("num_nextn_predict_layers", 0), stages, chunks, model.get("offset", 0))
    except (ValueError, TypeError):
        return None


def is_count(value: Any) -> bool:
    """Return True for a positive integer."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
