"""What the training loop and its callbacks share: the state of the run, and the record of one step."""

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
    """The step a process ends with: ``runner_config.stop_step`` if that comes before the end of the run."""
    stop = config.runner_config.stop_step
    return min(stop, total_steps) if stop else total_steps


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, as it is written to ``metrics.jsonl``. Times in seconds, loss in nats per token.

    ``tflops`` is the model's floating-point work per second and device in 10¹², ``mfu`` its ratio to the device's peak.
    ``tokens`` are those that the loss is the mean of; of pairs of answers they are the pairs. ``slowest_rank`` worked longest
    on the step, ``slowest_rank_time_s``; of one rank this is the step. ``skipped``: the guard against spikes left it out.
    ``overflow_share``: the part of the run's steps so far that overflowed. ``data_wait_s``: how long this rank waited for the
    batch, before the step and no part of ``step_time_s``.
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
        """Whether the step changed the weights."""
        return not (self.overflow or self.skipped)


@dataclass
class RunState:
    """A run between two steps. ``step`` counts finished optimizer steps; ``batch`` is the one last trained on.

    ``scores``: figures that a callback found after the newest step, by name; those that write metrics write them, too.
    ``expert_loads``: by layer what the newest step counted of experts, if the model has any. ``preference``: what it counted of
    pairs of answers, by name, if it learns from such. ``mtp_loss``: the mean loss of what layers predict ahead, if the model has
    such and this rank knows it. ``against_proof``: the newest step beside what the run's proof predicts, by name, if it has one.
    ``health``: figures of the newest step by ``figure/group``, where ``monitor_config`` asks for them. ``counted_steps``, of
    which ``overflows``: steps of the whole run, as far as its checkpoints say how many overflowed.
    ``base``: the frozen weights as checkpoints name them, which leave them out; None if checkpoints hold all weights.
    ``base_weights``: the weights the run was given, None if it drew them from the seed.
    ``sample_offset``: samples consumed beyond ``step`` global batches; not 0 after a resume with another batch size.
    ``failures``: what is lost at the end though training went on; the process then ends with exit code 1.
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
        """The step this process ends with."""
        return last_step(self.config, self.total_steps)

    def place_in_epoch(self, step: int) -> tuple[int, int]:
        """Return the epoch and the step within it, both counted from 1."""
        size = self.config.global_batch_size
        last = self.consumed_samples(step) - 1
        of_epoch = self.steps_per_epoch * size
        return last // of_epoch + 1, last % of_epoch // size + 1

    def consumed_samples(self, step: int) -> int:
        """Return the number of samples that the run has consumed after ``step``."""
        return self.sample_offset + step * self.config.global_batch_size
