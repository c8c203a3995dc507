"""Simulations by the nodes of a Ray cluster; what they find is kept here as if this machine had found it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindllm.compiled.rank.compile_rank import compile_rank
from mindllm.compiled.simulation.simulate_rank import simulate_rank
from mindllm.config import config_tree, load_config
from mindllm.dry_run.profile import profile_of, save_profile
from mindllm.dry_run.request import LINES, Request
from mindllm.dry_run.source_lines import write_lines
from mindllm.dry_run.worker_memory import worker_bytes
from mindllm.files import atomic_open
from mindllm.jobs.ray_cluster import Spread, Work
from mindllm.process.temporary import temporary_directory
from mindllm.terminal.progress import Progress

FUNCTION = f"{__name__}:done_there"


def run_on_cluster(missing: Mapping[Path, Request], progress: Progress) -> None:
    """Have the cluster do all requests, and write what comes back into their files as it comes.

    Raises:
        UserError: what MindSpore's compiler refuses, or no node has the memory.
        RunFailed: a simulation, or its node, ended unexpectedly.
    """
    files = sorted(missing, key=lambda file: -worker_bytes(missing[file].config))
    works = [_work(missing[file]) for file in files]
    spread = Spread(works)
    progress(f"simulating on the cluster, beginning with {works[0].name}", 0, len(works))
    try:
        for place, content in spread.done(None):
            with atomic_open(files[place], "wb") as file:
                file.write(content)
            progress("simulating on the cluster", len(works) - spread.left, len(works))
    finally:
        spread.kill()


def _work(request: Request) -> Work:
    arguments = (config_tree(request.config), request.rank, request.what)
    return Work(FUNCTION, arguments, request.name, worker_bytes(request.config))


def done_there(tree: dict[str, Any], rank: int, what: str) -> bytes:
    """Do a request on a node, and return what the file of it holds."""
    config = load_config(tree)
    with temporary_directory("mindllm_dry_run_") as directory:
        file = directory / "found"
        if what == LINES:
            write_lines(compile_rank(config, rank).sources, file)
        else:
            save_profile(profile_of(simulate_rank(config, rank)), file)
        return file.read_bytes()
