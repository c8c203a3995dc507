"""Execute all ranks of a program in lockstep: compare replicas, and all of them with the program on one device."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mindllm.compiled.execute.comparer import Comparer
from mindllm.compiled.execute.rank_interpreter import RankInterpreter
from mindllm.compiled.execute.records import Record, Recorder
from mindllm.compiled.execute.state import slices_of, whole_shape
from mindllm.compiled.rank.pool import Pool
from mindllm.errors import RunFailed, UserError
from mindllm.jobs.memory import ADVICE, MemoryClaim, gibibytes
from mindllm.outside import read_text
from mindllm.parallel.layout import Mesh
from mindllm.programs.inside_program import MIND_IR
from mindllm.programs.kept import NOT_ALONE, SINGLE, KeptRank, kept_ranks
from mindllm.programs.lockstep import ExecutableRank, ProgramCluster, read_rank, without_kernel
from mindllm.results import Result
from mindllm.terminal.tables import Table, figures, texts
from mindllm.timing.stage_graph import micro_batches_of
from mindllm.train.checkpoint.parts import Part as TensorPart
from mindllm.verify.compare import TensorError, tensor_errors

if TYPE_CHECKING:
    from mindllm.results import Part

# Largest differences due to rounding, as a share of a tensor's largest element: in fp32, and in graphs with bf16 or fp16.
FP32_TOLERANCE, HALF_TOLERANCE = 1e-4, 5e-2
LOCATE_SHARE = 0.1  # of the tolerance; the first step that exceeds it is searched for the operator that differs
OPERATOR_TOLERANCE = 1e-5  # of the largest element of a value; if no operator exceeds it, the tolerance of the check
SMALLEST = 1e-12  # scale of a tensor of zeros
FP32_BYTES = 4
GRAPH_BYTES, COPIES = 3, 2  # bytes in memory for each byte of MindIR; a parameter's value before and after a step
LONGEST_REASON = 1 << 16
FACTOR_TOLERANCE = 1e-3  # of a change that is a multiple of another
FACTOR = (
    "the parameters that differ change {} times as much: gradients are sums where the single device has means. MindSpore 2.10 "
    "divides the gradient of a loss by its copies only if a function under value_and_grad returns nothing else (has_aux=False)"
)
RETURNED, PARAMETERS = "returned", "parameters"


@dataclass(frozen=True, repr=False)
class ProgramOutcome(Result):
    """Result of executing a program.

    Attributes:
        ranks: number of ranks executed.
        stages: of the pipeline.
        steps: number of steps executed.
        exchanges: per step.
        compared: whether the program on one device was available for comparison.
        summed: number of micro-batches whose losses are returned as a sum.
        unfinished: parameters that are not finite on the single device either.
        errors: largest errors by kind, as shares of the largest element of a tensor.
        problems: a line for each.
        not_alone: why the program did not run on one device; empty if it did, or if that was not tried.
        place: the first operator of the ranks that differs from the single device; empty without one.
    """

    ranks: int
    stages: int
    steps: int
    exchanges: int
    compared: bool
    summed: int = 1
    unfinished: tuple[str, ...] = ()
    errors: Mapping[str, float] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    not_alone: str = ""
    place: str = ""

    @property
    def ok(self) -> bool:
        """Return True if the ranks agree with each other and with the single device."""
        return not self.problems

    def summary(self) -> str:
        """Return the number of ranks and the verdict."""
        return f"{self.ranks} ranks, {'ok' if self.ok else 'not ok'}"

    def tree(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        return {"ok": self.ok, **vars(self)}

    def parts(self) -> Iterator[Part]:
        """Yield what was executed, the largest errors, the problems, and the verdict."""
        yield (
            f"{self.ranks} ranks, {self.stages} stage{'s' * (self.stages > 1)}: {self.steps} steps in lockstep, "
            f"{self.exchanges} exchanges per step, all of them matched"
        )
        if self.errors:
            rows = [(name, f"{error:.1e}") for name, error in self.errors.items()]
            yield Table("largest errors", [*texts("what"), *figures("share of the largest element")], rows)
        if self.summed > 1:
            yield f"the ranks return the sum over {self.summed} micro-batches of what the single device returns"
        if self.unfinished:
            yield f"not finite on the single device either: {', '.join(self.unfinished)}"
        yield from self.problems
        if self.place:
            yield f"first difference: {self.place}"
        if self.ok and self.compared:
            yield "all ranks match the single device"
        elif self.ok and self.not_alone:
            yield f"replicas are equal and all values are finite. No comparison with one device: {self.not_alone}"
        elif self.ok:
            yield (
                "replicas are equal and all values are finite. No comparison with one device; use --single DIR to compare "
                "with the program on one device"
            )


def check_program(directory: Path, single: Path | None, steps: int) -> ProgramOutcome:
    """Execute all ranks of a program; see :func:`mindllm.programs.verify_program`."""
    next_to_ranks = directory / SINGLE
    why_not = next_to_ranks / NOT_ALONE
    searched = single is None
    if searched and list(next_to_ranks.glob("rank_*")):
        single = next_to_ranks
    with MemoryClaim() as claim:
        kept = kept_ranks(directory)
        stages, pool = max(rank.simulation.stage for rank in kept) + 1, Pool()
        kept_alone = kept_ranks(single) if single else []
        _claim_graphs([*kept, *kept_alone], claim)
        ranks = [read_rank(rank, pool) for rank in kept]
        alone = with_initial_values([read_rank(rank, pool) for rank in kept_alone], ranks)
        _claim_values([*ranks, *alone], claim)
        if len(alone) > 1:
            raise UserError(
                f"--single {single}: contains {len(alone)} ranks; pass the directory of the program on one device"
            )
        if unknown := without_kernel([*ranks, *alone]):
            operators = ", ".join(f"{name} ({count})" for name, count in unknown.items())
            raise RunFailed(f"{directory}: cannot execute the graphs: no CPU kernel for {operators}")
        _require_all_ranks(ranks, directory)
        outcome = _Execution(ranks, alone, stages).run(steps)
    if searched and why_not.is_file():
        return replace(outcome, not_alone=read_text(why_not, LONGEST_REASON).strip())
    return outcome


def with_initial_values(alone: Sequence[ExecutableRank], ranks: Sequence[ExecutableRank]) -> list[ExecutableRank]:
    """Add the ranks' constant initial values to those of the single device.

    On one device MindSpore fills a parameter when it is created, so that a constant can no longer be recognized.
    """
    initial = {name: value for rank in ranks for name, value in rank.initial.items()}
    return [replace(rank, initial={**initial, **rank.initial}) for rank in alone]


def _claim_graphs(kept: Sequence[KeptRank], claim: MemoryClaim) -> None:
    """Claim memory for graphs, by the sizes of their files."""
    files = [rank.directory / MIND_IR for rank in kept]
    size = GRAPH_BYTES * sum(file.stat().st_size for file in files if file.is_file())
    _claim(claim, size, "the graphs of its ranks")


def _claim_values(ranks: Sequence[ExecutableRank], claim: MemoryClaim) -> None:
    """Claim memory for the parameters of all ranks, in addition to what is in use. Activations are not included."""
    parameters = (parameter for rank in ranks for parameter in rank.graph.parameters.values())
    elements = sum(math.prod(parameter.shape) for parameter in parameters)
    _claim(claim, claim.taken() + COPIES * FP32_BYTES * elements, "the parameters of all ranks")


def _claim(claim: MemoryClaim, size: int, what: str) -> None:
    if not claim.fits(size):
        raise UserError(f"{what} take at least {gibibytes(size)}, and there are {claim.describe()}: {ADVICE}")
    claim.take(size)


def _require_all_ranks(ranks: Sequence[ExecutableRank], directory: Path) -> None:
    """Raise UserError if a rank is missing, or one with which ranks exchange data."""
    present = {rank.graph.rank for rank in ranks}
    peers = {other for rank in ranks for node in rank.graph.collectives() for other in node.ranks}
    missing = sorted((peers | set(range(max(present)))) - present)
    if missing:
        raise UserError(f"{directory}: no rank {', '.join(map(str, missing))}; run mindllm offline with --ranks all")


class _Execution:
    """Steps of all ranks and of the single device, if there is one, and the findings."""

    def __init__(self, ranks: Sequence[ExecutableRank], alone: Sequence[ExecutableRank], stages: int) -> None:
        self.ranks, self.alone, self.stages = ranks, alone, stages
        self.cluster = ProgramCluster(ranks, stages)
        self.single = ProgramCluster(alone, 1) if alone else None
        self.tolerance = HALF_TOLERANCE if any(map(_is_half, (*ranks, *alone))) else FP32_TOLERANCE
        self.errors: dict[str, float] = {}
        self.error_by_step: dict[int, float] = {}
        self.summed = 1

    def run(self, steps: int) -> ProgramOutcome:
        """Execute the steps and return the findings."""
        unfinished: set[str] = set()
        problems: list[str] = []
        for number in range(1, steps + 1):
            before = _paired_values(self.cluster, self.single) if self.single and number == 1 else {}
            outputs = self.cluster.step(number)
            lines: list[str] = []
            if self.single is None:
                lines += [*_not_finite(self.cluster, outputs, ()), *_unequal_replicas(self.cluster)]
            else:
                reference = self.single.step(number)[self.single.machines[0].rank]
                unfinished |= _not_finite_parameters(self.single.machines[0])
                lines += [*_not_finite(self.cluster, outputs, unfinished), *_unequal_replicas(self.cluster)]
                lines += self._compare(number, outputs, reference)
                if before and (
                    times := change_factor(before, _paired_values(self.cluster, self.single), self.tolerance)
                ):
                    lines.append(FACTOR.format(times))
            problems += (f"step {number}: {line}" for line in lines)
        return ProgramOutcome(
            ranks=len(self.ranks),
            stages=self.stages,
            steps=steps,
            exchanges=self._exchanges(),
            compared=self.single is not None,
            summed=self.summed,
            unfinished=tuple(sorted(unfinished)),
            errors=self.errors,
            problems=tuple(problems),
            place=self._place(),
        )

    def _compare(self, number: int, outputs: Mapping[int, Any], reference: Any) -> Iterator[str]:
        """Yield a line for outputs, and one for parameters, if they differ from the single device after step ``number``."""
        assert self.single is not None
        parts = micro_batches_of(self.ranks[-1].graph)
        returned = _output_error(self.cluster, outputs, reference, 1)
        if parts > 1:  # ranks may return the sum of the losses of micro-batches
            summed = _output_error(self.cluster, outputs, reference, parts)
            if summed and returned and summed[0] < returned[0]:
                returned, self.summed = summed, parts
        differences = {RETURNED: returned}
        if errors := list(parameter_errors(self.cluster, self.single)):
            worst = max(errors, key=lambda error: error.relative)
            differences[PARAMETERS] = worst.relative, f"{worst.name} on rank {worst.rank}"
        for kind, difference in differences.items():
            if difference is None:
                continue
            error, where = difference
            self.errors[kind] = max(error, self.errors.get(kind, 0.0))
            self.error_by_step[number] = max(error, self.error_by_step.get(number, 0.0))
            if not error <= self.tolerance:
                yield f"{where} is off by {error:.1e} of the single device's largest element"

    def _exchanges(self) -> int:
        """Count the exchanges of all ranks in a step."""
        return sum(
            rank.graph.executions[function.name]
            for rank in self.ranks
            for function in rank.graph.functions
            for node in function.nodes
            if node.exchanges
        )

    def _place(self) -> str:
        """Describe the first operator that differs from the single device; empty if nothing differs."""
        if all(error <= self.tolerance for error in self.error_by_step.values()):
            return ""
        # a difference that is large in a later step may begin small
        limit = self.tolerance * LOCATE_SHARE
        first = next(number for number, error in self.error_by_step.items() if not error <= limit)
        return describe_difference(self.ranks, self.alone[0], self.stages, first, limit)


def _is_half(rank: ExecutableRank) -> bool:
    """Return True if a graph computes in bf16 or fp16."""
    return any(dtype in ("bfloat16", "float16") for node in rank.graph.nodes() for dtype in node.dtypes)


def _arrays(value: Any) -> Iterator[np.ndarray]:
    """Yield the floating-point arrays in an output, which may be nested tuples."""
    if isinstance(value, tuple):
        for item in value:
            yield from _arrays(item)
    elif isinstance(value, np.ndarray | np.generic) and np.asarray(value).dtype.kind == "f":
        yield np.asarray(value)


def _not_finite(cluster: ProgramCluster, outputs: Mapping[int, Any], expected: Collection[str]) -> Iterator[str]:
    """Yield ranks whose outputs, or parameters other than the ``expected`` ones, are not finite."""
    for machine in cluster.machines:
        if not all(np.isfinite(array).all() for array in _arrays(outputs[machine.rank])):
            yield f"rank {machine.rank} returns values that are not finite"
        for name in sorted(_not_finite_parameters(machine) - set(expected))[:1]:
            yield f"rank {machine.rank}: {name} is not finite"


def _not_finite_parameters(machine: RankInterpreter) -> set[str]:
    return {
        name for name, value in machine.values().items() if value.dtype.kind == "f" and not np.isfinite(value).all()
    }


def _unequal_replicas(cluster: ProgramCluster) -> Iterator[str]:
    """Yield parameters that differ between ranks of a stage with the same part of them."""
    first_copies: dict[tuple[Any, ...], tuple[int, np.ndarray]] = {}
    for machine in cluster.machines:
        stage = machine.rank // cluster.stage_devices
        for name, value in machine.values().items():
            parameter = machine.graph.parameters[name]
            place = tuple((part.start, part.stop) for part in slices_of(parameter, machine.rank))
            first, copy = first_copies.setdefault((stage, name, place), (machine.rank, value))
            if not np.array_equal(copy, value, equal_nan=True):
                yield f"{name} differs between ranks {first} and {machine.rank}, which have the same part of it"


def parameter_errors(cluster: ProgramCluster, single: ProgramCluster) -> Iterator[TensorError]:
    """Yield the error of every floating-point parameter of every rank against the single device."""
    values = single.machines[0].values()
    ranks: dict[int, dict[str, TensorPart]] = {}
    for machine in cluster.machines:
        parts = ranks.setdefault(machine.rank, {})
        for name, value in machine.values().items():
            if name in values and value.dtype.kind == "f" and value.size:
                parameter = machine.graph.parameters[name]
                parts[name] = TensorPart(whole_shape(parameter), slices_of(parameter, machine.rank), value)
    yield from tensor_errors(values, ranks, zero_scale=SMALLEST, equal_nan=True)


def _output_error(
    cluster: ProgramCluster, outputs: Mapping[int, Any], reference: Any, parts: int
) -> tuple[float, str] | None:
    """Return the largest error of what ranks of the last stage return, and its rank; None if nothing is comparable.

    A loss may be a sum over ``parts`` micro-batches, or the mean over a rank's own rows. Each output is compared in all these
    forms, and the best one counts.
    """
    last = [machine.rank for machine in cluster.machines[-cluster.stage_devices :]]
    means = _means([outputs[rank] for rank in last])
    worst: tuple[float, str] | None = None
    for rank in last:
        for index, (value, expected) in enumerate(zip(_arrays(outputs[rank]), _arrays(reference), strict=False)):
            if value.shape != expected.shape or not value.size:
                continue
            candidates = [value, value / parts]
            if means is not None:
                candidates += [means[index], means[index] / parts]
            error = min(relative_error(candidate, expected) for candidate in candidates)
            if worst is None or error > worst[0]:
                worst = error, f"what rank {rank} returns"
    return worst


def _means(outputs: Sequence[Any]) -> list[np.ndarray] | None:
    """Return the mean of each output over ranks; None if ranks return equal values, or values of other shapes."""
    columns = [list(_arrays(output)) for output in outputs]
    same_shapes = len({tuple(array.shape for array in column) for column in columns}) == 1
    if not same_shapes or all(np.array_equal(a, b) for a, b in zip(columns[0], columns[-1], strict=True)):
        return None
    return [np.mean(arrays, axis=0) for arrays in zip(*columns, strict=True)]


def relative_error(value: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference as a share of the largest element; infinite if only one side is NaN somewhere."""
    whole = tuple(slice(0, size) for size in value.shape)
    ranks = {0: {"": TensorPart(value.shape, whole, value)}}
    (error,) = tensor_errors({"": expected}, ranks, zero_scale=SMALLEST, equal_nan=True)
    return error.relative


def _paired_values(cluster: ProgramCluster, single: ProgramCluster) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return each parameter's part on the first rank of a stage, and the same part on the single device."""
    whole = single.machines[0].values()
    return {
        name: (value, whole[name][slices_of(machine.graph.parameters[name], machine.rank)])
        for machine in cluster.machines[:: cluster.stage_devices]
        for name, value in machine.values().items()
        if name in whole and value.dtype.kind == "f" and value.size
    }


def change_factor(
    before: Mapping[str, tuple[np.ndarray, np.ndarray]],
    after: Mapping[str, tuple[np.ndarray, np.ndarray]],
    tolerance: float,
) -> int:
    """Return by which integer factor the parameters that differ change more than on the single device; 0 if by none.

    Args:
        before: value on a rank and on the single device before a step, by parameter.
        after: the values after it. They are rounded, and a change may be small compared with their rounding.
        tolerance: allowed error of a change, as a share of its largest element.
    """
    factors = set[int]()
    for name, (value, alone) in after.items():
        change, expected = value - before[name][0], alone - before[name][1]
        if relative_error(change, expected) > tolerance:
            factors.add(_integer_factor(change, expected, np.finfo(value.dtype).eps * np.abs(value).max()))
    return factors.pop() if len(factors) == 1 else 0


def _integer_factor(change: np.ndarray, expected: np.ndarray, rounding: float) -> int:
    """Return the integer above 1 by which ``change`` is a multiple of ``expected``, up to rounding; 0 if there is none."""
    if not expected.any() or not np.isfinite(change).all() or not np.isfinite(expected).all():
        return 0
    times = round(float((change * expected).sum() / (expected * expected).sum()))
    allowed = FACTOR_TOLERANCE * np.abs(change).max() + (1 + times) * rounding
    return times if times > 1 and np.abs(change - times * expected).max() <= allowed else 0


def describe_difference(
    ranks: Sequence[ExecutableRank], alone: ExecutableRank, stages: int, step: int, tolerance: float
) -> str:
    """Describe the first operator that differs in step ``step`` (from 1); empty if there is none.

    The step is executed again, with the value of every operator recorded.
    """
    cluster, recorder, outputs = _record(ranks, stages, step)
    single, reference, expected = _record([alone], 1, step)
    # Without layouts the compiler cut no parameter: ranks have their own rows and average gradients themselves.
    averaged = not any(parameter.layout for rank in ranks for parameter in rank.graph.parameters.values())
    with np.errstate(all="ignore"):
        wrong = [
            record
            for error in parameter_errors(cluster, single)
            if not error.relative <= tolerance and (record := recorder.changer(error.rank, error.name)) is not None
        ]
        if not averaged:  # in data parallel a rank returns the loss of its own rows
            wrong += _wrong_outputs(cluster, outputs, expected[alone.graph.rank], recorder, tolerance)
        mesh = Mesh(data_parallel=cluster.stage_devices, pipeline_stage=stages)
        graphs = [rank.graph for rank in ranks]
        for allowed in (OPERATOR_TOLERANCE, tolerance):
            comparer = Comparer(recorder.records, reference.records, graphs, mesh, allowed, averaged)
            if difference := comparer.first_difference(wrong):
                return difference.describe()
    return comparer.explained(wrong[0]).describe() if wrong else ""


def _record(
    ranks: Sequence[ExecutableRank], stages: int, step: int
) -> tuple[ProgramCluster, Recorder, Mapping[int, Any]]:
    """Execute up to step ``step`` and record the operators of that one."""
    cluster, recorder = ProgramCluster(ranks, stages), Recorder()
    for number in range(1, step):
        cluster.step(number)
    for machine in cluster.machines:
        machine.observer = recorder
    return cluster, recorder, cluster.step(step)


def _wrong_outputs(
    cluster: ProgramCluster, outputs: Mapping[int, Any], expected: Any, recorder: Recorder, tolerance: float
) -> Iterator[Record]:
    """Yield the operators whose outputs on the last stage differ from the single device."""
    for machine in cluster.machines[-cluster.stage_devices :]:
        for value, reference in zip(_flat(outputs[machine.rank]), _flat(expected), strict=False):
            record = recorder.maker(machine.rank, value)
            if record is None or value.dtype.kind != "f" or value.shape != reference.shape or not value.size:
                continue
            if not relative_error(value, reference) <= tolerance:
                yield record


def _flat(value: Any) -> Iterator[np.ndarray]:
    if isinstance(value, tuple):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, np.ndarray):
        yield value
