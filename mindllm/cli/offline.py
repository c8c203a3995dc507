"""``mindllm offline``: dry run of any MindSpore program."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from mindllm.command import CommandParser, output_directory, positive, run_command
from mindllm.compiled.device.wheel import PROGRAM_VERSIONS, wheel_of
from mindllm.errors import CheckFailed, UserError
from mindllm.files import atomic_open
from mindllm.jobs.memory import add_memory_option
from mindllm.outside import LARGEST_YAML, read_bytes
from mindllm.terminal.console import output
from mindllm.terminal.render import drawn, show

if TYPE_CHECKING:
    from mindllm.compiled.foreign.environment import Report
    from mindllm.dry_run.program.running import Choose, Subject

ALL, STAGES = "all", "stages"
EXAMPLE = f"""examples:
  %(prog)s -- python run_mindformer.py --config theirs.yaml
  %(prog)s --devices 16 --ranks 0,8 -- python train.py
  eval "$(%(prog)s --devices 16 --env)"

The program runs as it is, in its own environment (MindSpore {PROGRAM_VERSIONS[0]} to {PROGRAM_VERSIONS[-1]}); it ends when a
training step has been simulated.
Exit code 0: all ranks fit, 3: one does not, 2: wrong input, or a program that does not train.
"""


def make_parser() -> CommandParser:
    """Returns the parser of the command line."""
    parser = CommandParser(
        prog="mindllm offline",
        description="Runs any MindSpore program in MindSpore's dry run, on a machine without a device: what fills the memory of "
        "its ranks, and whether that fits into what the program grants itself (max_device_memory).",
        epilog=EXAMPLE,
    )
    parser.add_argument(
        "--devices",
        type=positive,
        metavar="N",
        help="ranks of the cluster (default: those of the parallel_config in the YAML that the program is given with "
        "--config; else RANK_SIZE, or 1)",
    )
    parser.add_argument(
        "--ranks",
        default=STAGES,
        metavar="R",
        help="stages: the first rank of each (default); all, and the program on one device; or as 0,8,16",
    )
    parser.add_argument("--steps", type=positive, default=1, metavar="N", help="training steps to simulate (default 1)")
    parser.add_argument("--workers", type=positive, metavar="N", help="ranks at once (default: what memory allows)")
    add_memory_option(parser)
    parser.add_argument("--max_device_memory", metavar="SIZE", help="the limit, as 58GB (default: the program's own)")
    parser.add_argument(
        "--keep",
        type=output_directory,
        default="output_offline",
        metavar="DIR",
        help="for simulations, graphs, logs and the page (default output_offline)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--env", action="store_true", help="print the environment of such a run, for a shell's eval")
    parser.add_argument("--python", metavar="PATH", help="the program's Python (default: what its command runs)")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the program and its arguments")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what every rank needs; returns 0 when all fit."""
    options = make_parser().parse_args(arguments)

    from mindllm.dry_run.page import PAGE
    from mindllm.dry_run.program.report import ProgramMemory, render
    from mindllm.dry_run.program.running import run_ranks
    from mindllm.dry_run.program.single import run_single

    if options.env:
        return _print_environment(options)
    subject = _subject(options)
    with drawn(transient=False) as progress:
        runs = run_ranks(subject, *_ranks(options.ranks, subject.devices), options.keep, options.workers, progress)
        alone = options.ranks == ALL and subject.devices > 1
        missing = run_single(subject, options.keep, runs[0].report.stages, progress) if alone else ""
    keep_config(subject.command, options.keep)
    with atomic_open(options.keep / PAGE) as page:
        page.write(render(runs, shlex.join(subject.command)))
    found = ProgramMemory(tuple(runs))
    show(found, options.json)
    if not options.json:
        if alone:
            output.print(_of_one_device(options.keep, missing))
        output.print(f"{options.keep / PAGE}: what fills the memory; mindllm inspect comm {runs[0].directory}")
    if not found.fits:
        raise CheckFailed(found.shortage)
    return 0


def _of_one_device(keep: Path, missing: str) -> str:
    from mindllm.compiled.foreign.kept_program import SINGLE

    if missing:
        return f"the program on one device is not kept: {missing}"
    return f"{keep / SINGLE}: the program on one device; mindllm check --program {keep} holds all ranks against it"


def _command(options: argparse.Namespace) -> list[str]:
    return options.command[1:] if options.command[:1] == ["--"] else options.command


def _print_environment(options: argparse.Namespace) -> int:
    from mindllm.compiled.foreign.environment import shell_environment
    from mindllm.dry_run.program.subject import python_of

    command = _command(options) or [options.python or "python"]
    wheel = wheel_of(options.python or python_of(command))
    for name, value in shell_environment(wheel, _first(options.ranks), _devices(options, command)).items():
        output.print(f"export {name}={shlex.quote(value)}")
    return 0


def _first(ranks: str) -> int:
    return 0 if ranks in (ALL, STAGES) else _numbers(ranks)[0]


def _subject(options: argparse.Namespace) -> Subject:
    from mindllm.dry_run.program.running import Subject
    from mindllm.dry_run.program.subject import python_of

    command = _command(options)
    if not command:
        raise UserError("no program is given; write it behind --, as: mindllm offline -- python train.py")
    wheel = wheel_of(options.python or python_of(command))
    limit = _limit(options.max_device_memory) if options.max_device_memory else None
    return Subject(command, wheel, _devices(options, command), options.steps, limit)


def _devices(options: argparse.Namespace, command: Sequence[str]) -> int:
    from mindllm.dry_run.program.subject import devices_of

    if options.devices:
        return options.devices
    known = os.environ.get("RANK_SIZE", "1")
    return devices_of(command) or (int(known) if known.isdigit() and int(known) else 1)


def _limit(text: str) -> int:
    from mindllm.config.runtime import bytes_of

    with suppress(ValueError):
        if limit := bytes_of(text):
            return limit
    raise UserError(f"--max_device_memory {text}: is not a size; write as MindSpore does, 58GB")


def _ranks(text: str, devices: int) -> tuple[int, Choose]:
    """The rank that is run first, and what chooses all of them from what it reports."""
    if text == ALL:
        return 0, lambda report: range(devices)
    if text == STAGES:
        return 0, lambda report: _first_of_stages(report, devices)
    numbers = _numbers(text)
    if missing := next((number for number in numbers if number >= devices), None):
        raise UserError(f"--ranks {text}: there is no rank {missing} among {devices} devices; write 0 to {devices - 1}")
    return numbers[0], lambda report: numbers


def _first_of_stages(report: Report, devices: int) -> Sequence[int]:
    return range(0, devices, max(1, devices // report.stages))


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdigit() for part in parts):
        raise UserError(f"--ranks {text}: write stages, all, or numbers as 0,8,16")
    return [int(part) for part in parts]


def keep_config(command: Sequence[str], keep: Path) -> None:
    """Keeps the YAML that the program was given: other tools read how it selects operators."""
    from mindllm.compiled.foreign.kept_program import CONFIG
    from mindllm.dry_run.program.subject import config_of

    given = config_of(command)
    (keep / CONFIG).unlink(missing_ok=True)
    if given is not None:
        with atomic_open(keep / CONFIG, "wb") as file:
            file.write(read_bytes(given, LARGEST_YAML))


if __name__ == "__main__":
    run_command(main)
