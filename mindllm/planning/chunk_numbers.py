"""How many chunks per stage: each number asked for is planned, the fastest plan is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mindllm.planning.costs.configured import Configured
from mindllm.planning.problem import Problem
from mindllm.planning.reports.plan import gap_text
from mindllm.planning.solve import Infeasible, Solution, solve
from mindllm.terminal.tables import Table, figures


@dataclass(frozen=True)
class Interleave:
    """A problem with some number of chunks per stage.

    Attributes:
        solution: None where no plan fits.
        configured: the run that it is the problem of, if any.
    """

    problem: Problem
    solution: Solution | None
    configured: Configured | None = None

    @property
    def chunks(self) -> int:
        """``pp_interleave_num``."""
        return self.problem.chunks


def try_interleaves(configured: Configured, numbers: Sequence[int], seconds: float) -> list[Interleave]:
    """Plans every number of chunks of a run, each within about ``seconds``; raises as :func:`try_problems`.

    Raises:
        UserError: there are fewer layers than chunks.
    """
    runs = [configured.interleaved(chunks) for chunks in dict.fromkeys(numbers)]
    tried = try_problems([run.problem for run in runs], seconds)
    return [replace(choice, configured=run) for choice, run in zip(tried, runs, strict=True)]


def try_problems(problems: Sequence[Problem], seconds: float) -> list[Interleave]:
    """Plans every problem, each within about ``seconds``.

    Raises:
        Infeasible: none of them fits the memory; what the first one would need.
    """
    tried: list[Interleave] = []
    refused: Infeasible | None = None
    for problem in problems:
        try:
            tried.append(Interleave(problem, solve(problem, seconds)))
        except Infeasible as error:
            refused = refused or error
            tried.append(Interleave(problem, None))
    if refused and not any(choice.solution for choice in tried):
        raise refused
    return tried


def fastest(tried: Sequence[Interleave]) -> Interleave:
    """The one whose plan takes the least time; of equal ones the first."""
    planned = [(choice.solution.best.step_time, number) for number, choice in enumerate(tried) if choice.solution]
    return tried[min(planned)[1]]


def interleaves_table(tried: Sequence[Interleave]) -> Table:
    """Step, bound and fullest stage by number of chunks."""
    names = ("pp_interleave_num", "step", "lower bound", "gap", "fullest stage MB")
    table = Table("chunks per stage", figures(*names))
    for choice in tried:
        found, cells = choice.solution, ("does not fit", "", "", "")
        if found:
            bound = "none" if found.lower_bound is None else f"{found.lower_bound:,.6g}"
            cells = (f"{found.best.step_time:,.6g}", bound, gap_text(found), f"{found.best.peak_mb.max():,.0f}")
        table.add_row(str(choice.chunks), *cells)
    return table
