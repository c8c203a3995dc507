"""How to check, and the answer: nothing here takes long to import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mindllm.config import RunConfig
from mindllm.reduced_runs.model import ACCUMULATION_STEPS
from mindllm.verify.scope import Memory, Scope

if TYPE_CHECKING:
    from mindllm.compiled.conformance import Finding
    from mindllm.verify.compare import Comparison

MOST_RANKS = 64  # more take hours to compile


@dataclass(frozen=True)
class Options:
    """How to check. ``real_dtype`` computes in the dtypes of the YAML instead of fp32; a mesh of more than ``most_ranks`` is made
    smaller; ``resume`` also saves and resumes, where the ranks compute what they should. Without ``every_rank`` a few ranks of
    each stage are compiled, and the others derived where that is shown to be right. At most ``accumulation_steps`` are executed.
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
    """The answer: two verdicts.

    ``problems`` is empty where all ranks together compute what a single device does; every one of ``asked_for`` holds where
    their graphs are what the YAML asks for. Where it was not ``executed``, it does not compile, or holds what cannot be
    executed here. ``resumed`` is empty where steps after a resume are those of a run that went on, None where that was not tried.
    ``config`` is that of the small model, ``scope`` what it leaves out of the YAML's. ``compiled``: the ranks that were; all
    others were derived from them. ``refused``: by stage, why none were.
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
        """Whether the graphs have all the YAML asks for."""
        return all(finding.holds for finding in self.asked_for)


def refused(config: RunConfig, error: Exception) -> Outcome:
    """The answer for a configuration that does not compile, or has an operator that cannot be executed here."""
    return Outcome(config, (), (str(error),), config.parallel_config.device_num, executed=False)
