"""The process that simulates one rank for the dry run: ``python -m toolkit.dry_run.worker --config C --rank R --output FILE``.

A process of its own, so that several run at once, and everything one of them has started ends with it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mindllm.command import CommandParser, run_command
from mindllm.compiled.simulate_rank import simulate_rank
from mindllm.compiled.worker import sources_in, text_of_last_graph
from mindllm.config import load_config
from toolkit.dry_run.profile import profile_of, save_profile


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulates one rank and writes its profile."""
    parser = CommandParser(
        prog="python -m toolkit.dry_run.worker",
        description="Simulates one rank for the dry run.",
        epilog="example: python -m toolkit.dry_run.worker --config run.yaml --rank 0 --output rank_0.profile",
    )
    parser.add_argument("--config", required=True, help="YAML of the run")
    parser.add_argument("--rank", type=int, required=True, help="global rank")
    parser.add_argument("--output", type=Path, required=True, help="file that receives the profile")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="mindllm_dry_run_") as name:
        os.environ.update(text_of_last_graph(Path(name)))  # of this process: the one that simulates inherits it
        simulation = simulate_rank(load_config(options.config), options.rank)
        save_profile(profile_of(simulation, sources_in(Path(name))), options.output)
    return 0


if __name__ == "__main__":
    run_command(main)
