"""The interface of everything that executes a run: train, evaluate, save and load.

Implementations: the whole model on one device or on several replicas (``replica``), one rank of a cluster that shares the
model (``cluster_rank``), and all ranks of a cluster in lockstep in one process (``mindllm.compiled.execute``). The trainer,
callbacks and checkpoints use only this interface.
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
PRECISION_RANK = {"float64": 3, "float32": 2, "float16": 1, "bfloat16": 0}
"""Floating-point types by rank of precision."""
Batch = Mapping[str, np.ndarray]
Signatures = dict[str, tuple[tuple[int, ...], np.dtype]]


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step over the whole global batch.

    Attributes:
        loss: mean loss in nats per token; NaN in a simulation.
        global_norm: norm of the gradients before clipping; NaN in a simulation.
        overflow: whether the norm was not finite.
        tokens: tokens that count in the loss.
        waited: seconds that this rank waited for others, if known.
        skipped: whether the norm or the loss exceeded its limit.
    """

    loss: float
    global_norm: float
    overflow: bool
    tokens: int
    waited: float = 0.0
    skipped: bool = False

    @classmethod
    def of(cls, loss: Any, norm: Any, applied: Any, tokens: Any, waited: float = 0.0) -> StepResult:
        """Return the result from the outputs of a compiled step. A step that was neither applied nor overflowed was skipped."""
        overflow = not math.isfinite(norm)
        return cls(float(loss), float(norm), overflow, int(tokens), waited, skipped=not (applied or overflow))


class Engine(ABC):
    """The model of a run and the graphs that train and evaluate it.

    Attributes:
        ranks: the ranks of the run, and the one of this process.
        parts: number of micro-batches that a rank accumulates in a step.
        holds_all: True if the ranks of this process together have all of every weight.
        simulated: True if nothing is computed: losses, norms and token counts do not exist.
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
        """Execute one optimizer step. The first one compiles.

        Weights and optimizer state stay unchanged if the norm is not finite, or if the norm or loss exceeds its limit.

        Args:
            batch: this process's rows of a global batch, with the columns of ``BatchStream.batch``.
            rate: the learning rate.
            scale: the loss scale.
            limits: of norm and loss (:func:`mindllm.train.optimizers.spikes.limits_of_step`); none by default.
            group_rates: learning rates of the weight groups; by default ``rate``.
        """

    def complete_limits(self, limits: Sequence[float]) -> tuple[float, ...]:
        """Return a value for every limit input of the compiled step; infinity if no limit applies."""
        return tuple(limits) or (math.inf,) * len(limits_of_step(self.config))

    def complete_group_rates(self, rate: float, group_rates: Sequence[float]) -> tuple[float, ...]:
        """Return a learning rate for every weight group; ``rate`` if none are given."""
        return tuple(group_rates) or (rate,) * len(self.config.grouped_lr_schedule.grouped)

    @abstractmethod
    def evaluate(self, batch: Batch) -> tuple[float, int]:
        """Return the summed loss in nats and the number of tokens of a global batch, from this process's rows."""

    @abstractmethod
    def not_finite(self, batch: Batch) -> list[str]:
        """Return the names of weights with NaN or infinity on any rank, or else of the gradients that ``batch`` yields."""

    @abstractmethod
    def local_state(self) -> Mapping[int, RankTensors]:
        """Return the tensors of each rank of this process, for a checkpoint. They are copied to the host one at a time."""

    @abstractmethod
    def load_state(self, arrays: Mapping[str, Any]) -> None:
        """Load whole tensors, weights or optimizer state, by name. Each rank keeps its part.

        A value is an array, or a source for ``read_slices``, of which only this rank's part is read.
        """

    def counts(self) -> Mapping[str, np.ndarray]:
        """Return the counters of the last step by name, as far as this process has them; unscaled.

        - experts: fp32 ``[experts + 1]``, the tokens of every expert, then the number of dropped choices
        - MTP layers: fp32 ``[2]``, the sum of losses and the number of tokens
        - preference pairs: the figures named in :mod:`mindllm.finetune.preference`
        """
        return {}

    def watched(self) -> Watched:
        """Return the sums for the health figures of the last step (:mod:`mindllm.train.health`), over the whole model.

        Collective: every rank calls it. Empty if no figure is requested.
        """
        return {}

    def load(self, checkpoint: Checkpoint) -> None:
        """Load the weights and optimizer state of a checkpoint.

        Raises:
            UserError: a tensor is missing, unknown or has another shape. The engine is unchanged then.
        """
        if not self.simulated:  # the checkpoint of a simulated rank has only that rank's tensors
            _require_same_state_bits(self.config, checkpoint)
            weights = trained_signatures(self.config)
            checkpoint = with_master_weights(self.config, checkpoint, weights)
            checkpoint.require(with_stored_dtypes(checkpoint.weights, weights), state_signatures(self.config, weights))
            if line := describe_dtype_changes(checkpoint.weights, weights):
                logger.warning("%s: %s", checkpoint.path, line)
        self.load_state({**checkpoint.weights, **checkpoint.optimizer})


def _require_same_state_bits(config: RunConfig, checkpoint: Checkpoint) -> None:
    """Raise if the moments of a checkpoint have another number of bits than those of the run; they are not converted."""
    quantized = any(kind_of_state(name) in CODES for name in checkpoint.optimizer)
    state_bits = config.optimizer.state_bits
    if checkpoint.optimizer and quantized != (state_bits == CODE_BITS):
        bits = CODE_BITS if quantized else 32
        message = f"the checkpoint's moments have {bits} bits (value {state_bits}); write {bits}, or start without its optimizer"
        raise config.error("optimizer.state_bits", message)


def with_master_weights(config: RunConfig, checkpoint: Checkpoint, weights: Signatures) -> Checkpoint:
    """Return a checkpoint with exactly the float32 master weights that the run needs.

    Missing master weights are converted from the weights. A float32 run continues from the master weights themselves.
    """
    if not checkpoint.optimizer:
        return checkpoint
    prefix = f"{MASTER}."
    copies = {name.removeprefix(prefix): item for name, item in checkpoint.optimizer.items() if name.startswith(prefix)}
    others = {name: item for name, item in checkpoint.optimizer.items() if not name.startswith(prefix)}
    if config.optimizer.master_weights:
        masters = {
            name: Converted(name, checkpoint.weights[name], np.dtype(np.float32))
            for name, (_, dtype) in weights.items()
            if dtype.itemsize < FP32_SIZE and name in checkpoint.weights
        }
        named = {f"{prefix}{name}": item for name, item in (masters | copies).items()}
        return replace(checkpoint, optimizer={**others, **named})
    if config.model.config.has_half_parameters:
        return replace(checkpoint, optimizer=others)
    return replace(checkpoint, optimizer=others, weights={**checkpoint.weights, **copies})


def with_stored_dtypes(stored: Mapping[str, Any], expected: Signatures) -> Signatures:
    """Return ``expected`` with the floating-point types that weights have in a checkpoint; other types stay as expected."""
    return {
        name: (shape, np.dtype(stored[name].dtype) if name in stored and stored[name].dtype.name in FLOATING else dtype)
        for name, (shape, dtype) in expected.items()
    }


def describe_dtype_changes(stored: Mapping[str, Any], expected: Signatures) -> str:
    """Return a line about weights that a checkpoint stores in another type than the run uses; empty if none differ."""
    pairs = Counter(
        (stored[name].dtype.name, dtype.name)
        for name, (_, dtype) in expected.items()
        if name in stored and stored[name].dtype != dtype
    )
    changes = []
    for (old, new), count in pairs.items():
        verb = "rounded" if PRECISION_RANK[old] > PRECISION_RANK[new] else "converted"
        changes.append(f"{counted(count, 'weight')} from {old} {verb} to {new}")
    return f"{', '.join(changes)} (model.model_config.param_init_type)" if changes else ""


def weight_signatures(config: RunConfig) -> Signatures:
    """Return shape and dtype of every weight of the whole model, by name."""
    model = config.model.config
    return {
        name: (shape, numpy_dtype(model.parameter_type(name)))
        for name, shape in model.architecture.weight_shapes().items()
    }


def trained_signatures(config: RunConfig) -> Signatures:
    """Return shape and dtype of every trained weight, by name: the weights in a checkpoint."""
    trained = config.model.config.architecture.trained_shapes()
    return {name: signature for name, signature in weight_signatures(config).items() if name in trained}


def state_signatures(config: RunConfig, weights: Signatures) -> Signatures:
    """Return shape and dtype of the optimizer state of these weights, by name."""
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
    """Return the run with evaluation batches: ``eval_dataset.batch_size`` samples instead of the runner's."""
    samples = config.eval_dataset.batch_size
    return override_config(config, {"runner_config.batch_size": samples}) if samples else config
