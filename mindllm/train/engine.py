"""Everything of a run that lives in MindSpore: model, optimizer and compiled steps, behind plain numbers and arrays."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

from mindllm.config import RunConfig
from mindllm.models.weights import HostCopy, assign, initialise, signatures, trained_weights
from mindllm.parallel import build_replica
from mindllm.train.checkpoint import Checkpoint, RankTensors
from mindllm.train.compile_cache import cached_compilation
from mindllm.train.optimizer import AdamW
from mindllm.train.ranks import ALONE, Ranks
from mindllm.train.step import AccumulateStep, ApplyAccumulated, ForwardBackward, TrainStep

Batch = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step computed: mean loss per token in nats, norm of the gradients before clipping, tokens.

    ``waited``: seconds of the step in which this rank waited for others, where that is known.
    """

    loss: float
    global_norm: float
    overflow: bool
    tokens: int
    waited: float = 0.0


class SummedLoss(nn.Cell):
    """Forward only: ``[batch, seq]`` inputs -> summed loss and number of tokens."""

    def __init__(self, model: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.model = model

    def construct(
        self,
        input_ids: Tensor,
        labels: Tensor,
        loss_mask: Tensor,
        segment_starts: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return self.model(input_ids, labels, loss_mask, segment_starts, position_ids), loss_mask.sum()


class Engine:
    """The model of a run with what trains and evaluates it. Graphs are compiled when they are first used.

    Each of several ``ranks`` has the whole model and is given its own rows of a batch; results are those of all of them.
    """

    def __init__(self, config: RunConfig, training: bool = True, ranks: Ranks = ALONE) -> None:
        self.config = config
        self.ranks = ranks
        self.model = build_replica(config)
        self.weights = trained_weights(self.model)
        initialise(self.weights, config.seed)
        self._evaluation = SummedLoss(self.model)
        self._evaluation.set_train(False)
        if training:
            self._build_training()

    def _build_training(self) -> None:
        wrapper = self.config.runner_wrapper
        clip = wrapper.max_grad_norm if wrapper.use_clip_grad else None
        self.optimizer = AdamW(list(self.weights.values()), self.config.optimizer)
        self.parts = self.config.runner_config.gradient_accumulation_steps
        several = self.ranks.count > 1
        self._accumulates = several or self.parts > 1
        if not self._accumulates:
            self._step = TrainStep(self.model, self.optimizer, clip)
        else:
            positions = self.config.runner_config.batch_size * self.config.model.config.seq_length
            self._accumulate = AccumulateStep(self.model, self.optimizer.parameters)
            self._accumulate.set_train()
            self._step = ApplyAccumulated(self._accumulate, self.optimizer, clip, positions, several)
        self._step.set_train()
        self._compiled = False
        self._waited = 0.0

    def step(self, batch: Batch, rate: float, scale: float) -> StepResult:
        """One optimizer step on this rank's rows of a global batch ``[batch, seq]``: the columns of ``BatchStream.batch``."""
        with contextlib.nullcontext() if self._compiled else cached_compilation(self.config):
            outputs = self._run(batch, Tensor(rate, ms.float32), Tensor(scale, ms.float32))
            loss, norm, finite, tokens = (output.asnumpy() for output in outputs)
        self._compiled = True
        return StepResult(float(loss), float(norm), not bool(finite), int(tokens), self._waited)

    def _run(self, batch: Batch, rate: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        """The graphs of a step.

        Ranks meet before they add: on CPU MindSpore waits 30 seconds for a rank that is late, and compiling may take longer.
        """
        if not self._accumulates:
            return self._step(*_inputs(batch), rate, scale, *_document_columns(batch))
        for part in _parts(batch, self.parts):
            self._accumulate(*_inputs(part), scale, *_document_columns(part))
        if self.ranks.count > 1:
            if not self._compiled:
                self._step.compile(rate, scale)
            start = time.perf_counter()
            self.ranks.meet()
            self._waited = time.perf_counter() - start
        return self._step(rate, scale)

    def evaluate(self, batch: Batch) -> tuple[float, int]:
        """Summed loss in nats and number of tokens of this rank's rows of a batch; weights stay as they are."""
        loss, tokens = self._evaluation(*_inputs(batch), *_document_columns(batch))
        return float(loss.asnumpy()), int(tokens.asnumpy())

    def not_finite(self, batch: Batch) -> list[str]:
        """Names the weights, then the gradients on ``batch``, that hold a NaN or an infinity on any rank."""
        if names := self._bad_names("weight", self.weights.values()):
            return names
        gradients = ForwardBackward(self.model, self.optimizer.parameters)
        first = next(iter(_parts(batch, self.parts)))
        values = gradients(*_inputs(first), Tensor(1.0, ms.float32), *_document_columns(first))[2]
        return self._bad_names("gradient of", values)

    def _bad_names(self, what: str, values: Iterable[Tensor]) -> list[str]:
        bad = self.ranks.sum([float(not _finite(value)) for value in values])
        return [f"{what} {name}" for name, count in zip(self.weights, bad, strict=True) if count]

    @property
    def optimizer_state(self) -> dict[str, Parameter]:
        """The optimizer's own parameters by name: moments and powers of the betas."""
        weights = set(self.weights)
        return {item.name: item for item in self.optimizer.get_parameters() if item.name not in weights}

    def tensors(self) -> tuple[dict[str, HostCopy], dict[str, HostCopy]]:
        """Weights and optimizer state as sources for a checkpoint, copied to the host one at a time."""
        state = self.optimizer_state
        return _copies(self.weights), _copies(state)

    def held(self) -> dict[int, RankTensors]:
        """What this rank keeps, as a checkpoint is saved from it: of every tensor the whole."""
        return {self.ranks.rank: RankTensors(*self.tensors())}

    def load(self, checkpoint: Checkpoint) -> None:
        """Puts a checkpoint's weights and the optimizer's state into this model.

        Raises:
            UserError: tensors are missing, unknown or misshapen; nothing has been changed then.
        """
        state = self.optimizer_state
        checkpoint.require(signatures(self.weights), signatures(state))
        assign(self.weights, checkpoint.weights)
        assign(state, checkpoint.optimizer)


def _inputs(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    return Tensor(batch["input_ids"]), Tensor(batch["labels"]), Tensor(batch["loss_mask"])


def _document_columns(batch: Batch) -> tuple[Tensor | None, ...]:
    """``segment_starts`` and ``position_ids``; nothing where the batch has neither, as that is a graph without them."""
    columns = [batch.get(name) for name in ("segment_starts", "position_ids")]
    if not any(column is not None for column in columns):
        return ()
    return tuple(None if column is None else Tensor(column) for column in columns)


def _parts(batch: Batch, count: int) -> list[Batch]:
    """Cuts a global batch into ``count`` equal parts of consecutive rows."""
    pieces = {name: np.split(array, count) for name, array in batch.items()}
    return [{name: pieces[name][index] for name in pieces} for index in range(count)]


def _finite(tensor: Tensor) -> bool:
    return bool(np.isfinite(tensor.asnumpy()).all())


def _copies(parameters: Mapping[str, Parameter]) -> dict[str, HostCopy]:
    return {name: HostCopy(parameter) for name, parameter in parameters.items()}
