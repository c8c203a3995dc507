"""``mindllm prove``: check that runs are ready to launch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mindllm.cli.common import EVERY_RANK, add_device_option, exit_code_of, proof_display
from mindllm.command import (
    INTERRUPTED,
    RUN_HELP,
    CommandParser,
    output_directory,
    output_file,
    patience,
    positive,
    run_command,
)
from mindllm.errors import CheckFailed, RunFailed, UserError
from mindllm.jobs.memory import add_memory_option
from mindllm.jobs.ray_cluster import add_executor_option
from mindllm.terminal.console import output, print_json
from mindllm.terminal.render import show

if TYPE_CHECKING:
    from mindllm.config import RunConfig
    from mindllm.prove.proof import Proof

DESCRIPTION = """Checks that a run is ready to launch: ten questions, each proved, refuted or not proved, and one verdict.

Analytical estimates appear within a second. Then every stage is simulated by MindSpore's dry run; all ranks are
compiled, executed and compared with a single device; recomputation and communication are read from the compiled
graphs; data, checkpoints and this machine are checked. Results of earlier proofs are reused where nothing changed.
Ctrl-C keeps the results so far.

A CPU run may leave memory and step_time open, since dry run and device descriptions cover Ascend."""
EXAMPLE = """examples:
  %(prog)s run.yaml
  %(prog)s pretrain_llama2_7b.yaml --allow data
  %(prog)s run.yaml --quick
  %(prog)s configs/llama2/*.yaml --allow data --junit proofs.xml --sarif proofs.sarif
  %(prog)s run.yaml --against proof/proof.json --worse-by 2%%

Exit codes: 0 ready, 3 refuted, 1 not proved (--allow lists questions that may stay open), 2 invalid input.
"""
WORST_FIRST = (CheckFailed.exit_code, RunFailed.exit_code, 0)


def share(text: str) -> float:
    """Return the fraction of ``2%`` or ``0.02``, as the type of an option."""
    number = text.removesuffix("%")
    try:
        value = float(number) / (100 if number != text else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be a share such as 2% (value {text})")
    return value


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        prog="mindllm prove",
        takes_keys=True,
        usage="%(prog)s RUN [RUN ...] [options] [--section.key=value ...]",
        description=DESCRIPTION,
        epilog=EXAMPLE,
    )
    add = parser.add_argument
    add("runs", type=Path, nargs="+", metavar="RUN", help=RUN_HELP)
    add("--quick", action="store_true", help="validate the configuration and print analytical estimates only")
    questions = "questions that may stay open, as named in --json: data, memory, ..."
    add("--allow", nargs="+", default=[], metavar="QUESTION", help=questions)
    add("--every-rank", action="store_true", help=EVERY_RANK)
    add("--search", action="store_true", help="compare with every other strategy for the same number of devices")
    add_device_option(parser)
    add("--again", action="store_true", help="ignore earlier proofs")
    directory = (
        "directory for report.html and proof.json; each of several runs gets a subdirectory (default: %(default)s)"
    )
    add("--output", type=output_directory, default="proof", metavar="DIR", help=directory)
    add("--json", action="store_true", help="print one JSON object instead of the table; a list for several runs")
    add("--junit", type=output_file, metavar="FILE", help="write questions as JUnit test cases")
    add("--sarif", type=output_file, metavar="FILE", help="write findings with line and key of the YAML as SARIF")
    add("--against", type=Path, metavar="PROOF", help="compare with an earlier proof.json")
    worse = "with --against: exit with code 3 if memory or step time is worse by more than this, such as 2%%"
    add("--worse-by", type=share, metavar="SHARE", help=worse)
    advice = "if a stage does not fit, stop searching for memory fixes after SECONDS (default: %(default)s)"
    add("--advice", type=patience, default=20.0, metavar="SECONDS", help=advice)
    add("--workers", type=positive, metavar="N", help="concurrent processes of a check (default: set by cores)")
    add_memory_option(parser)
    add_executor_option(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Prove one run after the other; return the worst exit code."""
    options, overrides = make_parser().parse_known_args(arguments)

    from mindllm.api import read_device
    from mindllm.prove.proof import Proof, check_allowed

    check_allowed(options.allow)
    read_device(options.device)
    earlier = _earlier_proof(options)
    runs = [_load_run(path, overrides) for path in options.runs]  # refuse invalid input before any proof
    proofs, codes = list[Proof](), list[int]()
    for run, path, directory in zip(runs, options.runs, _directories(options), strict=True):
        try:
            proof = _prove(run, str(path), directory, options)
        except KeyboardInterrupt:  # before the first answer of this run
            return _write_reports(options, proofs, INTERRUPTED)
        if not options.json:
            output.print(f"report: {directory}/report.html; data: {directory}/proof.json")
            show(proof, as_json=False)  # the verdict is the last line
        proofs.append(proof)
        if not proof.complete and not options.quick:
            return _write_reports(options, proofs, INTERRUPTED)
        codes.append(exit_code_of(replace(proof, complete=True)))
        if earlier is not None:
            proofs[-1], code = _compare(earlier, proof, options)
            codes.append(code)
    return _write_reports(options, proofs, next(code for code in WORST_FIRST if code in codes))


def _earlier_proof(options: argparse.Namespace) -> Proof | None:
    if options.worse_by is not None and options.against is None:
        raise UserError("--worse-by requires --against")
    if options.against is None:
        return None
    from mindllm.prove.found import read_proof

    if len(options.runs) > 1:
        raise UserError("--against compares a single run; pass one run")
    return read_proof(options.against)


def _load_run(path: Path, overrides: Sequence[str]) -> RunConfig | UserError:
    """Load a run, or return the error of an invalid one.

    Raises:
        UserError: the file is missing or an option is invalid, which says nothing about the run.
    """
    from mindllm.api import load_config

    try:
        return load_config(path, overrides)
    except UserError as error:
        places = [problem.line or problem.key for problem in error.problems]
        if not places or not all(places) or any(problem.option for problem in error.problems):
            raise
        return error


def _directories(options: argparse.Namespace) -> list[Path]:
    """Return the directory of each run: ``--output``, or for several runs its subdirectories named after their files."""
    if len(options.runs) == 1:
        return [options.output]
    directories = list[Path]()
    for path in options.runs:
        name = path.stem if path.suffix in (".yaml", ".yml") else path.absolute().name or "run"
        names = [name, *(f"{name}_{number}" for number in range(2, len(options.runs) + 1))]
        directories.append(next(path for each in names if (path := options.output / each) not in directories))
    return directories


def _prove(run: RunConfig | UserError, name: str, directory: Path, options: argparse.Namespace) -> Proof:
    """Prove one run and write its report; an invalid configuration is refuted."""
    from mindllm import api
    from mindllm.prove.proof import check_allowed
    from mindllm.prove.prove import refused
    from mindllm.prove.write import write_proof

    if isinstance(run, UserError):
        proof = refused(name, run, check_allowed(options.allow))
        write_proof(proof, directory)
        return proof
    with proof_display(options.json) as (on_answer, progress):
        return api.prove(
            run,
            quick=options.quick,
            allow=options.allow,
            search=options.search,
            every_rank=options.every_rank,
            device=options.device,
            again=options.again,
            advice=options.advice,
            output=directory,
            workers=options.workers,
            name=name,
            on_answer=on_answer,
            progress=progress,
        )


def _compare(earlier: Proof, proof: Proof, options: argparse.Namespace) -> tuple[Proof, int]:
    """Show the changes since an earlier proof; return the proof with them, and 3 if it is worse than allowed."""
    from mindllm.prove.against import compare

    comparison = compare(earlier, proof)
    if not options.json:
        show(comparison, as_json=False)
    worse = options.worse_by is not None and comparison.worse_by(options.worse_by)
    return replace(proof, extra={"against": comparison.tree()}), CheckFailed.exit_code if worse else 0


def _write_reports(options: argparse.Namespace, proofs: Sequence[Proof], code: int) -> int:
    """Write the reports on all runs; return the exit code."""
    if options.junit:
        from mindllm.prove.junit import write_junit

        write_junit(proofs, options.junit)
    if options.sarif:
        from mindllm.prove.sarif import write_sarif

        write_sarif(proofs, options.sarif)
    if options.json:
        trees = [proof.to_dict() for proof in proofs]
        print_json(trees[0] if len(options.runs) == 1 else trees)
    return code


if __name__ == "__main__":
    run_command(main)
