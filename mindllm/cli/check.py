"""``mindllm check``: all ranks compute what one device does."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mindllm.command import CommandParser, output_directory, output_file, positive, run_command
from mindllm.errors import CheckFailed, UserError
from mindllm.jobs.memory import add_memory_option
from mindllm.jobs.ray_cluster import add_executor_option
from mindllm.process.interrupts import interruptible
from mindllm.results import SCHEMA
from mindllm.terminal.console import error_console, print_json
from mindllm.terminal.progress import Progress
from mindllm.terminal.render import drawn, show
from mindllm.terminal.text import styled

if TYPE_CHECKING:
    from mindllm.verify.verification import Options

MOST_RANKS, ACCUMULATION_STEPS = 64, 2  # those of mindllm.verify.verification
DESCRIPTION = """Proves that a parallel configuration computes what a single device does, on a machine without an accelerator.

All ranks are compiled by MindSpore's parallel compiler with a small model in place of the real one (the mesh, micro batches,
interleave, recomputation and every switch are those of the YAML) and executed together on the CPU: losses, gradient norms,
every weight and all optimizer state are compared with a single device, after every step. A second table says whether what
the YAML asks for and no number would tell is in the compiled graphs: layers and chunks by stage, parts of a batch,
recomputation, sharded optimizer state, gradient fusion, shardings. A mesh that does not fit into memory, or has more ranks than
--most_ranks, is checked as a smaller one of its kind; the verdict says what was checked. Ends with 0 where both agree, 3 where
they do not or ranks wait for each other, 2 for a configuration that is wrong."""
EXAMPLES = """examples:
  %(prog)s configs/llama2/pretrain_llama2_7b.yaml
  %(prog)s run.yaml --parallel_config.data_parallel=2 --json
  %(prog)s --program output_cluster --single output_single
  %(prog)s configs mindllm/verify/forms --table proven.md
"""


def make_parser() -> CommandParser:
    """Returns the parser of the command line."""
    parser = CommandParser(prog="mindllm check", takes_keys=True, description=DESCRIPTION, epilog=EXAMPLES)
    subject = parser.add_mutually_exclusive_group(required=True)
    subject.add_argument(
        "--config",
        nargs="+",
        type=Path,
        metavar="YAML",
        help="runs, and directories of them; also without --config, as the first words",
    )
    subject.add_argument(
        "--program",
        type=Path,
        metavar="DIR",
        help="what mindllm offline --ranks all kept of any program, executed as it is",
    )
    parser.add_argument(
        "--single",
        type=Path,
        metavar="DIR",
        help="the same program on one device, to compare with (default: what offline kept of it beside the ranks)",
    )
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps, besides one that overflows (default: 2)")
    parser.add_argument("--real_dtype", action="store_true", help="compute in the YAML's dtypes instead of fp32")
    parser.add_argument(
        "--accumulation_steps",
        type=positive,
        default=ACCUMULATION_STEPS,
        metavar="N",
        help=f"of more accumulation steps so many are executed; a third makes a check a quarter longer (default: "
        f"{ACCUMULATION_STEPS})",
    )
    parser.add_argument(
        "--mindspore_kernels",
        action="store_true",
        help="MindSpore's CPU kernels for elementary operators too, which are numpy otherwise (far slower)",
    )
    parser.add_argument("--workers", type=positive, help="ranks compiled at a time (default: by cores and memory)")
    parser.add_argument(
        "--most_ranks",
        type=positive,
        default=MOST_RANKS,
        metavar="N",
        help=f"a mesh of more ranks is checked as a smaller one of its kind (default: {MOST_RANKS})",
    )
    parser.add_argument(
        "--every_rank",
        "--every-rank",
        action="store_true",
        help="compile every rank; otherwise a few of each stage, and others are derived where that is shown to be right",
    )
    add_memory_option(parser)
    add_executor_option(parser)
    parser.add_argument(
        "--cache", type=output_directory, metavar="DIR", help="keeps compiled graphs (default: ~/.cache/mindllm/graphs)"
    )
    parser.add_argument("--no_cache", action="store_true", help="compiles every rank again")
    parser.add_argument(
        "--table", type=output_file, metavar="FILE", help="writes the answers into a table in Markdown, too"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object (a list for several configurations)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks one configuration after the other; returns the exit code."""
    parser = make_parser()
    options, overrides = parser.parse_known_args(arguments)

    from mindllm.verify.verification import Verification, configurations, verify_run

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
    if options.table:
        from mindllm.verify.report import read_table, write_table

        read_table(options.table)  # raises before any work is done
    outcomes = []
    how = _how(options)
    for name, config in configs:
        with interruptible(), drawn() as progress:
            found = verify_run(config, how, name, partial(_named, progress, name), len(configs) > 1)
        outcomes.append(found)
        if not options.json:
            show(found, as_json=False)
        if options.table:
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
    from mindllm.verify.verification import silence_mindspore

    silence_mindspore()
    from mindllm.compiled.rank.compile_ranks import cache_directory
    from mindllm.verify.verification import Options

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
    """Check another program; return the exit code."""
    from mindllm.verify.verification import silence_mindspore

    if overrides:
        raise UserError(f"{overrides[0]}: no such option; keys of a run go with --config")
    silence_mindspore()
    from mindllm.programs import verify_program

    with interruptible(), drawn() as progress:
        progress(f"executing the ranks of {options.program}", 0, 1)
        outcome = verify_program(options.program, options.single, options.steps)
    show(outcome, options.json)
    return 0 if outcome.ok else CheckFailed.exit_code


if __name__ == "__main__":
    run_command(main)
