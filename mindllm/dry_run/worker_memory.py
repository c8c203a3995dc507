"""How much memory of this machine a process that simulates a rank takes."""

from __future__ import annotations

from mindllm.config import RunConfig
from mindllm.parallel.stages import stages_of
from mindllm.reduced_runs.stage import micro_batches_of
from mindllm.units import MIB

# Measured with MindSpore 2.10 on Llama 2 of several widths: of the two processes of a worker, of a layer that is compiled, of a
# layer that is scheduled for a micro-batch. Widths hardly matter, since no weight is made.
PROCESSES, LAYER, SCHEDULED_LAYER = 1150 * MIB, 12 * MIB, 4 * MIB


def worker_bytes(config: RunConfig) -> int:
    """Memory a worker takes at most, estimated from the number of operators it compiles and schedules."""
    chunks = config.parallel_config.pipeline_stage * config.model.config.pp_interleave_num  # other stages: a layer each
    on_stage = max(stage.layers for stage in stages_of(config))
    return PROCESSES + (chunks + on_stage) * LAYER + on_stage * micro_batches_of(config) * SCHEDULED_LAYER
