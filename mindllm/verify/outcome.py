"""Options and outcome of the cluster check. Importing this does not import MindSpore."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mindllm.config import RunConfig
from mindllm.reduced_runs.model import ACCUMULATION_STEPS
from mindllm.verify.scope import Memory, Scope

if TYPE_CHECKING:  # these import MindSpore
    from mindllm.compiled.conformance import Finding
    from mindllm.verify.compare import Comparison

MOST_RANKS = 64  # more take hours to compile


@dataclass(frozen=True)
class Options:
    """Options of a check.

    Attributes:
        steps: optimizer steps, in addition to overflowing ones.
        real_dtype: compute in the dtypes of the YAML instead of fp32.
        mindspore_kernels: use MindSpore's CPU kernels for elementary operators.
        workers: ranks compiled at a time; None: by cores and memory.
        cache: directory of compiled graphs; None: none are kept.
        most_ranks: a larger mesh is reduced.
        resume: also save a checkpoint and continue from it, if all ranks match.
        every_rank: compile every rank; otherwise ranks are derived if that is shown to be right.
        accumulation_steps: the most that are executed.
    """

    steps: int = 2
    real_dtype: bool = False
    mindspore_kernels: bool = False
    workers: int | None = None
    cache: Path | None = None
    most_ranks: int = MOST_RANKS
    resume: bool = False
    every_rank: bool = False
    accumulation_steps: int = ACCUMULATION_STEPS


@dataclass(frozen=True)
class Outcome:
    """Result of a check.

    Attributes:
        config: of the small model.
        comparisons: a comparison for each step.
        problems: differences from the single device; empty if all ranks match it.
        ranks: number of ranks.
        first_difference: the operator at which a difference begins.
        asked_for: properties of the graphs, each with the YAML's value.
        executed: False if the run does not compile, or has an operator that cannot be executed here.
        seconds: time by phase.
        scope: what the small model leaves out.
        memory: of this machine.
        resumed: differences after a resume; None if that was not tried.
        compiled: ranks that were compiled; the others were derived from them.
        refused: by stage, why no rank was derived.
    """

    config: RunConfig
    comparisons: tuple[Comparison, ...]
    problems: tuple[str, ...]
    ranks: int
    first_difference: str = ""
    asked_for: tuple[Finding, ...] = ()
    executed: bool = True
    seconds: Mapping[str, float] = field(default_factory=dict)
    scope: Scope | None = None
    memory: Memory | None = None
    resumed: tuple[str, ...] | None = None
    compiled: tuple[int, ...] = ()
    refused: Mapping[int, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.problems and self.obeys

    @property
    def obeys(self) -> bool:
        """Return True if the graphs match the YAML."""
        return all(finding.holds for finding in self.asked_for)


def not_executed(config: RunConfig, error: Exception) -> Outcome:
    """Return the outcome of a run that does not compile, or has an operator that cannot be executed here."""
    return Outcome(config, (), (str(error),), config.parallel_config.device_num, executed=False)
