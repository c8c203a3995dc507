"""State that the training loop shares with its callbacks, and the record of one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mindllm.config import RunConfig
from mindllm.train.checkpoint.loading import Base
from mindllm.train.expert_loads import LayerLoad
from mindllm.train.optimizers.loss_scale import LossScaler
from mindllm.train.optimizers.spikes import SpikeGuard

if TYPE_CHECKING:
    from mindllm.train.checkpoint.tensors import TensorSource
    from mindllm.train.engine import Batch, Engine


def last_step(config: RunConfig, total_steps: int) -> int:
    """Return the last step of a process: ``runner_config.stop_step`` if it comes before the end of the run."""
    stop = config.runner_config.stop_step
    return min(stop, total_steps) if stop else total_steps


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, as written to ``metrics.jsonl``. Times are in seconds, the loss in nats per token.

    Attributes:
        tflops: floating-point operations of the model, in 10¹² per second and device.
        mfu: ``tflops`` over the peak of the device.
        tokens: tokens over which the loss is the mean; preference pairs count as one each.
        slowest_rank: the rank that worked longest, for ``slowest_rank_time_s``.
        skipped: whether the spike guard skipped the step.
        overflow_share: share of the run's steps so far that overflowed.
        data_wait_s: time this rank waited for the batch; not part of ``step_time_s``.
    """

    step: int
    epoch: int
    loss: float
    learning_rate: float
    global_norm: float
    overflow: bool
    loss_scale: float
    tokens: int
    step_time_s: float
    tokens_per_s: float
    tokens_per_s_per_device: float
    samples_per_s_per_device: float
    tflops: float
    mfu: float
    slowest_rank: int = 0
    slowest_rank_time_s: float = 0.0
    skipped: bool = False
    overflow_share: float = 0.0
    data_wait_s: float = 0.0

    @property
    def applied(self) -> bool:
        """True if the step changed the weights."""
        return not (self.overflow or self.skipped)


@dataclass
class RunState:
    """A run between two steps.

    Attributes:
        step: number of finished optimizer steps.
        batch: the batch of the last step.
        base: record of the frozen weights, which checkpoints leave out; None if checkpoints have all weights.
        base_weights: the weights that the run was started with; None if they were initialized from the seed.
        results: names and values printed at the end.
        scores: figures that a callback computed after the last step; metrics include them.
        failures: errors that did not end training; the process exits with code 1.
        expert_loads: loads of experts in the last step, by layer.
        preference: figures of preference pairs in the last step.
        mtp_loss: mean loss of the MTP layers in the last step, if this rank has it.
        against_proof: the last step relative to the run's proof.
        health: health figures of the last step by ``figure/group``.
        counted_steps: steps of the whole run whose overflow is known; ``overflows`` of them overflowed.
        sample_offset: samples consumed beyond ``step`` global batches, after a resume with another batch size.
    """

    config: RunConfig
    engine: Engine
    scaler: LossScaler
    total_steps: int
    steps_per_epoch: int
    step: int = 0
    batch: Batch | None = None
    base: Base | None = None
    base_weights: Mapping[str, TensorSource] | None = None
    stop_reason: str = ""
    results: dict[str, str] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    expert_loads: tuple[LayerLoad, ...] = ()
    preference: dict[str, float] = field(default_factory=dict)
    mtp_loss: float | None = None
    against_proof: dict[str, float] = field(default_factory=dict)
    health: dict[str, float] = field(default_factory=dict)
    counted_steps: int = 0
    overflows: int = 0
    sample_offset: int = 0
    spikes: SpikeGuard = field(init=False)

    def __post_init__(self) -> None:
        self.spikes = SpikeGuard(self.config)

    @property
    def output_dir(self) -> Path:
        return Path(self.config.output_dir)

    @property
    def last_step(self) -> int:
        """The last step of this process."""
        return last_step(self.config, self.total_steps)

    def place_in_epoch(self, step: int) -> tuple[int, int]:
        """Return the epoch and the step within it, both counted from 1."""
        size = self.config.global_batch_size
        last = self.consumed_samples(step) - 1
        epoch_samples = self.steps_per_epoch * size
        return last // epoch_samples + 1, last % epoch_samples // size + 1

    def consumed_samples(self, step: int) -> int:
        """Return the number of samples that the run has consumed after ``step``."""
        return self.sample_offset + step * self.config.global_batch_size
