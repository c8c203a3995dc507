"""Memory of a program's ranks: a table for people, an object for programs, and a page with a section for each rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindllm.compiled.graph.sources import read_sources
from mindllm.compiled.simulation.simulation import CATEGORIES, Simulation
from mindllm.dry_run.moments import moments_of
from mindllm.dry_run.page import Section, render_sections
from mindllm.dry_run.profile import profile_of
from mindllm.dry_run.report import IN_JSON, verdict
from mindllm.dry_run.source_lines import lines_by_place
from mindllm.dry_run.workspace import attention_elements_in, peak_with_workspace
from mindllm.programs.environment import Report
from mindllm.results import Result
from mindllm.terminal.tables import Table, figures, texts
from mindllm.terminal.text import styled
from mindllm.units import MIB, device_memory, gigabytes, missing_memory

if TYPE_CHECKING:
    from mindllm.results import Part


@dataclass(frozen=True)
class RankRun:
    """A rank whose training step was simulated. ``directory`` contains its results, ``seconds`` is the time it ran."""

    simulation: Simulation
    report: Report
    seconds: float
    directory: Path


@dataclass(frozen=True, repr=False)
class ProgramMemory(Result):
    """Memory that ranks of a program need, by MindSpore's own dry run.

    Attributes:
        runs: the ranks, in order.
        not_alone: why the program could not run on one device; empty if it did, None if that was not tried.
    """

    runs: tuple[RankRun, ...]
    not_alone: str | None = None

    @property
    def fits(self) -> bool:
        """Return True if every rank fits."""
        return all(run.simulation.fits for run in self.runs)

    @property
    def shortage(self) -> str:
        """Return how many ranks do not fit, and the memory that the fullest lacks; empty if all fit."""
        short = [run.simulation for run in self.runs if not run.simulation.fits]
        if not short:
            return ""
        worst = max(short, key=lambda simulation: simulation.used_peak - simulation.limit)
        return (
            f"{len(short)} of {len(self.runs)} ranks do not fit; rank {worst.rank} (stage {worst.stage}) lacks "
            f"{missing_memory(worst.used_peak - worst.limit)} of max_device_memory ({device_memory(worst.limit)})"
        )

    def summary(self) -> str:
        """Return the number of ranks and the verdict."""
        return f"{len(self.runs)} ranks, {'fits' if self.fits else 'does not fit'}"

    def tree(self) -> dict[str, Any]:
        """Return ``{"fits", "mindspore", "ranks": […]}``; a MB is 2**20 bytes, as in MindSpore's lines."""
        return {
            "fits": self.fits,
            "mindspore": self.runs[0].report.mindspore,
            "ranks": [_rank_tree(run) for run in self.runs],
        }

    def parts(self) -> Iterator[Part]:
        """Yield a row for each rank, and the source of the figures."""
        yield memory_table(self.runs)
        yield (
            f"MindSpore {self.runs[0].report.mindspore}'s own dry run, one training step; used peak: the sum of the columns "
            "before it; with workspace ≈: an estimate of what kernels need beside it"
        )


def memory_table(runs: Sequence[RankRun]) -> Table:
    """Return a row per rank: device memory in GB (2**30 bytes) at the moment of the peak."""
    limits = sorted({run.simulation.limit for run in runs})
    gb = gigabytes(run.simulation.actual_peak for run in runs)
    memory_columns = (*CATEGORIES, "used peak", "with fragments", "with workspace ≈")
    rows = Table(
        f"Memory of each rank at its peak, GB (limit {', '.join(map(device_memory, limits))})",
        [*figures("stage", "rank", *memory_columns), *texts("verdict"), *figures("compiled in s", "host MB")],
    )
    for run in runs:
        simulation = run.simulation
        used, actual, extra = simulation.used_peak, simulation.actual_peak, workspace(simulation)
        by_category = simulation.peak_by_category()
        rows.add_row(
            str(simulation.stage),
            str(simulation.rank),
            *(gb(by_category[category]) for category in CATEGORIES),
            styled((gb(used), "bold")),
            gb(actual),
            gb(used + extra),
            verdict(used, extra, simulation.limit, gb),
            f"{run.report.compile_seconds:.1f}",
            str(run.report.host_bytes // MIB),
        )
    return rows


def workspace(simulation: Simulation) -> int:
    """Estimate the bytes that kernels need in addition to the used peak."""
    return peak_with_workspace(moments_of(simulation), attention_elements_in(simulation)) - simulation.used_peak


def _rank_tree(run: RankRun) -> dict[str, Any]:
    simulation = run.simulation
    by_category = simulation.peak_by_category()
    return {
        "rank": simulation.rank,
        "stage": simulation.stage,
        "limit_mb": simulation.limit // MIB,
        **{key: round(by_category[category] / MIB, 1) for key, category in IN_JSON.items()},
        "used_peak_mb": simulation.used_peak // MIB,
        "actual_peak_mb": simulation.actual_peak // MIB,
        "workspace_mb": workspace(simulation) // MIB,
        "fits": simulation.fits,
        "collectives": len(simulation.collectives),
        "operators": len(simulation.tasks),
        "compile_seconds": round(run.report.compile_seconds, 1),
        "seconds": round(run.seconds, 1),
        "host_mb": run.report.host_bytes // MIB,
        "kept": str(run.directory),
    }


def render(runs: Sequence[RankRun], command: str) -> str:
    """Return the page as HTML."""
    sections, lines = [], dict[str, str]()
    for run in runs:
        profile = profile_of(run.simulation)
        section = Section(
            name=f"rank {run.simulation.rank}",
            about=f"stage {run.simulation.stage}; simulated by MindSpore {run.report.mindspore}",
            peak=profile.peak,
            actual_peak=profile.actual_peak,
            workspace=workspace(run.simulation),
            shown=profile,
            exact=True,
        )
        sections.append(section)
        # source lines of operators are in the texts of the graphs
        for path in run.directory.glob("*_validate_*.ir"):
            with open(path, encoding="utf-8", errors="replace") as text:
                lines |= lines_by_place(read_sources(text))
    limit = max(run.simulation.limit for run in runs)
    return render_sections(f"{command}: memory of each rank", sections, limit, lines)
