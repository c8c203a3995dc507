"""Verify a run, and select the runs to verify. Importing this does not import MindSpore."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindllm.config import RunConfig, is_hugging_face, load_config
from mindllm.config.reading.overrides import Overrides
from mindllm.errors import UserError
from mindllm.results import Result
from mindllm.terminal.progress import Progress, unwatched
from mindllm.verify.outcome import Options, Outcome

if TYPE_CHECKING:
    from mindllm.results import Part

BASE = "base"  # directories of what YAMLs share
ERRORS_ONLY = "3"


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
