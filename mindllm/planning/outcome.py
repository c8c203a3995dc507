"""Plan a subject: solve every number of chunks, choose the fastest, validate it by a dry run, compare it with the YAML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindllm.config import RunConfig
from mindllm.errors import UserError
from mindllm.planning.exports import megatron_options, torch_schedule
from mindllm.planning.plan import Evaluation
from mindllm.planning.problem import Problem
from mindllm.planning.reports.plan import (
    NOT_EVALUATED,
    answer,
    comparison_answer,
    describe_gain,
    gap_text,
    solution_parts,
    validated_answer,
    validated_parts,
)
from mindllm.planning.solve import Infeasible, Solution, solve
from mindllm.planning.subject import Solver, Subject
from mindllm.planning.validate import Validated, planned_config, validate, write_run
from mindllm.planning.yaml_plan import KEYS, YamlPlan, write_plan
from mindllm.results import Result
from mindllm.terminal.tables import Table, figures
from mindllm.timing.verdict import limit_text, memory_limit
from mindllm.units import DEVICE_GB, MIB, gigabytes

if TYPE_CHECKING:
    from mindllm.results import Part


@dataclass(frozen=True)
class Interleave:
    """A problem with some number of chunks per stage.

    Attributes:
        solution: None if no plan fits.
    """

    problem: Problem
    solution: Solution | None

    @property
    def chunks(self) -> int:
        """``pp_interleave_num``."""
        return self.problem.chunks


def try_problems(problems: Sequence[Problem], seconds: float, solver: Solver = solve) -> list[Interleave]:
    """Plan every problem, each within about ``seconds``.

    ``solver`` adds the reported step to plans.

    Raises:
        Infeasible: no problem has a plan that fits the memory; the error of the first problem.
    """
    choices: list[Interleave] = []
    first_error: Infeasible | None = None
    for problem in problems:
        try:
            choices.append(Interleave(problem, solver(problem, seconds)))
        except Infeasible as error:
            first_error = first_error or error
            choices.append(Interleave(problem, None))
    if first_error and not any(choice.solution for choice in choices):
        raise first_error
    return choices


def fastest(tried: Sequence[Interleave]) -> Interleave:
    """Return the first choice with the shortest reported step."""
    planned = [(choice.solution.best.reported_step, number) for number, choice in enumerate(tried) if choice.solution]
    return tried[min(planned)[1]]


def interleaves_table(tried: Sequence[Interleave]) -> Table:
    """Return step, bound and fullest stage by number of chunks."""
    names = ("pp_interleave_num", "step", "objective", "lower bound", "gap", "fullest stage GB")
    table = Table("chunks per stage", figures(*names))
    gb = gigabytes((choice.solution.best.peak_mb.max() for choice in tried if choice.solution), MIB)
    for choice in tried:
        solution, cells = choice.solution, ("does not fit", "", "", "", "")
        if solution:
            bound = "none" if solution.lower_bound is None else f"{solution.lower_bound:,.6g}"
            steps = f"{solution.best.reported_step:,.6g}", f"{solution.best.step_time:,.6g}"
            cells = (*steps, bound, gap_text(solution), gb(solution.best.peak_mb.max()))
        table.add_row(str(choice.chunks), *cells)
    return table


@dataclass(frozen=True, repr=False)
class PipelinePlan(Result):
    """The fastest plan, and a lower bound of the planner's objective for all plans.

    Times are milliseconds if the subject is a run, otherwise in the unit of the problem.

    Attributes:
        subject: what was planned.
        solution: the plan, its bound, and the even split.
        tried: every number of chunks to choose from; empty if there was one.
        validated: the dry runs that validated the plan; None without validation.
    """

    subject: Subject
    solution: Solution
    tried: tuple[Interleave, ...] = ()
    validated: Validated | None = None

    @property
    def best(self) -> Evaluation:
        """The plan with its step, its memory and its bubbles."""
        return self.solution.best

    @property
    def step_time(self) -> float:
        """The step of the plan; for a run the prediction of ``mindllm time`` for the run with the plan in it."""
        return self.best.reported_step

    @property
    def objective(self) -> float:
        """The quantity that the planner minimizes; equal to the step if the subject is not a run."""
        return self.best.step_time

    @property
    def lower_bound(self) -> float | None:
        """A lower bound of the :attr:`objective` of all plans; None if none was proved."""
        return self.solution.lower_bound

    @property
    def gain(self) -> str:
        """The gain over the YAML as it is, in words; empty if that cannot be evaluated."""
        return describe_gain(self.best, self.subject.before) if self.subject.before else ""

    @property
    def written(self) -> YamlPlan:
        """The lists of the YAML.

        Raises:
            UserError: its recomputation has no YAML form.
        """
        lists = write_plan(self.best.problem, self.best.plan)
        if lists is None:
            kinds = ", ".join(self.best.problem.kind_names)
            raise UserError(f"kinds {kinds} have no YAML form; add recompute_kinds to the problem")
        return lists

    @property
    def keys(self) -> dict[str, Any]:
        """The lists as ``--yaml`` writes them."""
        swap = {} if self.written.swap_config is None else {"swap_config": self.written.swap_config}
        return {**{key: getattr(self.written, key) for key in ("offset", *KEYS)}, **swap}

    @property
    def config(self) -> RunConfig:
        """The run with the plan in it.

        Raises:
            UserError: the subject is not a run.
        """
        if self.subject.run is None:
            raise UserError("the plan is for a problem, not for a run; see the attribute keys")
        return planned_config(self.subject.run, self.best.problem, self.best.plan)

    def write(self, path: Path | str) -> None:
        """Write the run with the plan in it, once it has been read back as the same plan."""
        write_run(Path(path), self.config)

    def draw(self, path: Path | str) -> None:
        """Draw the schedule as a picture or a page."""
        from mindllm.planning.reports.picture import draw_schedule

        draw_schedule(self.best, Path(path), self.gain)

    @property
    def torch_schedule(self) -> str:
        """The order of passes as PyTorch's pipelining and torchtitan read it, CSV."""
        return torch_schedule(self.best)

    @property
    def megatron_options(self) -> str:
        """The options of Megatron-LM for the split, one per line, without recomputation, which it has once for all stages."""
        run = self.subject.run
        return megatron_options(self.best, run.model.config.num_nextn_predict_layers if run else 0)

    def explain(self, seconds: float = 60.0) -> list[str]:
        """Return the binding constraint and the gain of more memory; replans, each time within about ``seconds``."""
        from mindllm.planning.explain import explain, lines

        return list(lines(self.solution, explain(self.solution, seconds, self.subject.solve)))

    def summary(self) -> str:
        """Return the step and the gap to the lower bound."""
        gap = self.solution.gap
        return f"step {self.step_time:,.6g}, gap {'unknown' if gap is None else f'{100 * gap:.3g}%'}"

    def tree(self) -> dict[str, Any]:
        """Return the output of ``--json``."""
        subject = self.subject
        return {
            **answer(self.solution),
            **(comparison_answer(self.best, subject.before) if subject.run else {}),
            **self._limit_tree(),
            **(validated_answer(self.validated) if self.validated else {}),
        }

    def _limit_tree(self) -> dict[str, Any]:
        """Return the memory of a device in MB: the limit of a run, and the part that plans may use."""
        subject = self.subject
        if subject.run is None or subject.device is None:
            return {}
        usable = max(self.best.problem.per_stage("limit_mb"))
        return {"memory_limit_mb": memory_limit(subject.run, subject.device) / MIB, "memory_usable_mb": usable}

    def parts(self) -> Iterator[Part]:
        """Yield the costs, the choice of chunks, the dry runs, and the plan with a comparison."""
        yield from self.subject.parts()
        yield from self.choice()
        yield from self.answer()

    def choice(self) -> Iterator[Part]:
        """Yield the table of numbers of chunks, if there were several."""
        if self.tried:
            yield interleaves_table(self.tried)

    def answer(self) -> Iterator[Part]:
        """Yield the dry runs, the plan with a comparison, and its memory limit."""
        subject = self.subject
        if self.validated:
            yield from validated_parts(self.validated)
        yield from solution_parts(self.solution, subject.before)
        if subject.run and not subject.before:
            yield NOT_EVALUATED
        if subject.run and subject.device:
            yield f"memory by formula, {DEVICE_GB}: {limit_text(memory_limit(subject.run, subject.device))}"


def make_plan(subject: Subject, seconds: float = 60.0, confirm: bool = False) -> PipelinePlan:
    """Plan every problem of a subject within about ``seconds`` each, and return the fastest plan.

    With ``confirm`` the plan of a run is validated by a dry run and corrected until confirmed.

    Raises:
        Infeasible: no plan fits the memory.
        CheckFailed: no plan fits in the dry run.
        UserError: no plan was found in that time.
    """
    try:
        tried = try_problems(subject.problems, seconds, subject.solve) if len(subject.problems) > 1 else []
        chosen = fastest(tried) if tried else Interleave(subject.problems[0], None)
        if not (confirm and subject.run and subject.device and subject.simulations):
            return PipelinePlan(subject, chosen.solution or subject.solve(chosen.problem, seconds), tuple(tried))
        limit_mb = memory_limit(subject.run, subject.device) / MIB
        validated = validate(subject.run, chosen.problem, limit_mb, seconds, subject.simulations, subject.predict_step)
        return PipelinePlan(subject, subject.predict_steps(validated.chosen.solution), tuple(tried), validated)
    except Infeasible as error:
        raise subject.suggest_memory(error) from None
