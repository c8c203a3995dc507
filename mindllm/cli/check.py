"""``mindllm check``: check that all ranks match a single device."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mindllm.cli.common import EVERY_RANK
from mindllm.command import CommandParser, output_directory, output_file, positive, run_command
from mindllm.errors import CheckFailed, RunFailed, UserError
from mindllm.jobs.memory import add_memory_option
from mindllm.jobs.ray_cluster import add_executor_option
from mindllm.process.interrupts import interruptible
from mindllm.results import SCHEMA
from mindllm.terminal.console import error_console, print_json
from mindllm.terminal.progress import Progress
from mindllm.terminal.render import drawn, show
from mindllm.terminal.text import styled

if TYPE_CHECKING:
    from mindllm.config import RunConfig
    from mindllm.verify.verification import Verification

MOST_RANKS, ACCUMULATION_STEPS = 64, 2  # those of mindllm.verify.outcome
DESCRIPTION = """Checks that a parallel run computes the same as a single device, on a machine without accelerators.

MindSpore's parallel compiler compiles all ranks with a small model; mesh, micro-batches, interleaving, recomputation
and switches are those of the YAML. The ranks are executed together on the CPU. After every step, losses, gradient norms,
weights and optimizer state are compared with a single device. A second table compares the compiled graphs with the YAML,
for example layers per stage, micro-batches, recomputation, sharded optimizer state, gradient fusion and shardings.

A mesh that does not fit into memory, or has more ranks than --most-ranks, is checked as a smaller mesh of the same
kind, as the verdict states."""
EXAMPLES = """examples:
  %(prog)s configs/llama2/pretrain_llama2_7b.yaml
  %(prog)s run.yaml --parallel_config.data_parallel=2 --json
  %(prog)s --program output_cluster --single output_single
  %(prog)s configs mindllm/verify/forms --table proven.md

Exit codes: 0 all ranks match, 3 they differ or wait for each other, 2 invalid configuration.
"""


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(prog="mindllm check", takes_keys=True, description=DESCRIPTION, epilog=EXAMPLES)
    subject = parser.add_mutually_exclusive_group(required=True)
    runs = "YAMLs of mindllm or MindFormers, Hugging Face directories, and directories of YAMLs"
    subject.add_argument("runs", nargs="*", default=(), type=Path, metavar="RUN", help=runs)
    program = "output directory of mindllm offline --ranks all for any MindSpore program"
    subject.add_argument("--program", type=Path, metavar="DIR", help=program)
    add = parser.add_argument
    single = "with --program: output directory of the same program on one device (default: the one in DIR)"
    add("--single", type=Path, metavar="DIR", help=single)
    add("--steps", type=int, default=2, help="optimizer steps, in addition to one that overflows (default: 2)")
    add("--real-dtype", action="store_true", help="compute in the dtypes of the YAML instead of fp32")
    accumulation = f"most accumulation steps to execute; a third takes a quarter longer (default: {ACCUMULATION_STEPS})"
    add("--accumulation-steps", type=positive, default=ACCUMULATION_STEPS, metavar="N", help=accumulation)
    kernels = "use MindSpore's CPU kernels for elementwise operators, too, instead of numpy (much slower)"
    add("--mindspore-kernels", action="store_true", help=kernels)
    add("--workers", type=positive, metavar="N", help="ranks compiled concurrently (default: set by cores and memory)")
    ranks = f"check larger meshes as a smaller mesh of the same kind (default: {MOST_RANKS})"
    add("--most-ranks", type=positive, default=MOST_RANKS, metavar="N", help=ranks)
    add("--every-rank", action="store_true", help=EVERY_RANK)
    add_memory_option(parser)
    add_executor_option(parser)
    cache = "directory for compiled graphs (default: ~/.cache/mindllm/graphs)"
    add("--cache", type=output_directory, metavar="DIR", help=cache)
    add("--no-cache", action="store_true", help="compile every rank again")
    add("--table", type=output_file, metavar="FILE", help="also update a table in Markdown")
    add("--json", action="store_true", help="print one JSON object; a list for several runs")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Check one run after the other; return the exit code."""
    options, overrides = make_parser().parse_known_args(arguments)
    if options.steps < 1:
        raise UserError(f"--steps must be at least 1 (value {options.steps})")
    if options.program is not None:
        return _check_program(options, overrides)
    if options.single is not None:
        raise UserError("--single requires --program")

    from mindllm.verify.verification import Verification, configurations

    invalid: dict[str, UserError] = {}
    configs = configurations(options.runs, overrides, invalid)
    for error in invalid.values():
        error_console.print(styled(("error:", "bold red"), f" {error}"))
    if options.table:
        from mindllm.verify.report import read_table, write_table

        read_table(options.table)  # refuse an invalid file before any work
    results = list[Verification]()
    for name, config in configs:
        with interruptible(), drawn() as progress:
            results.append(_verify(name, config, options, progress, one_of_many=len(configs) > 1))
        if not options.json:
            show(results[-1], as_json=False)
        if options.table:
            write_table([(result.name, result.outcome) for result in results], options.table)
    if options.json:
        trees = [result.to_dict() for result in results]
        failed = {SCHEMA: Verification.schema, "ok": False}
        trees += [{**failed, "config": name, "problems": [str(error)]} for name, error in invalid.items()]
        print_json(trees[0] if len(trees) == 1 else trees)
    if not all(result.ok for result in results):
        return CheckFailed.exit_code
    return UserError.exit_code if invalid else 0


def _verify(
    name: str, config: RunConfig, options: argparse.Namespace, progress: Progress, one_of_many: bool
) -> Verification:
    """Verify a run; a run that cannot be checked is a failed result if it is one of many."""
    from mindllm import api
    from mindllm.verify.outcome import not_executed
    from mindllm.verify.verification import Verification

    try:
        return api.verify(
            config,
            steps=options.steps,
            real_dtype=options.real_dtype,
            mindspore_kernels=options.mindspore_kernels,
            workers=options.workers,
            most_ranks=options.most_ranks,
            every_rank=options.every_rank,
            accumulation_steps=options.accumulation_steps,
            cache=options.cache,
            use_cache=not options.no_cache,
            name=name,
            progress=partial(_report, progress, name),
        )
    except (UserError, RunFailed) as error:
        if not one_of_many:
            raise
        return Verification(name, not_executed(config, error))


def _report(progress: Progress, name: str, what: str, done: int = 0, total: int | None = None) -> None:
    progress(f"{name}: {what}", done, total)


def _check_program(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Check the ranks of any MindSpore program."""
    from mindllm import api

    if overrides:
        raise UserError(f"{overrides[0]}: unknown option; --program has no keys of a run")
    with interruptible(), drawn() as progress:
        progress(f"executing the ranks of {options.program}", 0, 1)
        outcome = api.verify_program(options.program, single=options.single, steps=options.steps)
    show(outcome, options.json)
    return 0 if outcome.ok else CheckFailed.exit_code


if __name__ == "__main__":
    run_command(main)
