"""The options of ``mindllm offline``."""

from __future__ import annotations

import argparse

from mindllm.cli.registry import spelled
from mindllm.command import CommandParser, output_directory, positive
from mindllm.compiled.device.wheel import PROGRAM_VERSIONS
from mindllm.process.host_memory import add_memory_option

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
        prog=spelled("offline"),
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
