"""Pipeline stages: runs of equal layers, and the micro-batches that a stage keeps alive."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from mindllm.architecture.layer_kind import LayerKind
from mindllm.config import RunConfig
from mindllm.parallel.layer_plan import LayerPlan, make_plan
from mindllm.parallel.layout import mesh_of

FIRST, MIDDLE, LAST, ONLY = "first", "middle", "last", "only"


@dataclass(frozen=True)
class Run:
    """Consecutive layers of one chunk that are of one kind."""

    chunk: int
    kind: LayerKind
    count: int


@dataclass(frozen=True)
class Stage:
    """A pipeline stage; ``rank`` is its first rank.

    ``alive``: the maximum number of micro-batches whose activations it saves (1F1B). In a V it is twice the number of stages,
    with one chunk saved for most of them.
    """

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
        """A key that is equal for stages that differ only in numbers of layers per run and of micro-batches alive."""
        return self.place, tuple((run.chunk, run.kind) for run in self.runs)


def stages_of(config: RunConfig) -> list[Stage]:
    """Return the stages of a run, in order."""
    plan = make_plan(config)
    architecture = config.model.config.architecture
    differ = len(architecture.specifications()) > 1
    kinds = plan.kinds(architecture.layers if differ else None)
    sizes = config.parallel_config
    mesh = mesh_of(config)
    return [
        Stage(
            number=number,
            rank=number * mesh.stage_device_num,
            place=_place(number, plan),
            runs=tuple(_runs(plan, kinds, number)),
            alive=min(sizes.micro_batch_num, 2 * plan.stages if plan.v_shape else plan.stages - number),
        )
        for number in range(plan.stages)
    ]


def _place(number: int, plan: LayerPlan) -> str:
    """Return the kind of place. In a V the first stage also has the head, so that its peak may be the loss."""
    if plan.stages == 1:
        return ONLY
    return LAST if number == plan.last_stage else FIRST if number == 0 else MIDDLE


def _runs(plan: LayerPlan, kinds: list[LayerKind], stage: int) -> list[Run]:
    """Layers of one kind of a chunk as one run, also where layers of other kinds stand between them.

    What layers keep does not depend on their order, so a small run has alternating layers one kind after another.
    """
    counts = Counter[tuple[int, LayerKind]]()
    for layer, kind in zip(plan.layers, kinds, strict=True):
        if layer.stage == stage:
            counts[layer.chunk, kind] += 1
    return [Run(chunk, kind, count) for (chunk, kind), count in counts.items()]
