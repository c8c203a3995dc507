"""The dry run of a run: the memory of its stages beside the limit, as a table, a page, logs, and what would make it fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindllm.compiled.simulation.simulate_rank import DEVICE_MEMORY, check_simulated
from mindllm.config import RunConfig
from mindllm.dry_run.advice import shortage
from mindllm.dry_run.forecast import StageMemory, forecast_stages, simulate_stages
from mindllm.dry_run.page import PAGE, render_page
from mindllm.dry_run.report import about_fragments, about_planned, about_routing, json_report, log_lines, table
from mindllm.dry_run.simulations import Simulations
from mindllm.dry_run.source_lines import Lines
from mindllm.errors import UserError
from mindllm.files import atomic_open
from mindllm.parallel.stages import Stage, stages_of
from mindllm.results import Result
from mindllm.terminal.page import beside_proof
from mindllm.units import device_memory

if TYPE_CHECKING:
    from mindllm.results import Part

ADVICE_SECONDS = 20


@dataclass(frozen=True, repr=False)
class DryRun(Result):
    """What the stages of a run need, and whether that fits.

    Attributes:
        config: the run.
        stages: what every stage needs, in bytes.
        lines: source lines of operators, for the page; empty where they were not asked for.
        advice: what does not fit and what would help; empty where all fits or nobody asked.
    """

    config: RunConfig
    stages: tuple[StageMemory, ...]
    lines: Lines = field(default_factory=dict)
    advice: str = ""

    @property
    def limit(self) -> int:
        """Bytes that a stage may take."""
        return self.config.context.device_memory

    @property
    def fits(self) -> bool:
        """Whether all stages fit."""
        return all(memory.device_peak <= self.limit for memory in self.stages)

    def summary(self) -> str:
        """Return the fullest stage and the verdict."""
        peak = max(memory.device_peak for memory in self.stages)
        return f"{len(self.stages)} stages, at most {device_memory(peak)}, {'fits' if self.fits else 'does not fit'}"

    def tree(self) -> dict[str, Any]:
        """Return what ``--json`` prints, in MB of 2**20 bytes."""
        holds_for = about_routing(self.config)
        return json_report(self.stages, self.limit) | ({"holds_for": holds_for} if holds_for else {})

    def parts(self) -> Iterator[Part]:
        """Yield the table of stages, and where its figures are from."""
        yield table(self.stages, self.config, self.limit)
        yield (
            "used peak: what MindSpore's dry run reports, the sum of the columns before it; "
            "with workspace ≈: an estimate of what kernels need beside it"
        )
        if any(not memory.exact for memory in self.stages):
            yield (
                "extrapolated: from smaller runs of the same widths, checked against one more, or from fewer micro-batches; "
                "--full simulates stages as they are"
            )
        actual_peaks = [memory.actual_peak for memory in self.stages]
        fragments = about_fragments(actual_peaks, [memory.device_peak for memory in self.stages], self.limit)
        yield from filter(None, [*map(about_planned, self.stages), fragments, about_routing(self.config)])

    def write(self, directory: Path) -> Path:
        """Write a log for each rank and the page of what fills the memory; return the page."""
        for memory in self.stages:
            with atomic_open(directory / f"rank_{memory.stage.rank}.log") as log:
                log.write("\n".join(log_lines(memory, self.config, DEVICE_MEMORY, self.limit)) + "\n")
        with atomic_open(directory / PAGE) as page:
            page.write(render_page(self.stages, self.config, self.limit, self.lines, beside_proof(directory)))
        return directory / PAGE


def simulate(
    config: RunConfig,
    simulations: Simulations,
    numbers: Sequence[int] | None = None,
    full: bool = False,
    with_lines: bool = False,
) -> DryRun:
    """Find the memory of the stages ``numbers`` (None: all), simulated whole with ``full``, extrapolated otherwise.

    Raises:
        UserError: no such stage, another device than Ascend, or what MindSpore's compiler refuses.
        RunFailed: a simulation that ended unexpectedly.
    """
    check_simulated(config)
    stages = chosen_stages(config, numbers)
    if with_lines:
        simulations.prepare_source_lines(config)
    find = simulate_stages if full else forecast_stages
    memories = find(config, stages, simulations)
    return DryRun(config, tuple(memories), simulations.source_lines(config) if with_lines else {})


def advise(found: DryRun, simulations: Simulations, seconds: float = math.inf) -> str:
    """Return what does not fit, by how much, and which changes would help; try none after ``seconds``. Empty where all fits."""
    return "" if found.fits else shortage(found.stages, found.config, found.limit, simulations, seconds)


def chosen_stages(config: RunConfig, numbers: Sequence[int] | None) -> list[Stage]:
    """Return the stages of these numbers (None: all); raise UserError where there is none of one."""
    stages = stages_of(config)
    wanted = sorted(set(range(len(stages)) if numbers is None else numbers))
    unknown = [number for number in wanted if not 0 <= number < len(stages)]
    if unknown:
        raise UserError(f"--stages {unknown[0]}: there is no such stage; write 0 to {len(stages) - 1}")
    return [stages[number] for number in wanted]
