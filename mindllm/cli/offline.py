"""``mindllm offline``: dry run of any MindSpore program."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mindllm.cli.common import add_json_option
from mindllm.command import CommandParser, output_directory, positive, run_command
from mindllm.compiled.device.wheel import PROGRAM_VERSIONS
from mindllm.errors import CheckFailed, UserError
from mindllm.jobs.memory import add_memory_option
from mindllm.programs import simulate_program
from mindllm.terminal.console import output
from mindllm.terminal.render import drawn, show

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
    add("--ranks", default="stages", metavar="R", help=ranks)
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
    """Print the memory of each rank; return 0 if all ranks fit."""
    options = make_parser().parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if options.env:
        return _print_environment(options, command)
    with drawn(transient=False) as progress:
        memory = simulate_program(
            command,
            options.keep,
            devices=options.devices,
            ranks=options.ranks,
            steps=options.steps,
            limit=_bytes(options.max_device_memory) if options.max_device_memory else None,
            python=options.python,
            workers=options.workers,
            progress=progress,
        )
    show(memory, options.json)
    if not options.json:
        _print_next_steps(options, memory.not_alone, memory.runs[0].directory)
    if not memory.fits:
        raise CheckFailed(memory.shortage)
    return 0


def _print_next_steps(options: argparse.Namespace, not_alone: str | None, first: Path) -> None:
    """Print where results are, and the commands that read them."""
    from mindllm.dry_run.page import PAGE
    from mindllm.programs.kept import SINGLE

    if not_alone:
        output.print(f"the program did not run on one device: {not_alone}")
    elif not_alone is not None:
        single = options.keep / SINGLE
        output.print(f"program on one device: {single}; compare: mindllm check --program {options.keep}")
    output.print(f"memory contents: {options.keep / PAGE}; graphs: mindllm inspect comm {first}")


def _print_environment(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Print the environment of a rank as shell commands."""
    from mindllm.programs.command_line import read_program
    from mindllm.programs.environment import shell_environment
    from mindllm.programs.simulate import first_rank

    program = read_program(command or [options.python or "python"], options.devices, python=options.python)
    for name, value in shell_environment(program.wheel, first_rank(options.ranks), program.devices).items():
        output.print(f"export {name}={shlex.quote(value)}")
    return 0


def _bytes(size: str) -> int:
    from mindllm.config.runtime import bytes_of

    with suppress(ValueError):
        if limit := bytes_of(size):
            return limit
    raise UserError(f"--max-device-memory: invalid memory size '{size}' (example: 58GB)")


if __name__ == "__main__":
    run_command(main)
