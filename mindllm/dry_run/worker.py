"""The process that simulates one rank for the dry run: ``python -m mindllm.dry_run.worker --config C --rank R --output FILE``.

A process of its own, so that several run at once, and everything one of them has started ends with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mindllm.command import CommandParser, run_command
from mindllm.compiled.simulation.estimate_rank import estimate_rank
from mindllm.compiled.simulation.simulate_rank import simulate_rank
from mindllm.config import load_config
from mindllm.dry_run.profile import profile_of, save_profile
from mindllm.dry_run.source_lines import write_lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulates one rank and writes its profile."""
    parser = CommandParser(
        prog="python -m mindllm.dry_run.worker",
        description="Simulates one rank for the dry run.",
        epilog="example: python -m mindllm.dry_run.worker --config run.yaml --rank 0 --output rank_0.profile",
    )
    parser.add_argument("--config", required=True, help="YAML of the run")
    parser.add_argument("--rank", type=int, required=True, help="global rank")
    parser.add_argument("--output", type=Path, required=True, help="file that receives the profile")
    parser.add_argument("--lines", action="store_true", help="write the source lines of its operators instead")
    parser.add_argument("--estimate", action="store_true", help="estimate from the compiled graph, without the dry run")
    options = parser.parse_args(arguments)
    config = load_config(options.config)
    if options.lines:
        write_lines(config, options.rank, options.output)
    elif options.estimate:
        save_profile(profile_of(estimate_rank(config, options.rank), estimated=True), options.output)
    else:
        save_profile(profile_of(simulate_rank(config, options.rank)), options.output)
    return 0


if __name__ == "__main__":
    run_command(main)
