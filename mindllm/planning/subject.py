"""What is planned: problems with where their costs come from, one for every number of chunks that may be chosen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindllm.config import RunConfig
from mindllm.deadline import OutOfTime, now
from mindllm.dry_run.simulations import Simulations
from mindllm.errors import UserError
from mindllm.planning.costs.configured import Configured, configured_problem, with_memory
from mindllm.planning.costs.formula import formula_as_it_is, formula_problems
from mindllm.planning.costs.measured import Fit, read_measured
from mindllm.planning.from_programs.simulated import read_simulated
from mindllm.planning.from_programs.simulated_costs import SimulatedFit, simulated_problem
from mindllm.planning.plan import Evaluation
from mindllm.planning.problem import Problem, make_problem
from mindllm.planning.read_problem import Setting, read_problem
from mindllm.planning.recomputation.feasible import lightest_split
from mindllm.planning.reports.costs import costs_parts, simulated_parts
from mindllm.planning.reports.plan import fit_parts
from mindllm.planning.solve import GRACE, Infeasible, Solution, solve
from mindllm.planning.validate import planned_config
from mindllm.terminal.progress import Progress, unwatched
from mindllm.timing.device import Device
from mindllm.timing.prediction import predict_step
from mindllm.timing.verdict import RESERVED
from mindllm.units import GIB, MIB

if TYPE_CHECKING:
    from mindllm.results import Part

Solver = Callable[[Problem, float], Solution]


@dataclass(frozen=True)
class Subject:
    """Problems to plan, of which the fastest plan is taken.

    Attributes:
        run: the run that they are of, if it is one.
        before: the run as it is, at the same costs; None where that cannot be judged.
        configured: what a run's parts cost in small runs, simulated and compiled; with it the chunks are chosen later.
        simulations: what those were found by, and what a plan is held to.
        fit: how well measurements are explained.
        programs: how well simulated programs are explained.
        device: what steps of the run are predicted on.
    """

    problems: tuple[Problem, ...]
    run: RunConfig | None = None
    before: Evaluation | None = None
    configured: Configured | None = None
    simulations: Simulations | None = None
    fit: Fit | None = None
    programs: SimulatedFit | None = None
    device: Device | None = None

    def with_step(self, evaluation: Evaluation) -> Evaluation:
        """Return a plan with the step that ``mindllm time`` predicts of the run with it; unchanged if there is no run."""
        if self.run is None or self.device is None:
            return evaluation
        try:
            run = planned_config(self.run, evaluation.problem, evaluation.plan)
        except UserError:  # no lists of a YAML express it
            return evaluation
        return predicted(evaluation, run, self.device)

    def solve(self, problem: Problem, seconds: float) -> Solution:
        """Plan one of the problems with :func:`mindllm.planning.solve.solve`, and predict its step."""
        return self.timed(solve(problem, seconds))

    def timed(self, solution: Solution) -> Solution:
        """Return a solution with the predicted steps of its plan and of the even split."""
        even = self.with_step(solution.even) if solution.even else None
        return replace(solution, best=self.with_step(solution.best), even=even)

    def infeasible(self, error: Infeasible) -> Infeasible:
        """Return ``error`` with the memory limit under which a plan of the run fits; unchanged if there is no run."""
        if self.run is None:
            return error
        deadline = now() + GRACE
        try:
            lacking = [(problem, lightest_split(problem, deadline).missing_mb) for problem in self.problems]
        except OutOfTime:
            return error
        if not all(missing for _, missing in lacking):  # a plan fits by formula: a dry run refused it
            return error
        needed = min(max(problem.per_stage("limit_mb")) + missing for problem, missing in lacking)
        size = math.ceil(needed / (1 - RESERVED) / (GIB // MIB) * 10) / 10
        return Infeasible(f"{error}; with {RESERVED:.0%} reserved that is --max_memory {size:g}GB")

    def parts(self) -> Iterator[Part]:
        """Yield what the costs are, and how well they explain what was seen; nothing of costs by formula or from a file."""
        if self.configured:
            yield from costs_parts(self.configured)
        if self.fit:
            yield from fit_parts(self.fit)
        if self.programs:
            yield from simulated_parts(self.problems[0], self.programs)


def of_run(config: RunConfig, device: Device, simulations: Simulations, max_memory: str | None = None) -> Subject:
    """Return the subject of a run whose costs are found by simulating and compiling small ones."""
    configured = configured_problem(with_memory(config, max_memory), device, simulations)
    run, before = configured.config, configured.as_it_is()
    before = predicted(before, run, device) if before else None
    return Subject((configured.problem,), run, before, configured, simulations, device=device)


def of_architecture(
    config: RunConfig,
    device: Device,
    interleave: Sequence[int] | None,
    max_memory: str | None = None,
    swap: bool = False,
    simulations: Simulations | None = None,
) -> Subject:
    """Return the subject of a run whose costs are those of its architecture, by formula.

    With ``swap`` plans also choose what waits on the host; ``simulations`` are what a plan may be held to.
    """
    config = with_memory(config, max_memory)
    problems = tuple(formula_problems(config, device, interleave, swap))
    before = formula_as_it_is(config, device)
    before = predicted(before, config, device) if before else None
    return Subject(problems, config, before, simulations=simulations, device=device)


def predicted(evaluation: Evaluation, config: RunConfig, device: Device) -> Evaluation:
    """Return the plan of a run with its step by the model of time; unchanged where that does not model the run."""
    try:
        return replace(evaluation, predicted=predict_step(config, device))
    except UserError:
        return evaluation


def of_problem(path: Path, settings: Sequence[Setting], instance: str | None = None) -> Subject:
    """Return the subject of a problem in a file, under each of several settings."""
    return Subject(tuple(read_problem(path, setting, instance) for setting in settings))


def of_fields(fields: Mapping[str, Any], settings: Sequence[Setting], name: str = "problem") -> Subject:
    """Return the subject of a problem's keys, under each of several settings; errors call it ``name``."""
    return Subject(tuple(make_problem({**fields, **setting.fields()}, name) for setting in settings))


def of_measurements(paths: Sequence[Path], settings: Sequence[Setting]) -> Subject:
    """Return the subject of SAPP's files, as measured."""
    found = [read_measured(paths, setting) for setting in settings]
    return Subject(tuple(problem for problem, _ in found), fit=found[-1][1])


def of_programs(
    directories: Sequence[Path],
    device: Device,
    settings: Sequence[Setting],
    layers: int | None,
    progress: Progress = unwatched,
) -> Subject:
    """Return the subject of simulated programs."""
    runs = read_simulated(directories, device, progress)
    found = [simulated_problem(runs, setting, layers) for setting in settings]
    return Subject(tuple(problem for problem, _ in found), programs=found[0][1])
