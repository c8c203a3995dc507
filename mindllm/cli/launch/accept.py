"""``mindllm accept``: what mindllm claims, beside a few small runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mindllm.cli.registry import spelled
from mindllm.command import INTERRUPTED, CommandParser, output_directory, positive, run_command
from mindllm.errors import CheckFailed, RunFailed
from mindllm.terminal.console import error_console, output
from mindllm.terminal.render import drawn, show
from mindllm.terminal.text import styled
from mindllm.timing.shipped import DEFAULT, shipped_devices

if TYPE_CHECKING:
    from mindllm.accept.accept import Wanted
    from mindllm.accept.acceptance import Acceptance
    from mindllm.accept.judge import Line

CLAIMS = "single, dp, tp, pp, ep, optimizer, recompute, resume"
EXAMPLES = """examples:
  %(prog)s --devices 8 --output accept
  %(prog)s --claims dp,tp --keep

Exit codes: 0 good, 1 a run failed or no claim was run, 2 wrong input, 3 a claim is refuted.
"""


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        prog=spelled("accept"),
        description="Holds what mindllm claims against a few small runs: on Ascend devices where there are some, otherwise as "
        "processes of this CPU. Leaves one page, and one archive without names, paths or addresses. Installs nothing.",
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "--devices", type=positive, metavar="N", help="devices, or ranks on a CPU (default: all that are here, or 2)"
    )
    parser.add_argument(
        "--output",
        type=output_directory,
        default="accept",
        metavar="DIR",
        help="for page and archive (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        default=DEFAULT,
        metavar="FILE",
        help=f"what steps and links are predicted for: a YAML, or one of {', '.join(shipped_devices())} (default: %(default)s)",
    )
    parser.add_argument("--claims", default="", metavar="LIST", help=f"some of {CLAIMS} (default: all)")
    parser.add_argument("--keep", action="store_true", help="keep the runs; those that failed are kept anyway")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the claims, write page and archive, and return the exit code."""
    options = make_parser().parse_args(arguments)

    from mindllm.accept.accept import accept
    from mindllm.accept.acceptance import ON_A_CPU
    from mindllm.accept.archive import write_acceptance

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
    from mindllm.accept.accept import ON_CPU_DEVICES, Wanted
    from mindllm.accept.claims import chosen
    from mindllm.preflight.node import visible_devices
    from mindllm.timing.device import read_device

    here = visible_devices()
    names = [name.strip() for name in options.claims.split(",") if name.strip()]
    devices = options.devices or here or ON_CPU_DEVICES
    return Wanted(chosen(names), devices, read_device(options.device), Path(options.output), options.keep, here)


def code_of(found: Acceptance) -> int:
    """Return the exit code: 3 where a claim is refuted, 1 where a run failed or none says anything."""
    from mindllm.accept.judge import Verdict

    verdicts = {found.verdict(claim) for claim in found.claims}
    if Verdict.REFUTED in verdicts:
        return CheckFailed.exit_code
    silent = verdicts <= {Verdict.NOT_RUN}
    return RunFailed.exit_code if Verdict.FAILED in verdicts or silent else 0


def _write(found: Acceptance, directory: Path) -> None:
    from mindllm.accept.archive import write_acceptance

    write_acceptance(found, directory)


def _print(line: Line) -> None:
    from mindllm.accept.acceptance import COLOURS, cells

    name, figure, predicted, measured = cells(line)
    verdict = (f"{line.verdict.value:<11}", COLOURS[line.verdict])
    output.print(styled(verdict, f"{name} {figure}: predicted {predicted}, measured {measured}; {line.why}"))


def _explain(claim: str, text: str) -> None:
    """Print all that is said of a failure, which is not for the archive."""
    error_console.print(f"{claim}: {text}")


if __name__ == "__main__":
    run_command(main)
