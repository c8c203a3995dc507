"""Validate plans by MindSpore's dry run. If it contradicts the prediction, the problem is corrected and solved again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mindllm.config import RunConfig, override_config
from mindllm.config.reading.shorten import source_bases, write_short
from mindllm.dry_run.forecast import StageMemory, forecast_stages
from mindllm.dry_run.simulations import Simulations
from mindllm.dry_run.workspace import attention_elements_of
from mindllm.errors import CheckFailed
from mindllm.parallel.stages import stages_of
from mindllm.planning.plan import Evaluation, Plan, evaluate
from mindllm.planning.problem import Problem
from mindllm.planning.solve import Infeasible, Solution, solve
from mindllm.planning.yaml_plan import write_plan
from mindllm.timing.verdict import Room
from mindllm.units import MIB

ROUNDS = 5
TOLERANCE = 0.01  # of the memory of a stage


@dataclass(frozen=True)
class Round:
    """A plan and the result of its dry run.

    Attributes:
        memories: of every stage.
        limit_mb: of every stage, workspace of kernels included.
        attention_elements: of query, key and value, from which the workspace of kernels is estimated.
    """

    solution: Solution
    memories: Sequence[StageMemory]
    limit_mb: float
    attention_elements: int = 0

    @property
    def used_mb(self) -> list[float]:
        """Used peak of every stage in the dry run."""
        return [memory.used_peak / MIB for memory in self.memories]

    @property
    def differences(self) -> list[float]:
        """Memory of every stage beyond the prediction, in MB."""
        return [used - float(peak) for used, peak in zip(self.used_mb, self.solution.best.peak_mb, strict=True)]

    @property
    def needed_mb(self) -> list[float]:
        """Return the peak of every stage with workspace of kernels, as ``mindllm prove`` compares it."""
        return [memory.with_workspace(self.attention_elements) / MIB for memory in self.memories]

    @property
    def fits(self) -> bool:
        """Return True if every stage fits, workspace included."""
        return all(needed <= self.limit_mb for needed in self.needed_mb)

    @property
    def confirmed(self) -> bool:
        """Whether the plan fits and every stage is near its prediction."""
        return self.fits and all(
            abs(off) <= TOLERANCE * used for off, used in zip(self.differences, self.used_mb, strict=True)
        )


@dataclass(frozen=True)
class Validated:
    """All rounds, and the chosen one: the fastest plan that fits in the dry run."""

    rounds: tuple[Round, ...]
    chosen: Round


def planned_config(config: RunConfig, problem: Problem, plan: Plan) -> RunConfig:
    """Return the run with the plan in it."""
    lists = write_plan(problem, plan)
    assert lists is not None  # kinds of a run have a YAML form
    return override_config(config, lists.overrides(problem))


def write_run(path: Path, planned: RunConfig) -> None:
    """Write a run with a plan in it as differences to its original file.

    Raises:
        UserError: the file cannot be written.
    """
    write_short(planned, path, source_bases(planned))


def check_fits(planned: RunConfig, simulations: Simulations) -> None:
    """Raise CheckFailed if a stage of a run with a plan in it does not fit in the dry run, workspace included."""
    elements = attention_elements_of(planned)
    memories = forecast_stages(planned, stages_of(planned), simulations)
    needed = tuple(float(memory.with_workspace(elements)) for memory in memories)
    room = Room(needed, planned.context.device_memory, reserved=0.0)
    if not room.fits:
        raise CheckFailed(
            f"the plan {room}, in the dry run; plan with a lower --max_memory, or write it with --no-validate"
        )


def validate(
    config: RunConfig,
    problem: Problem,
    limit_mb: float,
    seconds: float,
    simulations: Simulations,
    with_step: Callable[[Evaluation], Evaluation] = lambda evaluation: evaluation,
) -> Validated:
    """Solve, dry-run, correct and solve again until the dry run agrees with the prediction, or ROUNDS times.

    The first correction of a stage goes either way. Later ones only take memory away, so that the rounds end.

    Args:
        config: the run.
        problem: its problem.
        limit_mb: memory of a device, workspace of kernels included.
        seconds: for each plan.
        simulations: the dry runs.
        with_step: adds the reported step to a plan.

    Raises:
        Infeasible: no plan fits.
        CheckFailed: none of the plans fits in the dry run.
    """
    rounds, by_plan = list[Round](), dict[Plan, Round]()
    while len(rounds) < ROUNDS:
        try:
            solution = solve(problem, seconds)
            solution = replace(solution, best=with_step(solution.best))
        except Infeasible:
            if not any(earlier.fits for earlier in rounds):
                raise
            break
        repeated = by_plan.get(solution.best.plan)
        if repeated is not None:  # corrections lead to no new plan
            rounds.append(replace(repeated, solution=solution))
            break
        planned = planned_config(config, problem, solution.best.plan)
        memories = forecast_stages(planned, stages_of(planned), simulations)
        rounds.append(Round(solution, memories, limit_mb, attention_elements_of(planned)))
        by_plan[solution.best.plan] = rounds[-1]
        if rounds[-1].confirmed:
            break
        problem = corrected(problem, rounds[-1], first=len(rounds) == 1)
    fitting = [result for result in reversed(rounds) if result.fits]
    if not fitting:
        raise CheckFailed(f"none of {len(rounds)} plans fits in the dry run; plan with a lower --max_memory")
    chosen = min(fitting, key=lambda result: result.solution.best.reported_step)  # the last of equal plans
    return Validated(tuple(rounds), chosen if chosen.confirmed else _with_dry_run_memory(chosen))


def _with_dry_run_memory(chosen: Round) -> Round:
    """Return the round with its plan in the memory of the dry run; the bound stays that of the solved problem."""
    best = chosen.solution.best
    evaluation = evaluate(corrected(best.problem, chosen, first=True), best.plan)
    best = replace(evaluation, predicted=best.predicted)
    return replace(chosen, solution=replace(chosen.solution, best=best))


def corrected(problem: Problem, result: Round, first: bool) -> Problem:
    """Return the problem with memory corrected by the dry run, and limits reduced by the measured workspace.

    With ``first`` stages that need less than predicted are corrected, too.
    """
    moments = {key: list(problem.per_stage(key)) for key in ("static_mb", "start_mb", "update_mb")}
    limits = list(problem.per_stage("limit_mb"))
    for stage, (off, used, needed_mb) in enumerate(
        zip(result.differences, result.used_mb, result.needed_mb, strict=True)
    ):
        if first or off > 0:
            for needed in moments.values():
                needed[stage] = max(0.0, needed[stage] + off)
        limits[stage] = max(0.0, min(limits[stage], result.limit_mb - (needed_mb - used)))
    changes = {key: tuple(needed) for key, needed in moments.items()} | {"limit_mb": tuple(limits)}
    return problem.model_copy(update=changes)
