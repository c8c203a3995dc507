"""Cross checks of the device mesh: divisibility, pipeline, ``offset`` and recompute lists."""

from __future__ import annotations

from collections.abc import Iterator

from mindllm.architecture.layer_counts import CHUNKS_OF_A_V, StageLayers, layer_counts
from mindllm.axes import CONTEXT, DATA, STAGE_AXES
from mindllm.config.checks import MESH, MODEL, Finding
from mindllm.config.reading.document import KeyPath
from mindllm.config.recompute import LayerCounts, LayerSelection
from mindllm.config.run import RunConfig


def check_mesh(config: RunConfig) -> Iterator[Finding]:
    """Check the number of devices and the parallel mode."""
    mesh, parallel = config.parallel_config, config.parallel
    if not config.use_parallel and mesh.device_num > 1:
        devices = f"parallel_config asks for {mesh.device_num} devices ({mesh.sizes_text(of='size')})"
        yield ("use_parallel",), f"{devices}, but this is false; write use_parallel: true, or sizes of 1"
    if parallel.parallel_mode == 0 and mesh.device_num > mesh.data_parallel:
        message = f"data_parallel mode shards no operator (value {parallel.parallel_mode}); write semi_auto_parallel"
        yield ("parallel", "parallel_mode"), message
    if parallel.full_batch and parallel.dataset_strategy is not None:
        message = "has no meaning with full_batch: true; remove it, or write full_batch: false"
        yield ("parallel", "dataset_strategy"), message
    yield from _check_copies(config)
    settings: KeyPath = ("parallel", "parallel_optimizer_config")
    optimizer = parallel.parallel_optimizer_config
    if optimizer.gradient_accumulation_shard and not parallel.enable_parallel_optimizer:
        yield (*settings, "gradient_accumulation_shard"), "needs parallel.enable_parallel_optimizer: true (value true)"
    share = optimizer.optimizer_weight_shard_size
    if share == 0 or (share > 0 and mesh.replica_num % share):
        replicas = mesh.sizes_text(axis for axis in STAGE_AXES if axis.copies_weights)
        message = f"must be -1 or divide {replicas} (value {share})"
        yield (*settings, "optimizer_weight_shard_size"), message


def _check_copies(config: RunConfig) -> Iterator[Finding]:
    """Check that interleaved copies divide the batch and have communication to overlap."""
    copies, batch = config.micro_batch_interleave_num, config.runner_config.batch_size
    key: KeyPath = ("micro_batch_interleave_num",)
    if copies == 1:
        return
    if batch % copies:
        near = [size for size in range(1, batch + 1) if batch % size == 0]
        yield key, f"must divide runner_config.batch_size {batch} (value {copies}); write {' or '.join(map(str, near))}"
    if config.parallel_config.model_parallel == 1 and config.parallel_config.expert_parallel == 1:
        message = f"there is nothing to exchange inside a layer, so nothing to overlap (value {copies}); write 1"
        yield key, message


def check_devices(config: RunConfig) -> Iterator[Finding]:
    """Check that MindSpore compiles for the number of devices. CPU replicas are compiled separately: any number works."""
    mesh = config.parallel_config
    replicas = config.context.device_target == "CPU" and mesh.device_num == mesh.data_parallel
    if not replicas and (message := device_count_error(config)):
        yield (*MESH, "data_parallel"), message


def device_count_error(config: RunConfig) -> str:
    """Return why MindSpore rejects the number of devices ("parallel init failed"), with valid numbers; empty if it does not.

    Its rule (``ParallelInit``) for all devices and for those of a stage: divisible by 8, or 1, 2 or 4.
    """
    mesh = config.parallel_config
    stages = mesh.pipeline_stage
    inner_devices = mesh.stage_device_num // mesh.data_parallel
    if compiles_for(mesh.data_parallel * inner_devices, stages):
        return ""
    possible = [size for size in range(1, 2 * mesh.data_parallel + 8) if compiles_for(size * inner_devices, stages)]
    near = sorted(sorted(possible, key=lambda size: abs(size - mesh.data_parallel))[:3])
    in_stages = f", {mesh.data_parallel * inner_devices} in each of {stages} stages" if stages > 1 else ""
    return (
        f"makes {mesh.device_num} devices{in_stages}, and {COMPILED}, of all and of "
        f"a stage (value {mesh.data_parallel}); write {' or '.join(map(str, near))}"
    )


COMPILED = "MindSpore compiles for 1, 2, 4 or a multiple of 8"


def compiles_for(stage_devices: int, stages: int) -> bool:
    """Return True if MindSpore compiles for this number of stages and devices per stage."""
    return all(devices in (1, 2, 4) or devices % 8 == 0 for devices in (stage_devices, stage_devices * stages))


def check_sharding(config: RunConfig) -> Iterator[Finding]:
    """Check that tensor parallelism divides the sizes of the model."""
    ranks = config.parallel_config.model_parallel
    if ranks == 1:
        return
    model = config.model.config
    everyone = config.parallel_config.stage_device_num
    if model.norm_head and model.vocab_size % everyone and not model.vocab_size % ranks:
        message = f"rows of a normalised head are shared by all {everyone} devices of a stage, which do not divide it"
        yield (
            (*MODEL, "vocab_size"),
            f"{message} (value {model.vocab_size}); write 1 for {DATA.key} and {CONTEXT.key}",
        )
    keys = ["num_heads", "n_kv_heads", "intermediate_size", "hidden_size"]
    if not (
        model.tie_word_embeddings and config.parallel_config.vocab_emb_dp
    ):  # a tied table without vocabulary sharding is replicated
        keys.append("vocab_size")
    if config.parallel_config.use_seq_parallel:
        keys.append("seq_length")
    for key in keys:
        size = getattr(model, key)
        if size % ranks:
            message = f"is not divisible by parallel_config.model_parallel {ranks} (value {size})"
            possible = [str(n) for n in range(2, min(size, 64) + 1) if size % n == 0]
            yield (*MODEL, key), f"{message}; it can be shared by {', '.join(possible) or 'one rank only'}"


def check_spikes(config: RunConfig) -> Iterator[Finding]:
    """Check that every rank knows the figures of the spike guard before the update."""
    guard, stages = config.runner_wrapper.skip_spikes, config.parallel_config.pipeline_stage
    if guard is not None and "loss" in guard.watch and stages > 1:
        message = f"the loss is known on one of {stages} stages alone (value [{', '.join(guard.watch)}]); write [norm]"
        yield ("runner_wrapper", "skip_spikes", "watch"), message


def check_pipeline(config: RunConfig) -> Iterator[Finding]:
    """Check micro batches, stages and chunks."""
    mesh, model = config.parallel_config, config.model.config
    interleaves = config.parallel.pipeline_config.pipeline_interleave
    stages, chunks = mesh.pipeline_stage, model.pp_interleave_num
    if stages == 1 and mesh.micro_batch_num > 1:
        message = f"requires pipeline_stage above 1 (value {mesh.micro_batch_num})"
        yield (*MESH, "micro_batch_num"), f"{message}; write runner_config.gradient_accumulation_steps"
    pieces = mesh.seq_split_num if chunks == 1 else 1  # pieces fill the stages as well
    if mesh.micro_batch_num * pieces < stages:
        least = f"{-(-stages // pieces)} for {pieces} pieces of each (seq_split_num): " if pieces > 1 else ""
        message = f"must be at least {least}pipeline_stage {stages} (value {mesh.micro_batch_num})"
        yield (*MESH, "micro_batch_num"), message
    if config.parallel.pipeline_config.v_shape:
        yield from _check_v_shape(config)
    steps = config.runner_config.gradient_accumulation_steps
    if stages > 1 and steps > 1:
        message = (
            f"a pipeline accumulates over its micro batches (value {steps}); write parallel_config.micro_batch_num"
        )
        yield ("runner_config", "gradient_accumulation_steps"), message
    if chunks > 1 and stages == 1:
        message = f"several chunks per stage need a pipeline (value {chunks}); write 1, or a larger pipeline_stage"
        yield (*MODEL, "pp_interleave_num"), message
    elif chunks > 1 and not interleaves:
        message = f"needs parallel.pipeline_config.pipeline_interleave: true (value {chunks})"
        yield (*MODEL, "pp_interleave_num"), message
    elif chunks > 1 and (config.do_eval or config.run_mode == "eval"):
        key, value = ("run_mode", "eval") if config.run_mode == "eval" else ("do_eval", "true")
        message = (
            f"MindSpore 2.10 crashes when it compiles an evaluation of {chunks} chunks per stage (value {value}); evaluate "
            "checkpoints by themselves, where pp_interleave_num is 1"
        )
        yield (key,), f"{message}; write false" if key == "do_eval" else message


def _check_v_shape(config: RunConfig) -> Iterator[Finding]:
    """Check the requirements of zero_bubble_v: a pipeline, two chunks per stage, two micro batches per stage."""
    mesh, chunks = config.parallel_config, config.model.config.pp_interleave_num
    scheduler, stages = ("parallel", "pipeline_config", "pipeline_scheduler"), mesh.pipeline_stage
    if stages == 1:
        yield scheduler, "zero_bubble_v needs a pipeline; write 1f1b, or a larger parallel_config.pipeline_stage"
        return
    if chunks != CHUNKS_OF_A_V:
        message = f"zero_bubble_v has {CHUNKS_OF_A_V} chunks per stage, which run back (value {chunks})"
        yield (*MODEL, "pp_interleave_num"), f"{message}; write {CHUNKS_OF_A_V}"
    copies, optimizer = config.micro_batch_interleave_num, config.parallel.parallel_optimizer_config
    crashes = "with zero_bubble_v MindSpore 2.10 cannot compile it ('Unexpected empty queue')"
    if copies > 1:
        yield ("micro_batch_interleave_num",), f"{crashes} (value {copies}); write 1"
    if optimizer.gradient_accumulation_shard:
        key = ("parallel", "parallel_optimizer_config", "gradient_accumulation_shard")
        yield key, f"{crashes} (value true); write false"
    if stages <= mesh.micro_batch_num < 2 * stages:
        message = (
            f"zero_bubble_v needs at least two micro batches per stage, {2 * stages} (value {mesh.micro_batch_num})"
        )
        yield (*MESH, "micro_batch_num"), message


def check_offset(config: RunConfig) -> Iterator[Finding]:
    """Check that every chunk and stage has layers."""
    model, stages = config.model.config, config.parallel_config.pipeline_stage
    places = stages * model.pp_interleave_num
    if model.layer_count < places:
        message = (
            f"pipeline_stage {stages} x pp_interleave_num {model.pp_interleave_num} needs at least {places} layers"
        )
        yield (*MODEL, "num_layers"), f"{message} (value {model.layer_count})"
        return
    try:
        last = _layers(config)[-1][config.last_stage]
        if last < model.num_nextn_predict_layers:
            message = f"must all be on the last stage, which has {last} layers (value {model.num_nextn_predict_layers})"
            yield (*MODEL, "num_nextn_predict_layers"), f"{message}; write another offset"
    except ValueError as error:
        yield (*MODEL, "offset"), f"{error} (value {_listed(model.offset)})"
        return
    adding = [layer.adds_to_loss for layer in model.architecture.layers]
    if stages > 1 and any(adding) and not any(adding[-last:]):
        message = (
            f"the last stage has {last} layers without experts, but auxiliary losses are added on a stage with experts "
            f"(value {_listed(model.offset)}); write an offset that gives it one"
        )
        yield (*MODEL, "offset"), message


def check_recompute(config: RunConfig) -> Iterator[Finding]:
    """Check the lengths of recompute lists, and their counts against the number of layers."""
    try:
        layers = _layers(config)
    except ValueError:
        return  # check_offset reports it
    for key in type(config.recompute_config).model_fields:
        value = getattr(config.recompute_config, key)
        for path, counts in _counts_in(("recompute_config", key), value):
            message = _wrong_counts(counts, layers)
            if message:
                yield path, f"{message} (value {_listed(counts)})"


def _layers(config: RunConfig) -> StageLayers:
    model, stages = config.model.config, config.parallel_config.pipeline_stage
    return layer_counts(model.layer_count, stages, model.pp_interleave_num, model.offset)


def _counts_in(path: KeyPath, value: LayerSelection) -> Iterator[tuple[KeyPath, LayerCounts]]:
    """Yield the lists of counts in a value: the value itself, or one for each pattern."""
    if isinstance(value, dict):
        for pattern, counts in value.items():
            yield (*path, pattern), counts
    elif isinstance(value, tuple) and not isinstance(value[0], str):
        yield path, value  # type: ignore[misc]


def _wrong_counts(counts: LayerCounts, layers: StageLayers) -> str:
    """Return what the error in a list of counts for ``layers[chunk][stage]``; empty if it is valid."""
    if isinstance(counts, bool):
        return ""
    rows = [row for row in counts if isinstance(row, tuple)]
    stages = len(layers[0])
    if not rows:
        totals = tuple(map(sum, zip(*layers, strict=True)))
        return _wrong_row(tuple(count for count in counts if not isinstance(count, tuple)), totals, "stage {place}")
    if len(rows) != len(layers):
        return f"must hold {len(layers)} lists, one for each chunk (pp_interleave_num), each of {stages} counts"
    for chunk, (row, available) in enumerate(zip(rows, layers, strict=True)):
        message = _wrong_row(row, available, f"stage {{place}} of chunk {chunk}")
        if message:
            return message
    return ""


def _wrong_row(row: tuple[bool | int, ...], available: tuple[int, ...], place: str) -> str:
    if len(row) != len(available):
        return f"must hold {len(available)} counts, one for each stage (pipeline_stage), not {len(row)}"
    for stage, (count, layers) in enumerate(zip(row, available, strict=True)):
        if not isinstance(count, bool) and count > layers:
            return f"{place.format(place=stage)} has only {layers} layers, not {count}; write {layers} or true for all"
    return ""


def _listed(value: object) -> object:
    return [_listed(entry) for entry in value] if isinstance(value, tuple) else value
