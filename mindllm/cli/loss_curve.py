"""What ``mindllm loss-curve`` does."""

from __future__ import annotations

from collections.abc import Sequence

from mindllm.cli.parsers.loss_curve import make_parser
from mindllm.command import run_command
from mindllm.terminal.console import output
from mindllm.train.curves.draw import draw, draw_experts, read_run


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads ``metrics.jsonl`` and ``evaluation.jsonl`` of the runs and writes one picture."""
    parser = make_parser()
    options = parser.parse_args(arguments)
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
