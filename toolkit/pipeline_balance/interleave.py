"""How many chunks per stage: each number asked for is planned, the fastest plan is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from mindllm.tables import Table, figures
from toolkit.pipeline_balance.configured import Configured
from toolkit.pipeline_balance.solve import Infeasible, Solution, solve


@dataclass(frozen=True)
class Interleave:
    """A run with some number of chunks per stage; ``solution`` is None where no plan fits."""

    configured: Configured
    solution: Solution | None

    @property
    def chunks(self) -> int:
        """``pp_interleave_num``."""
        return self.configured.problem.chunks


def try_interleaves(configured: Configured, numbers: Sequence[int], seconds: float) -> list[Interleave]:
    """Plans every number of chunks, each within about ``seconds``.

    Raises:
        Infeasible: none of them fits the memory; what the first one would need.
        UserError: there are fewer layers than chunks.
    """
    tried: list[Interleave] = []
    refused: Infeasible | None = None
    for run in [configured.interleaved(chunks) for chunks in dict.fromkeys(numbers)]:
        try:
            tried.append(Interleave(run, solve(run.problem, seconds)))
        except Infeasible as error:
            refused = refused or error
            tried.append(Interleave(run, None))
    if refused and not any(choice.solution for choice in tried):
        raise refused
    return tried


def fastest(tried: Sequence[Interleave]) -> Interleave:
    """The one whose plan takes the least time; of equal ones the first."""
    planned = [(choice.solution.best.step_time, number) for number, choice in enumerate(tried) if choice.solution]
    return tried[min(planned)[1]]


def print_interleaves(console: Console, tried: Sequence[Interleave]) -> None:
    """Step, bound and fullest stage by number of chunks."""
    names = ("pp_interleave_num", "step", "no plan takes less than", "gap", "fullest stage MB")
    table = Table("chunks per stage", figures(*names))
    for choice in tried:
        found, cells = choice.solution, ("does not fit", "", "", "")
        if found:
            step, bound, peak = found.best.step_time, found.lower_bound, found.best.peak_mb.max()
            cells = (f"{step:,.6g}", f"{bound:,.6g}", f"{100 * found.gap:.3g}%", f"{peak:,.0f}")
        table.add_row(str(choice.chunks), *cells)
    console.print(table)
