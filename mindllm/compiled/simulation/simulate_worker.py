"""The process that simulates one rank: ``python -m mindllm.compiled.simulation.simulate_worker --config C.yaml --rank 0``.

Started by ``simulate_rank``, with the environment it sets, in a directory that receives MindSpore's files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from mindllm.command import CommandParser, run_command
from mindllm.compiled.device.callback_thread import calm_callback_thread
from mindllm.config import RunConfig, load_config
from mindllm.parallel.refusals import refusals_explained

PIPELINED_THREADS = 8  # with a single one, which is what two cores get, kernels cannot be launched in branches
# O1 fuses elementwise operators and leaves used peaks as they are (docs/simulation.md); O2 needs GE, a part of CANN.
KERNEL_BY_KERNEL = "O0"
MORE_THAN_ANY = "4000GB"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one training step of one rank on a device that is not there."""
    parser = CommandParser(
        prog="python -m mindllm.compiled.simulation.simulate_worker",
        description="Runs one training step of one rank in MindSpore's dry run.",
        epilog="example: python -m mindllm.compiled.simulation.simulate_worker --config run.yaml --rank 3",
    )
    parser.add_argument("--config", required=True, help="YAML of the run")
    parser.add_argument("--rank", type=int, required=True, help="global rank")
    parser.add_argument("--whole", action="store_true", help="compile the layers of other stages as they are")
    options = parser.parse_args(arguments)
    simulate(load_config(options.config), options.rank, options.whole)
    return 0


def simulate(config: RunConfig, rank: int, whole: bool = False) -> None:
    """One step of ``rank``; what it takes is in the files and lines MindSpore leaves.

    ``whole``: the layers of other stages are compiled as they are.
    """
    import mindspore as ms
    from mindspore.communication import init
    from mindspore.communication._comm_helper import GlobalComm
    from mindspore.nn.utils import no_init_parameters

    context = config.context
    GlobalComm.CHECK_ENVS = False
    ms.set_context(device_target="Ascend", max_device_memory=MORE_THAN_ANY, mode=ms.GRAPH_MODE)
    ms.set_context(jit_config={"jit_level": KERNEL_BY_KERNEL}, memory_optimize_level=context.memory_optimize_level)
    ms.set_recursion_limit(context.max_call_depth)
    ms.runtime.dispatch_threads_num(PIPELINED_THREADS)
    init()
    from mindllm.train.distributed_step import build_distributed_step, example_inputs

    calm_callback_thread(Path(ms.__file__).parent)
    alone = config.parallel_config.device_num == 1
    # On one device weights would be drawn as soon as they are made. Elsewhere they are made when they are cut; what
    # no_init_parameters leaves on the class makes MindSpore 2.10 fill them on the host instead.
    with no_init_parameters() if alone else nullcontext():
        if alone and config.runner_config.gradient_accumulation_steps > 1:
            calls = _part_by_part(config)
        else:
            calls = [(build_distributed_step(config, rank, alone=not whole, balanced=True), example_inputs(config))]
    for cell, inputs in calls:
        leave_uninitialised(cell.get_parameters())
        with refusals_explained(cell):
            cell(*inputs)
    ms.runtime.synchronize()


def _part_by_part(config: RunConfig) -> list[tuple[Any, Sequence[Any]]]:
    """Cells and inputs of a step on one device that accumulates gradients, whose engine has a graph for its parts and one for
    their end. One part is as good as several. It comes last: when it is first called, optimizer state is not on the device yet.
    """
    from mindllm.models.attention.largest_logit import largest_logits
    from mindllm.models.weights import shares_of
    from mindllm.parallel import build_replica
    from mindllm.parallel.context import input_columns
    from mindllm.train.distributed_step import example_inputs
    from mindllm.train.engine.columns import inputs, optional_inputs
    from mindllm.train.engine.replica import accumulating_cells
    from mindllm.train.optimizers.build import make_optimizer

    model = build_replica(config)
    optimizer = make_optimizer(model.trainable_params(), config, shares=shares_of(model), largest=largest_logits(model))
    accumulate, end = accumulating_cells(config, model, optimizer)
    columns = input_columns(config)
    given = example_inputs(config)
    parts = config.runner_config.gradient_accumulation_steps
    batch = {name: values.asnumpy()[: len(values) // parts] for name, values in zip(columns, given, strict=False)}
    rate, scale, *last = given[len(columns) :]
    return [(end, (rate, scale, *last)), (accumulate, (*inputs(batch), scale, *optional_inputs(batch)))]


def leave_uninitialised(parameters: Iterable[Any]) -> None:
    """Weights become zeros: memory of the host that nobody touches, so it is never really taken."""
    from mindspore.common.initializer import Zero

    for parameter in parameters:
        if parameter.has_init:
            parameter.init_mode.init = Zero()


if __name__ == "__main__":
    run_command(main)
