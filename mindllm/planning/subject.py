"""What is planned: problems with where their costs come from, one for every number of chunks that may be chosen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindllm.config import RunConfig
from mindllm.dry_run.simulations import Simulations
from mindllm.planning.costs.configured import Configured, configured_problem, with_memory
from mindllm.planning.costs.formula import formula_as_it_is, formula_problems
from mindllm.planning.costs.measured import Fit, read_measured
from mindllm.planning.from_programs.simulated import read_simulated
from mindllm.planning.from_programs.simulated_costs import SimulatedFit, simulated_problem
from mindllm.planning.plan import Evaluation
from mindllm.planning.problem import Problem, make_problem
from mindllm.planning.read_problem import Setting, read_problem
from mindllm.planning.reports.costs import costs_parts, simulated_parts
from mindllm.planning.reports.plan import fit_parts
from mindllm.terminal.progress import Progress, unwatched
from mindllm.timing.device import Device

if TYPE_CHECKING:
    from mindllm.results import Part


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
    """

    problems: tuple[Problem, ...]
    run: RunConfig | None = None
    before: Evaluation | None = None
    configured: Configured | None = None
    simulations: Simulations | None = None
    fit: Fit | None = None
    programs: SimulatedFit | None = None

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
    return Subject((configured.problem,), configured.config, configured.as_it_is(), configured, simulations)


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
    return Subject(problems, config, formula_as_it_is(config, device), simulations=simulations)


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
