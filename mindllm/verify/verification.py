"""A run verified: the outcome of the check by name, as tables and JSON, and the runs that a directory holds."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindllm.config import RunConfig, is_hugging_face, load_config
from mindllm.config.reading.overrides import Overrides
from mindllm.errors import RunFailed, UserError
from mindllm.results import Result
from mindllm.terminal.progress import Progress, unwatched

if TYPE_CHECKING:  # they import MindSpore
    from mindllm.results import Part
    from mindllm.verify.outcome import Options, Outcome

BASE = "base"
ERRORS_ONLY = "3"


@dataclass(frozen=True, repr=False)
class Verification(Result):
    """Whether all ranks of a run together compute what a single device does, and their graphs are what the YAML asks for.

    Attributes:
        name: of the run.
        outcome: losses, norms, errors and graphs in full.
    """

    name: str
    outcome: Outcome

    @property
    def ok(self) -> bool:
        """Whether both hold."""
        return self.outcome.ok

    @property
    def obeys(self) -> bool:
        """Whether the graphs have all that the YAML asks for."""
        return self.outcome.obeys

    @property
    def problems(self) -> tuple[str, ...]:
        """Where the ranks compute something else; empty where they do not."""
        return self.outcome.problems

    def summary(self) -> str:
        """Return ranks and verdict."""
        return f"{self.outcome.ranks} ranks, {'ok' if self.ok else 'not ok'}"

    def tree(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        from mindllm.verify.report import as_json

        return {"config": self.name, **as_json(self.outcome)}

    def parts(self) -> Iterator[Part]:
        """Yield steps, largest errors, and both verdicts."""
        from mindllm.verify.report import outcome_parts

        yield from outcome_parts(self.outcome, self.name)


def verify_run(
    config: RunConfig, options: Options, name: str = "run", progress: Progress = unwatched, one_of_many: bool = False
) -> Verification:
    """Compile all ranks of a run with a small model, execute them together, and compare them with a single device.

    Args:
        config: the run.
        options: how to check.
        name: what the result calls it.
        progress: told of ranks that are compiled, and of what follows.
        one_of_many: what cannot be checked is an outcome, too, in place of an error.

    Raises:
        UserError: the run describes one device, or does not compile.
        RunFailed: it holds operators that cannot be executed here.
    """
    several(config)
    quiet()
    from mindllm.verify.check import check
    from mindllm.verify.outcome import refused

    try:
        return Verification(name, check(config, options, progress))
    except (UserError, RunFailed) as error:
        if not one_of_many:
            raise
        return Verification(name, refused(config, error))


def quiet() -> None:
    """Have MindSpore say errors alone, unless the environment says otherwise; before it is imported."""
    os.environ.setdefault("GLOG_v", ERRORS_ONLY)


def configurations(
    paths: Sequence[Path], overrides: Overrides, broken: dict[str, UserError] | None = None
) -> list[tuple[str, RunConfig]]:
    """Return the runs to check by name: the files, and for a directory those below it that describe several devices.

    What files share stands in directories called ``base`` and is no run. A file of a directory that cannot be read goes into
    ``broken``, so that the others are checked all the same.

    Raises:
        UserError: a file that describes a single device, or a directory without a run on several.
    """
    found: list[tuple[str, RunConfig]] = []
    for path in paths:
        found += _below(path, overrides, broken) if _is_folder(path) else [(str(path), _one(path, overrides))]
    return found


def _is_folder(path: Path) -> bool:
    """Whether it is a directory of YAMLs, not a Hugging Face directory, which is a run itself."""
    return path.is_dir() and not is_hugging_face(path)


def _one(path: Path, overrides: Overrides) -> RunConfig:
    return several(load_config(path, overrides))


def _below(directory: Path, overrides: Overrides, broken: dict[str, UserError] | None) -> list[tuple[str, RunConfig]]:
    """Return the runs below a directory, those of few devices first."""
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
        raise UserError(f"{directory}: holds no YAML of a run on several devices")
    return sorted(runs, key=lambda item: item[1].parallel_config.device_num)


def several(config: RunConfig) -> RunConfig:
    """Refuse what has nothing to prove."""
    if config.parallel_config.device_num == 1:
        raise config.error("parallel_config", "describes one device; there is nothing to compare it with")
    return config
