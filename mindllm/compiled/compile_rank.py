"""``compile_rank(config, rank)``: the graph of any rank's training step, from MindSpore's own parallel compiler."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import mindllm
from mindllm.compiled.device.front_end import environment
from mindllm.compiled.graph import CompiledGraph
from mindllm.compiled.graph_file import load
from mindllm.compiled.worker import GRAPH, text_of_last_graph
from mindllm.config import RunConfig, render_config
from mindllm.errors import UserError
from mindllm.parallel.layout import Mesh
from mindllm.train.device import saved_graphs_environment

CONFIG = "config.yaml"
SHOWN_LINES = 12
ERRORS_ONLY = "3"


class CompileFailed(UserError):
    """MindSpore's compiler refused the configuration; holds what it said."""


def compile_rank(config: RunConfig, rank: int, timeout: float = 3600.0) -> CompiledGraph:
    """Compiles the training step of global ``rank`` in a process of its own, and returns its graph.

    Raises:
        UserError: the rank does not exist, or MindSpore cannot be used for this.
        CompileFailed: the compiler's own error.
    """
    sizes = config.parallel_config
    devices = Mesh(sizes.data_parallel, sizes.model_parallel, sizes.pipeline_stage).devices
    if not 0 <= rank < devices:
        raise UserError(f"rank {rank} does not exist: the configuration has {devices} devices, 0 to {devices - 1}")
    with tempfile.TemporaryDirectory(prefix="mindllm_compile_") as name:
        directory = Path(name)
        (directory / CONFIG).write_text(render_config(config), encoding="utf-8")
        graphs = saved_graphs_environment(config, rank) or text_of_last_graph(directory)
        _run_worker(directory, rank, devices, timeout, graphs)
        return load(directory / GRAPH)


def _run_worker(directory: Path, rank: int, devices: int, timeout: float, graphs: Mapping[str, str]) -> None:
    """Runs the worker inside ``directory``, where MindSpore may litter; ``graphs`` says where it writes their text."""
    command = [
        sys.executable,
        "-m",
        "mindllm.compiled.worker",
        "--config",
        CONFIG,
        "--rank",
        str(rank),
        "--output",
        ".",
    ]
    packages = str(Path(mindllm.__file__).resolve().parent.parent)
    search = os.pathsep.join(filter(None, [packages, os.environ.get("PYTHONPATH", "")]))
    variables = {
        "GLOG_v": ERRORS_ONLY,
        **os.environ,
        **environment(rank, devices),
        **graphs,
        "PYTHONPATH": search,
    }
    try:
        result = subprocess.run(
            command, cwd=directory, env=variables, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        raise CompileFailed(f"compiling rank {rank} took longer than {timeout:.0f} s") from None
    if result.returncode == UserError.exit_code:
        raise UserError(result.stderr.strip().removeprefix("error: "))
    if result.returncode != 0 or not (directory / GRAPH).is_file():
        raise CompileFailed(
            f"rank {rank} does not compile (exit code {result.returncode}):\n{_last_error(result.stderr)}"
        )


def _last_error(output: str) -> str:
    """The final exception of a traceback, without the stacks MindSpore adds to it."""
    starts = list(re.finditer(r"^\w*(Error|Exception|Interrupt)\b.*$", output, re.MULTILINE))
    tail = output[starts[-1].start() :] if starts else output
    lines = [line for line in tail.splitlines() if line.strip()]
    return "\n".join(lines[:SHOWN_LINES] if starts else lines[-SHOWN_LINES:])
