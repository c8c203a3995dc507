"""What executing all ranks of a run on this machine takes: memory and seconds per step, told before anything is compiled.

Both are lower bounds from the configuration alone: state and activations as Korthikanti et al. (2022, "Reducing Activation
Recomputation in Large Transformer Models", section 4) count them, in fp32, and the floating-point operations of a step at the
rate of this machine's matrix product. What moves, checks and interprets operators comes on top.
"""

from __future__ import annotations

import atexit
import time
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from mindllm.config import RunConfig
from mindllm.jobs.memory import ADVICE, MemoryClaim, gibibytes
from mindllm.parallel.layer_plan import make_plan

FP32 = 4
BYTES_OF_ACTIVATIONS = 34 * 2  # per token and hidden channel of a layer, of which half a byte count is for fp16
BYTES_OF_SCORES = 5 * 2  # per token, position and head
SIZE = 768  # of the matrices that are multiplied to learn this machine's rate


@dataclass(frozen=True)
class Estimate:
    """What a run takes at least: ``memory`` in bytes, ``step_seconds`` per optimizer step."""

    memory: int
    step_seconds: float


def estimate(config: RunConfig, rate: float) -> Estimate:
    """Return the least time and memory of executing all ranks on a machine of ``rate`` FLOP/s."""
    model = config.model.config
    tokens = config.global_batch_size * model.seq_length
    return Estimate(_state_bytes(config) + _activation_bytes(config), model.flops_per_token() * tokens / rate)


def refuse_too_large(config: RunConfig) -> None:
    """Claim memory for a run until the process ends.

    Raises:
        UserError: this machine cannot hold the run, or not execute it in reasonable time; with the estimate.
    """
    found, patience = estimate(config, matmul_rate()), config.context.lockstep_step_seconds
    devices = config.parallel_config.device_num
    advice = (
        "Train a smaller model (num_layers, hidden_size, seq_length, batch_size), or prove this one with "
        "mindllm check and measure its memory with MS_SIMULATION_LEVEL=1 and context.device_target: Ascend"
    )
    with ExitStack() as block:
        claim = block.enter_context(MemoryClaim(guarded=False))
        if not claim.fits(found.memory):
            raise config.error(
                "parallel_config",
                f"describes {devices} devices, which context.device_target: CPU executes together: that takes at least "
                f"{gibibytes(found.memory)} of memory, and there are {claim.describe()}: {ADVICE}. {advice}",
            )
        if found.step_seconds > patience:
            raise config.error(
                "context.lockstep_step_seconds",
                f"executing {devices} ranks together takes at least {found.step_seconds:.0f} s per step, more than this "
                f"allows (value {patience}). {advice}; or allow more",
            )
        claim.take(found.memory)
        atexit.register(block.pop_all().close)


def _state_bytes(config: RunConfig) -> int:
    """Weights and optimizer state once, or by every replica; accumulated gradients by every replica."""
    sizes = config.parallel_config
    weights = config.model.config.architecture.trained_parameter_count() * FP32
    frozen = config.model.config.parameter_count() * FP32 - weights
    replicas = sizes.replica_num
    copies = 1 if config.parallel.enable_parallel_optimizer else replicas
    accumulates = sizes.pipeline_stage > 1 or config.runner_config.gradient_accumulation_steps > 1
    return weights * (3 * copies + (replicas if accumulates else 1)) + frozen * replicas


def _activation_bytes(config: RunConfig) -> int:
    """Return the bytes that layers of all stages keep for micro-batches in flight; a recomputed layer keeps its input."""
    model, sizes = config.model.config, config.parallel_config
    tokens = config.runner_config.batch_size * sizes.data_parallel * model.seq_length
    kept = BYTES_OF_ACTIVATIONS * model.hidden_size + BYTES_OF_SCORES * model.num_heads * model.seq_length
    plan = make_plan(config)
    total = 0
    for layer in plan.layers:
        alive = min(sizes.micro_batch_num, sizes.pipeline_stage - layer.stage)
        total += alive * tokens * (FP32 * model.hidden_size if layer.recompute else kept)
    return total


def matmul_rate() -> float:
    """FLOP/s of numpy's matrix product on this machine, the best of a few."""
    matrix = np.ones((SIZE, SIZE), np.float32)
    seconds = []
    for _ in range(3):
        begun = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - begun)
    return 2.0 * SIZE**3 / min(seconds)
