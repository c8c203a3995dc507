"""``context.save_graphs`` writes the graphs of a run where ``save_graphs_path`` says, and ``ir_inspect`` reads them."""

from pathlib import Path

import pytest
from command_line import run
from test_several_processes import end, launch

from mindllm.compiled.inspect.source import read_graph

SHORT = ("--runner_config.stop_step=2", "--do_eval=false", "--callbacks=[{type: MFLossMonitor}]")
PLAIN = "--context.enable_graph_kernel=false"  # graphs with fused operators are not kept


@pytest.mark.slow
def test_graphs_are_written_when_asked_for_and_can_be_inspected(config_file, tmp_path):
    kept = tmp_path / "kept"
    options = (*SHORT, PLAIN, f"--context.compile_cache_path={kept}")
    run(config_file, tmp_path / "output", *options)
    assert list(kept.glob("step-*"))
    assert not list(tmp_path.rglob("*.ir"))
    # What the cache holds is compiled again: a graph that was loaded would not be written.
    written = ("--context.save_graphs=true", "--context.save_graphs_path=graphs")
    run(config_file, tmp_path / "output", *options, *written)
    graph = read_graph(_step_graph(tmp_path / "graphs")).graph
    assert graph.parameters["model.layers.0.attention.wq.weight"].shape == (32, 32)
    products = graph.find("MatMul", lambda node: not node.backward)
    assert "linear.py" in {Path(line.file).name for product in products for line in graph.source(product)[-1:]}


@pytest.mark.slow
def test_each_rank_writes_into_its_own_directory(config_file, tmp_path):
    end(
        launch(config_file, tmp_path / "output", *SHORT, "--context.save_graphs=1", "--context.save_graphs_path=graphs")
    )
    for rank in (0, 1):
        assert read_graph(_step_graph(tmp_path / "graphs" / f"rank_{rank}")).graph.rank == rank


def _step_graph(directory):
    """The graph of the training step; a run compiles smaller ones besides."""
    return max(directory.glob("*_validate_*.ir"), key=lambda path: path.stat().st_size)
