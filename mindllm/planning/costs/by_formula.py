"""The problem of a run YAML by formula: layers, ends and memory from the architecture alone; nothing is compiled or simulated."""

from __future__ import annotations

from collections.abc import Sequence

from mindllm.config import RunConfig, override_config
from mindllm.planning.costs.as_it_is import by_formula
from mindllm.planning.costs.formula import plan_problem
from mindllm.planning.costs.layer_types import check_ahead
from mindllm.planning.plan import Evaluation
from mindllm.planning.problem import Problem
from mindllm.reduced_runs.even import even_keys
from mindllm.timing.configured import workload_of
from mindllm.timing.device import Device
from mindllm.timing.verdict import memory_limit

ROOM = 0.95  # of the limit: what gaps between blocks and kernels' workspace leave


def formula_problems(config: RunConfig, device: Device, numbers: Sequence[int] | None) -> list[Problem]:
    """The problem of ``config`` for each number of chunks per stage (None: the YAML's own).

    Raises:
        UserError: the run has no pipeline, several layers predict ahead, or there are fewer layers than places.
    """
    stages, model = config.parallel_config.pipeline_stage, config.model.config
    if stages < 2:
        message = f"is {stages}: there is no pipeline to plan; write a number of stages from 2 on"
        raise config.error("parallel_config.pipeline_stage", message)
    check_ahead(config)
    limit = memory_limit(config, device)
    name = config.trainer.model_name or "run"
    return [
        formula_problem(override_config(config, even_keys(config, stages, chunks)), device, limit, name)
        for chunks in dict.fromkeys(numbers or [model.pp_interleave_num])
    ]


def formula_as_it_is(config: RunConfig, device: Device) -> Evaluation | None:
    """The run of the YAML as it is, with the same costs and the same limit."""
    return by_formula(config, device, ROOM * memory_limit(config, device), config.trainer.model_name or "run")


def formula_problem(bare: RunConfig, device: Device, limit: float, name: str) -> Problem:
    """The problem of a run that recomputes nothing; ``limit`` is bytes of a device, some of which stay free."""
    return plan_problem(workload_of(bare), device, ROOM * limit, name)
