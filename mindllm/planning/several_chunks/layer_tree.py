"""A lower bound of plans with whole numbers of layers: branch and bound over the linear program of paths.

In an answer of the program nearly every place holds a fraction of a layer, and deciding one place changes little: its neighbours
take what it loses. What matters is the fullest (or emptiest) one of a group, because the others wait for it: of the stages,
then of the places of a chunk. So a node is divided by a group: either none of it has more than k layers, or one of them has; the
latter are as many nodes as there are members, each with the members before it bounded. Where all stages hold the average number
of layers at most, one such division decides them all.

A box is a set of plans: bounds on numbers of layers, and ways to divide it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import highspy
import numpy as np

from mindllm.deadline import now, passed
from mindllm.planning.highs import run_until
from mindllm.planning.several_chunks.path_program import PathProgram
from mindllm.planning.several_chunks.stage_floor import EMPTY

Names = tuple[str, str]  # of the least and the greatest numbers of layers in a box
PLACES: Names = ("low", "high")
STAGES: Names = ("stage_low", "stage_high")
PATHS = 200  # known paths kept when there are too many
TOO_MANY = 320
ROUNDS = 6  # paths looked for in a node at a time
TOLERANCE = 1e-6
STEADY = 1e-5  # a rise of a bound that counts
REFUTING = 0.5  # share of the time for steps that are refuted as a whole
FINE = 2e-4  # to which such steps are searched
FAILURES = 2  # steps that are not refuted, after which no more are tried
ROUNDING = 1e-6
DOUBT = 0.01  # by which a stage's number of layers must differ from a whole one to be divided by


@dataclass(frozen=True)
class Box:
    """Bounds of layer counts: in each place, of each kind there (``[places, layer kinds]``), and of each kind on a stage."""

    low: np.ndarray
    high: np.ndarray
    kind_high: np.ndarray
    stage_low: np.ndarray
    stage_high: np.ndarray

    def bounded(self, names: Names, low: np.ndarray, high: np.ndarray) -> Box:
        """Return the box with other bounds of its places or stages."""
        return replace(self, **dict(zip(names, (low, high), strict=True)))

    def limited(self, index: int, limits: tuple[int, int], stages: int) -> Box:
        """Return the box with other bounds of the stage, or from ``stages`` on of the place, at ``index``."""
        names, where = (STAGES, index) if index < stages else (PLACES, index - stages)
        low, high = (_changed(getattr(self, name), where, limit) for name, limit in zip(names, limits, strict=True))
        return self.bounded(names, low, high)

    def size(self) -> float:
        """Return the sum of all widths."""
        return float((self.high - self.low).sum() + (self.stage_high - self.stage_low).sum())


def above(box: Box, names: Names, members: np.ndarray, most: int) -> Iterator[Box]:
    """Yield the box where no member has more than ``most`` layers, and a box for each first member that has more."""
    low, high = (getattr(box, name) for name in names)
    yield box.bounded(names, low, _changed(high, members, np.minimum(high[members], most)))
    for number, member in enumerate(members):
        if high[member] > most:
            before = members[:number]
            at_most = _changed(high, before, np.minimum(high[before], most))
            yield box.bounded(names, _changed(low, member, max(low[member], most + 1)), at_most)


def below(box: Box, names: Names, members: np.ndarray, least: int) -> Iterator[Box]:
    """Yield the box where no member has less than ``least`` layers, and a box for each first member that has less."""
    low, high = (getattr(box, name) for name in names)
    yield box.bounded(names, _changed(low, members, np.maximum(low[members], least)), high)
    for number, member in enumerate(members):
        if low[member] < least:
            before = members[:number]
            at_least = _changed(low, before, np.maximum(low[before], least))
            yield box.bounded(names, at_least, _changed(high, member, min(high[member], least - 1)))


def _changed(values: np.ndarray, where: np.ndarray | int, by: np.ndarray | float) -> np.ndarray:
    changed = values.copy()
    changed[where] = by
    return changed


class LayerTree:
    """Best-first branch and bound: the bound of all plans is the least bound of the open nodes."""

    def __init__(self, program: PathProgram, best: float, proven: float) -> None:
        self.program, self.stages = program, program.problem.stages
        self.kinds = len(program.problem.layers)
        self.enough = best * (1 - proven)  # a node with this bound needs no dividing
        self.stage_columns = np.array(program.stage_counts, np.int32)
        self.stage_kinds = np.array(program.stage_kinds, int)

    def bound(self, deadline: float, tell: Callable[[float], None]) -> None:
        """Divides nodes until ``deadline`` or until nothing is left to prove; reports every rise.

        No more than what ends the proof is reported: nodes beyond it are left out.
        """

        def report(value: float) -> None:
            tell(min(value, self.enough))

        program, ticket = self.program, itertools.count()
        stage_low, stage_high = program.stage_limits()
        places = np.ones(program.problem.places, int)
        kinds = np.tile([layer.count for layer in program.problem.layers], (len(places), 1))
        root = Box(places, places * program.most, kinds, stage_low, stage_high)
        first, _ = self._separated(root, 400, deadline, report)
        report(first)
        if self.kinds > 1:  # the layers of one kind alone are sooner decided by dividing
            first, root = self._refute(root, first, now() + REFUTING * (deadline - now()), report)
        heap = [(first, next(ticket), root)]
        reported = first
        while heap and not passed(deadline):
            bound, _, box = heapq.heappop(heap)
            if bound > reported * (1 + STEADY):
                report(bound)
                reported = bound
            if bound >= self.enough:
                return
            following = heap[0][0] if heap else math.inf
            risen, values = self._separated(box, ROUNDS, deadline)
            risen = max(risen, bound)
            decided = (box.low == box.high).all()
            if decided and risen < self.enough:
                risen = max(risen, self._integer_bound(box, deadline))
            if risen > max(following, bound * (1 + STEADY)) or risen >= self.enough:
                heapq.heappush(heap, (risen, next(ticket), box))
                continue
            if decided:
                report(risen)
                return
            for child, value in self._divide(box, values):
                heapq.heappush(heap, (max(value, risen), next(ticket), child))
            if len(program.known) > TOO_MANY:
                program.forget_slack_paths(PATHS)
        if not heap:  # what was left out may still be better by less than is asked for
            report(self.enough)

    def _integer_bound(self, box: Box, deadline: float) -> float:
        """Return the bound of a box where only recomputation is open, with whole layers of each kind."""
        program, solver = self.program, self.program.solver
        bound, _ = self._solve(box)
        columns = np.arange(len(program.columns), dtype=np.int32)
        solver.changeColsIntegrality(len(columns), columns, np.array([highspy.HighsVarType.kInteger] * len(columns)))
        try:
            while bound < self.enough and not passed(deadline):
                run_until(solver, deadline)
                if solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
                    return math.inf
                bound = max(bound, solver.getInfo().mip_dual_bound)
                if not solver.getSolution().value_valid:
                    break
                simulated, new = program.separate(np.array(solver.getSolution().col_value))
                if simulated <= bound * (1 + TOLERANCE) or not new:
                    break
            return bound
        finally:
            continuous = np.array([highspy.HighsVarType.kContinuous] * len(columns))
            solver.changeColsIntegrality(len(columns), columns, continuous)

    def _refute(self, box: Box, bound: float, deadline: float, report: Callable[[float], None]) -> tuple[float, Box]:
        """Raise the bound by bisection: a step is refuted if no whole layer counts can reach it.

        Return the bound, and the box of plans that are better than the best.
        """
        inner = self._tightened(box, self.enough, deadline)
        if inner is None:
            report(self.enough)
            return self.enough, box
        low, high, failures = bound, self.enough, 0
        while high > low * (1 + FINE) and failures < FAILURES and not passed(deadline):
            middle = (low + high) / 2
            if self._tightened(inner, middle, deadline) is None:
                low = middle
                report(low)
            else:
                high, failures = middle, failures + 1
        return low, inner

    def _tightened(self, box: Box, target: float, deadline: float) -> Box | None:
        """Return the box with the least and most layers of plans below ``target``; None if there are no such plans."""
        program = self.program
        groups = [np.array([column]) for column in self.stage_columns] + list(program.counts_of)
        columns = len(self.stage_columns)
        changed = True
        while changed:
            bound, _ = self._separated(box, ROUNDS, deadline)
            if bound > target:
                return None
            changed = False
            program.solver.changeColBounds(program.step, 0, target)
            program.solver.changeColCost(program.step, 0.0)
            try:
                for index, group in enumerate(groups):
                    if passed(deadline):
                        return box
                    limits = self._integer_limits(group)
                    if limits is None:
                        return None
                    tighter = box.limited(index, limits, columns)
                    changed |= tighter.size() < box.size() - 0.5
                    box = tighter
                    self._apply(box)
            finally:
                program.solver.changeColBounds(program.step, 0, highspy.kHighsInf)
                program.solver.changeColCost(program.step, 1.0)
        return box

    def _integer_limits(self, columns: np.ndarray) -> tuple[int, int] | None:
        """Return the least and greatest integer that a sum of columns can be; None if there is none."""
        solver, limits = self.program.solver, []
        for sign in (1.0, -1.0):
            for column in columns:
                solver.changeColCost(int(column), sign)
            run_until(solver, self.program.deadline)
            status, value = solver.getModelStatus(), solver.getInfo().objective_function_value
            for column in columns:
                solver.changeColCost(int(column), 0.0)
            if status in EMPTY:
                return None
            optimal = status == highspy.HighsModelStatus.kOptimal
            limits.append(sign * value if optimal else -sign * math.inf)
        if not all(map(math.isfinite, limits)):  # unknown: no limit
            return 0, self.program.problem.layer_count
        low, high = math.ceil(limits[0] - ROUNDING), math.floor(limits[1] + ROUNDING)
        return (low, high) if low <= high else None

    def _solve(self, box: Box) -> tuple[float, np.ndarray]:
        """Return the program's bound in a box, infinite without a plan, and its answer."""
        count = self.program.problem.layer_count
        if (box.low > box.high).any() or box.low.sum() > count or box.high.sum() < count:
            return math.inf, np.zeros(0)
        self._apply(box)
        return self.program.solve()

    def _apply(self, box: Box) -> None:
        self.program.limit_totals(box.low, box.high)
        if self.kinds > 1:
            counts = self.program.by_kind(box.low)
            decided = (box.low == box.high).all()
            self.program.limit_counts(counts if decided else 0 * counts, counts if decided else box.kind_high)
        self.program.limit_stages(box.stage_low, box.stage_high)

    def _separated(
        self, box: Box, rounds: int, deadline: float, report: Callable[[float], None] = lambda _: None
    ) -> tuple[float, np.ndarray]:
        bound, values = self._solve(box)
        for _ in range(rounds):
            report(bound)
            if not bound < self.enough or passed(deadline):
                break
            simulated, new = self.program.separate(values)
            if simulated <= bound * (1 + 5e-4) or not new:
                break
            bound, values = self._solve(box)
        return bound, values

    def _divide(self, box: Box, values: np.ndarray) -> list[tuple[Box, float]]:
        """Return the parts of a box that may have better plans, with their bounds, by the most effective division."""
        totals = self.program.totals(values)
        best, chosen = (-math.inf, -math.inf), self._by_order(box, values)
        for parts in [] if chosen else [*self._by_chunk(box, totals), *self._by_stage(box, values)]:
            ends = [min(self._solve(part)[0], self.enough) for part in (parts[0], parts[-1])]
            if (min(ends), max(ends)) > best:
                best, chosen = (min(ends), max(ends)), parts
        if chosen is None:
            doubt = np.where(box.low < box.high, np.abs(totals - np.rint(totals)), -1.0)
            place = int(doubt.argmax())
            most = min(math.floor(totals[place] + TOLERANCE), int(box.high[place]) - 1)
            chosen = list(above(box, PLACES, np.array([place]), most))
        bounds = [(part, self._solve(part)[0]) for part in chosen]
        return [(part, bound) for part, bound in bounds if bound < self.enough]

    def _by_order(self, box: Box, values: np.ndarray) -> list[Box] | None:
        """Divide a box whose answer has a later kind before an earlier one: the kinds change in one half or the other."""
        order = self.program.problem.visits
        counts = values[self.program.counts_of][list(order)]
        for kind in range(1, self.kinds):
            earlier = np.flatnonzero(counts[:, :kind].sum(axis=1) > TOLERANCE)[-1]
            later = np.flatnonzero(counts[:, kind:].sum(axis=1) > TOLERANCE)[0]
            if later < earlier:
                middle = (later + earlier) // 2
                before, after = box.kind_high.copy(), box.kind_high.copy()
                before[list(order[middle + 1 :]), :kind] = 0
                after[list(order[: middle + 1]), kind:] = 0
                return [replace(box, kind_high=before), replace(box, kind_high=after)]
        return None

    def _by_chunk(self, box: Box, totals: np.ndarray) -> Iterator[list[Box]]:
        for first in range(0, len(totals), self.stages):
            yield from self._by_extremes(box, PLACES, np.arange(first, first + self.stages), totals)

    def _by_stage(self, box: Box, values: np.ndarray) -> Iterator[list[Box]]:
        """Yield divisions by the fullest or emptiest stage, and by the most fractional stage."""
        counts = values[self.stage_columns]
        doubt = np.abs(counts - np.rint(counts))
        for kind in range(self.kinds):
            open_ = np.flatnonzero((self.stage_kinds == kind) & (doubt > DOUBT))
            if len(open_):
                yield from self._by_extremes(box, STAGES, np.flatnonzero(self.stage_kinds == kind), counts)
                index = open_[doubt[open_].argmax()]
                yield list(above(box, STAGES, np.array([index]), math.floor(counts[index])))

    def _by_extremes(self, box: Box, names: Names, members: np.ndarray, counts: np.ndarray) -> Iterator[list[Box]]:
        """Yield divisions by the largest and the smallest count of the members; the most effective part comes first."""
        low, high = (getattr(box, name)[members] for name in names)
        most = math.floor(counts[members].max() - TOLERANCE)
        if (high > most).any() and most >= low.max():
            yield list(above(box, names, members[np.argsort(counts[members])], most))
        least = math.ceil(counts[members].min() + TOLERANCE)
        if (low < least).any() and least <= high.min():
            yield list(below(box, names, members[np.argsort(-counts[members])], least))
