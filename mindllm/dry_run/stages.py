"""What each pipeline stage holds: runs of layers that are alike, and the micro-batches it keeps alive."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from mindllm.architecture.layer import LayerSpec
from mindllm.config import RunConfig
from mindllm.parallel.layer_plan import LayerAssignment, LayerPlan, make_plan
from mindllm.parallel.layout import mesh_of

FIRST, MIDDLE, LAST, ONLY = "first", "middle", "last", "only"
FULL, SELECT, COMMUNICATION, BOTH, NONE = "full", "select", "comm", "both", "none"


@dataclass(frozen=True)
class LayerKind:
    """What a layer is and how it is recomputed; layers of one kind need the same memory.

    ``patterns`` as in a LayerAssignment; ``spec`` is None where all layers of the model are alike.
    """

    recompute: bool
    patterns: tuple[tuple[str, tuple[str, ...]], ...]
    spec: LayerSpec | None = None

    @property
    def name(self) -> str:
        """``full``, ``select``, ``comm``, ``both`` (of the latter two) or ``none``; and which layer where they differ."""
        return self.recomputation if self.spec is None else f"{self.recomputation} ({self.spec.name})"

    @property
    def recomputation(self) -> str:
        """The first word of the name."""
        keys = {key for key, _ in self.patterns}
        if self.recompute:
            return FULL
        if {"select_recompute", "select_comm_recompute"} <= keys:
            return BOTH
        return SELECT if "select_recompute" in keys else COMMUNICATION if "select_comm_recompute" in keys else NONE

    def assignment(self, stage: int, chunk: int) -> LayerAssignment:
        """A layer of this kind at a place of the pipeline."""
        return LayerAssignment(stage, chunk, self.recompute, dict(self.patterns))


def kind_of(layer: LayerAssignment, spec: LayerSpec | None = None) -> LayerKind:
    """The kind of a layer of a plan; ``spec`` where layers of the model differ."""
    return LayerKind(layer.recompute, tuple(sorted(layer.patterns.items())), spec)


def kinds_of(config: RunConfig, plan: LayerPlan) -> list[LayerKind]:
    """The kind of every layer of a run, in order."""
    architecture = config.model.config.architecture
    differ = len(architecture.kinds()) > 1
    pairs = zip(plan.layers, architecture.layers, strict=True)
    return [kind_of(layer, spec if differ else None) for layer, spec in pairs]


@dataclass(frozen=True)
class Run:
    """Consecutive layers of one chunk that are of one kind."""

    chunk: int
    kind: LayerKind
    count: int


@dataclass(frozen=True)
class Stage:
    """A pipeline stage; ``rank`` is its first one. ``alive``: micro-batches whose activations it keeps at most (1F1B)."""

    number: int
    rank: int
    place: str
    runs: tuple[Run, ...]
    alive: int

    @property
    def layers(self) -> int:
        return sum(run.count for run in self.runs)

    @property
    def recompute(self) -> str:
        """``4 full, 6 none``."""
        counts = Counter[str]()
        for run in self.runs:
            counts[run.kind.name] += run.count
        return ", ".join(f"{count} {name}" for name, count in counts.items())

    @property
    def likeness(self) -> tuple:
        """Stages with the same one differ by numbers only: of layers in their runs, of micro-batches alive."""
        return self.place, tuple((run.chunk, run.kind) for run in self.runs)


def stages_of(config: RunConfig) -> list[Stage]:
    """The stages of a run, in order."""
    plan = make_plan(config)
    kinds = kinds_of(config, plan)
    sizes = config.parallel_config
    mesh = mesh_of(config)
    return [
        Stage(
            number=number,
            rank=number * mesh.stage_device_num,
            place=_place(number, plan.stages),
            runs=tuple(_runs(plan, kinds, number)),
            alive=min(sizes.micro_batch_num, plan.stages - number),
        )
        for number in range(plan.stages)
    ]


def _place(number: int, stages: int) -> str:
    if stages == 1:
        return ONLY
    return FIRST if number == 0 else LAST if number == stages - 1 else MIDDLE


def _runs(plan: LayerPlan, kinds: list[LayerKind], stage: int) -> list[Run]:
    """Layers of one kind of a chunk as one run, also where layers of other kinds stand between them.

    What layers keep does not depend on their order, so a small run has alternating layers one kind after another.
    """
    held = Counter[tuple[int, LayerKind]]()
    for layer, kind in zip(plan.layers, kinds, strict=True):
        if layer.stage == stage:
            held[layer.chunk, kind] += 1
    return [Run(chunk, kind, count) for (chunk, kind), count in held.items()]
