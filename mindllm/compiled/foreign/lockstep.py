"""Ranks of anybody's program in lock-step, from what ``mindllm offline`` kept of all of them.

Weights are drawn by their names, so that every rank cuts its part of one whole tensor, and a single device has the same one.
Copies of weights (moments, accumulators) begin with zeros, and what has one value everywhere with that.
"""

from __future__ import annotations

import operator
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindllm.compiled.device.inside_program import MIND_IR, PARAMETERS
from mindllm.compiled.execute.assignments import ASSIGNMENTS, CHANGES_STATE
from mindllm.compiled.execute.elementary import ELEMENTARY
from mindllm.compiled.execute.kernels import cpu_kernel
from mindllm.compiled.execute.lockstep import Lockstep
from mindllm.compiled.execute.rank_interpreter import CONTROL, DATASET, RankInterpreter
from mindllm.compiled.execute.references import REFERENCES
from mindllm.compiled.execute.state import slices_of, whole_shape
from mindllm.compiled.foreign.kept_program import KeptRank, with_own_groups
from mindllm.compiled.graph.compiled_graph import CALL, COLLECTIVES, CONSTANT, CompiledGraph, Node, TensorType
from mindllm.compiled.graph.mind_ir import parse_mind_ir
from mindllm.compiled.rank.pool import Pool
from mindllm.errors import UserError
from mindllm.outside import LARGEST_GRAPH, read_bytes, read_json
from mindllm.parallel.parameter_layout import ParameterLayout

WIDTH = 0.1  # of the normal distribution that weights are drawn from
MOST_SLICES = 1 << 20
INTEGERS = 8  # an integer of a batch is below: a token, a label, a position that any program has
EXECUTED = {*CONTROL, *ASSIGNMENTS, *REFERENCES, *ELEMENTARY, *COLLECTIVES, CALL, CONSTANT, DATASET, "Cast"}


@dataclass(frozen=True)
class ProgramRank:
    """A rank that can be executed. ``slices``: parts the batch is given in, 0 for one for each device of a stage."""

    graph: CompiledGraph
    initial: Mapping[str, float]
    slices: int


def read_rank(kept: KeptRank, pool: Pool | None = None) -> ProgramRank:
    """Reads the graph of a kept rank with its constants and layouts; those of one ``pool`` share what they have in common.

    Raises:
        UserError: they were not kept.
    """
    try:
        data = read_bytes(kept.directory / MIND_IR, LARGEST_GRAPH)
        known = read_json(kept.directory / PARAMETERS)
        layouts = {name: ParameterLayout.from_front_end(layout) for name, layout in known["layouts"].items()}
        for layout in layouts.values():
            layout.require_consistent()
        initial = {str(name): float(value) for name, value in known["initial"].items()}
        slices = operator.index(known["slices"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{kept.directory}: holds no graph that can be executed ({MIND_IR} and {PARAMETERS}: {reason}); run "
            "mindllm offline again"
        ) from None
    try:
        graph = parse_mind_ir(data, kept.number, layouts, pool=pool)
    except UserError as error:
        raise UserError(f"{kept.directory / MIND_IR}: {error}") from error
    if not 0 <= slices <= MOST_SLICES:
        raise UserError(f"{kept.directory / PARAMETERS}: slices: must be from 0 to {MOST_SLICES} (value {slices})")
    return ProgramRank(with_own_groups(graph, kept.simulation), initial, slices)


def without_kernel(ranks: Iterable[ProgramRank]) -> Mapping[str, int]:
    """Operators that nothing here computes, with how often they stand in the graphs of all ranks, the most frequent first."""
    counts: Counter[str] = Counter()
    for rank in ranks:
        for node in rank.graph.nodes():
            unknown = node.op not in EXECUTED if not node.exchanges else node.op not in COLLECTIVES
            changes = bool(node.attributes.get(CHANGES_STATE))  # a kernel would change a copy, which nobody reads
            if unknown and (node.exchanges or changes or not _computes(rank.graph, node)):
                counts[node.op] += 1
    return dict(counts.most_common())


_answers: dict[tuple[Any, ...], bool] = {}


def _computes(graph: CompiledGraph, node: Node) -> bool:
    """Whether MindSpore's CPU back end has a kernel, tried on ones of the operator's shapes; once for alike operators."""
    operands = tuple(_example(graph, name) for name in node.inputs)
    key = (
        node.op,
        *((value.shape, value.dtype.name) if isinstance(value, np.ndarray) else repr(value) for value in operands),
    )
    if key not in _answers:
        try:
            cpu_kernel(node)(*(value for value in operands if value is not None))
            _answers[key] = True
        except (NotImplementedError, ValueError, TypeError, IndexError, RuntimeError):
            _answers[key] = False
    return _answers[key]


def _example(graph: CompiledGraph, name: str) -> Any:
    if name in graph.constants:
        return graph.constants[name]
    kind = graph.types.get(name)
    if isinstance(kind, TensorType):
        return np.ones(kind.shape, np.float32 if kind.dtype == "bfloat16" else kind.dtype)
    return None


class Program:
    """All ranks of a program with their parameters, one step at a time."""

    def __init__(self, ranks: Sequence[ProgramRank], stages: int) -> None:
        self.ranks = ranks
        self.stage_devices = max(1, len(ranks) // stages)
        self.machines = [RankInterpreter(rank.graph, _begin(rank)) for rank in ranks]

    def step(self, number: int) -> dict[int, Any]:
        """What the step of every rank returns.

        Raises:
            Deadlock: ranks that wait for each other.
            RunFailed: an operator or an exchange that cannot be executed here.
        """
        inputs = {rank.graph.rank: self._batch(rank, number) for rank in self.ranks}
        for machine, rank in zip(self.machines, self.ranks, strict=True):
            machine.dataset = tuple(self._columns(rank, number, _read_by_graph(rank.graph)))
        with np.errstate(all="ignore"):
            return Lockstep(self.machines, inputs).run()

    def _batch(self, rank: ProgramRank, step: int) -> list[np.ndarray]:
        """The rows of the global batch that a rank is given."""
        return self._columns(rank, number=step, kinds=_given(rank.graph))

    def _columns(self, rank: ProgramRank, number: int, kinds: Sequence[TensorType]) -> list[np.ndarray]:
        """A rank's part of columns of these types, drawn by step and column; what stands beside tokens is a mask of ones."""
        tokens = any("int" in kind.dtype and len(kind.shape) > 1 for kind in kinds)  # labels have one dimension
        slices = rank.slices or self.stage_devices
        index = rank.graph.rank % self.stage_devices * slices // self.stage_devices
        found = []
        for column, kind in enumerate(kinds):
            shape = kind.shape
            whole = _drawn(f"batch {number} {column}", (shape[0] * slices, *shape[1:]) if shape else (), kind.dtype)
            whole = np.ones_like(whole) if tokens and whole.dtype.kind == "f" else whole
            found.append(np.split(whole, slices)[index] if shape else whole)
        return found


def batch_of(rank: ProgramRank, stage_devices: int) -> list[list[int]]:
    """Shapes of the columns that all devices of a stage read together in a step."""
    slices = rank.slices or stage_devices
    columns = _read_by_graph(rank.graph) or _given(rank.graph)
    return [[kind.shape[0] * slices, *kind.shape[1:]] if kind.shape else [] for kind in columns]


def _given(graph: CompiledGraph) -> list[TensorType]:
    """Types of the batch that a step is given."""
    return [item.type for item in graph.step.inputs if isinstance(item.type, TensorType)]


def _read_by_graph(graph: CompiledGraph) -> tuple[TensorType, ...]:
    """Types of the batch that a graph reads itself, where its dataset is sunk into it."""
    found = graph.find(DATASET)
    return found[0].tensors if found else ()


def _drawn(name: str, shape: tuple[int, ...], dtype: str, width: float = 1.0) -> np.ndarray:
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    if dtype == "bool":
        return np.ones(shape, bool)
    if "int" in dtype:
        return generator.integers(0, INTEGERS, shape).astype(dtype)
    return (width * generator.standard_normal(shape)).astype(np.float32)


def _begin(rank: ProgramRank) -> dict[str, np.ndarray]:
    names = set(rank.graph.parameters)
    found = {}
    for name, parameter in rank.graph.parameters.items():
        dtype = np.float32 if parameter.dtype == "bfloat16" else np.dtype(parameter.dtype)
        if name in rank.initial:
            found[name] = np.full(parameter.shape, rank.initial[name], dtype)
        elif is_copy(name, names):
            found[name] = np.zeros(parameter.shape, dtype)
        else:
            whole = _drawn(name, whole_shape(parameter), parameter.dtype, WIDTH)
            found[name] = whole[slices_of(parameter, rank.graph.rank)].astype(dtype)
    return found


def is_copy(name: str, names: set[str]) -> bool:
    """Whether a parameter is a copy of another one, as ``moments.layers.0.first`` of ``layers.0.first``."""
    rest = name
    while "." in rest:
        rest = rest.partition(".")[2]
        if rest in names:
            return True
    return False
