"""What would make stages fit that do not: recomputation, other places for layers, sharded state, a sliced loss.

Every piece of advice is itself a forecast: the changed stages are extrapolated from small simulations as the others are.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from mindllm.architecture.layer_kind import LayerKind
from mindllm.axes import CONTEXT
from mindllm.config import RunConfig, override_config
from mindllm.config.reading.yaml_tree import command_line_options
from mindllm.dry_run.forecast import StageMemory, forecast_stages
from mindllm.dry_run.simulations import Simulations
from mindllm.errors import UserError
from mindllm.parallel.layer_plan import DEFAULT_PATTERNS, EXCLUDES, LayerAssignment, LayerPlan
from mindllm.parallel.plan_text import render_plan
from mindllm.parallel.stages import Run, Stage, stages_of
from mindllm.timing.configured import workload_of
from mindllm.timing.costs.work import HALVES
from mindllm.timing.memory import stage_bytes
from mindllm.units import device_memory, gigabytes, missing_memory

SELECT = "select_recompute"
SHARDED, REPEATED = "parallel.enable_parallel_optimizer", "recompute_config.mp_comm_recompute"
LOSS_CHUNKS, FROZEN = "model.model_config.loss_chunks", "model.model_config.pet_config.frozen_dtype"
PARAMETERS = "model.model_config.param_init_type"
LOST_UPDATES = {"bfloat16": 512, "float16": 4096}  # an update below one such part of a weight is rounded away
SLICES = 4  # of the loss, for one there is now


def shortage(
    memories: Sequence[StageMemory],
    config: RunConfig,
    limit: int,
    simulations: Simulations,
    seconds: float = math.inf,
) -> str:
    """Says which stages do not fit, by how much, and which single changes would make all of them fit.

    ``seconds`` after its beginning no further change is tried, and those left are named.
    """
    short = [memory for memory in memories if memory.device_peak > limit]
    lines = [_lacks(memory, limit) for memory in short]
    if config.model.config.pp_interleave_num > 1:
        return "\n".join([*lines, "no advice is worked out for several chunks per stage"])
    advisor = _Advisor(memories, short, config, limit, simulations)
    ways, left = advisor.ways(time.monotonic() + seconds)
    found = ["what closes it, each by itself:" if ways else advisor.nothing(left), *(f"  - {way}" for way in ways)]
    untried = [f"not tried in {seconds:.0f} s: {', '.join(left)}; --advice 1000 tries all"] if left else []
    return "\n".join([*lines, *found, *untried])


def _lacks(memory: StageMemory, limit: int) -> str:
    gb = gigabytes((memory.device_peak, limit))
    return (
        f"stage {memory.stage.number} (rank {memory.stage.rank}) needs {gb(memory.device_peak)} GB, "
        f"{gb.at_least(memory.device_peak - limit)} GB more than the limit of {gb(limit)} GB"
    )


def _short(memory: StageMemory, limit: int) -> str:
    return f"{missing_memory(memory.device_peak - limit)} short"


class _Advisor:
    """Tries changes."""

    def __init__(
        self,
        memories: Sequence[StageMemory],
        short: Sequence[StageMemory],
        config: RunConfig,
        limit: int,
        simulations: Simulations,
    ) -> None:
        self.memories, self.short, self.limit = memories, short, limit
        self.config, self.simulations = config, simulations
        self.least: list[str] = []

    def ways(self, deadline: float) -> tuple[list[str], list[str]]:
        """The changes after which every stage fits, and the names of those that were not begun before ``deadline``.

        Those that formulas expect to be enough come first, those that fall short by them last.
        """
        slices = SLICES * self.config.model.config.loss_chunks
        tries: dict[str, Callable[[], str | None]] = {
            "select recompute": lambda: self._recompute("select", _selected),
            "full recompute": lambda: self._recompute("full", _full),
            "layers on other stages": self._move_layers,
            "sharded optimizer state": self._shard_optimizer,
            "repeated communication": self._repeat_communication,
            "a sliced loss": self._slice_losses,
            "frozen weights in half precision": self._halve_frozen,
            "parameters in half precision": self._halve_parameters,
        }
        keys: dict[str, Callable[[], dict[str, object]]] = {
            "select recompute": lambda: self._recomputed(_selected),
            "full recompute": lambda: self._recomputed(_full),
            "sharded optimizer state": lambda: {SHARDED: True},
            "repeated communication": lambda: {REPEATED: True},
            "a sliced loss": lambda: {LOSS_CHUNKS: slices},
            "frozen weights in half precision": lambda: {FROZEN: self.config.model.config.compute_dtype},
            "parameters in half precision": lambda: {PARAMETERS: self.config.model.config.compute_dtype},
        }
        found, left = [], sorted(tries, key=lambda name: self._falls_short(keys.get(name)))
        while left and time.monotonic() < deadline:
            found.append(tries[left.pop(0)]())
        return [way for way in found if way], left

    def _recomputed(self, change: Callable[[LayerKind], LayerKind]) -> dict[str, object]:
        """The keys that recompute all layers of the short stages."""
        stages = [_changed(memory.stage, change, _left(memory.stage, change)) for memory in self.short]
        return self._keys(stages)

    def _falls_short(self, keys: Callable[[], dict[str, object]] | None) -> float:
        """0 where formulas expect that ``keys`` are enough, 1 where they expect that they are not, between where none tells.

        What a formula says of a stage is held to what is known of it, in proportion.
        """
        if keys is None:
            return 0.5
        try:
            now, then = (stage_bytes(workload_of(run)) for run in (self.config, override_config(self.config, keys())))
        except UserError:  # what has no formula
            return 0.5
        known = {memory.stage.number: memory.device_peak for memory in self.short}
        return float(any(peak * then[number] / now[number] > self.limit for number, peak in known.items()))

    def nothing(self, left: Collection[str]) -> str:
        """What to say when no single change is enough, or none of those that were tried."""
        tried = "; ".join(self.least)
        if left:
            return f"nothing was found yet{': ' + tried if tried else ''}"
        return f"no single change closes it{': ' + tried if tried else ''}; use more devices, or a shorter sequence"

    def _recompute(self, name: str, change: Callable[[LayerKind], LayerKind]) -> str | None:
        """More layers recomputed, from the first one of each stage on; as few as are enough."""
        lefts = [_left(memory.stage, change) for memory in self.short]
        if not all(lefts):
            return None
        pairs = list(zip(self.short, lefts, strict=True))
        most = [_changed(memory.stage, change, left) for memory, left in pairs]
        found = self._forecast(most)
        if any(stage not in found for stage in most):
            return None
        worst = max(most, key=lambda stage: found[stage].device_peak)
        if found[worst].device_peak > self.limit:  # then fewer layers need not be tried
            rest = f"leaves it {_short(found[worst], self.limit)}"
            self.least.append(f"{name} recompute of all layers of stage {worst.number} {rest}")
            return None
        variants = [[_changed(memory.stage, change, n) for n in range(1, left + 1)] for memory, left in pairs]
        found |= self._forecast([stage for mine in variants for stage in mine[:-1]])
        chosen = [
            (memory, found[stage], number)
            for memory, mine in zip(self.short, variants, strict=True)
            for number, stage in [self._first_that_fits(mine, found)]
        ]
        parts = [
            f"{number} more layers of stage {before.stage.number} (-{gb(saved)} GB, {gb(saved / number)} GB each)"
            for before, after, number in chosen
            for saved in [before.device_peak - after.device_peak]
            for gb in [gigabytes([saved])]
        ]
        return f"{name} recompute of {', '.join(parts)}: {self._options(after.stage for _, after, _ in chosen)}"

    def _first_that_fits(self, stages: Sequence[Stage], found: Mapping[Stage, StageMemory]) -> tuple[int, Stage]:
        """The first of the stages that fits, with its number from 1 on; the last one does."""
        return next(
            (number, stage)
            for number, stage in enumerate(stages, 1)
            if stage in found and found[stage].device_peak <= self.limit
        )

    def _move_layers(self) -> str | None:
        """Layers moved from the one short stage to the one with most room."""
        if len(self.short) != 1 or len(self.memories) < 2:
            return None
        (short,), room = self.short, min(self.memories, key=lambda memory: memory.device_peak)
        numbers = range(1, short.stage.layers)
        smaller = [_resized(short.stage, -number) for number in numbers]
        larger = [_resized(room.stage, number) for number in numbers]
        found = self._forecast([*smaller, *larger])
        for number, less, more in zip(numbers, smaller, larger, strict=True):
            if less in found and more in found and found[less].device_peak <= self.limit >= found[more].device_peak:
                saved = short.device_peak - found[less].device_peak
                return (
                    f"{number} layers of stage {short.stage.number} given to stage {room.stage.number} "
                    f"(-{device_memory(saved)}, which then "
                    f"needs {device_memory(found[more].device_peak)}): {self._options([less, more])}"
                )
        self.least.append(f"no number of layers moved to stage {room.stage.number} makes both fit")
        return None

    def _shard_optimizer(self) -> str | None:
        """The state of the optimizer over data-parallel ranks."""
        sizes = self.config.parallel_config
        if self.config.parallel.enable_parallel_optimizer or sizes.replica_num == 1:
            return None
        return self._switch("optimizer state sharded over data-parallel ranks", SHARDED)

    def _repeat_communication(self) -> str | None:
        """What recomputed layers keep only because their tensor-parallel communication is not repeated."""
        recomputed = any(run.kind.recompute for memory in self.short for run in memory.stage.runs)
        if self.config.recompute_config.mp_comm_recompute or self.config.parallel_config.model_parallel == 1:
            return None
        if not recomputed:
            return None
        return self._switch("results of tensor-parallel communication not kept in recomputed layers", REPEATED)

    def _slice_losses(self) -> str | None:
        """The logits of the last stage a slice at a time, computed again for the gradient."""
        model, sizes = self.config.model.config, self.config.parallel_config
        slices, rows = SLICES * model.loss_chunks, model.seq_length // sizes.size(CONTEXT)
        if rows % slices or all(memory.stage.number < sizes.pipeline_stage - 1 for memory in self.short):
            return None
        return self._switch("logits of one slice at a time", LOSS_CHUNKS, slices)

    def _halve_frozen(self) -> str | None:
        """What is only read, in the type that it is computed in: then no pass casts copies of it."""
        model = self.config.model.config
        if model.pet_config is None or model.frozen_dtype != "float32" or model.compute_dtype not in HALVES:
            return None
        return self._switch("frozen weights in half precision", FROZEN, model.compute_dtype)

    def _halve_parameters(self) -> str | None:
        """Propose parameters in the type that they are computed in, with the effect on precision."""
        model = self.config.model.config
        if model.param_init_type != "float32" or model.compute_dtype not in HALVES:
            return None
        try:
            override_config(self.config, {PARAMETERS: model.compute_dtype})
        except UserError:  # ways of tuning that need float32
            return None
        part = LOST_UPDATES[model.compute_dtype]
        what = (
            f"parameters in half precision, less precise: updates below 1/{part} of a weight are lost, unless "
            "optimizer.master_weights keeps float32 copies (4 bytes each)"
        )
        return self._switch(what, PARAMETERS, model.compute_dtype)

    def _switch(self, what: str, key: str, value: bool | int | str = True) -> str | None:
        """The short stages with ``value`` for ``key``, and what that saves."""
        changed = override_config(self.config, {key: value})
        found = forecast_stages(changed, [memory.stage for memory in self.short], self.simulations, whole=False)
        if len(found) < len(self.short):
            return None
        worst = max(found, key=lambda memory: memory.device_peak)
        pairs = zip(self.short, found, strict=True)
        saved = " and ".join(
            f"{device_memory(before.device_peak - after.device_peak)} of stage {before.stage.number}"
            for before, after in pairs
        )
        text = command_line_options({key: value})
        if worst.device_peak <= self.limit:
            return f"{what} (at most {device_memory(worst.device_peak)}, saves {saved}): {text}"
        short = _short(worst, self.limit)
        self.least.append(f"{text} saves {saved} and leaves stage {worst.stage.number} {short}")
        return None

    def _forecast(self, stages: Sequence[Stage]) -> dict[Stage, StageMemory]:
        """Those of the stages that small runs tell of: advice is not worth simulating whole stages for."""
        found = forecast_stages(self.config, stages, self.simulations, whole=False)
        return {memory.stage: memory for memory in found}

    def _options(self, changed: Iterator[Stage] | Sequence[Stage]) -> str:
        """Return the keys of the plan that some changed stages change, as options with their new values."""
        return command_line_options(self._keys(changed))

    def _keys(self, changed: Iterator[Stage] | Sequence[Stage]) -> dict[str, object]:
        """The keys of the plan that some changed stages change, with their new values."""
        stages = {stage.number: stage for stage in stages_of(self.config)}
        now = render_plan(_plan(stages.values()))
        wanted = render_plan(_plan({**stages, **{stage.number: stage for stage in changed}}.values()))
        return {key: value for key, value in wanted.items() if value != now.get(key)}


def _plan(stages: Collection[Stage]) -> LayerPlan:
    layers = (LayerAssignment.of_kind(kind, stage.number) for stage in stages for kind in _kinds(stage))
    return LayerPlan(len(stages), 1, tuple(layers))


def _kinds(stage: Stage) -> list[LayerKind]:
    return [run.kind for run in stage.runs for _ in range(run.count)]


def _left(stage: Stage, change: Callable[[LayerKind], LayerKind]) -> int:
    """Layers of a stage that a change does something to."""
    return sum(change(kind) != kind for kind in _kinds(stage))


def _changed(stage: Stage, change: Callable[[LayerKind], LayerKind], number: int) -> Stage:
    """The stage with its first ``number`` layers changed that can be."""
    kinds, left = [], number
    for kind in _kinds(stage):
        changes = left > 0 and change(kind) != kind
        kinds.append(change(kind) if changes else kind)
        left -= changes
    return _with_kinds(stage, kinds)


def _resized(stage: Stage, more: int) -> Stage:
    """The stage with some layers more, or fewer, at its end."""
    kinds = _kinds(stage)
    return _with_kinds(stage, kinds[:more] if more < 0 else kinds + [kinds[-1]] * more)


def _with_kinds(stage: Stage, kinds: Sequence[LayerKind]) -> Stage:
    groups = ((kind, len(list(group))) for kind, group in itertools.groupby(kinds))
    return replace(stage, runs=tuple(Run(0, kind, count) for kind, count in groups))


def _full(kind: LayerKind) -> LayerKind:
    left = tuple((key, patterns) for key, patterns in kind.patterns if key not in EXCLUDES)
    return replace(kind, recompute=True, patterns=left)


def _selected(kind: LayerKind) -> LayerKind:
    if kind.recompute or SELECT in dict(kind.patterns):
        return kind
    patterns = {**dict(kind.patterns), SELECT: tuple(sorted(DEFAULT_PATTERNS[SELECT]))}
    return replace(kind, patterns=tuple(sorted(patterns.items())))
