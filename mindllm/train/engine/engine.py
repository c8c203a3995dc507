"""What trains, evaluates, saves and loads, whatever executes it: the one interface that trainer, callbacks and checkpoints know.

Behind it stand a device with the whole model, or several such replicas (``replica``); one rank of a cluster whose devices
share the model (``cluster_rank``); and all ranks of a cluster in lock-step in one process (``mindllm.compiled.execute``).
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mindllm.architecture.optimizer_state import CODE_BITS, CODES, MASTER, further_state, kind_of_state, state_shapes
from mindllm.config import RunConfig, override_config
from mindllm.train.checkpoint import Checkpoint, RankTensors
from mindllm.train.checkpoint.loading import FLOATING
from mindllm.train.checkpoint.tensors import Converted, numpy_dtype
from mindllm.train.health import Watched
from mindllm.train.job.ranks import Ranks
from mindllm.train.optimizers.spikes import limits_of_step
from mindllm.units import counted

logger = logging.getLogger(__name__)
FP32_SIZE = 4
LENGTHS = {"float64": 3, "float32": 2, "float16": 1, "bfloat16": 0}
"""Orders floating types by their precision."""
Batch = Mapping[str, np.ndarray]
Signatures = dict[str, tuple[tuple[int, ...], np.dtype]]


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step computed: mean loss per token in nats, norm of the gradients before clipping, tokens.

    All are those of the whole global batch. In a simulation, which computes nothing, loss and norm are NaN. ``waited``: seconds
    of the step in which this rank waited for others, where that is known. ``skipped``: norm or loss were past their limits.
    """

    loss: float
    global_norm: float
    overflow: bool
    tokens: int
    waited: float = 0.0
    skipped: bool = False

    @classmethod
    def of(cls, loss: Any, norm: Any, applied: Any, tokens: Any, waited: float = 0.0) -> StepResult:
        """What a compiled step gave back; one that was not applied overflowed, or its norm is finite and it was skipped."""
        overflow = not math.isfinite(norm)
        return cls(float(loss), float(norm), overflow, int(tokens), waited, skipped=not (applied or overflow))


class Engine(ABC):
    """The model of a run with what trains and evaluates it.

    Attributes:
        ranks: the processes of the run, and which of them this is.
        parts: equal parts of its rows that go through the model one after another in a step.
        holds_all: the ranks of this process have all of every weight between them.
        simulated: nothing is computed, so there are no losses, norms or tokens.
    """

    holds_all = True
    simulated = False
    parts = 1

    def __init__(self, config: RunConfig, ranks: Ranks) -> None:
        self.config = config
        self.ranks = ranks

    @abstractmethod
    def step(
        self, batch: Batch, rate: float, scale: float, limits: Sequence[float] = (), group_rates: Sequence[float] = ()
    ) -> StepResult:
        """One optimizer step on this process's rows of a global batch: the columns of ``BatchStream.batch``.

        The first one compiles. A norm that is not finite leaves weights and optimizer state as they are, and so does one, or a
        loss, past its limit: ``limits`` are those of :func:`mindllm.train.optimizers.spikes.limits_of_step`, none by default.
        ``group_rates`` are the learning rates of groups of weights, by default ``rate``.
        """

    def limits_or_none(self, limits: Sequence[float]) -> tuple[float, ...]:
        """A value for every limit that the compiled step is given; infinity where there is none."""
        return tuple(limits) or (math.inf,) * len(limits_of_step(self.config))

    def rates_of_groups(self, rate: float, group_rates: Sequence[float]) -> tuple[float, ...]:
        """A learning rate for every group of weights; ``rate`` where none are given."""
        return tuple(group_rates) or (rate,) * len(self.config.grouped_lr_schedule.grouped)

    @abstractmethod
    def evaluate(self, batch: Batch) -> tuple[float, int]:
        """Summed loss in nats and number of tokens of a batch of which this process has its rows; nothing changes."""

    @abstractmethod
    def not_finite(self, batch: Batch) -> list[str]:
        """Names what holds a NaN or an infinity on any rank: weights, or what computing on ``batch`` yields first."""

    @abstractmethod
    def local_state(self) -> Mapping[int, RankTensors]:
        """By rank what the ranks of this process keep: the content of a checkpoint, copied to the host one tensor at a time."""

    @abstractmethod
    def load_state(self, arrays: Mapping[str, Any]) -> None:
        """Replaces the parts this process keeps of these whole tensors, weights or optimizer state, by name.

        A value is an array, or whatever ``read_slices`` takes, of which no more is read than is kept.
        """

    def counts(self) -> Mapping[str, np.ndarray]:
        """What the last step counted by gradients, by the counter's name, as far as this process knows; not scaled.

        Of experts each is fp32 ``[experts + 1]``: the tokens of every expert, then the choices that were dropped; of a layer that
        predicts ahead fp32 ``[2]``: the sum of its losses and the number of its tokens; of pairs of answers there is one, of
        what :mod:`mindllm.finetune.preference` names.
        """
        return {}

    def watched(self) -> Watched:
        """What the health figures of the last step are made of, of the whole model (:mod:`mindllm.train.health`).

        Every rank calls it. Empty where nothing is watched.
        """
        return {}

    def load(self, checkpoint: Checkpoint) -> None:
        """Puts a checkpoint's weights and optimizer state into this model.

        Raises:
            UserError: tensors are missing, unknown or misshapen; nothing has been changed then.
        """
        if not self.simulated:  # one rank's checkpoint is all that a simulated rank has
            _require_same_bits(self.config, checkpoint)
            weights = trained_signatures(self.config)
            checkpoint = with_asked_masters(self.config, checkpoint, weights)
            checkpoint.require(in_their_types(checkpoint.weights, weights), state_signatures(self.config, weights))
            if line := changed_types(checkpoint.weights, weights):
                logger.warning("%s: %s", checkpoint.path, line)
        self.load_state({**checkpoint.weights, **checkpoint.optimizer})


def _require_same_bits(config: RunConfig, checkpoint: Checkpoint) -> None:
    """Raise UserError where moments of a checkpoint have other bits than the run's: they are not converted."""
    coded = any(kind_of_state(name) in CODES for name in checkpoint.optimizer)
    asked = config.optimizer.state_bits
    if checkpoint.optimizer and coded != (asked == CODE_BITS):
        bits = CODE_BITS if coded else 32
        message = (
            f"the checkpoint's moments have {bits} bits (value {asked}); write {bits}, or begin without its optimizer"
        )
        raise config.error("optimizer.state_bits", message)


def with_asked_masters(config: RunConfig, checkpoint: Checkpoint, weights: Signatures) -> Checkpoint:
    """Return a checkpoint with the float32 copies of weights that the run keeps, and no others.

    Copies that it lacks are made from its weights. A run in float32 goes on from the copies.
    """
    if not checkpoint.optimizer:
        return checkpoint
    prefix = f"{MASTER}."
    copies = {name.removeprefix(prefix): item for name, item in checkpoint.optimizer.items() if name.startswith(prefix)}
    others = {name: item for name, item in checkpoint.optimizer.items() if not name.startswith(prefix)}
    if config.optimizer.master_weights:
        asked = [
            name for name, (_, dtype) in weights.items() if dtype.itemsize < FP32_SIZE and name in checkpoint.weights
        ]
        made = {name: Converted(name, checkpoint.weights[name], np.dtype(np.float32)) for name in asked}
        return replace(
            checkpoint, optimizer={**others, **{f"{prefix}{name}": item for name, item in (made | copies).items()}}
        )
    if config.model.config.has_half_parameters:
        return replace(checkpoint, optimizer=others)
    return replace(checkpoint, optimizer=others, weights={**checkpoint.weights, **copies})


def in_their_types(found: Mapping[str, Any], expected: Signatures) -> Signatures:
    """Return ``expected`` with the types that weights have in a checkpoint; one that is no floating type stays as expected."""
    return {
        name: (shape, np.dtype(found[name].dtype) if name in found and found[name].dtype.name in FLOATING else dtype)
        for name, (shape, dtype) in expected.items()
    }


def changed_types(found: Mapping[str, Any], expected: Signatures) -> str:
    """Return a line on weights that a checkpoint holds in another type than the run; empty if there are none."""
    pairs = Counter(
        (found[name].dtype.name, dtype.name)
        for name, (_, dtype) in expected.items()
        if name in found and found[name].dtype != dtype
    )
    changes = [
        f"{counted(count, 'weight')} from {stored} {'rounded' if LENGTHS[stored] > LENGTHS[asked] else 'converted'} to {asked}"
        for (stored, asked), count in pairs.items()
    ]
    return f"{', '.join(changes)} (model.model_config.param_init_type)" if changes else ""


def weight_signatures(config: RunConfig) -> Signatures:
    """Shape and dtype of every weight of the whole model, by name."""
    model = config.model.config
    return {
        name: (shape, numpy_dtype(model.parameter_type(name)))
        for name, shape in model.architecture.weight_shapes().items()
    }


def trained_signatures(config: RunConfig) -> Signatures:
    """The same of the weights that training changes: what a checkpoint holds."""
    trained = config.model.config.architecture.trained_shapes()
    return {name: signature for name, signature in weight_signatures(config).items() if name in trained}


def state_signatures(config: RunConfig, weights: Signatures) -> Signatures:
    """Shape and dtype of all that the optimizer keeps for these weights."""
    optimizer = config.optimizer
    shapes = state_shapes({name: shape for name, (shape, _) in weights.items()}, optimizer.type, optimizer.block)
    shapes |= further_state(config.model.config.architecture)
    if optimizer.master_weights:
        shapes |= {f"{MASTER}.{name}": shape for name, (shape, dtype) in weights.items() if dtype.itemsize < FP32_SIZE}
    return {
        name: (shape, np.dtype(np.uint8 if kind_of_state(name) in CODES else np.float32))
        for name, shape in shapes.items()
    }


def evaluation_config(config: RunConfig) -> RunConfig:
    """The same run with the batches that are evaluated: ``eval_dataset.batch_size`` samples instead of the runner's."""
    samples = config.eval_dataset.batch_size
    return override_config(config, {"runner_config.batch_size": samples}) if samples else config
