"""What ``mindllm accept`` does."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mindllm.accept.accept import ON_CPU_DEVICES, Wanted, accept
from mindllm.accept.acceptance import COLOURS, ON_A_CPU, Acceptance, cells
from mindllm.accept.archive import write_acceptance
from mindllm.accept.claims import chosen
from mindllm.accept.judge import Line, Verdict
from mindllm.cli.parsers.accept import make_parser
from mindllm.command import INTERRUPTED, run_command
from mindllm.errors import CheckFailed, RunFailed
from mindllm.preflight.node import visible_devices
from mindllm.terminal.console import error_console, output
from mindllm.terminal.render import drawn, show
from mindllm.terminal.text import styled
from mindllm.timing.device import read_device


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the claims, write page and archive, and return the exit code."""
    options = make_parser().parse_args(arguments)
    wanted = _wanted(options)
    if not wanted.here:
        error_console.print(ON_A_CPU)
    with drawn() as progress:
        found = accept(
            wanted,
            lambda line: None if options.json else _print(line),
            _explain,
            lambda known: _write(known, wanted.output),
            progress,
        )
    page, archive = write_acceptance(found, wanted.output)
    show(found, options.json)
    if not options.json:
        output.print(f"{page}: for people; {archive}: without names, paths or addresses, to hand on")
    return INTERRUPTED if found.interrupted else code_of(found)


def _wanted(options: argparse.Namespace) -> Wanted:
    here = visible_devices()
    names = [name.strip() for name in options.claims.split(",") if name.strip()]
    devices = options.devices or here or ON_CPU_DEVICES
    return Wanted(chosen(names), devices, read_device(options.device), Path(options.output), options.keep, here)


def code_of(found: Acceptance) -> int:
    """Return the exit code: 3 where a claim is refuted, 1 where a run failed or none says anything."""
    verdicts = {found.verdict(claim) for claim in found.claims}
    if Verdict.REFUTED in verdicts:
        return CheckFailed.exit_code
    silent = verdicts <= {Verdict.NOT_RUN}
    return RunFailed.exit_code if Verdict.FAILED in verdicts or silent else 0


def _write(found: Acceptance, directory: Path) -> None:
    write_acceptance(found, directory)


def _print(line: Line) -> None:
    name, figure, predicted, measured = cells(line)
    verdict = (f"{line.verdict.value:<11}", COLOURS[line.verdict])
    output.print(styled(verdict, f"{name} {figure}: predicted {predicted}, measured {measured}; {line.why}"))


def _explain(claim: str, text: str) -> None:
    """Print all that is said of a failure, which is not for the archive."""
    error_console.print(f"{claim}: {text}")


if __name__ == "__main__":
    run_command(main)
