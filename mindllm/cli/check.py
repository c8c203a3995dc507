"""What ``mindllm check`` does."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.status import Status

from mindllm.cli.parsers.check import make_parser
from mindllm.command import run_command
from mindllm.config import RunConfig, load_config
from mindllm.console import error_console, output, print_json, styled
from mindllm.errors import CheckFailed, RunFailed, UserError
from mindllm.interrupts import interruptible

BASE = "base"


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks one configuration after the other; returns the exit code."""
    parser = make_parser()
    options, overrides = parser.parse_known_args(arguments)
    if options.steps < 1:
        raise UserError(f"--steps must be at least 1 (value {options.steps})")
    if options.program is not None:
        return _check_program(options, overrides)
    if options.single is not None:
        raise UserError("--single: belongs to --program DIR, which is not given")
    broken: dict[str, UserError] = {}
    configs = configurations(options.config, overrides, broken)
    for error in broken.values():
        error_console.print(styled(("error:", "bold red"), f" {error}"))
    os.environ.setdefault("GLOG_v", "3")
    from mindllm.compiled.rank.compile_ranks import cache_directory
    from mindllm.verify.check import Options, Outcome, check, refused
    from mindllm.verify.report import as_json, print_outcome, write_table

    cache = None if options.no_cache else options.cache or cache_directory()
    how = Options(
        options.steps, options.real_dtype, options.mindspore_kernels, options.workers, cache, options.most_ranks
    )
    outcomes: list[tuple[str, Outcome]] = []
    for name, config in configs:
        try:
            with interruptible(), error_console.status(name, spinner="line") as status:
                outcome = check(config, how, partial(_show, status, name))
        except (UserError, RunFailed) as error:
            if len(configs) == 1:
                raise
            outcome = refused(config, error)
        outcomes.append((name, outcome))
        if not options.json:
            print_outcome(outcome, name, output)
        if options.table:
            write_table(outcomes, options.table)
    if options.json:
        found = [{"config": name, **as_json(outcome)} for name, outcome in outcomes]
        found += [{"config": name, "ok": False, "problems": [str(error)]} for name, error in broken.items()]
        print_json(found[0] if len(found) == 1 else found)
    if not all(outcome.ok for _, outcome in outcomes):
        return CheckFailed.exit_code
    return UserError.exit_code if broken else 0


def _check_program(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """A program that is not mindllm's."""
    if overrides:
        raise UserError(f"{overrides[0]}: no such option; keys of a run go with --config")
    os.environ.setdefault("GLOG_v", "3")
    from mindllm.verify.program import as_json, check_program, lines

    with interruptible():
        outcome = check_program(options.program, options.single, options.steps)
    if options.json:
        print_json(as_json(outcome))
    else:
        for line in lines(outcome):
            output.print(line)
    return 0 if outcome.ok else CheckFailed.exit_code


def configurations(
    paths: Sequence[Path], overrides: Sequence[str], broken: dict[str, UserError] | None = None
) -> list[tuple[str, RunConfig]]:
    """The runs to check by name: the files, and in place of a directory those below it that describe several devices.

    What files share stands in directories called ``base`` and is no run. A file of a directory that cannot be read goes into
    ``broken``, so that the others are checked all the same.

    Raises:
        UserError: a file that describes a single device, or a directory without a run on several.
    """
    found: list[tuple[str, RunConfig]] = []
    for path in paths:
        if not path.is_dir():
            found.append((str(path), several(load_config(path, overrides))))
            continue
        files = [file for file in sorted(path.rglob("*.yaml")) if BASE not in file.relative_to(path).parts]
        runs = []
        for file in files:
            try:
                runs.append((str(file), load_config(file, overrides)))
            except UserError as error:
                if broken is None:
                    raise
                broken[str(file)] = error
        runs = [(name, run) for name, run in runs if run.parallel_config.device_num > 1]
        if not runs:
            raise UserError(f"{path}: holds no YAML of a run on several devices")
        found += sorted(runs, key=lambda item: item[1].parallel_config.device_num)
    return found


def _show(status: Status, name: str, text: str) -> None:
    status.update(f"{name}: {text}")


def several(config: RunConfig) -> RunConfig:
    """Refuses what has nothing to prove."""
    if config.parallel_config.device_num == 1:
        raise config.error("parallel_config", "describes one device; there is nothing to compare it with")
    return config


if __name__ == "__main__":
    run_command(main)
