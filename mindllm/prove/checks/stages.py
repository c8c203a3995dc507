"""Whether every stage fits: by MindSpore's dry run, and before that by formula."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mindllm.config import RunConfig
from mindllm.dry_run.forecast import StageMemory
from mindllm.dry_run.page import PAGE, render_page
from mindllm.dry_run.report import about_fragments
from mindllm.dry_run.run import DryRun, advise, simulate
from mindllm.dry_run.simulations import simulations_here
from mindllm.dry_run.workspace import attention_elements_of
from mindllm.prove.answers import Answer, Finding, Page, Standing, Table
from mindllm.prove.pieces import Options
from mindllm.prove.questions import MEMORY
from mindllm.prove.remedy import LIMIT
from mindllm.terminal.progress import Progress
from mindllm.timing.verdict import limit_text
from mindllm.units import DEVICE_GB, GIB, TENTHS_OF_GB, Gigabytes, gigabytes, missing_memory

COLUMNS = ("stage", "layers", "recomputation", "used GB", "workspace ≈ GB", "peak GB", "room GB", "fragments GB")


def answers(config: RunConfig, options: Options, progress: Progress) -> Iterator[Answer]:
    """Answer whether all stages fit."""
    if config.context.device_target != "Ascend":
        yield not_simulated(config)
        return
    simulations = simulations_here(options.workers, progress)
    found = simulate(config, simulations)
    advice = "" if found.fits else advise(found, simulations, options.advice)
    page = render_page(found.stages, config, found.limit, found.lines, to_proof=True)
    yield replace(judged(found, advice), pages=(Page("what fills the memory", PAGE, page),))


def not_simulated(config: RunConfig) -> Answer:
    """Return the answer for devices that are not simulated."""
    target = config.context.device_target
    reason = Finding(
        f"MindSpore's dry run is of Ascend devices (value {target})",
        "--context.device_target=Ascend asks for the memory of one",
        "context.device_target",
    )
    return Answer(MEMORY, Standing.NOT_PROVED, f"the memory of a {target} is not simulated", (reason,))


def judged(found: DryRun, advice: str) -> Answer:
    """Return the answer of a dry run.

    It is refuted where a stage needs more than the limit, and not proved where only kernels may lack workspace.
    """
    rows = [_Row(memory, found.config) for memory in found.stages]
    fullest = max(rows, key=lambda row: row.peak)
    tight = [row for row in rows if row.peak > found.limit]
    findings = tuple(_shortages(tight, found.limit, advice))
    if not found.fits:
        standing, verb = Standing.REFUTED, "needs"
    else:
        standing, verb = (Standing.NOT_PROVED, "may need") if tight else (Standing.PROVED, "takes")
    says = f"stage {fullest.number} {verb} {TENTHS_OF_GB(fullest.peak)} of {found.limit / GIB:.4g} GB, the most of {len(rows)}"
    gb = gigabytes(row.peak for row in rows)
    table = Table(f"memory of every stage, {DEVICE_GB}", COLUMNS, tuple(row.cells(found.limit, gb) for row in rows))
    sizes = {"limit": found.limit, "reserved": 0.0, "usable": found.limit, "peak": fullest.peak}
    figures = {**sizes, "stages": [row.tree() for row in rows]}
    counted = f"{limit_text(found.limit, reserved=0.0)}: workspace is counted, fragments are not, since devices remap idle pages"
    fragments = about_fragments([row.pool for row in rows], [row.needed for row in rows], found.limit)
    evidence = (counted, *filter(None, [fragments]), *_methods(rows))
    return Answer(MEMORY, standing, says, findings, evidence, (table,), figures)


class _Row:
    """What the answer says of a stage, in bytes."""

    def __init__(self, memory: StageMemory, config: RunConfig) -> None:
        self.number, self.layers = memory.stage.number, memory.stage.layers
        self.recompute, self.method = memory.stage.recompute, memory.method
        self.used, self.pool, self.needed = memory.used_peak, memory.actual_peak, memory.device_peak
        self.workspace = memory.with_workspace(attention_elements_of(config)) - self.needed
        self.categories = {str(name): size for name, size in memory.by_category.items()}

    @property
    def peak(self) -> int:
        """Bytes that a device needs, with workspace."""
        return self.needed + self.workspace

    def cells(self, limit: int, gb: Gigabytes) -> tuple[str, ...]:
        room = limit - self.peak
        left = gb(room) if room >= 0 else f"-{gb.at_least(-room)}"
        sizes = map(gb, (self.used, self.workspace, self.peak))
        return (str(self.number), str(self.layers), self.recompute, *sizes, left, gb(self.pool - self.used))

    def tree(self) -> dict[str, object]:
        return {
            "stage": self.number,
            "layers": self.layers,
            "recompute": self.recompute,
            "used": self.used,
            "fragments": self.pool - self.used,
            "workspace": self.workspace,
            "peak": self.peak,
            "categories": self.categories,
        }


def _methods(rows: list[_Row]) -> Iterator[str]:
    """How the figures were found, once for all stages of which that is the same."""
    stages: dict[str, list[str]] = {}
    for row in rows:
        stages.setdefault(row.method, []).append(str(row.number))
    for method, numbers in stages.items():
        yield f"stage{'s' * (len(numbers) > 1)} {', '.join(numbers)}: {method}"


def _shortages(tight: list[_Row], limit: int, advice: str) -> Iterator[Finding]:
    ways = _ways(advice)
    for row in tight:
        if row.needed > limit:
            gb = gigabytes((row.needed, limit))
            missing = gb.at_least(row.needed - limit)
            needs = f"stage {row.number} needs {gb.at_least(row.needed)} GB of {gb(limit)} GB"
            yield Finding(f"{needs}, {missing} GB more than the limit", ways, LIMIT)
        else:
            over = missing_memory(row.peak - limit)
            message = f"stage {row.number} fits, but the workspace of kernels may take {over} more than is left"
            yield Finding(message, "leave more room: lower what is kept, or raise the limit", LIMIT)


def _ways(advice: str) -> str:
    """The changes that close a shortage; where none was found, what was tried and how much it leaves short."""
    lines = [line for line in advice.splitlines() if not line.startswith("stage ")]
    ways = [line for line in lines if line.startswith("  -")]
    return "; ".join(line.strip().removeprefix("- ") for line in ways or lines)
