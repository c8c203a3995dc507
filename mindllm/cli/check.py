"""What ``mindllm check`` does."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from mindllm.cli.parsers.check import make_parser
from mindllm.command import run_command
from mindllm.errors import CheckFailed, UserError
from mindllm.process.interrupts import interruptible
from mindllm.results import SCHEMA
from mindllm.terminal.console import error_console, print_json
from mindllm.terminal.progress import Progress
from mindllm.terminal.render import drawn, show
from mindllm.terminal.text import styled
from mindllm.verify.verification import Verification, configurations, quiet, verify_run

if TYPE_CHECKING:  # they import MindSpore
    from mindllm.verify.outcome import Options


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
    outcomes = []
    how = _how(options)
    for name, config in configs:
        with interruptible(), drawn() as progress:
            found = verify_run(config, how, name, partial(_named, progress, name), len(configs) > 1)
        outcomes.append(found)
        if not options.json:
            show(found, as_json=False)
        if options.table:
            from mindllm.verify.report import write_table

            write_table([(found.name, found.outcome) for found in outcomes], options.table)
    if options.json:
        trees = [found.to_dict() for found in outcomes]
        said = {SCHEMA: Verification.schema, "ok": False}
        trees += [{**said, "config": name, "problems": [str(error)]} for name, error in broken.items()]
        print_json(trees[0] if len(trees) == 1 else trees)
    if not all(found.ok for found in outcomes):
        return CheckFailed.exit_code
    return UserError.exit_code if broken else 0


def _how(options: argparse.Namespace) -> Options:
    """How to check, by the options."""
    quiet()
    from mindllm.compiled.rank.compile_ranks import cache_directory
    from mindllm.verify.outcome import Options

    cache = None if options.no_cache else options.cache or cache_directory()
    return Options(
        options.steps,
        options.real_dtype,
        options.mindspore_kernels,
        options.workers,
        cache,
        options.most_ranks,
        every_rank=options.every_rank,
        accumulation_steps=options.accumulation_steps,
    )


def _named(progress: Progress, name: str, what: str, done: int = 0, total: int | None = None) -> None:
    progress(f"{name}: {what}", done, total)


def _check_program(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """A program that is not mindllm's."""
    if overrides:
        raise UserError(f"{overrides[0]}: no such option; keys of a run go with --config")
    quiet()
    from mindllm.verify.program import check_program

    with interruptible():
        outcome = check_program(options.program, options.single, options.steps)
    show(outcome, options.json)
    return 0 if outcome.ok else CheckFailed.exit_code


if __name__ == "__main__":
    run_command(main)
