"""Options and outcome of the cluster check, and functions that verify a run. Importing this does not import MindSpore."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindllm.config import RunConfig, is_hugging_face, load_config
from mindllm.config.reading.overrides import Overrides
from mindllm.errors import UserError
from mindllm.reduced_runs.model import ACCUMULATION_STEPS
from mindllm.results import Result
from mindllm.terminal.progress import Progress, unwatched
from mindllm.verify.scope import Memory, Scope

if TYPE_CHECKING:  # these import MindSpore
    from mindllm.compiled.conformance import Finding
    from mindllm.results import Part
    from mindllm.verify.compare import Comparison

MOST_RANKS = 64  # more take hours to compile
BASE = "base"  # directories of what YAMLs share
ERRORS_ONLY = "3"


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


@dataclass(frozen=True, repr=False)
class Verification(Result):
    """The outcome of checking a run.

    Attributes:
        name: of the run.
        outcome: losses, norms, errors and graphs in full.
    """

    name: str
    outcome: Outcome

    @property
    def ok(self) -> bool:
        """Return True if all ranks match a single device and the graphs match the YAML."""
        return self.outcome.ok

    @property
    def obeys(self) -> bool:
        """Return True if the graphs match the YAML."""
        return self.outcome.obeys

    @property
    def problems(self) -> tuple[str, ...]:
        """Differences from the single device; empty if there are none."""
        return self.outcome.problems

    def summary(self) -> str:
        """Return the number of ranks and the verdict."""
        return f"{self.outcome.ranks} ranks, {'ok' if self.ok else 'not ok'}"

    def tree(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        from mindllm.verify.report import as_json

        return {"config": self.name, **as_json(self.outcome)}

    def parts(self) -> Iterator[Part]:
        """Yield steps, largest errors, and both verdicts."""
        from mindllm.verify.report import outcome_parts

        yield from outcome_parts(self.outcome, self.name)


def verify_run(config: RunConfig, options: Options, name: str = "run", progress: Progress = unwatched) -> Verification:
    """Compile all ranks of a run with a small model, execute them together, and compare them with a single device.

    Args:
        config: the run.
        options: of the check.
        name: of the run in the result.
        progress: receives ranks that are compiled, and later phases.

    Raises:
        UserError: the run uses a single device, or does not compile.
        RunFailed: it has operators that cannot be executed here.
    """
    require_multi_device(config)
    silence_mindspore()
    from mindllm.verify.check import check

    return Verification(name, check(config, options, progress))


def not_executed(config: RunConfig, error: Exception) -> Outcome:
    """Return the outcome of a run that does not compile, or has an operator that cannot be executed here."""
    return Outcome(config, (), (str(error),), config.parallel_config.device_num, executed=False)


def silence_mindspore() -> None:
    """Log only MindSpore errors, unless the environment sets a level. Must be called before MindSpore is imported."""
    os.environ.setdefault("GLOG_v", ERRORS_ONLY)


def require_multi_device(config: RunConfig) -> RunConfig:
    """Raise UserError if the run uses a single device."""
    if config.parallel_config.device_num == 1:
        raise config.error("parallel_config", "describes one device; there is nothing to compare it with")
    return config


def configurations(
    paths: Sequence[Path], overrides: Overrides, broken: dict[str, UserError] | None = None
) -> list[tuple[str, RunConfig]]:
    """Return the runs to check by name: files, and in a directory those that use several devices.

    Directories called ``base`` contain what YAMLs share, and no runs.

    Args:
        paths: files and directories.
        overrides: keys for all of them.
        broken: receives the errors of files in directories, so that the others are still checked.

    Raises:
        UserError: a file describes a single device, or a directory contains no run on several.
    """
    runs: list[tuple[str, RunConfig]] = []
    for path in paths:
        # a Hugging Face directory is one run
        if path.is_dir() and not is_hugging_face(path):
            runs += _runs_below(path, overrides, broken)
        else:
            runs.append((str(path), require_multi_device(load_config(path, overrides))))
    return runs


def _runs_below(
    directory: Path, overrides: Overrides, broken: dict[str, UserError] | None
) -> list[tuple[str, RunConfig]]:
    """Return the runs on several devices below a directory, those with few devices first."""
    runs = []
    for file in sorted(directory.rglob("*.yaml")):
        if BASE in file.relative_to(directory).parts:
            continue
        try:
            runs.append((str(file), load_config(file, overrides)))
        except UserError as error:
            if broken is None:
                raise
            broken[str(file)] = error
    runs = [(name, run) for name, run in runs if run.parallel_config.device_num > 1]
    if not runs:
        raise UserError(f"{directory}: contains no YAML of a run on several devices")
    return sorted(runs, key=lambda item: item[1].parallel_config.device_num)
