"""The options of ``mindllm plan``."""

from __future__ import annotations

import argparse
from pathlib import Path

from mindllm.cli.registry import spelled
from mindllm.command import CommandParser, output_file
from mindllm.files import size_in_bytes
from mindllm.process.host_memory import add_memory_option
from mindllm.timing.shipped import DEFAULT

EXAMPLES = """example:
  %(prog)s run.yaml --max_memory 58GB --validate --apply --output planned.yaml
  %(prog)s run.yaml --device my_device.yaml --parallel_config.micro_batch_num=64
  %(prog)s run.yaml --interleave 1 2 4 --validate --apply --output planned.yaml
  %(prog)s run.yaml --formula --interleave 1 2 --yaml plan.yaml
  %(prog)s --problem problem.json --picture schedule.png
  %(prog)s --problem layers.json --stages 16 --micro_batches 32 --max_memory 53GB --explain
  %(prog)s --measured init.yaml --micro_batches 64 --max_memory 58GB --json
  %(prog)s --simulated output_even output_shifted --layers 64 --yaml plan.yaml
  %(prog)s --problem problem.json --apply run.yaml --output planned.yaml
"""
SCHEDULES = (
    "1f1b", "less_memory", "gpipe", "seqpipe", "seqvpp", "seqsmartvpp", "zero_bubble_v", "controllable_v", "zb1p", "zb2p", "zb"
)  # fmt: skip
"""Of mindllm.planning.problem."""
FORMATS = (".png", ".svg", ".html")  # of mindllm.planning.reports.picture
DESCRIPTION = (
    "Plans pipeline stages, interleaving and recomputation: the fastest plan that fits the memory, and a bound no plan can "
    "beat. Exit code 0: planned, 3: no plan fits the memory, 2: wrong input."
)
OF_CONFIG = Path()  # --apply without a file: the run of --config


def make_parser() -> CommandParser:
    """Returns the parser of the command line."""
    parser = CommandParser(prog=spelled("plan"), takes_keys=True, description=DESCRIPTION, epilog=EXAMPLES)
    _add_subject(parser)
    _add_settings(parser)
    _add_planning(parser)
    _add_written(parser)
    return parser


def _add_subject(parser: CommandParser) -> None:
    """Add what is planned."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--config",
        metavar="RUN.yaml",
        help="a run, whose costs are found by simulating small ones; further options are its keys; also without --config, as the "
        "first word",
    )
    source.add_argument("--problem", type=Path, metavar="FILE", help="a problem as JSON, or a layer file of SAPP")
    source.add_argument(
        "--measured", type=Path, nargs="+", metavar="FILE", help="init YAMLs and a layer file of SAPP, as measured"
    )
    source.add_argument(
        "--simulated",
        type=Path,
        nargs="+",
        metavar="DIR",
        help=f"directories that {spelled('offline')} kept of a program, with other offsets or recomputation each; "
        "the plan is written as keys of MindFormers",
    )
    parser.add_argument(
        "--formula",
        action="store_true",
        help=f"costs of --config from the architecture alone, as {spelled('search')} has them: in seconds, for a layer that "
        "predicts ahead too",
    )
    parser.add_argument(
        "--swap",
        action="store_true",
        help="with --formula: choose also the layers whose attention waits on the host (swap_config)",
    )


def _add_settings(parser: CommandParser) -> None:
    """Add what a file may leave open."""
    given = parser.add_argument_group("what the file does not say, or says otherwise")
    given.add_argument("--instance", metavar="NAME", help="one of the instances that the file of --problem holds")
    given.add_argument("--stages", type=_positive, metavar="N")
    given.add_argument("--layers", type=_positive, metavar="N", help="of the model that --simulated were small runs of")
    given.add_argument(
        "--interleave",
        "--chunks",
        type=_positive,
        nargs="+",
        metavar="N",
        help="chunks per stage (pp_interleave_num); of several numbers the fastest is taken",
    )
    given.add_argument("--micro_batches", type=_positive, metavar="N")
    given.add_argument(
        "--schedule",
        choices=SCHEDULES,
        help="1f1b is interleaved where there are chunks; zero_bubble_v is MindSpore's V, controllable_v one within the memory",
    )
    given.add_argument("--max_memory", type=_size, metavar="SIZE", help="of every stage: 58GB, 58000MB")


def _add_planning(parser: CommandParser) -> None:
    """Add how it is planned, and what is told beside the plan."""
    parser.add_argument(
        "--device", metavar="FILE", help=f"what the device of a run can do: a YAML or a name (default: {DEFAULT})"
    )
    parser.add_argument(
        "--validate", action="store_true", help="dry-run the plan of --config, and correct it until confirmed"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="to plan in, at most about (default: %(default)s)")
    parser.add_argument("--manual", type=Path, metavar="FILE", help="judge the plans of this YAML instead of planning")
    parser.add_argument("--explain", action="store_true", help="which constraint binds, and what one more GB would buy")
    add_memory_option(parser)
    parser.add_argument("--json", action="store_true", help="the answer as JSON")


def _add_written(parser: CommandParser) -> None:
    """Add the files that a plan is written to."""
    parser.add_argument("--yaml", type=output_file, metavar="FILE", help="write offset and recompute lists")
    parser.add_argument(
        "--torch_csv",
        type=output_file,
        metavar="FILE",
        help="write the order of passes as torchtitan's pipeline_parallel_schedule_csv has it",
    )
    parser.add_argument(
        "--megatron", type=output_file, metavar="FILE", help="write the split as options of Megatron-LM"
    )
    parser.add_argument(
        "--apply",
        type=Path,
        nargs="?",
        const=OF_CONFIG,
        metavar="RUN.yaml",
        help="the run to write with the plan in it",
    )
    parser.add_argument("--output", type=output_file, metavar="FILE", help="where --apply writes")
    parser.add_argument("--picture", type=output_file, metavar="FILE", help=f"draw the schedule: {', '.join(FORMATS)}")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _size(text: str) -> str:
    try:
        size_in_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text
