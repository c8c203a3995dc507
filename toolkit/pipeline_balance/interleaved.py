"""Planning with several chunks per stage: a search for the plan, a program over paths for the bound."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np

from toolkit.pipeline_balance.feasible import lightest_split
from toolkit.pipeline_balance.path_program import PathProgram
from toolkit.pipeline_balance.plan import Plan, orders_of
from toolkit.pipeline_balance.problem import Problem
from toolkit.pipeline_balance.recompute_mix import Mixes
from toolkit.pipeline_balance.schedule import timetable
from toolkit.pipeline_balance.search import Search
from toolkit.pipeline_balance.stage_choice import StageChoice

PROVEN = 1e-4  # a gap that ends the work
FEW = 20_000  # splits that are all simulated
STEPS = (0.1, 0.25, 0.45, 0.7)
"""Shares of the time at which end: the first search, the paths, the search from their answer, the bound of whole layers."""


def solve_interleaved(problem: Problem, until: float) -> tuple[Plan | None, float]:
    """A plan, or None when none was found, and a lower bound of the makespan (infinite when none exists)."""
    started = time.monotonic()
    moments = [started + share * (until - started) for share in STEPS]
    orders = orders_of(problem)
    table = timetable(orders, problem.chunks)
    search = Search(problem, StageChoice(problem, Mixes(problem), orders), table)
    if len(problem.kind_names) == 1 and math.comb(problem.layer_count - 1, problem.places - 1) <= FEW:
        search.times(all_splits(problem))
        return (search.choice.plan(search.best), search.best_time) if search.best is not None else (None, math.inf)
    starts = profiles(problem)
    search.times(starts)
    if search.best is None:
        search.times(lightest_split(problem).counts[None])
    if search.best is None:
        return None, math.inf
    search.descend(search.best, moments[0])
    program = PathProgram(problem, table)
    bound, layers = program.find_paths(search.paths, moments[1])
    if layers is not None:
        search.descend(rounded(layers), moments[2])
    search.wander(moments[2], bound * (1 + PROVEN))
    if bound < search.best_time:
        program.ask_for_whole_layers(search.best_time, moments[3])
        sharper, layers = program.find_paths(search.paths, moments[3])
        sharper = program.whole_stage_bound(sharper, search.paths, moments[3])
        bound = max(bound, min(sharper, search.best_time))
        if layers is not None:
            search.descend(rounded(layers), until)
        bound = max(bound, whole_layer_bound(program, bound, search.best_time, moments[3]))
    search.wander(until, bound * (1 + PROVEN))
    search.choice.weigh(search.best_weights)
    return search.choice.plan(search.best), min(bound, search.best_time)


def all_splits(problem: Problem) -> np.ndarray:
    """Every split, ``[splits, places]``: with one recompute kind nothing else is to choose, so the best is the optimum."""
    cuts = np.array(list(itertools.combinations(range(1, problem.layer_count), problem.places - 1)), int)
    cuts = cuts.reshape(-1, problem.places - 1)
    edges = np.pad(cuts, ((0, 0), (1, 1)), constant_values=((0, 0), (0, problem.layer_count)))
    return np.diff(edges, axis=1)


def whole_layer_bound(program: PathProgram, low: float, high: float, until: float) -> float:
    """Raises a lower bound towards ``high``, by halves, as long as the program proves it in time."""
    if not np.isfinite(high):
        return low
    target = high
    while time.monotonic() < until and target > low * (1 + PROVEN):
        if program.beaten(target, until):
            low, target = target, (target + high) / 2
            if low >= high * (1 - PROVEN):
                break
        else:
            high, target = target, (low + target) / 2
    return low


def profiles(problem: Problem) -> np.ndarray:
    """Splits to start from: the same layers on all stages, more or fewer by chunk, the rest spread, ``[splits, places]``."""
    average, left = divmod(problem.layer_count, problem.places)
    found = []
    for steps in itertools.product((-1, 0, 1), repeat=problem.chunks):
        if sum(steps) == 0 and average + min(steps) >= 1:
            counts = np.repeat(average + np.array(steps), problem.stages)
            for order in (np.arange(problem.places), np.arange(problem.places)[::-1]):
                more = counts.copy()
                more[order[:left]] += 1
                found.append(more)
    return np.unique(found, axis=0)


def rounded(layers: np.ndarray) -> np.ndarray:
    """Whole layers whose running sums are nearest, at least one in each place."""
    sums = np.rint(layers.cumsum()).astype(int)
    counts = np.diff(sums, prepend=0)
    while (counts < 1).any():
        counts[counts.argmax()] -= 1
        counts[counts.argmin()] += 1
    return counts
