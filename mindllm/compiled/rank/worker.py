"""The process that compiles one rank: ``python -m mindllm.compiled.rank.worker --config C.yaml --rank 0 --output DIR``.

Started by ``compile_rank``, with the environment it sets; a process of its own, as MindSpore's context is global.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from mindllm.command import CommandParser, run_command
from mindllm.compiled.graph.file import write_graph
from mindllm.compiled.graph.mind_ir import parameter_names
from mindllm.compiled.graph.sources import SourceLine, read_sources
from mindllm.config import RunConfig, load_config
from mindllm.parallel.layout import mesh_of
from mindllm.parallel.parameter_layout import ParameterLayout
from mindllm.parallel.refusals import refusals_explained

GRAPH = "rank.graph"
TEXT = "text"
LAST_PASS = "validate"
TEXT_DIRECTORY = "MS_DEV_SAVE_GRAPHS_PATH"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles the training step of one rank and writes its graph."""
    parser = CommandParser(
        prog="python -m mindllm.compiled.rank.worker",
        description="Compiles the training step of one rank without a device.",
        epilog="example: python -m mindllm.compiled.rank.worker --config run.yaml --rank 3 --output compiled/",
    )
    parser.add_argument("--config", required=True, help="YAML of the run")
    parser.add_argument("--rank", type=int, required=True, help="global rank")
    parser.add_argument("--output", type=Path, required=True, help="directory that receives the graph")
    options = parser.parse_args(arguments)
    compile_to(load_config(options.config), options.rank, options.output, balanced=True)
    return 0


def compile_to(
    config: RunConfig,
    rank: int,
    output: Path,
    training: bool = True,
    asked: Callable[[], int] | None = None,
    balanced: bool = False,
) -> None:
    """Compiles the step of ``rank``, or what it evaluates with, and writes the graph into the directory ``output``.

    With ``asked``, of the rank that this returns once the compiler wants to know; one of those that are built as ``rank`` is.
    ``balanced``: tokens that are sent have the lengths of a router that spreads them evenly, so that all shapes are known.
    """
    from mindllm.compiled.device import front_end

    front_end.pretend_device(rank, mesh_of(config).device_num, asked)
    import mindspore as ms

    from mindllm.compiled.graph.initial import beginnings, initial_values, leave_undrawn
    from mindllm.train.distributed_step import build_distributed_loss, build_distributed_step, example_inputs

    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_recursion_limit(config.context.max_call_depth)
    build = partial(build_distributed_step, balanced=balanced) if training else build_distributed_loss
    cell = build(config, rank, tell_rank=asked is None)
    constants = leave_undrawn(cell)
    with refusals_explained(cell):
        graph = front_end.compile_cell(cell, *example_inputs(config, training))
    layouts = {name: ParameterLayout.from_front_end(layout) for name, layout in graph.parameter_layouts.items()}
    layouts |= getattr(cell, "state_layouts", {})
    sources = sources_in(Path(os.environ[TEXT_DIRECTORY]))
    names = parameter_names(graph.mind_ir)
    own = ms.get_auto_parallel_context("global_rank") if asked else rank
    initial = initial_values(cell, names, constants)
    begins = beginnings(cell, names, constants)
    write_graph(output / GRAPH, own, graph.mind_ir, layouts, sources, initial, begins)


def text_of_last_graph(output: Path) -> dict[str, str]:
    """Variables that make MindSpore write the text of the graph behind its last pass, where source lines stand."""
    return {
        "MS_DEV_SAVE_GRAPHS": "1",
        TEXT_DIRECTORY: str(output / TEXT),
        "MS_DEV_DUMP_IR_PASSES": LAST_PASS,
    }


def sources_in(text: Path) -> dict[str, tuple[SourceLine, ...]]:
    """Source lines by scope, from the text of graphs that MindSpore wrote into the directory ``text``."""
    found: dict[str, tuple[SourceLine, ...]] = {}
    for path in sorted(text.glob(f"*_{LAST_PASS}_*.ir")):
        with open(path, encoding="utf-8", errors="replace") as lines:
            found |= read_sources(lines)
    return found


if __name__ == "__main__":
    run_command(main)
