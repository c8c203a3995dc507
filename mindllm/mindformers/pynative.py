"""The PyNative form of MindFormers 2.x, rewritten as the form of its static graphs, which is then translated key by key.

Every key has a place in the other form (:data:`RENAMED`), because the result does not depend on the execution mode. Sizes that
the trainer derives from the number of devices are derived from the batch. Entries and problems name the keys as written.

:data:`PYNATIVE` has the keys without a place in the other form. Meanings are those of MindFormers' own page
(``feature/configuration.md`` of r2.10.0).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mindllm.architecture.layer_counts import StageLayers, layer_counts
from mindllm.config.reading.document import Document, KeyPath, Problem, at, child, closest_origin, path_of
from mindllm.mindformers.mesh import is_count
from mindllm.mindformers.reading import Entry, Outcome, Reading, Table, decided, idle, only, shown
from mindllm.mindformers.session import PYNATIVE_MONITOR
from mindllm.mindformers.update import UPDATE

SECTIONS = ("training", "parallelism", "lr_scheduler", "checkpoint")
"""Sections that only this form has."""
SINGLE_FILE = "a checkpoint is written once, whole parameters with the optimizer's state, below output_dir"
HIDING = "it only overlaps communication with computation"
GATHERED = (
    "weights are gathered before they are used and kept until the backward pass, unless "
    "recompute_config.parallel_optimizer_comm_recompute is true, which gathers them again as FSDP does"
)
SUMS = "gradients are sums over tokens, divided once by the tokens of the global batch"

RENAMED = {
    "training.seed": "seed",
    "training.local_batch_size": "runner_config.batch_size",
    "training.max_norm": "runner_wrapper.max_grad_norm",
    "parallelism.tensor_parallel": "parallel_config.model_parallel",
    "parallelism.pipeline_parallel": "parallel_config.pipeline_stage",
    "parallelism.context_parallel": "parallel_config.context_parallel",
    "parallelism.context_parallel_method": "parallel_config.context_parallel_algo",
    "parallelism.ulysses_degree_in_cp": "parallel_config.ulysses_degree_in_cp",
    "parallelism.expert_parallel": "parallel_config.expert_parallel",
    "parallelism.pipeline_parallel_schedule": "parallel.pipeline_config.pipeline_scheduler",
    "parallelism.pipeline_parallel_interleave_num": "model.model_config.pp_interleave_num",
    "parallelism.moe_token_dispatcher_type": "model.model_config.moe_token_dispatcher_type",
    "profiler.enable_profiling": "profile",
    "profiler.start_step": "profile_start_step",
    "profiler.end_step": "profile_stop_step",
    "profiler.profile_memory": "profile_memory",
    "profiler.with_stack": "with_stack",
    "profiler.profiler_rank": "profile_rank_ids",
}
"""Keys that mean the same in both forms, and where they stand in the other."""
DERIVED = {
    "training.global_batch_size": "runner_config.gradient_accumulation_steps",
    "parallelism.data_parallel_shard": "parallel_config.data_parallel",
    "parallelism.pipeline_parallel_layers_per_stage": "model.model_config.offset",
    "recompute.full_recompute_layer": "recompute_config.recompute",
    "checkpoint.load_path": "load_checkpoint",
    "checkpoint.no_load_optim": "resume_training",
    "checkpoint.save_interleaved_steps": "callbacks.CheckpointMonitor.save_checkpoint_steps",
    "checkpoint.save_max": "callbacks.CheckpointMonitor.keep_checkpoint_max",
    "checkpoint.async_save": "callbacks.CheckpointMonitor.async_save",
}
"""Keys whose value in the other form follows from others too."""

PYNATIVE: Table = {
    **{key: decided(target) for key, target in (RENAMED | DERIVED).items()},
    **{f"lr_scheduler.{key.partition('.')[2]}": decided(key) for key in UPDATE if key.startswith("lr_schedule.")},
    "training.steps": decided("runner_config.train_steps"),
    "training.deterministic": decided("train_precision_sync"),
    "parallelism.data_parallel_shard_strategy": idle("weights, gradients and optimizer state are all shared"),
    "parallelism.reshard_after_forward_policy": idle(GATHERED),
    "parallelism.cpu_offload": only(
        False, None, reason="off", otherwise="weights stay on the device; write swap_config for activations"
    ),
    "parallelism.disable_gradient_division": idle(SUMS),
    "parallelism.sequence_parallel": idle("it is on wherever tensor_parallel is above 1, whatever is written"),
    "parallelism.context_parallel_async": idle(HIDING),
    "parallelism.context_parallel_mask_type": only(
        "causal", None, reason="masks are causal", otherwise="masks are causal here"
    ),
    "parallelism.pipeline_parallel_overlap_p2p": idle(HIDING),
    "parallelism.pipeline_parallel_overlap_b_f": idle(HIDING),
    "parallelism.pipeline_parallel_enable_dxdw_split": only(
        False,
        None,
        reason="a backward pass is whole",
        otherwise="MindSpore's static graph has no backward pass in two parts; write false",
    ),
    "parallelism.npu_nums_per_device": idle("the description of the device has its links"),
    "checkpoint.enable_save": decided("callbacks"),
    "checkpoint.save_path": idle("checkpoints stand in output_dir/checkpoint"),
    "checkpoint.prefix": idle("checkpoints are named llm-STEP"),
    "checkpoint.no_save_optim": idle(SINGLE_FILE),
    "checkpoint.remove_redundancy": idle(SINGLE_FILE),
    "checkpoint.load_balanced": idle("weights are read one tensor at a time"),
    "checkpoint.load_worker_number": idle("weights are read one tensor at a time"),
    "checkpoint.save_global_layout_cache": idle(SINGLE_FILE),
    "recompute.mode": decided("recompute_config.recompute"),
    "recompute.select_module": decided("recompute_config.select_recompute"),
    "recompute.select_module.*": decided("recompute_config.select_recompute"),
    "recompute_comm.enable": only(
        False,
        None,
        reason="off",
        otherwise="modules have other names here; write recompute_config.select_comm_recompute",
    ),
    "recompute_comm.select_module": idle("enable is false"),
    "recompute_comm.select_module.*": idle("enable is false"),
    "swap.enable": only(False, None, reason="off", otherwise="modules have other names here; write swap_config"),
    "swap.default_prefetch": idle("enable is false"),
    "swap.layer_swap": idle("enable is false"),
    "swap.layer_swap.*": idle("enable is false"),
    "swap.op_swap": idle("enable is false"),
    "swap.op_swap.*": idle("enable is false"),
    "profiler.output_path": idle("profiles stand in output_dir/profile"),
    "profiler.profiler_level": idle("the profile is that of level 1, which has shapes"),
    "profiler.mstx": idle("the profile is that of level 1, which has shapes"),
    "profiler.profile_cpu": idle("the profile is that of level 1, which has shapes"),
    **PYNATIVE_MONITOR,
    "optimizer.weight_decay_include": only(
        None, reason="none", otherwise="matrices are decayed, vectors are not; write null"
    ),
    "optimizer.weight_decay_exclude": only(
        None, reason="none", otherwise="matrices are decayed, vectors are not; write null"
    ),
}


ABSENT = object()
DEFAULTS: dict[str, Any] = {  # defaults of its configuration classes, by their place in the other form
    "run_mode": "train",
    "use_legacy": False,
    "seed": 42,
    "runner_config.batch_size": 1,
    "runner_config.train_steps": 1000,
    "runner_wrapper.type": "MFTrainOneStepCell",
    "runner_wrapper.use_clip_grad": True,
    "runner_wrapper.max_grad_norm": 1.0,
    "optimizer.type": "AdamW",
    "optimizer.weight_decay": 0.01,
    "lr_schedule.learning_rate": 1e-5,
}
ADAMW_KEYS = {"optimizer.betas": [0.9, 0.95], "optimizer.eps": 1e-8}
SAVING = {"save_interleaved_steps": ("save_checkpoint_steps", 1000), "save_max": ("keep_checkpoint_max", 5)}
METHODS = {"colossal": "colossalai_cp", "ulysses": "ulysses_cp", "hybrid": "hybrid_cp"}
SPEC = re.compile(r"(\d+)(?:-(\d+))?")
MOST_LAYERS = 4096
ALL_LAYERS = "of every stage the first layers are recomputed here, as the lists of recompute_config count them"


@dataclass
class Static:
    """A PyNative document in the form of static graphs.

    Attributes:
        document: the rewritten document.
        places: the path of each key in the source, by its path in ``document``.
        added: dotted keys that the source does not have.
        reasons: additional remarks about a key, by its path in ``document``.
        entries: the outcome of keys that are not in ``document``.
    """

    document: Document
    places: dict[KeyPath, KeyPath] = field(default_factory=dict)
    added: set[str] = field(default_factory=set)
    reasons: dict[KeyPath, str] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)

    def written(self, path: KeyPath) -> KeyPath:
        """Return where the key at ``path`` was written."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                return (*self.places[path[:length]], *path[length:])
        return path


def is_pynative(data: Mapping[str, Any]) -> bool:
    """Return True if a YAML has this form: a section that only it has, or a flat section ``model``."""
    model = data.get("model")
    flat = isinstance(model, dict) and "model_config" not in model and {"model_type", "architectures"} & model.keys()
    return bool(flat) or any(isinstance(data.get(section), dict) for section in SECTIONS)


def static_form(document: Document) -> Static:
    """Return the document in the form of static graphs. Keys without a place there do not move."""
    mover = _Mover(document)
    mover.whole("model", "model.model_config")
    mover.whole("train_dataset.dataloader", "train_dataset.data_loader")
    mover.whole("lr_scheduler", "lr_schedule")
    layers = _mesh(mover)
    # move recomputation: mode: full lists layers, the other form counts the first layers per stage
    mode, key = str(mover.get("recompute.mode", "None")).lower(), "recompute.full_recompute_layer"
    if mode == "select":
        reason = "modules have other names here; write recompute_config.select_recompute"
        mover.drop("recompute.mode", Outcome.REFUSED, reason=reason)
    elif mode == "full":
        mover.drop("recompute.mode", Outcome.TRANSLATED, "recompute_config.recompute", "the layers below")
        counts = _recomputed(mover.get(key), layers)
        if counts is None:
            mover.drop(key, Outcome.REFUSED, reason=ALL_LAYERS)
        else:
            mover.move(key, "recompute_config.recompute", counts)
    else:
        mover.drop("recompute.mode", Outcome.WITHOUT_EFFECT, reason="nothing is recomputed")
        mover.drop(key, Outcome.WITHOUT_EFFECT, reason="mode is not full")
    mover.drop("recompute.select_module", Outcome.WITHOUT_EFFECT, reason=f"mode is {mode}")
    for source, target in RENAMED.items():
        mover.move(source, target)
    _steps(mover)
    _checkpoints(mover)
    for key, value in DEFAULTS.items():
        mover.default(key, value)
    if mover.ours("optimizer.type") == "AdamW":
        for key, value in ADAMW_KEYS.items():
            mover.default(key, value)
    return mover.static


def keep_masters(reading: Reading) -> None:
    """Enable master weights: MindFormers' PyNative optimizers always keep float32 copies of half-precision parameters."""
    path = path_of("model.model_config.params_dtype")
    kind, entry = at(reading.ours.data, path_of("model.model_config.param_init_type")), reading.entries.get(path)
    if kind not in ("float16", "bfloat16"):
        return
    if at(reading.ours.data, path_of("optimizer.type")) == "Muon":
        reason = "moments are float32; its optimizers keep a float32 copy of every parameter, Muon here keeps none"
    else:
        reading.put("optimizer.master_weights", True, path)
        reason = "optimizer.master_weights: its optimizers keep a float32 copy of every parameter"
    if entry is not None:
        reading.entries[path] = replace(entry, reason=reason)


def as_written(static: Static, original: Document, entries: Iterable[Entry]) -> Iterator[Entry]:
    """Yield the entries of the translated document as those of the YAML's own keys."""
    yield from static.entries
    for entry in entries:
        path = static.written(entry.path)
        if path == entry.path:
            if entry.origin is not None or path[0] != "callbacks":  # entries of checkpoint report these
                yield entry
            continue
        becomes, outcome = entry.becomes, entry.outcome
        if outcome is Outcome.USED:
            becomes, outcome = f"{entry.key}: {shown(entry.value)}", Outcome.TRANSLATED
        reason = static.reasons.get(entry.path, entry.reason)
        value = at(original.data, path)
        yield replace(entry, path=path, value=value, outcome=outcome, becomes=becomes, reason=reason)


def problems_as_written(static: Static, problems: Iterable[Problem]) -> list[Problem]:
    """Return the mistakes with the keys as they were written."""
    return [replace(problem, path=static.written(problem.path)) for problem in problems]


class _Mover:
    """Moves keys from one form to the other and removes them from the source."""

    def __init__(self, source: Document) -> None:
        self.original = source
        self.left: dict[str, Any] = copy.deepcopy(source.data)
        self.static = Static(Document(self.left, dict(source.origins), list(source.problems)))

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value in the source."""
        value = at(self.original.data, path_of(key))
        return default if value is None else value

    def count(self, key: str, default: int = 1) -> int:
        """Return a positive integer of the source, or ``default``."""
        value = self.get(key)
        return value if is_count(value) else default

    def ours(self, key: str) -> Any:
        """Return a value in the other form."""
        return at(self.left, path_of(key))

    def whole(self, source: str, target: str) -> None:
        """Move a complete section."""
        if isinstance(self.get(source), dict):
            self._put(path_of(target), self._take(path_of(source)), path_of(source))

    def move(self, source: str, target: str, value: Any = ABSENT, reason: str = "") -> None:
        """Move a key, with its value or another one."""
        path = path_of(source)
        parent = at(self.left, path[:-1])
        if not isinstance(parent, dict) or path[-1] not in parent:
            return
        moved = self._take(path)
        self._put(path_of(target), moved if value is ABSENT else value, path)
        if reason:
            self.static.reasons[path_of(target)] = reason

    def drop(self, source: str, outcome: Outcome, becomes: str = "", reason: str = "") -> None:
        """Remove a key without a place in the other form, and record its outcome."""
        path = path_of(source)
        parent = at(self.left, path[:-1])
        if isinstance(parent, dict) and path[-1] in parent:
            value, origin = self._take(path), closest_origin(self.original.origins, path)
            self.static.entries.append(Entry(path, value, outcome, becomes, reason, origin))

    def add(self, target: str, value: Any) -> None:
        """Add a key that follows from other keys."""
        self._put(path_of(target), value)
        self.static.added.add(target)

    def default(self, target: str, value: Any) -> None:
        """Add a key that the source omits."""
        if self.ours(target) is None:
            self.add(target, value)

    def _take(self, path: KeyPath) -> Any:
        parent = at(self.left, path[:-1])
        value = parent.pop(path[-1])
        if not parent and len(path) > 1:
            at(self.left, path[:-2]).pop(path[-2])
        return value

    def _put(self, path: KeyPath, value: Any, source: KeyPath = ()) -> None:
        section: Any = self.left
        for key in path[:-1]:
            if not isinstance(child(section, key), dict | list):
                section[key] = {}
            section = section[key]
        section[path[-1]] = value
        if not source:
            return
        self.static.places[path] = source
        for inner, origin in self.original.origins.items():
            if inner[: len(source)] == source:
                moved = path + inner[len(source) :]
                self.static.document.origins[moved] = origin


def _mesh(mover: _Mover) -> StageLayers | None:
    """Move the mesh and the batch; return the layers per chunk and stage, or None if they are invalid."""
    stages, tensor = mover.count("parallelism.pipeline_parallel"), mover.count("parallelism.tensor_parallel")
    context, shards = mover.count("parallelism.context_parallel"), mover.get("parallelism.data_parallel_shard", -1)
    local_batch, global_batch = mover.count("training.local_batch_size"), mover.count("training.global_batch_size")
    replicas = shards if is_count(shards) else max(1, global_batch // local_batch)
    sizes = f"global_batch_size {global_batch} / local_batch_size {local_batch}"
    reason = f"all devices of a launch, here {sizes}: without gradient accumulation"
    reason = "" if is_count(shards) else f"{reason}; --parallelism.data_parallel_shard=N changes that"
    mover.move("parallelism.data_parallel_shard", "parallel_config.data_parallel", replicas, reason)
    mover.default("parallel_config.data_parallel", replicas)
    mover.add("use_parallel", replicas * tensor * stages * context > 1)
    mover.add("parallel.enable_parallel_optimizer", replicas > 1)
    mover.add("parallel_config.use_seq_parallel", tensor > 1)
    parts = max(1, global_batch // (replicas * local_batch))
    reason = f"{global_batch} samples / ({replicas} replicas x {local_batch})"
    target = "parallel_config.micro_batch_num" if stages > 1 else "runner_config.gradient_accumulation_steps"
    mover.move("training.global_batch_size", target, parts, reason)
    mover.default(target, parts)
    method = "parallelism.context_parallel_method"
    method_name = mover.get(method)
    algorithm = METHODS.get(method_name, method_name) if isinstance(method_name, str) else method_name
    mover.move(method, "parallel_config.context_parallel_algo", algorithm)
    chunks = mover.count("parallelism.pipeline_parallel_interleave_num")
    if stages > 1 and chunks > 1:
        mover.add("parallel.pipeline_config.pipeline_interleave", True)
    # layers of every [chunk][stage]: an even split, or the intervals that are written for each stage
    key, layers = "parallelism.pipeline_parallel_layers_per_stage", mover.count("model.num_hidden_layers", 0)
    method_name = mover.get(key)
    if method_name is None or method_name == "auto" or stages == 1:
        mover.drop(key, Outcome.WITHOUT_EFFECT, reason="an even split" if stages > 1 else "pipeline_stage is 1")
        try:
            return layer_counts(layers, stages, chunks, 0)
        except ValueError:
            return None
    counts = _intervals(method_name, stages, chunks, layers)
    if counts is None:
        reason = (
            f"must be {chunks} intervals in order for each of {stages} stages, as in ['0-3', '4-7'], of {layers} layers"
        )
        mover.drop(key, Outcome.REFUSED, reason=reason)
        return None
    average = layers // (stages * chunks)
    offset = [[count - average for count in row] for row in counts]
    mover.move(key, "model.model_config.offset", offset if chunks > 1 else offset[0])
    return tuple(map(tuple, counts))


def _intervals(intervals: Any, stages: int, chunks: int, layers: int) -> list[list[int]] | None:
    """Return the layers per ``[chunk][stage]`` of ``['0-3,8-11', '4-7,12-15']``; None if it is invalid."""
    rows = intervals.split("|") if isinstance(intervals, str) else intervals
    if not isinstance(rows, list) or len(rows) != stages:
        return None
    places = [[_interval(part) for part in str(row).split(",")] for row in rows]
    if any(len(row) != chunks for row in places):
        return None
    following, counts = 0, []
    for chunk in range(chunks):
        counts.append([len(row[chunk]) for row in places])
        for row in places:
            if not row[chunk] or row[chunk].start != following:
                return None
            following = row[chunk].stop
    return counts if following == layers else None


def _interval(text: str) -> range:
    """Return the layers of ``0-3`` or ``5``; empty for other text."""
    match = SPEC.fullmatch(text.strip())
    if not match:
        return range(0)
    first, last = int(match[1]), int(match[2] or match[1])
    return range(first, last + 1) if last < MOST_LAYERS else range(0)


def _recomputed(value: Any, layers: StageLayers | None) -> bool | list[Any] | None:
    """Return ``true`` or the number of recomputed layers per stage; None if they are not the first ones."""
    if layers is None or not isinstance(value, list):
        return None
    chosen = {layer for part in value for layer in _interval(str(part))}
    if chosen >= set(range(sum(map(sum, layers)))):
        return True
    following = 0
    counts: list[list[int]] = []
    for row in layers:
        counts.append([])
        for layer_count in row:
            place = range(following, following + layer_count)
            following += layer_count
            count = sum(layer in chosen for layer in place)
            if not chosen.issuperset(place[:count]):
                return None
            counts[-1].append(count)
    return counts if len(counts) > 1 else counts[0]


def _steps(mover: _Mover) -> None:
    """Move the number of steps and determinism, which have other places in the other form."""
    mover.move("training.steps", "runner_config.train_steps")
    if mover.get("training.deterministic") is not None:
        mover.move("training.deterministic", "context.deterministic", bool(mover.get("training.deterministic")))
    if mover.get("context.mode") == 1:
        mover.move("context.mode", "context.mode", 0, "runs are compiled graphs here, with the same results")


def _checkpoints(mover: _Mover) -> None:
    """Move checkpoints: saving becomes a callback."""
    entries = mover.ours("callbacks")
    if not isinstance(entries, list):
        entries = []
    mover.left["callbacks"] = entries
    if mover.get("checkpoint.enable_save", True) is False:
        entries.append({"type": "MFLossMonitor"})
        mover.drop("checkpoint.enable_save", Outcome.TRANSLATED, "callbacks", "without a CheckpointMonitor")
        for name in (*SAVING, "async_save"):
            mover.drop(f"checkpoint.{name}", Outcome.WITHOUT_EFFECT, reason="enable_save is false")
    else:
        mover.drop("checkpoint.enable_save", Outcome.TRANSLATED, "callbacks", "with a CheckpointMonitor")
        monitor = {"type": "CheckpointMonitor"} | dict(SAVING.values())
        entries += [{"type": "MFLossMonitor"}, monitor]
        place = f"callbacks.{len(entries) - 1}"
        for source, (target, _) in SAVING.items():
            mover.move(f"checkpoint.{source}", f"{place}.{target}")
        mover.move("checkpoint.async_save", f"{place}.async_save")
    if mover.get("checkpoint.load_path", "") == "":
        for name in ("load_path", "no_load_optim"):
            mover.drop(f"checkpoint.{name}", Outcome.WITHOUT_EFFECT, reason="nothing is loaded")
        return
    mover.move("checkpoint.load_path", "load_checkpoint")
    resumed = mover.get("checkpoint.no_load_optim", False) is False
    mover.move("checkpoint.no_load_optim", "resume_training", resumed)
    mover.default("resume_training", resumed)
