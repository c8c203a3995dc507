"""The process that estimates one rank for the dry run: ``python -m mindllm.dry_run.worker --config C --rank R --output FILE``.

It works where nothing can simulate; what can, simulates in forks of one process (:mod:`mindllm.dry_run.server`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mindllm.command import CommandParser, run_command
from mindllm.compiled.rank.compile_rank import compile_rank
from mindllm.compiled.simulation.estimate_rank import estimate_rank
from mindllm.config import load_config
from mindllm.dry_run.profile import profile_of, save_profile
from mindllm.dry_run.source_lines import write_lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Estimates one rank and writes its profile."""
    parser = CommandParser(
        prog="python -m mindllm.dry_run.worker",
        description="Estimates the memory of one rank from its compiled graph.",
        epilog="example: python -m mindllm.dry_run.worker --config run.yaml --rank 0 --output rank_0.profile",
    )
    parser.add_argument("--config", required=True, help="YAML of the run")
    parser.add_argument("--rank", type=int, required=True, help="global rank")
    parser.add_argument("--output", type=Path, required=True, help="file that receives the profile")
    parser.add_argument("--lines", action="store_true", help="write the source lines of its operators instead")
    options = parser.parse_args(arguments)
    config = load_config(options.config)
    if options.lines:
        write_lines(compile_rank(config, options.rank).sources, options.output)
    else:
        save_profile(profile_of(estimate_rank(config, options.rank), estimated=True), options.output)
    return 0


if __name__ == "__main__":
    run_command(main)
