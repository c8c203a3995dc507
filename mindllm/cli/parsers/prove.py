"""The options of ``mindllm prove``."""

from __future__ import annotations

from pathlib import Path

from mindllm.cli.registry import spelled
from mindllm.command import CommandParser, output_directory, output_file, patience, positive
from mindllm.executor.option import add_executor_option
from mindllm.process.host_memory import add_memory_option
from mindllm.timing.shipped import DEFAULT, shipped_devices

DESCRIPTION = """Proves a run before it is launched: ten questions, each proved, refuted or not proved, and one verdict.

What formulas expect comes at once; then every stage is simulated by MindSpore's dry run, all ranks are compiled and executed
beside a single device, recomputation and communication are read off the compiled graphs, and data, checkpoints and this machine
are looked at. What has not changed since an earlier proof is not proved again. Ctrl-C keeps what is known.
Exit code 0: ready, 3: refuted, 1: something could not be proved (--allow names what may stay open), 2: wrong input."""
EXAMPLE = """examples:
  %(prog)s run.yaml
  %(prog)s pretrain_llama2_7b.yaml --allow data
  %(prog)s run.yaml --quick
  %(prog)s configs/llama2/*.yaml --allow data --junit proofs.xml --sarif proofs.sarif
  %(prog)s run.yaml --against proof/proof.json --worse-by 2%%
"""


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
        prog=spelled("prove"),
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
        help="for report.html and proof.json; of several runs a directory each (default: %(default)s)",
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
