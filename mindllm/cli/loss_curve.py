"""``mindllm loss-curve``: draw the losses of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mindllm.command import CommandParser, output_file, run_command
from mindllm.terminal.console import output

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
    parser = CommandParser(prog="mindllm loss-curve", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("runs", nargs="+", type=Path, metavar="DIR", help="output directory of a run")
    parser.add_argument(
        "--output",
        type=output_file,
        default="loss_curve.png",
        metavar="FILE",
        help="PNG to write (default: %(default)s)",
    )
    parser.add_argument(
        "--experts", action="store_true", help="draw tokens per expert of one run, layer by layer, instead of losses"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads ``metrics.jsonl`` and ``evaluation.jsonl`` of the runs and writes one picture."""
    parser = make_parser()
    options = parser.parse_args(arguments)

    from mindllm.train.curves import draw, draw_experts, read_run

    if options.experts and len(options.runs) > 1:
        parser.error(f"--experts draws one run; {len(options.runs)} were given")
    runs = [read_run(directory) for directory in options.runs]
    if options.experts:
        draw_experts(runs[0], options.output)
    else:
        draw(runs, options.output)
    output.print(str(options.output))
    return 0


if __name__ == "__main__":
    run_command(main)
