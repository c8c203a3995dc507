"""``mindllm prove``: one verdict: is this run ready to be launched?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mindllm.command import INTERRUPTED, CommandParser, output_directory, output_file, patience, positive, run_command
from mindllm.errors import CheckFailed, RunFailed, UserError
from mindllm.jobs.memory import add_memory_option
from mindllm.jobs.ray_cluster import add_executor_option
from mindllm.terminal.console import output, print_json
from mindllm.terminal.render import show
from mindllm.timing.shipped import DEFAULT, shipped_devices

if TYPE_CHECKING:
    from mindllm.config import RunConfig
    from mindllm.prove.proof import Proof

DESCRIPTION = """Proves a run before it is launched: ten questions, each proved, refuted or not proved, and one verdict.

What formulas expect comes at once; then every stage is simulated by MindSpore's dry run, all ranks are compiled and executed
beside a single device, recomputation and communication are read off the compiled graphs, and data, checkpoints and this machine
are looked at. What has not changed since an earlier proof is not proved again. Ctrl-C keeps what is known.
A run on a CPU may leave memory and step_time open: the dry run and the described devices are of Ascend.
Exit code 0: ready, 3: refuted, 1: something could not be proved (--allow names what may stay open), 2: wrong input."""
EXAMPLE = """examples:
  %(prog)s run.yaml
  %(prog)s pretrain_llama2_7b.yaml --allow data
  %(prog)s run.yaml --quick
  %(prog)s configs/llama2/*.yaml --allow data --junit proofs.xml --sarif proofs.sarif
  %(prog)s run.yaml --against proof/proof.json --worse-by 2%%
"""
WORST_FIRST = (CheckFailed.exit_code, RunFailed.exit_code, 0)


def share(text: str) -> float:
    """``2%`` or ``0.02`` as the type of an option."""
    import argparse

    number = text.removesuffix("%")
    try:
        value = float(number) / (100 if number != text else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share; write one as 2%")
    return value


def make_parser() -> CommandParser:
    """Returns the parser of the command line."""
    parser = CommandParser(
        prog="mindllm prove",
        takes_keys=True,
        usage="%(prog)s RUN [RUN ...] [options] [--section.key=value ...]",
        description=DESCRIPTION,
        epilog=EXAMPLE,
    )
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="YAMLs of mindllm or MindFormers, Hugging Face directories"
    )
    parser.add_argument("--quick", action="store_true", help="stop after the configuration and what formulas expect")
    parser.add_argument(
        "--allow",
        nargs="+",
        default=[],
        metavar="QUESTION",
        help="may stay open: data, memory, … (as --json names them)",
    )
    parser.add_argument(
        "--every_rank",
        "--every-rank",
        action="store_true",
        help="compile every rank; otherwise a few of each stage, and others are derived where that is shown to be right",
    )
    parser.add_argument("--search", action="store_true", help="hold the strategy against all others on as many devices")
    parser.add_argument(
        "--device",
        default=DEFAULT,
        metavar="FILE",
        help=f"a YAML, or one of {', '.join(shipped_devices())} (default: %(default)s)",
    )
    parser.add_argument("--again", action="store_true", help="prove everything again, also what has not changed")
    parser.add_argument(
        "--output",
        type=output_directory,
        default="proof",
        metavar="DIR",
        help="directory for report.html and proof.json; several runs get one below it each (default: %(default)s)",
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object instead of the table; a list of several runs"
    )
    parser.add_argument("--junit", type=output_file, metavar="FILE", help="questions as test cases, for CI")
    parser.add_argument(
        "--sarif", type=output_file, metavar="FILE", help="findings at line and key of the YAML, for CI"
    )
    parser.add_argument(
        "--against", type=Path, metavar="PROOF", help="an earlier proof.json: say what became better or worse"
    )
    parser.add_argument(
        "--worse-by",
        type=share,
        metavar="SHARE",
        help="with --against: exit code 3 where memory or step time is worse by more (as 2%%)",
    )
    parser.add_argument(
        "--advice",
        type=patience,
        default=20.0,
        metavar="SECONDS",
        help="where a stage does not fit, begin no further change that may help after so long (default: %(default)s)",
    )
    parser.add_argument(
        "--workers", type=positive, metavar="N", help="processes at once in a piece (default: by cores)"
    )
    add_memory_option(parser)
    add_executor_option(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Proves one run after the other; returns the exit code of the worst."""
    options, overrides = make_parser().parse_known_args(arguments)

    from mindllm.cli.proving import CODES
    from mindllm.prove.proof import Proof, check_allowed
    from mindllm.prove.write import write_proof
    from mindllm.timing.device import read_device

    allowed = check_allowed(options.allow)
    read_device(options.device)
    earlier = _earlier(options)
    runs = [_loaded(path, overrides) for path in options.runs]  # wrong input is told before anything is proved
    proofs, codes = list[Proof](), list[int]()
    for run, path, directory in zip(runs, options.runs, _directories(options), strict=True):
        try:
            proof = _prove(run, str(path), options, allowed)
        except KeyboardInterrupt:  # before anything is known of this one
            return _end(options, proofs, INTERRUPTED)
        page = write_proof(proof, directory)
        if not options.json:
            output.print(f"{page}: for people; {directory}/proof.json")
            show(proof, as_json=False)  # the verdict comes last
        proofs.append(proof)
        if _is_interrupted(proof, options):
            return _end(options, proofs, INTERRUPTED)
        codes.append(CODES[proof.verdict])
        if earlier is not None:
            proofs[-1], code = _compared(earlier, proof, options)
            codes.append(code)
    return _end(options, proofs, next(code for code in WORST_FIRST if code in codes))


def _earlier(options: argparse.Namespace) -> Proof | None:
    if options.worse_by is not None and options.against is None:
        raise UserError("--worse-by: says how much worse than an earlier proof; give that with --against")
    if options.against is None:
        return None
    from mindllm.prove.found import read_proof

    if len(options.runs) > 1:
        raise UserError("--against: compares one run with its earlier proof; give one run")
    return read_proof(options.against)


def _loaded(path: Path, overrides: Sequence[str]) -> RunConfig | UserError:
    """Load a run; return its mistakes where it has some.

    Raises:
        UserError: there is no such file, or an option is wrong: that says nothing about the run.
    """
    from mindllm.config import load_config

    try:
        return load_config(path, overrides)
    except UserError as error:
        of_the_run = [problem.line or problem.key for problem in error.problems]
        if not of_the_run or not all(of_the_run) or any(problem.option for problem in error.problems):
            raise
        return error


def _is_interrupted(proof: Proof, options: argparse.Namespace) -> bool:
    return not proof.complete and not options.quick


def _compared(earlier: Proof, proof: Proof, options: argparse.Namespace) -> tuple[Proof, int]:
    """Show what became better or worse; return the proof with that, and 3 where it is worse by more than allowed."""
    from mindllm.prove.against import compare

    found = compare(earlier, proof)
    if not options.json:
        show(found, as_json=False)
    worse = options.worse_by is not None and found.worse_by(options.worse_by)
    return replace(proof, extra={"against": found.tree()}), CheckFailed.exit_code if worse else 0


def _end(options: argparse.Namespace, proofs: Sequence[Proof], code: int) -> int:
    """Write what is of all runs together."""
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


def _directories(options: argparse.Namespace) -> list[Path]:
    """The directory of every run: below ``--output`` by the names of their files where there are several."""
    if len(options.runs) == 1:
        return [Path(options.output)]
    found = list[Path]()
    for path in options.runs:
        name = path.stem if path.suffix in (".yaml", ".yml") else path.absolute().name or "run"
        same = [name, *(f"{name}_{number}" for number in range(2, len(options.runs) + 1))]
        found.append(next(path for each in same if (path := Path(options.output) / each) not in found))
    return found


def _prove(run: RunConfig | UserError, name: str, options: argparse.Namespace, allowed: tuple[str, ...]) -> Proof:
    """Prove one run; one whose configuration has mistakes is refuted."""
    from mindllm.cli.proving import watched
    from mindllm.prove.pieces import Options
    from mindllm.prove.prove import prove_run, refused

    if isinstance(run, UserError):
        return refused(name, run, allowed)
    how = Options(options.device, options.search, options.advice, options.workers, options.every_rank)
    with watched(options.json) as (answered, told):
        return prove_run(
            run,
            how,
            name,
            quick=options.quick,
            allowed=allowed,
            use_kept=not options.again,
            answered=answered,
            told=told,
        )


if __name__ == "__main__":
    run_command(main)
