"""Planning subjects: problems with the source of their costs, one for each number of chunks to choose from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindllm.config import RunConfig, override_config
from mindllm.deadline import OutOfTime, now
from mindllm.dry_run.simulations import Simulations
from mindllm.errors import UserError
from mindllm.planning.costs.formula import evaluate_run, formula_problems
from mindllm.planning.costs.measured import Fit, read_measured
from mindllm.planning.plan import Evaluation
from mindllm.planning.problem import Problem, make_problem
from mindllm.planning.read_problem import Setting, read_problem
from mindllm.planning.recomputation.feasible import lightest_split
from mindllm.planning.reports.plan import fit_parts
from mindllm.planning.solve import GRACE, Infeasible, Solution, solve
from mindllm.planning.validate import planned_config
from mindllm.timing.device import Device
from mindllm.timing.prediction import predict_step
from mindllm.timing.verdict import RESERVED
from mindllm.units import GIB, MIB, device_mebibytes

if TYPE_CHECKING:
    from mindllm.results import Part

Solver = Callable[[Problem, float], Solution]


@dataclass(frozen=True)
class Subject:
    """Problems to plan, of which the fastest plan is taken.

    Attributes:
        run: the run that the problems describe; None for a problem in a file.
        before: the run as it is, at the same costs; None if it cannot be evaluated.
        simulations: dry runs that validate a plan.
        fit: the costs fitted to measurements, and their residuals.
        device: the device that steps of the run are predicted on.
    """

    problems: tuple[Problem, ...]
    run: RunConfig | None = None
    before: Evaluation | None = None
    simulations: Simulations | None = None
    fit: Fit | None = None
    device: Device | None = None

    def solve(self, problem: Problem, seconds: float) -> Solution:
        """Plan one of the problems with :func:`mindllm.planning.solve.solve`, and predict its step."""
        return self.predict_steps(solve(problem, seconds))

    def predict_steps(self, solution: Solution) -> Solution:
        """Return a solution with the predicted steps of its plan and of the even split."""
        even = self.predict_step(solution.even) if solution.even else None
        return replace(solution, best=self.predict_step(solution.best), even=even)

    def predict_step(self, evaluation: Evaluation) -> Evaluation:
        """Return a plan with the step that ``mindllm time`` predicts; unchanged if there is no run."""
        if self.run is None or self.device is None:
            return evaluation
        try:
            run = planned_config(self.run, evaluation.problem, evaluation.plan)
        except UserError:  # no lists of a YAML express the plan
            return evaluation
        return _with_prediction(evaluation, run, self.device)

    def suggest_memory(self, error: Infeasible) -> Infeasible:
        """Return ``error`` with the memory limit under which a plan of the run fits; unchanged if there is no run."""
        if self.run is None:
            return error
        deadline = now() + GRACE
        try:
            lacking = [(problem, lightest_split(problem, deadline).missing_mb) for problem in self.problems]
        except OutOfTime:
            return error
        if not all(missing for _, missing in lacking):  # a plan fits by formula, but not in the dry run
            return error
        needed = min(max(problem.per_stage("limit_mb")) + missing for problem, missing in lacking)
        size = math.ceil(needed / (1 - RESERVED) / (GIB // MIB) * 10) / 10
        return Infeasible(f"{error}; with {RESERVED:.0%} reserved that is --max_memory {size:g}GB")

    def parts(self) -> Iterator[Part]:
        """Yield the costs fitted to measurements, if there are any."""
        if self.fit:
            yield from fit_parts(self.fit)


def from_run(
    config: RunConfig,
    device: Device,
    interleave: Sequence[int] | None = None,
    max_memory: str | None = None,
    swap: bool = False,
    simulations: Simulations | None = None,
) -> Subject:
    """Return the subject of a run, with the costs of its architecture by formula.

    Args:
        config: the run.
        device: what steps are predicted on.
        interleave: numbers of chunks per stage to choose from; None: the number of the run.
        max_memory: replaces ``max_device_memory``.
        swap: also choose whose attention waits on the host.
        simulations: dry runs that validate a plan.
    """
    config = with_memory(config, max_memory)
    problems = tuple(formula_problems(config, device, interleave, swap))
    before = evaluate_run(config, device)
    before = _with_prediction(before, config, device) if before else None
    return Subject(problems, config, before, simulations, device=device)


def with_memory(config: RunConfig, size: str | None) -> RunConfig:
    """Return the run with another ``max_device_memory``, such as ``58GB`` or ``58000MB`` (units of 2**30 and 2**20 bytes)."""
    if size is None:
        return config
    gb = device_mebibytes(size) * MIB / GIB
    return override_config(config, {"context.max_device_memory": f"{gb:g}GB"})


def _with_prediction(evaluation: Evaluation, config: RunConfig, device: Device) -> Evaluation:
    """Return the plan of a run with its predicted step; unchanged if the model of time does not cover the run."""
    try:
        return replace(evaluation, predicted=predict_step(config, device))
    except UserError:
        return evaluation


def from_file(path: Path, settings: Sequence[Setting], instance: str | None = None) -> Subject:
    """Return the subject of a problem in a file, under each of several settings."""
    return Subject(tuple(read_problem(path, setting, instance) for setting in settings))


def from_fields(fields: Mapping[str, Any], settings: Sequence[Setting], name: str = "problem") -> Subject:
    """Return the subject of the keys of a problem, under each of several settings; errors call it ``name``."""
    return Subject(tuple(make_problem({**fields, **setting.fields()}, name) for setting in settings))


def from_measurements(paths: Sequence[Path], settings: Sequence[Setting]) -> Subject:
    """Return the subject of the measured files of SAPP."""
    problems, fits = zip(*(read_measured(paths, setting) for setting in settings), strict=True)
    return Subject(problems, fit=fits[-1])
