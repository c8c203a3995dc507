"""``compile_rank(config, rank)``: the graph of any rank's training step, from MindSpore's own parallel compiler."""

from __future__ import annotations

from pathlib import Path

from mindllm.compiled.device.front_end import environment
from mindllm.compiled.graph.compiled_graph import CompiledGraph
from mindllm.compiled.graph.file import load
from mindllm.compiled.rank.host_needs import claimed
from mindllm.compiled.rank.worker import GRAPH, text_of_last_graph
from mindllm.compiled.rank.worker_process import run_worker
from mindllm.config import RunConfig, render_config
from mindllm.errors import UserError
from mindllm.parallel.layout import mesh_of
from mindllm.process.temporary import temporary_directory
from mindllm.train.device import saved_graphs_environment

CONFIG = "config.yaml"
ERRORS_ONLY = "3"


def compile_rank(config: RunConfig, rank: int, timeout: float = 3600.0) -> CompiledGraph:
    """Compiles the training step of global ``rank`` in a process of its own, and returns its graph.

    Raises:
        UserError: the rank does not exist, or MindSpore cannot be used for this.
        CompileFailed: the compiler's own error, with the operator it refuses; too little memory; too long a time (seconds).
    """
    devices = mesh_of(config).device_num
    if not 0 <= rank < devices:
        raise UserError(f"rank {rank} does not exist: the configuration has {devices} devices, 0 to {devices - 1}")
    with temporary_directory("mindllm_compile_") as directory, claimed(config):
        (directory / CONFIG).write_text(render_config(config), encoding="utf-8")
        own_graphs = Path(config.context.save_graphs_path) / f"rank_{rank}"
        variables = {
            "GLOG_v": ERRORS_ONLY,
            **environment(rank, devices),
            **(saved_graphs_environment(config, own_graphs) or text_of_last_graph(directory)),
        }
        run_worker(
            "mindllm.compiled.rank.worker",
            ["--config", CONFIG, "--rank", str(rank), "--output", "."],
            directory,
            variables,
            product=GRAPH,
            doing=f"compiling rank {rank}",
            timeout=timeout,
        )
        return load(directory / GRAPH)
