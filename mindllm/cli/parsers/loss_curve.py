"""The options of ``mindllm loss-curve``."""

from __future__ import annotations

from pathlib import Path

from mindllm.cli.registry import spelled
from mindllm.command import CommandParser, output_file

DESCRIPTION = (
    "Draws training and held-out loss of one or several runs as a PNG, or with --experts how one run's tokens fell on "
    "experts."
)
EXAMPLES = """example:
  %(prog)s output/llama2_tiny --output loss_curve.png
  %(prog)s output/run_a output/run_b --output comparison.png
  %(prog)s output/mixtral_tiny --experts --output experts.png
"""


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(prog=spelled("loss-curve"), description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("runs", nargs="+", type=Path, metavar="DIR", help="output directory of a run")
    parser.add_argument(
        "--output", type=output_file, default="loss_curve.png", help="PNG to write (default: %(default)s)"
    )
    parser.add_argument(
        "--experts", action="store_true", help="draw tokens per expert of one run, layer by layer, instead of losses"
    )
    return parser
