"""Planning with several chunks per stage: splits are searched with the program over paths, beside a tree for the bound."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from mindllm.deadline import OutOfTime, now, passed
from mindllm.planning.local_search import Search
from mindllm.planning.plan import Evaluation, evaluate, problem_orders
from mindllm.planning.problem import Problem
from mindllm.planning.recomputation.feasible import lightest_split
from mindllm.planning.recomputation.mixes import Mixes
from mindllm.planning.recomputation.stage_choice import StageChoice
from mindllm.planning.several_chunks.bound_process import BoundProcess, tree_of
from mindllm.planning.several_chunks.layer_descent import LayerDescent
from mindllm.planning.several_chunks.path_program import PathProgram
from mindllm.planning.several_chunks.reoptimise import SECONDS, Reoptimiser, StageRounding, dive
from mindllm.schedules.orders import Timetable, timetable

PROVEN = 1e-4  # a gap that ends the work
MANY = 6  # chunks beyond which not all profiles are tried
PROFILES = 16  # that are simulated at a time
FEW = 20_000  # splits that are all simulated
SMALL = 1500  # operations of a problem that is first tried without a process for the bound
ALONE = 1.5  # seconds for that
DESCENT = 2.0  # seconds, at most, of the search with simulated steps
DIVES = 3
NEAR_PATHS = 400  # known when recomputation is chosen
NEAR = 0.003  # share by which a split may be judged worse than the best and still get its recomputation chosen
QUICK = 16  # places whose recomputation a mixed-integer program chooses in little time
DESCENDING = 0.8  # share of the time that is left that a search for splits may take
FAR = 0.03  # beyond which a split is not judged more precisely
WANDER = 1.5  # seconds of a search by simulated steps


def solve_interleaved(
    problem: Problem, even: Evaluation | None, deadline: float, first: float
) -> tuple[Evaluation | None, float]:
    """A plan, or None when none was found, and a lower bound of the makespan: 0 without one, infinite when no plan exists.

    ``first`` is the deadline of a first plan where the ``even`` split is none.

    Raises:
        OutOfTime: there was no plan at its deadline.
    """
    orders, mixes, started = problem_orders(problem), Mixes(problem, first), now()
    table = timetable(orders, problem.chunks)
    search = Search(problem, StageChoice(problem, mixes, orders), table)
    if even is not None:
        search.times(np.array([even.plan.counts]), deadline=first)
    if len(problem.kind_names) == 1 and math.comb(problem.layer_count - 1, problem.places - 1) <= FEW:
        return _best_of_all(search, first)
    for some in np.array_split(splits := profiles(problem), max(1, len(splits) // PROFILES)):
        search.times(some, search.best_time, first if search.best is None else deadline)
    if search.best is None:
        lightest = lightest_split(problem, first)
        search.times(lightest.counts[None], deadline=first)
        if search.best is None:
            return None, math.inf if lightest.missing_mb > 0 else 0.0
    search.descend(search.best, started + min(DESCENT, 0.1 * (deadline - started)))
    planner = _Planner(problem, table, mixes, search, deadline)
    mixes.deadline = deadline
    bounds = [0.0]
    with contextlib.suppress(OutOfTime):
        if table.size <= SMALL:
            tree = tree_of(problem, planner.best_time, PROVEN, deadline)
            tree.bound(min(deadline, now() + ALONE), bounds.append)
            planner.first_plans(min(deadline, now() + ALONE), lambda: max(bounds))
    for work in (planner.first_plans, planner.improve):
        if not planner.proved(max(bounds)) and not passed(deadline):  # begun anew, the proof is quicker
            beside = BoundProcess(problem, planner.best_time, PROVEN, deadline - now())
            with beside as process, contextlib.suppress(OutOfTime):
                work(deadline, partial(_highest, bounds, process))
            bounds.append(process.bound)
    assert planner.plans.best is not None
    return planner.plans.best, min(max(bounds), planner.best_time)


def _best_of_all(search: Search, deadline: float) -> tuple[Evaluation | None, float]:
    """Simulates every split until ``deadline``."""
    search.times(all_splits(search.problem), deadline=deadline)
    proved = not passed(deadline)
    if search.best is None:
        return None, math.inf if proved else 0.0
    return evaluate(search.problem, search.choice.plan(search.best)), search.best_time if proved else 0.0


def _highest(bounds: list[float], process: BoundProcess) -> float:
    return max(*bounds, process.bound)


class _Planner:
    """The search for plans: splits judged by the program, whose recomputation is then chosen."""

    def __init__(
        self, problem: Problem, table: Timetable, mixes: Mixes, search: Search, deadline: float = math.inf
    ) -> None:
        self.problem, self.search = problem, search
        self.random = np.random.default_rng(0)
        self.program = PathProgram(problem, table)
        self.program.deadline = deadline
        for visits, delay in zip(search.paths.visits, search.paths.delays, strict=True):
            self.program.add_path(visits, delay)
        self.descent = LayerDescent(self.program, self.random)
        self.rounding = StageRounding(self.program, search.choice, self.random)
        self.plans = Reoptimiser(PathProgram(problem, table), mixes)
        assert search.best is not None
        self.plans.offer(search.choice.plan(search.best))
        self.split, self.value = search.best, math.inf
        self.together = 2  # stages that are planned anew at once
        self.chosen: dict[bytes, bool] = {}  # splits whose recomputation was looked for, and whether it was found

    @property
    def best_time(self) -> float:
        """The step of the best plan."""
        return self.plans.best_time

    def proved(self, bound: float) -> bool:
        """Whether the best plan needs no improvement."""
        return self.best_time * (1 - PROVEN) <= bound * (1 + 1e-12)

    def first_plans(self, deadline: float, bound: Callable[[], float]) -> None:
        """Splits from the best so far and from answers of the program, and the recomputation of the best."""
        starts = []
        for number in range(DIVES + 1):
            start = dive(self.program, self.random, deadline) if number else self.split
            if start is not None and not passed(deadline) and not self.proved(bound()):
                value = self.descent.judge(start, deadline, self.value * (1 + FAR))
                self._take(start, value, deadline)
                starts.append((value, start))
        for _, start in sorted(starts, key=lambda each: each[0]):
            if not passed(deadline) and not self.proved(bound()):
                self._descend(start, deadline)

    def improve(self, deadline: float, bound: Callable[[], float]) -> None:
        """Goes on in five ways, each with its share of the time, until ``deadline`` or until nothing is left to gain."""
        ways = {
            lambda: self._choose(self.split, deadline): 0.1,
            lambda: self._descend(self.descent.shaken(self.split), deadline): 0.5,
            lambda: self._round(self.split, deadline): 0.1,
            lambda: self._plan_anew(deadline): 0.2,
            lambda: self._wander(deadline): 0.1,
        }
        spent = dict.fromkeys(ways, 0.0)
        while not passed(deadline) and not self.proved(bound()):
            way = min(ways, key=lambda each: spent[each] / ways[each])
            begun = now()
            way()
            spent[way] += max(now() - begun, 0.01)

    def _wander(self, deadline: float) -> None:
        """Looks for splits by simulated steps for a while; a better plan's split is then judged by the program."""
        before = self.search.best_time
        self.search.wander(min(deadline, now() + WANDER), 0.0)
        if self.search.best_time < before and self.search.best is not None:
            self.search.choice.weigh(self.search.best_weights)
            self.plans.offer(self.search.choice.plan(self.search.best))
            self._descend(self.search.best, deadline)

    def _plan_anew(self, deadline: float) -> None:
        """Plans some stages of the best plan anew: more when that was quick."""
        assert self.plans.best is not None
        self._tell_paths(np.array(self.plans.best.plan.counts), deadline)
        begun = now()
        self.plans.plan_anew(self._some_places(self.together), deadline)
        more = 1 if now() - begun < SECONDS / 4 else -1
        self.together = int(np.clip(self.together + more, 2, self.problem.stages))

    def _descend(self, start: np.ndarray, deadline: float) -> None:
        """Looks for better splits from one, and rounds the recomputation of the last."""
        begun = now()
        self._take(*self.descent.descend(start, begun + DESCENDING * (deadline - begun)), deadline)

    def _take(self, split: np.ndarray, value: float, deadline: float) -> None:
        """Remembers a split that is judged better than the best, and plans it when it may be."""
        if value < self.value * (1 - PROVEN):
            self.split, self.value = split, value
        if value < min(self.value * (1 + NEAR), self.best_time) and split.tobytes() not in self.chosen:
            self._round(split, deadline)
            if self.problem.places <= QUICK and value < self.best_time * (1 - PROVEN):
                self._choose(split, deadline)

    def _round(self, split: np.ndarray, deadline: float) -> None:
        """Rounds the recomputation that the program wants for a split; every further time in another order of stages."""
        plan = self.rounding.plan(split, split.tobytes() not in self.chosen, deadline)
        self.chosen.setdefault(split.tobytes(), False)
        if plan is not None:
            self.plans.offer(plan)

    def _choose(self, split: np.ndarray, deadline: float) -> None:
        """Chooses the recomputation of a split, unless that is answered."""
        if self.chosen.get(split.tobytes()):
            return
        self._tell_paths(split, deadline)
        self.chosen[split.tobytes()] = self.plans.choose_recomputation(split, deadline)

    def _tell_paths(self, split: np.ndarray, deadline: float) -> None:
        """Has the planner of recomputation know the paths that matter for a split."""
        self.descent.judge(split, deadline)
        self.plans.know(self.program.near_paths(NEAR_PATHS))

    def _some_places(self, stages: int) -> np.ndarray:
        """All places of some stages, neighbours or any."""
        count = self.problem.stages
        first = self.random.integers(count)
        row = (
            (first + np.arange(stages)) % count
            if self.random.random() < 0.5
            else self.random.permutation(count)[:stages]
        )
        return (np.arange(self.problem.chunks)[:, None] * count + row).ravel()


def all_splits(problem: Problem) -> np.ndarray:
    """Every split, ``[splits, places]``: with one recompute kind nothing else is to choose, so the best is the optimum."""
    cuts = np.array(list(itertools.combinations(range(1, problem.layer_count), problem.places - 1)), int)
    cuts = cuts.reshape(-1, problem.places - 1)
    edges = np.pad(cuts, ((0, 0), (1, 1)), constant_values=((0, 0), (0, problem.layer_count)))
    return np.diff(edges, axis=1)


def _one_for_another(chunks: int) -> Iterator[tuple[int, ...]]:
    """No change, and a layer more in one chunk for a layer less in another."""
    yield (0,) * chunks
    for more, less in itertools.permutations(range(chunks), 2):
        yield tuple((chunk == more) - (chunk == less) for chunk in range(chunks))


def profiles(problem: Problem) -> np.ndarray:
    """Splits to start from: the same layers on all stages, more or fewer by chunk, the rest spread, ``[splits, places]``."""
    average, left = divmod(problem.layer_count, problem.places)
    found = []
    steps_of_chunks = itertools.product((-1, 0, 1), repeat=problem.chunks)
    for steps in steps_of_chunks if problem.chunks <= MANY else _one_for_another(problem.chunks):
        if sum(steps) == 0 and average + min(steps) >= 1:
            counts = np.repeat(average + np.array(steps), problem.stages)
            for order in (np.arange(problem.places), np.arange(problem.places)[::-1]):
                more = counts.copy()
                more[order[:left]] += 1
                found.append(more)
    return np.unique(found, axis=0)
