"""What runs of anybody's program tell a planner, read from the directories that ``mindllm offline`` kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindllm.compiled.simulation.stage_memory import StageMemory, stage_memory
from mindllm.errors import UserError
from mindllm.planning.from_programs.stage_shapes import StageShape, place_of
from mindllm.programs.kept import KeptRank, kept_config, kept_stages
from mindllm.terminal.progress import Progress, counted, unwatched
from mindllm.timing.device import Device
from mindllm.timing.stage_graph import SELECT, SeenLayer, StageGraph, Type, stage_graphs
from mindllm.units import MIB

STATIC = "Somas"  # blocks that MindSpore planned before the step, each for many operators
Read = tuple[Path, Sequence[tuple[KeptRank, StageGraph]]]


@dataclass(frozen=True)
class SimulatedStage(StageShape):
    """A stage of a run with what its graph and its simulation say."""

    graph: StageGraph
    memory: StageMemory


@dataclass(frozen=True)
class SimulatedRun:
    """One kept directory; ``patterns`` are those that its YAML selects operators by, empty where it names none."""

    source: str
    stages: tuple[SimulatedStage, ...]
    micro_batches: int
    limit_mb: float
    patterns: tuple[str, ...]

    @property
    def layers(self) -> tuple[str, ...]:
        """Types of all layers in the order of the model."""
        return tuple(name for stage in self.stages for name, _ in stage.layers)


def read_simulated(directories: Sequence[Path], device: Device, progress: Progress = unwatched) -> list[SimulatedRun]:
    """Reads every directory; ``progress`` is told of them.

    Raises:
        UserError: ranks are missing, there is no pipeline or an interleaved one, or runs are not of one program.
    """
    found: list[Read] = [
        (directory, _graphs(directory, device)) for directory in counted(directories, "reading", progress)
    ]
    names = _type_names(layer for _, stages in found for _, graph in stages for layer in graph.layers)
    _check_selections(found)
    runs = [_run(directory, stages, names) for directory, stages in found]
    for run in runs[1:]:
        if run.micro_batches != runs[0].micro_batches:
            raise UserError(
                f"{run.source}: has {run.micro_batches} micro-batches, and {runs[0].source} has {runs[0].micro_batches}; "
                "simulate runs that differ in offset, recomputation and number of layers alone"
            )
    return runs


def _graphs(directory: Path, device: Device) -> list[tuple[KeptRank, StageGraph]]:
    ranks = kept_stages(directory)
    if len(ranks) < 2:
        raise UserError(f"{directory}: there is no pipeline to plan; simulate a program of two stages or more")
    stages = list(zip(ranks, stage_graphs([rank.graph for rank in ranks], device), strict=True))
    for rank, graph in stages:
        if graph.chunks > 1:
            raise UserError(
                f"{directory}: its pipeline is interleaved ({graph.chunks} chunks), where costs of stages cannot be told "
                "apart; simulate it with pp_interleave_num 1, and plan with --interleave"
            )
        if not graph.layers:
            raise UserError(
                f"{rank.directory}: its graph has no numbered cells, as layers.0, so there is nothing to plan"
            )
    return stages


def _type_names(layers: Iterator[SeenLayer]) -> Mapping[Type, str]:
    """``layer``, or ``layer like 3`` where there are several types."""
    numbers: dict[Type, int] = {}
    for layer in layers:
        numbers[layer.type] = min(layer.number, numbers.get(layer.type, layer.number))
    if len(numbers) == 1:
        return dict.fromkeys(numbers, "layer")
    return {kind: f"layer like {number}" for kind, number in numbers.items()}


def _run(directory: Path, stages: Sequence[tuple[KeptRank, StageGraph]], names: Mapping[Type, str]) -> SimulatedRun:
    found = []
    micro_batches = max(graph.micro_batches for _, graph in stages)
    for number, (rank, graph) in enumerate(stages):
        if any(block.kind == STATIC for block in rank.simulation.blocks):
            raise UserError(
                f"{rank.directory}: its memory was laid out as a whole (memory_optimize_level O1), where what a micro-batch "
                "keeps cannot be told; simulate it with memory_optimize_level O0"
            )
        memory = stage_memory(rank.simulation, graph.list_of_layers, micro_batches, len(stages))
        if memory is None:
            raise UserError(
                f"{rank.directory}: its layers do not run as 1F1B has them, so what a micro-batch keeps cannot be told"
            )
        layers = tuple((names[layer.type], layer.recompute) for layer in graph.layers)
        found.append(SimulatedStage(place_of(number, len(stages)), layers, graph, memory))
    limit = min(rank.simulation.limit for rank, _ in stages) / MIB
    return SimulatedRun(str(directory), tuple(found), micro_batches, limit, _patterns(directory))


def _patterns(directory: Path) -> tuple[str, ...]:
    """Patterns of ``select_recompute`` in the YAML that the program was given."""
    given = kept_config(directory).get("recompute_config")
    selected = given.get("select_recompute") if isinstance(given, Mapping) else None
    named = selected if isinstance(selected, Mapping | list) else ()
    return tuple(named) if all(isinstance(entry, str) for entry in named) else ()


def _check_selections(found: Sequence[Read]) -> None:
    """All layers of a type that repeat some operators must repeat the same: there is one name for it."""
    met: dict[Type, frozenset[str]] = {}
    for directory, stages in found:
        for layer in (layer for _, graph in stages for layer in graph.layers if layer.recompute == SELECT):
            if met.setdefault(layer.type, layer.repeated) != layer.repeated:
                raise UserError(
                    f"{directory}: layer {layer.number} repeats other operators than another layer that repeats some; "
                    "simulate runs with one selection"
                )
