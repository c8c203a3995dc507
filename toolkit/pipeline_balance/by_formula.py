"""The problem of a run YAML by formula: layers, ends and memory from the architecture alone; nothing is compiled or simulated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindllm.config import RunConfig, layer_counts, override_config
from mindllm.planning.problem import Problem
from mindllm.timing.configured import workload_of
from mindllm.timing.device import Device
from mindllm.timing.plan_problem import plan_problem

ROOM = 0.95  # of the limit: what gaps between blocks and kernels' workspace leave


def formula_problems(config: RunConfig, device: Device, numbers: Sequence[int] | None) -> list[Problem]:
    """The problem of ``config`` for each number of chunks per stage (None: the YAML's own).

    Layers that predict ahead are the last ones of the order, so a single one is on the last stage whatever is planned.

    Raises:
        UserError: the run has no pipeline, several layers predict ahead, or there are fewer layers than places.
    """
    stages, model = config.parallel_config.pipeline_stage, config.model.config
    if stages < 2:
        message = f"is {stages}: there is no pipeline to plan; write a number of stages from 2 on"
        raise config.error("parallel_config.pipeline_stage", message)
    if model.num_nextn_predict_layers > 1:
        message = (
            "all of them have to be on the last stage, which the planner asks of one layer only "
            f"(value {model.num_nextn_predict_layers}); write 1 or 0"
        )
        raise config.error("model.model_config.num_nextn_predict_layers", message)
    limit = config.context.device_memory
    name = config.trainer.model_name or "run"
    return [
        formula_problem(override_config(config, plain_keys(config, stages, chunks)), device, limit, name)
        for chunks in dict.fromkeys(numbers or [model.pp_interleave_num])
    ]


def formula_problem(bare: RunConfig, device: Device, limit: float, name: str) -> Problem:
    """The problem of a run that recomputes nothing; ``limit`` is bytes of a device, some of which stay free."""
    return plan_problem(workload_of(bare), device, ROOM * limit, name)


def plain_keys(config: RunConfig, stages: int, chunks: int) -> dict[str, Any]:
    """The keys that spread the layers evenly over as many stages and chunks, and recompute nothing."""
    layers = config.model.config.layer_count
    average = layers // (stages * chunks)
    offset = [[count - average for count in row] for row in even_counts(layers, stages, chunks)]
    return {
        "parallel_config.pipeline_stage": stages,
        "parallel.pipeline_config.pipeline_interleave": chunks > 1,
        "model.model_config.pp_interleave_num": chunks,
        "model.model_config.offset": offset if chunks > 1 else offset[0],
        **{f"recompute_config.{key}": False for key in ("recompute", "select_recompute", "select_comm_recompute")},
    }


def even_counts(layers: int, stages: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """Layers per ``[chunk][stage]``; what is left over is on the first stages, for the last has the head."""
    left = layers % (stages * chunks)
    offset = tuple(tuple(int(chunk * stages + at < left) for at in range(stages)) for chunk in range(chunks))
    return layer_counts(layers, stages, chunks, offset)
