"""Planning with several chunks per stage: search splits with the program over paths, and bound them by a tree in parallel."""

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
from mindllm.planning.several_chunks.bound_process import BoundProcess, build_tree
from mindllm.planning.several_chunks.layer_descent import LayerDescent
from mindllm.planning.several_chunks.path_program import PathProgram
from mindllm.planning.several_chunks.reoptimise import SECONDS, Reoptimiser, StageRounding, dive
from mindllm.schedules.orders import Timetable, timetable

PROVEN = 1e-4  # a gap that ends the work
MANY = 6  # chunks beyond which not all profiles are tried
PROFILES = 16  # that are simulated at a time
FEW = 20_000  # splits that are all simulated
SMALL = 1500  # operations of a problem that is first tried without a process for the bound
FIRST_SECONDS = 1.5  # for that
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
    """Return a plan, None without one, and a lower bound of the makespan: 0 without one, infinite if no plan exists.

    ``first`` is the deadline of a first plan if there is no ``even`` split.

    Raises:
        OutOfTime: there was no plan before its deadline.
    """
    orders, mixes, started = problem_orders(problem), Mixes(problem, first), now()
    table = timetable(orders, problem.chunks)
    search = Search(problem, StageChoice(problem, mixes, orders), table)
    if even is not None:
        search.times(np.array([even.plan.counts]), deadline=first)
    if len(problem.kind_names) == 1 and math.comb(problem.layer_count - 1, problem.places - 1) <= FEW:
        return _simulate_all(search, first)
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
            tree = build_tree(problem, planner.best_time, PROVEN, deadline)
            tree.bound(min(deadline, now() + FIRST_SECONDS), bounds.append)
            planner.first_plans(min(deadline, now() + FIRST_SECONDS), lambda: max(bounds))
    for work in (planner.first_plans, planner.improve):
        if not planner.proved(max(bounds)) and not passed(deadline):  # a restarted proof is quicker
            bound_process = BoundProcess(problem, planner.best_time, PROVEN, deadline - now())
            with bound_process as process, contextlib.suppress(OutOfTime):
                work(deadline, partial(_highest, bounds, process))
            bounds.append(process.bound)
    assert planner.plans.best is not None
    return planner.plans.best, min(max(bounds), planner.best_time)


def _simulate_all(search: Search, deadline: float) -> tuple[Evaluation | None, float]:
    """Simulate every split until ``deadline``."""
    search.times(all_splits(search.problem), deadline=deadline)
    proved = not passed(deadline)
    if search.best is None:
        return None, math.inf if proved else 0.0
    return evaluate(search.problem, search.choice.plan(search.best)), search.best_time if proved else 0.0


def _highest(bounds: list[float], process: BoundProcess) -> float:
    return max(*bounds, process.bound)


class _Planner:
    """The search for plans: splits are judged by the program, then their recomputation is chosen."""

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
        self.together = 2  # stages that are replanned together
        self.chosen: dict[bytes, bool] = {}  # splits whose recomputation was looked for, and whether it was found

    @property
    def best_time(self) -> float:
        """The step of the best plan."""
        return self.plans.best_time

    def proved(self, bound: float) -> bool:
        """Return True if the best plan needs no improvement."""
        return self.best_time * (1 - PROVEN) <= bound * (1 + 1e-12)

    def first_plans(self, deadline: float, bound: Callable[[], float]) -> None:
        """Judge splits from the best plan and from answers of the program, and choose the recomputation of the best."""
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
        """Improve the plan in five ways, each with its share of the time, until ``deadline`` or until nothing can be gained."""
        ways = {
            lambda: self._choose(self.split, deadline): 0.1,
            lambda: self._descend(self.descent.shaken(self.split), deadline): 0.5,
            lambda: self._round(self.split, deadline): 0.1,
            lambda: self._replan(deadline): 0.2,
            lambda: self._wander(deadline): 0.1,
        }
        spent = dict.fromkeys(ways, 0.0)
        while not passed(deadline) and not self.proved(bound()):
            way = min(ways, key=lambda each: spent[each] / ways[each])
            started = now()
            way()
            spent[way] += max(now() - started, 0.01)

    def _wander(self, deadline: float) -> None:
        """Search splits by simulated steps for a while; then judge a better split by the program."""
        before = self.search.best_time
        self.search.wander(min(deadline, now() + WANDER), 0.0)
        if self.search.best_time < before and self.search.best is not None:
            self.search.choice.weigh(self.search.best_weights)
            self.plans.offer(self.search.choice.plan(self.search.best))
            self._descend(self.search.best, deadline)

    def _replan(self, deadline: float) -> None:
        """Replan some stages of the best plan; more stages next time if that was quick."""
        assert self.plans.best is not None
        self._share_paths(np.array(self.plans.best.plan.counts), deadline)
        started = now()
        self.plans.replan(self._some_places(self.together), deadline)
        more = 1 if now() - started < SECONDS / 4 else -1
        self.together = int(np.clip(self.together + more, 2, self.problem.stages))

    def _descend(self, start: np.ndarray, deadline: float) -> None:
        """Look for better splits from one, and round the recomputation of the last."""
        started = now()
        self._take(*self.descent.descend(start, started + DESCENDING * (deadline - started)), deadline)

    def _take(self, split: np.ndarray, value: float, deadline: float) -> None:
        """Remember a split that is judged better than the best, and plan it if it may be better."""
        if value < self.value * (1 - PROVEN):
            self.split, self.value = split, value
        if value < min(self.value * (1 + NEAR), self.best_time) and split.tobytes() not in self.chosen:
            self._round(split, deadline)
            if self.problem.places <= QUICK and value < self.best_time * (1 - PROVEN):
                self._choose(split, deadline)

    def _round(self, split: np.ndarray, deadline: float) -> None:
        """Round the recomputation of a split; after the first time in another order of stages."""
        plan = self.rounding.plan(split, split.tobytes() not in self.chosen, deadline)
        self.chosen.setdefault(split.tobytes(), False)
        if plan is not None:
            self.plans.offer(plan)

    def _choose(self, split: np.ndarray, deadline: float) -> None:
        """Choose the recomputation of a split, unless it is known."""
        if self.chosen.get(split.tobytes()):
            return
        self._share_paths(split, deadline)
        self.chosen[split.tobytes()] = self.plans.choose_recomputation(split, deadline)

    def _share_paths(self, split: np.ndarray, deadline: float) -> None:
        """Give the planner of recomputation the paths that matter for a split."""
        self.descent.judge(split, deadline)
        self.plans.know(self.program.near_paths(NEAR_PATHS))

    def _some_places(self, stages: int) -> np.ndarray:
        """Return all places of some stages, consecutive or random."""
        count = self.problem.stages
        first = self.random.integers(count)
        row = (
            (first + np.arange(stages)) % count
            if self.random.random() < 0.5
            else self.random.permutation(count)[:stages]
        )
        return (np.arange(self.problem.chunks)[:, None] * count + row).ravel()


def all_splits(problem: Problem) -> np.ndarray:
    """Return every split, ``[splits, places]``: with one recompute kind the best of them is the optimum."""
    cuts = np.array(list(itertools.combinations(range(1, problem.layer_count), problem.places - 1)), int)
    cuts = cuts.reshape(-1, problem.places - 1)
    edges = np.pad(cuts, ((0, 0), (1, 1)), constant_values=((0, 0), (0, problem.layer_count)))
    return np.diff(edges, axis=1)


def _chunk_exchanges(chunks: int) -> Iterator[tuple[int, ...]]:
    """Yield no change, and every layer more in one chunk with a layer less in another."""
    yield (0,) * chunks
    for more, less in itertools.permutations(range(chunks), 2):
        yield tuple((chunk == more) - (chunk == less) for chunk in range(chunks))


def profiles(problem: Problem) -> np.ndarray:
    """Return initial splits, ``[splits, places]``: equal stages, more or fewer layers by chunk, the rest spread."""
    average, rest = divmod(problem.layer_count, problem.places)
    splits = []
    chunk_steps = itertools.product((-1, 0, 1), repeat=problem.chunks)
    for steps in chunk_steps if problem.chunks <= MANY else _chunk_exchanges(problem.chunks):
        if sum(steps) == 0 and average + min(steps) >= 1:
            counts = np.repeat(average + np.array(steps), problem.stages)
            for order in (np.arange(problem.places), np.arange(problem.places)[::-1]):
                more = counts.copy()
                more[order[:rest]] += 1
                splits.append(more)
    return np.unique(splits, axis=0)
