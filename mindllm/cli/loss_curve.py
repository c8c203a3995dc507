"""``mindllm loss-curve``: plot the losses of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mindllm.command import CommandParser, output_file, run_command
from mindllm.terminal.console import output

DESCRIPTION = "Plots training and held-out losses of runs as a PNG; with --experts, the tokens per expert of one run."
EXAMPLES = """examples:
  %(prog)s output/llama2_tiny --output loss_curve.png
  %(prog)s output/run_a output/run_b --output comparison.png
  %(prog)s output/mixtral_tiny --experts --output experts.png
"""


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(prog="mindllm loss-curve", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("runs", nargs="+", type=Path, metavar="DIR", help="output directory of a run")
    picture = "PNG to write (default: %(default)s)"
    parser.add_argument("--output", type=output_file, default="loss_curve.png", metavar="FILE", help=picture)
    experts = "plot tokens per expert and layer of one run instead of losses"
    parser.add_argument("--experts", action="store_true", help=experts)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Plot ``metrics.jsonl`` and ``evaluation.jsonl`` of the runs; return the exit code."""
    parser = make_parser()
    options = parser.parse_args(arguments)

    from mindllm.train.curves import draw, draw_experts, read_run

    if options.experts and len(options.runs) > 1:
        parser.error(f"--experts takes one run ({len(options.runs)} given)")
    runs = [read_run(directory) for directory in options.runs]
    if options.experts:
        draw_experts(runs[0], options.output)
    else:
        draw(runs, options.output)
    output.print(f"wrote {options.output}")
    return 0


if __name__ == "__main__":
    run_command(main)
