"""The page of an offline run: that of the dry run, a section for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mindllm.compiled.graph.sources import read_sources
from mindllm.dry_run.page import Section, render_sections
from mindllm.dry_run.profile import profile_of
from mindllm.dry_run.program.report import workspace
from mindllm.dry_run.program.running import RankRun
from mindllm.dry_run.source_lines import Lines, lines_by_place


def render(runs: Sequence[RankRun], command: str) -> str:
    """Returns the page as HTML."""
    limit = max(run.simulation.limit for run in runs)
    return render_sections(f"{command}: memory of each rank", [_section(run) for run in runs], limit, _lines(runs))


def _section(run: RankRun) -> Section:
    simulation, profile = run.simulation, profile_of(run.simulation)
    return Section(
        name=f"rank {simulation.rank}",
        about=f"stage {simulation.stage}; simulated by MindSpore {run.report.mindspore}",
        peak=profile.peak,
        actual_peak=profile.actual_peak,
        workspace=workspace(simulation),
        shown=profile,
        exact=True,
    )


def _lines(runs: Sequence[RankRun]) -> Lines:
    """Source lines of the operators of all ranks, from the texts of their graphs."""
    lines: dict[str, str] = {}
    for run in runs:
        for path in Path(run.directory).glob("*_validate_*.ir"):
            with open(path, encoding="utf-8", errors="replace") as text:
                lines |= lines_by_place(read_sources(text))
    return lines
