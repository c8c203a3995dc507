"""Execute all ranks of a program in lockstep, from the graphs that ``mindllm offline`` kept.

Weights are drawn by name, so that each rank cuts its part from the same tensor that a single device has. Copies of weights
(moments, accumulators) start with zeros, and parameters with a constant initial value start with it.
"""

from __future__ import annotations

import operator
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindllm.compiled.execute.assignments import ASSIGNMENTS, CHANGES_STATE
from mindllm.compiled.execute.elementary import ELEMENTARY
from mindllm.compiled.execute.kernels import cpu_kernel
from mindllm.compiled.execute.lockstep import Lockstep
from mindllm.compiled.execute.rank_interpreter import CONTROL, DATASET, RankInterpreter
from mindllm.compiled.execute.references import REFERENCES
from mindllm.compiled.execute.state import slices_of, whole_shape
from mindllm.compiled.graph.compiled_graph import CALL, COLLECTIVES, CONSTANT, CompiledGraph, Node, TensorType
from mindllm.compiled.graph.mind_ir import parse_mind_ir
from mindllm.compiled.rank.pool import Pool
from mindllm.errors import UserError
from mindllm.outside import LARGEST_GRAPH, read_bytes, read_json
from mindllm.parallel.parameter_layout import ParameterLayout
from mindllm.programs.inside_program import MIND_IR, PARAMETERS
from mindllm.programs.kept import KeptRank, with_simulated_groups

WIDTH = 0.1  # standard deviation of weights
MAX_SLICES = 1 << 20
INTEGER_BOUND = (
    8  # integers of a batch are smaller, so that they are valid tokens, labels and positions for any program
)
WITH_KERNEL = {*CONTROL, *ASSIGNMENTS, *REFERENCES, *ELEMENTARY, *COLLECTIVES, CALL, CONSTANT, DATASET, "Cast"}


@dataclass(frozen=True)
class ExecutableRank:
    """A rank with everything needed to execute it.

    Attributes:
        graph: of its training step.
        initial: constants that parameters start with, by name.
        slices: parts into which the batch is cut; 0: one for each device of a stage.
    """

    graph: CompiledGraph
    initial: Mapping[str, float]
    slices: int


def read_rank(kept: KeptRank, pool: Pool | None = None) -> ExecutableRank:
    """Read the graph of a rank with constants and layouts. Ranks of one ``pool`` share equal parts.

    Raises:
        UserError: the files are missing or damaged.
    """
    try:
        data = read_bytes(kept.directory / MIND_IR, LARGEST_GRAPH)
        parameters = read_json(kept.directory / PARAMETERS)
        layouts = {name: ParameterLayout.from_front_end(layout) for name, layout in parameters["layouts"].items()}
        for layout in layouts.values():
            layout.require_consistent()
        initial = {str(name): float(value) for name, value in parameters["initial"].items()}
        slices = operator.index(parameters["slices"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{kept.directory}: contains no executable graph ({MIND_IR} and {PARAMETERS}: {reason}); run "
            "mindllm offline again"
        ) from None
    try:
        graph = parse_mind_ir(data, kept.number, layouts, pool=pool)
    except UserError as error:
        raise UserError(f"{kept.directory / MIND_IR}: {error}") from error
    if not 0 <= slices <= MAX_SLICES:
        raise UserError(f"{kept.directory / PARAMETERS}: slices: must be from 0 to {MAX_SLICES} (value {slices})")
    return ExecutableRank(with_simulated_groups(graph, kept.simulation), initial, slices)


def without_kernel(ranks: Iterable[ExecutableRank]) -> Mapping[str, int]:
    """Count the operators in the graphs of all ranks that cannot be executed here, the most frequent first."""
    counts: Counter[str] = Counter()
    for rank in ranks:
        for node in rank.graph.nodes():
            unknown = node.op not in WITH_KERNEL if not node.exchanges else node.op not in COLLECTIVES
            # a CPU kernel that changes state would change a copy of it
            changes = bool(node.attributes.get(CHANGES_STATE))
            if unknown and (node.exchanges or changes or not _has_cpu_kernel(rank.graph, node)):
                counts[node.op] += 1
    return dict(counts.most_common())


_has_kernel: dict[tuple[Any, ...], bool] = {}


def _has_cpu_kernel(graph: CompiledGraph, node: Node) -> bool:
    """Try MindSpore's CPU kernel of an operator on ones; equal operators are tried once."""
    operands = tuple(_example(graph, name) for name in node.inputs)
    key = (
        node.op,
        *((value.shape, value.dtype.name) if isinstance(value, np.ndarray) else repr(value) for value in operands),
    )
    if key not in _has_kernel:
        try:
            cpu_kernel(node)(*(value for value in operands if value is not None))
            _has_kernel[key] = True
        except (NotImplementedError, ValueError, TypeError, IndexError, RuntimeError):
            _has_kernel[key] = False
    return _has_kernel[key]


def _example(graph: CompiledGraph, name: str) -> Any:
    """Return a value that an operand may have."""
    if name in graph.constants:
        return graph.constants[name]
    kind = graph.types.get(name)
    if isinstance(kind, TensorType):
        return np.ones(kind.shape, np.float32 if kind.dtype == "bfloat16" else kind.dtype)
    return None


class ProgramCluster:
    """All ranks of a program with their parameters, executed one step at a time."""

    def __init__(self, ranks: Sequence[ExecutableRank], stages: int) -> None:
        self.ranks = ranks
        self.stage_devices = max(1, len(ranks) // stages)
        self.machines = [RankInterpreter(rank.graph, _initial_parameters(rank)) for rank in ranks]

    def step(self, number: int) -> dict[int, Any]:
        """Execute a step, and return the outputs of every rank.

        Raises:
            Deadlock: ranks wait for each other.
            RunFailed: an operator or an exchange cannot be executed here.
        """
        inputs = {rank.graph.rank: self._columns(rank, number, _input_columns(rank.graph)) for rank in self.ranks}
        for machine, rank in zip(self.machines, self.ranks, strict=True):
            machine.dataset = tuple(self._columns(rank, number, _dataset_columns(rank.graph)))
        with np.errstate(all="ignore"):
            return Lockstep(self.machines, inputs).run()

    def _columns(self, rank: ExecutableRank, step: int, kinds: Sequence[TensorType]) -> list[np.ndarray]:
        """Draw a rank's part of columns by step and column. Floating-point columns next to tokens are masks of ones."""
        tokens = any("int" in kind.dtype and len(kind.shape) > 1 for kind in kinds)  # labels have one dimension
        slices = rank.slices or self.stage_devices
        index = rank.graph.rank % self.stage_devices * slices // self.stage_devices
        columns = []
        for column, kind in enumerate(kinds):
            shape = kind.shape
            whole = _draw(f"batch {step} {column}", (shape[0] * slices, *shape[1:]) if shape else (), kind.dtype)
            whole = np.ones_like(whole) if tokens and whole.dtype.kind == "f" else whole
            columns.append(np.split(whole, slices)[index] if shape else whole)
        return columns


def batch_shapes(rank: ExecutableRank, stage_devices: int) -> list[list[int]]:
    """Return the shapes of the columns that all devices of a stage read together in a step."""
    slices = rank.slices or stage_devices
    columns = _dataset_columns(rank.graph) or _input_columns(rank.graph)
    return [[kind.shape[0] * slices, *kind.shape[1:]] if kind.shape else [] for kind in columns]


def _input_columns(graph: CompiledGraph) -> list[TensorType]:
    """Return the types of the columns that a step receives as inputs."""
    return [item.type for item in graph.step.inputs if isinstance(item.type, TensorType)]


def _dataset_columns(graph: CompiledGraph) -> tuple[TensorType, ...]:
    """Return the types of the columns that a graph reads from a dataset sunk into it."""
    nodes = graph.find(DATASET)
    return nodes[0].tensors if nodes else ()


def _draw(name: str, shape: tuple[int, ...], dtype: str, width: float = 1.0) -> np.ndarray:
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    if dtype == "bool":
        return np.ones(shape, bool)
    if "int" in dtype:
        return generator.integers(0, INTEGER_BOUND, shape).astype(dtype)
    return (width * generator.standard_normal(shape)).astype(np.float32)


def _initial_parameters(rank: ExecutableRank) -> dict[str, np.ndarray]:
    names = set(rank.graph.parameters)
    values = {}
    for name, parameter in rank.graph.parameters.items():
        dtype = np.float32 if parameter.dtype == "bfloat16" else np.dtype(parameter.dtype)
        if name in rank.initial:
            values[name] = np.full(parameter.shape, rank.initial[name], dtype)
        elif is_copy(name, names):
            values[name] = np.zeros(parameter.shape, dtype)
        else:
            whole = _draw(name, whole_shape(parameter), parameter.dtype, WIDTH)
            values[name] = whole[slices_of(parameter, rank.graph.rank)].astype(dtype)
    return values


def is_copy(name: str, names: set[str]) -> bool:
    """Return True if a parameter is named after another one, as ``moments.layers.0.first`` after ``layers.0.first``."""
    rest = name
    while "." in rest:
        rest = rest.partition(".")[2]
        if rest in names:
            return True
    return False
