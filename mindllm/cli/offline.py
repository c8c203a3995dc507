"""``mindllm offline``: dry run of any MindSpore program."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from mindllm.cli.common import add_json_option
from mindllm.command import CommandParser, output_directory, positive, run_command
from mindllm.compiled.device.wheel import PROGRAM_VERSIONS, wheel_of
from mindllm.errors import CheckFailed, UserError
from mindllm.files import atomic_open
from mindllm.jobs.memory import add_memory_option
from mindllm.outside import LARGEST_YAML, read_bytes
from mindllm.terminal.console import output
from mindllm.terminal.render import drawn, show

if TYPE_CHECKING:
    from mindllm.dry_run.program.running import Choose, Subject

ALL, STAGES = "all", "stages"
EXAMPLE = f"""examples:
  %(prog)s -- python run_mindformer.py --config pretrain.yaml
  %(prog)s --devices 16 --ranks 0,8 -- python train.py
  eval "$(%(prog)s --devices 16 --env)"

The program runs unchanged, in its own environment (MindSpore {PROGRAM_VERSIONS[0]} to {PROGRAM_VERSIONS[-1]}),
until a training step is simulated.
Exit codes: 0 all ranks fit, 3 a rank does not fit, 2 invalid input, or a program that does not train.
"""


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        prog="mindllm offline",
        description="Runs any MindSpore program in MindSpore's dry run, on a machine without devices: memory of its ranks, and "
        "whether it fits the limit of the program (max_device_memory).",
        epilog=EXAMPLE,
    )
    add = parser.add_argument
    devices = "ranks of the cluster (default: from parallel_config of the program's --config, else RANK_SIZE or 1)"
    add("--devices", type=positive, metavar="N", help=devices)
    ranks = "stages: first rank of each stage (default); all: all ranks, and the program on one device; or 0,8,16"
    add("--ranks", default=STAGES, metavar="R", help=ranks)
    add("--steps", type=positive, default=1, metavar="N", help="training steps to simulate (default: 1)")
    add("--workers", type=positive, metavar="N", help="concurrent ranks (default: set by memory)")
    add_memory_option(parser)
    add("--max-device-memory", metavar="SIZE", help="memory limit, such as 58GB (default: set by the program)")
    keep = "directory for simulations, graphs, logs and page (default: %(default)s)"
    add("--keep", type=output_directory, default="output_offline", metavar="DIR", help=keep)
    add_json_option(parser)
    add("--env", action="store_true", help="print the environment of such a run, for eval of a shell")
    add("--python", metavar="PATH", help="Python of the program (default: that of its command)")
    add("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="program and its arguments")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the memory of every rank; return 0 if all fit."""
    options = make_parser().parse_args(arguments)

    from mindllm.compiled.foreign.kept_program import SINGLE
    from mindllm.dry_run.page import PAGE
    from mindllm.dry_run.program.report import ProgramMemory, render
    from mindllm.dry_run.program.running import run_ranks
    from mindllm.dry_run.program.single import run_single

    if options.env:
        return _print_environment(options)
    subject = _subject(options)
    with drawn(transient=False) as progress:
        runs = run_ranks(subject, *_ranks(options.ranks, subject.devices), options.keep, options.workers, progress)
        with_single = options.ranks == ALL and subject.devices > 1
        failure = run_single(subject, options.keep, runs[0].report.stages, progress) if with_single else ""
    save_config(subject.command, options.keep)
    with atomic_open(options.keep / PAGE) as page:
        page.write(render(runs, shlex.join(subject.command)))
    memory = ProgramMemory(tuple(runs))
    show(memory, options.json)
    if not options.json:
        if with_single and failure:
            output.print(f"the program on one device was not saved: {failure}")
        elif with_single:
            single = f"program on one device: {options.keep / SINGLE}"
            output.print(f"{single}; compare all ranks with it: mindllm check --program {options.keep}")
        output.print(f"memory contents: {options.keep / PAGE}; graphs: mindllm inspect comm {runs[0].directory}")
    if not memory.fits:
        raise CheckFailed(memory.shortage)
    return 0


def _command(options: argparse.Namespace) -> list[str]:
    return options.command[1:] if options.command[:1] == ["--"] else options.command


def _print_environment(options: argparse.Namespace) -> int:
    from mindllm.compiled.foreign.environment import shell_environment
    from mindllm.dry_run.program.subject import python_of

    command = _command(options) or [options.python or "python"]
    wheel = wheel_of(options.python or python_of(command))
    first = 0 if options.ranks in (ALL, STAGES) else _rank_numbers(options.ranks)[0]
    for name, value in shell_environment(wheel, first, _device_count(options, command)).items():
        output.print(f"export {name}={shlex.quote(value)}")
    return 0


def _subject(options: argparse.Namespace) -> Subject:
    """Return the program with its environment, devices and limit."""
    from mindllm.dry_run.program.running import Subject
    from mindllm.dry_run.program.subject import python_of

    command = _command(options)
    if not command:
        raise UserError("the program is missing; example: mindllm offline -- python train.py")
    wheel = wheel_of(options.python or python_of(command))
    limit = _limit(options.max_device_memory) if options.max_device_memory else None
    return Subject(command, wheel, _device_count(options, command), options.steps, limit)


def _device_count(options: argparse.Namespace, command: Sequence[str]) -> int:
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
    raise UserError(f"--max-device-memory: invalid memory size '{text}' (example: 58GB)")


def _ranks(text: str, devices: int) -> tuple[int, Choose]:
    """Return the rank to run first, and a function that chooses all ranks from its report."""
    if text == ALL:
        return 0, lambda report: range(devices)
    if text == STAGES:
        return 0, lambda report: range(0, devices, max(1, devices // report.stages))
    numbers = _rank_numbers(text)
    if missing := next((number for number in numbers if number >= devices), None):
        raise UserError(
            f"--ranks {text}: rank {missing} does not exist; {devices} devices have ranks 0 to {devices - 1}"
        )
    return numbers[0], lambda report: numbers


def _rank_numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdigit() for part in parts):
        raise UserError(f"--ranks {text}: must be stages, all, or numbers such as 0,8,16")
    return [int(part) for part in parts]


def save_config(command: Sequence[str], directory: Path) -> None:
    """Save the YAML of the program, from which other commands read its operator selection."""
    from mindllm.compiled.foreign.kept_program import CONFIG
    from mindllm.dry_run.program.subject import config_of

    config = config_of(command)
    (directory / CONFIG).unlink(missing_ok=True)
    if config is not None:
        with atomic_open(directory / CONFIG, "wb") as file:
            file.write(read_bytes(config, LARGEST_YAML))


if __name__ == "__main__":
    run_command(main)
