"""Somebody's program, all its ranks in lock-step: do they agree with each other, and with a single device where it was kept?"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mindllm.compiled.device.inside_program import MIND_IR
from mindllm.compiled.execute.rank_interpreter import RankInterpreter
from mindllm.compiled.execute.state import slices_of
from mindllm.compiled.foreign.kept_program import NOT_ALONE, SINGLE, KeptRank, kept_ranks
from mindllm.compiled.foreign.lockstep import Program, ProgramRank, read_rank, without_kernel
from mindllm.compiled.rank.pool import Pool
from mindllm.errors import RunFailed, UserError
from mindllm.jobs.memory import ADVICE, MemoryClaim, gibibytes
from mindllm.outside import read_text
from mindllm.results import Result
from mindllm.terminal.tables import Table, figures, texts
from mindllm.timing.stage_graph import micro_batches_of
from mindllm.verify.program_place import place_of_difference

if TYPE_CHECKING:
    from mindllm.results import Part

FP32_TOLERANCE, HALF_TOLERANCE = (
    1e-4,
    5e-2,
)  # of the largest element: differences that rounding makes, in fp32 and where a graph has bf16 or fp16


EARLIER = 0.1
"""Of what is allowed: a difference that is found later begins in the first step that exceeds this."""
NOTHING = (0.0, "")
FP32 = 4
MOST_REASON = 1 << 16
LOOSELY = 1e-3  # of a change that is so many times another
TIMES = (
    "what changes otherwise changes {} times as much: gradients are sums where the single device has means. MindSpore 2.10 "
    "divides the gradient of a loss by its copies only if a function under value_and_grad returns nothing else (has_aux=False)"
)
OF_GRAPH, COPIES = 3, 2  # bytes held for each of MindIR; a parameter's value and the one a step computes


@dataclass(frozen=True, repr=False)
class ProgramOutcome(Result):
    """What was found of a program.

    Attributes:
        ranks: how many were executed.
        stages: of its pipeline.
        steps: that all ranks did.
        exchanges: of a step.
        compared: whether a single device was there to compare with.
        summed: micro-batches whose losses are returned as a sum.
        unfinished: parameters that are not finite on the single device either.
        errors: shares of the largest element of a tensor, by kind.
        problems: a line for each.
        place: the first operator of the ranks that yields something else than the single device; empty where none does.
        not_alone: why the program on one device was not kept beside its ranks; empty where it was, or nobody tried.
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
        """Whether the ranks agree with each other, and with the single device."""
        return not self.problems

    def summary(self) -> str:
        """Return ranks and verdict."""
        return f"{self.ranks} ranks, {'ok' if self.ok else 'not ok'}"

    def tree(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return {"ok": self.ok, **vars(self)}

    def parts(self) -> Iterator[Part]:
        """Yield what was executed, the largest errors, the problems, and the verdict."""
        yield (
            f"{self.ranks} ranks, {self.stages} stage{'s' * (self.stages > 1)}: {self.steps} steps in lock-step, "
            f"{self.exchanges} exchanges a step, all of them matched"
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
            yield "the ranks together compute what the single device does"
        elif self.ok and self.not_alone:
            yield f"replicas are equal and all is finite. Nothing was compared with one device: {self.not_alone}"
        elif self.ok:
            yield (
                "replicas are equal and all is finite. That the ranks compute what one device would was not asked: --single "
                "DIR compares with the program on one device"
            )


def check_program(directory: Path, single: Path | None, steps: int) -> ProgramOutcome:
    """Executes all kept ranks of a program.

    ``single``: what was kept of it on one device; None for what stands beside the ranks, if anything does.

    Raises:
        UserError: ranks are missing, or were not kept so that they can be executed.
        RunFailed: the graphs hold operators that nothing here computes.
        Deadlock: ranks that wait for each other.
    """
    beside = directory / SINGLE
    with MemoryClaim() as claim:
        if single is None and list(beside.glob("rank_*")):
            single = beside
        outcome = _check_program(directory, single, steps, claim)
    why_not = beside / NOT_ALONE
    if single is None and why_not.is_file():
        return replace(outcome, not_alone=read_text(why_not, MOST_REASON).strip())
    return outcome


def _check_program(directory: Path, single: Path | None, steps: int, claim: MemoryClaim) -> ProgramOutcome:
    kept = kept_ranks(directory)
    stages, pool = max(rank.simulation.stage for rank in kept) + 1, Pool()
    _claim_graphs([*kept, *(kept_ranks(single) if single else [])], claim)
    ranks = [read_rank(rank, pool) for rank in kept]
    alone = begun_alike([read_rank(rank, pool) for rank in kept_ranks(single)] if single else [], ranks)
    _claim_values([*ranks, *alone], claim)
    if len(alone) > 1:
        raise UserError(f"--single {single}: holds {len(alone)} ranks; name what was kept of the program on one device")
    if unknown := without_kernel([*ranks, *alone]):
        named = ", ".join(f"{name} ({count})" for name, count in unknown.items())
        raise RunFailed(f"{directory}: nothing here computes {named}: the graphs of all ranks cannot be executed")
    _check_complete(ranks, directory)
    return _executed(ranks, alone, stages, steps)


def begun_alike(alone: Sequence[ProgramRank], ranks: Sequence[ProgramRank]) -> list[ProgramRank]:
    """What is known of the ranks' first values holds for a single device, too.

    There MindSpore fills a parameter when it is made, so that afterwards nobody can tell that it began with ones.
    """
    known = {name: value for rank in ranks for name, value in rank.initial.items()}
    return [replace(rank, initial={**known, **rank.initial}) for rank in alone]


def _check_complete(ranks: Sequence[ProgramRank], directory: Path) -> None:
    """All ranks are there, those that others exchange data with, too."""
    there = {rank.graph.rank for rank in ranks}
    wanted = {other for rank in ranks for node in rank.graph.collectives() for other in node.ranks}
    missing = sorted((wanted | set(range(max(there)))) - there)
    if missing:
        named = ", ".join(map(str, missing))
        raise UserError(f"{directory}: holds no rank {named}; run mindllm offline with --ranks all")


def _executed(ranks: Sequence[ProgramRank], alone: Sequence[ProgramRank], stages: int, steps: int) -> ProgramOutcome:
    program, device = Program(ranks, stages), Program(alone, 1) if alone else None
    tolerance = HALF_TOLERANCE if any(_is_short(rank) for rank in (*ranks, *alone)) else FP32_TOLERANCE
    errors: dict[str, float] = {}
    summed = 1
    unfinished: set[str] = set()
    problems: list[str] = []
    largest: dict[int, float] = {}  # by step
    for number in range(1, steps + 1):
        begun = _values(program, device) if device is not None and number == 1 else {}
        outputs = program.step(number)
        said = device.step(number) if device is not None else {}
        if device is not None:
            unfinished |= _without_number(device.machines[0])
        problems += (f"step {number}: {line}" for line in _not_finite(program, outputs, unfinished))
        problems += (f"step {number}: {line}" for line in _unequal_replicas(program))
        if device is not None:
            parts = micro_batches_of(ranks[-1].graph)
            found = dict(_differences(program, outputs, device, said))
            again = dict(_differences(program, outputs, device, said, parts)) if parts > 1 else found
            if again.get("returned", NOTHING)[0] < found.get("returned", NOTHING)[0]:
                found, summed = again, parts
            for kind, (error, where) in found.items():
                errors[kind] = max(error, errors.get(kind, 0.0))
                largest[number] = max(error, largest.get(number, 0.0))
                if not error <= tolerance:
                    problems.append(
                        f"step {number}: {where} is off by {error:.1e} of the single device's largest element"
                    )
        if device is not None and begun and (times := times_as_much(begun, _values(program, device), tolerance)):
            problems.append(f"step {number}: {TIMES.format(times)}")
    exchanges = sum(
        rank.graph.executions[function.name]
        for rank in ranks
        for function in rank.graph.functions
        for node in function.nodes
        if node.exchanges
    )
    place = ""
    if any(not error <= tolerance for error in largest.values()):
        limit = tolerance * EARLIER
        first = next(step for step, error in largest.items() if not error <= limit)
        place = place_of_difference(ranks, alone[0], stages, first, limit, _error)
    return ProgramOutcome(
        ranks=len(ranks),
        stages=stages,
        steps=steps,
        exchanges=exchanges,
        compared=device is not None,
        summed=summed,
        unfinished=tuple(sorted(unfinished)),
        errors=errors,
        problems=tuple(problems),
        place=place,
    )


def _claim_graphs(kept: Sequence[KeptRank], claim: MemoryClaim) -> None:
    """Claims what the graphs take, by the sizes of their files."""
    files = [rank.directory / MIND_IR for rank in kept]
    _require(claim, OF_GRAPH * sum(file.stat().st_size for file in files if file.is_file()), "the graphs of its ranks")


def _claim_values(ranks: Sequence[ProgramRank], claim: MemoryClaim) -> None:
    """Claims what is held already, and what the parameters of all ranks take; what operators yield comes on top."""
    parameters = (parameter for rank in ranks for parameter in rank.graph.parameters.values())
    values = sum(math.prod(parameter.shape) for parameter in parameters)
    _require(claim, claim.taken() + COPIES * FP32 * values, "the parameters of all ranks")


def _require(claim: MemoryClaim, wanted: int, what: str) -> None:
    if not claim.fits(wanted):
        raise UserError(f"{what} take at least {gibibytes(wanted)}, and there are {claim.describe()}: {ADVICE}")
    claim.take(wanted)


def _values(program: Program, device: Program) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Of each parameter that ranks and the single device have a rank's part, and the same part there."""
    whole = device.machines[0].values()
    return {
        name: (value, whole[name][slices_of(machine.graph.parameters[name], machine.rank)])
        for machine in program.machines[:: program.stage_devices]
        for name, value in machine.values().items()
        if name in whole and value.dtype.kind == "f" and value.size
    }


def times_as_much(
    before: Mapping[str, tuple[np.ndarray, np.ndarray]],
    after: Mapping[str, tuple[np.ndarray, np.ndarray]],
    tolerance: float,
) -> int:
    """How many times as much as on the single device all parameters change that change otherwise; 0 if that is no number.

    Args:
        before: of each parameter its value on a rank and on the single device, before a step.
        after: the same after it. Values are rounded, so a change may be small beside what they are rounded by.
        tolerance: of a change, as a share of its largest element.
    """
    found = set[int]()
    for name, (value, alone) in after.items():
        changed, wanted = value - before[name][0], alone - before[name][1]
        if _error(changed, wanted) > tolerance:
            found.add(_whole_factor(changed, wanted, np.finfo(value.dtype).eps * np.abs(value).max()))
    return found.pop() if len(found) == 1 else 0


def _whole_factor(changed: np.ndarray, wanted: np.ndarray, rounding: float) -> int:
    """By which whole number above 1 ``changed`` is ``wanted``, both rounded so; 0 if by none."""
    if not wanted.any() or not np.isfinite(changed).all() or not np.isfinite(wanted).all():
        return 0
    times = round(float((changed * wanted).sum() / (wanted * wanted).sum()))
    allowed = LOOSELY * np.abs(changed).max() + (1 + times) * rounding
    return times if times > 1 and np.abs(changed - times * wanted).max() <= allowed else 0


def _is_short(rank: ProgramRank) -> bool:
    return any(dtype in ("bfloat16", "float16") for node in rank.graph.nodes() for dtype in node.dtypes)


def _arrays(value: Any) -> Iterator[np.ndarray]:
    if isinstance(value, tuple):
        for item in value:
            yield from _arrays(item)
    elif isinstance(value, np.ndarray | np.generic) and np.asarray(value).dtype.kind == "f":
        yield np.asarray(value)


def _not_finite(program: Program, outputs: Mapping[int, Any], expected: Collection[str]) -> Iterator[str]:
    """What is not finite on ranks, the parameters aside that are ``expected`` not to be."""
    for machine in program.machines:
        if not all(np.isfinite(array).all() for array in _arrays(outputs[machine.rank])):
            yield f"rank {machine.rank} returns what is not finite"
        for name in sorted(_without_number(machine) - set(expected))[:1]:
            yield f"rank {machine.rank}: {name} is not finite"


def _without_number(machine: RankInterpreter) -> set[str]:
    """Parameters that are not finite somewhere."""
    return {
        name for name, value in machine.values().items() if value.dtype.kind == "f" and not np.isfinite(value).all()
    }


def _unequal_replicas(program: Program) -> Iterator[str]:
    """Parameters whose parts differ between ranks of a stage that keep the same part."""
    kept: dict[tuple[Any, ...], tuple[int, np.ndarray]] = {}
    for machine in program.machines:
        stage = machine.rank // program.stage_devices
        for name, value in machine.values().items():
            parameter = machine.graph.parameters[name]
            place = tuple((part.start, part.stop) for part in slices_of(parameter, machine.rank))
            first, other = kept.setdefault((stage, name, place), (machine.rank, value))
            if not np.array_equal(other, value, equal_nan=True):
                yield f"{name} is not the same on ranks {first} and {machine.rank}, which keep the same part of it"


def _differences(
    program: Program, outputs: Mapping[int, Any], device: Program, said: Mapping[int, Any], parts: int = 1
) -> Iterator[tuple[str, tuple[float, str]]]:
    """By kind the largest error, and where: of parameters, and of what the last stage returns, sums over ``parts`` or not."""
    (single,) = device.machines
    worst: dict[str, tuple[float, str]] = {}

    def note(kind: str, found: np.ndarray, wanted: np.ndarray, where: str) -> None:
        error = _error(found, wanted) if found.size else 0.0
        if kind not in worst or error > worst[kind][0]:
            worst[kind] = (error, where)

    last = [machine.rank for machine in program.machines[-program.stage_devices :]]
    averages = _averages([outputs[rank] for rank in last])
    for rank in last:
        for at, (found, wanted) in enumerate(zip(_arrays(outputs[rank]), _arrays(said[single.rank]), strict=False)):
            if found.shape == wanted.shape and found.size:
                values: list[np.ndarray] = [
                    found,
                    found / parts,
                ]  # a loss is a sum over them, and what a step says beside is not
                if averages is not None:
                    values += [averages[at], averages[at] / parts]
                errors = [_error(value, wanted) for value in values]
                best = values[errors.index(min(errors))]
                note("returned", best, wanted, f"what rank {rank} returns")
    whole = single.values()
    for machine in program.machines:
        for name, value in machine.values().items():
            if name in whole and value.dtype.kind == "f":
                part = whole[name][slices_of(machine.graph.parameters[name], machine.rank)]
                note("parameters", value, part, f"{name} on rank {machine.rank}")
    yield from worst.items()


def _averages(outputs: Sequence[Any]) -> list[np.ndarray] | None:
    """Means over ranks of what they return, in order, where they return different values: losses of the rows each was given."""
    columns = [list(_arrays(output)) for output in outputs]
    alike = len({tuple(array.shape for array in column) for column in columns}) == 1
    if not alike or all(np.array_equal(one, other) for one, other in zip(columns[0], columns[-1], strict=True)):
        return None
    return [np.mean(arrays, axis=0) for arrays in zip(*columns, strict=True)]


def _error(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference as a share of the largest element; infinite where only one of them is no number."""
    neither = np.isnan(found) & np.isnan(wanted)
    off = np.where(neither, 0.0, np.abs(found - wanted)).max()
    largest = np.abs(np.where(np.isnan(wanted), 0.0, wanted)).max()
    return math.inf if np.isnan(off) else float(off / max(largest, 1e-12))
