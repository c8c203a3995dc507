"""Everything of a run that lives in MindSpore: model, optimizer and compiled steps, behind plain numbers and arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

from mindllm.config import RunConfig
from mindllm.models.weights import HostCopy, assign, initialise, signatures, trained_weights
from mindllm.parallel import build_parallel_model
from mindllm.train.checkpoint import Checkpoint
from mindllm.train.compile_cache import cached_compilation
from mindllm.train.optimizer import AdamW
from mindllm.train.step import AccumulateStep, ApplyAccumulated, ForwardBackward, TrainStep

Batch = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step computed: mean loss per token in nats, norm of the gradients before clipping, tokens."""

    loss: float
    global_norm: float
    overflow: bool
    tokens: int


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
    """The model of a run with what trains and evaluates it. Graphs are compiled when they are first used."""

    def __init__(self, config: RunConfig, training: bool = True) -> None:
        self.config = config
        self.model = build_parallel_model(config).model
        self.weights = trained_weights(self.model)
        initialise(self.weights, config.seed)
        self._evaluation = SummedLoss(self.model)
        self._evaluation.set_train(False)
        if training:
            self._build_training()

    def _build_training(self) -> None:
        wrapper = self.config.runner_wrapper
        clip = wrapper.max_grad_norm if wrapper.use_clip_grad else None
        fused = self.config.context.device_target == "CPU"
        self.optimizer = AdamW(list(self.weights.values()), self.config.optimizer, fused)
        self.parts = self.config.runner_config.gradient_accumulation_steps
        if self.parts == 1:
            self._step = TrainStep(self.model, self.optimizer, clip)
        else:
            positions = self.config.runner_config.batch_size * self.config.model.config.seq_length
            self._accumulate = AccumulateStep(self.model, self.optimizer.parameters)
            self._accumulate.set_train()
            self._step = ApplyAccumulated(self._accumulate, self.optimizer, clip, positions)
        self._step.set_train()
        self._compiled = False

    def step(self, batch: Batch, rate: float, scale: float) -> StepResult:
        """One optimizer step on a global batch of arrays ``[batch, seq]``: the columns of ``BatchStream.batch``."""
        with contextlib.nullcontext() if self._compiled else cached_compilation(self.config):
            outputs = self._run(batch, Tensor(rate, ms.float32), Tensor(scale, ms.float32))
            loss, norm, finite, tokens = (output.asnumpy() for output in outputs)
        self._compiled = True
        return StepResult(float(loss), float(norm), not bool(finite), int(tokens))

    def _run(self, batch: Batch, rate: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        """The graphs of a step."""
        if self.parts == 1:
            return self._step(*_inputs(batch), rate, scale, *_document_columns(batch))
        for part in _parts(batch, self.parts):
            self._accumulate(*_inputs(part), scale, *_document_columns(part))
        return self._step(rate, scale)

    def evaluate(self, batch: Batch) -> tuple[float, int]:
        """Summed loss in nats and number of tokens of a batch; weights stay as they are."""
        loss, tokens = self._evaluation(*_inputs(batch), *_document_columns(batch))
        return float(loss.asnumpy()), int(tokens.asnumpy())

    def not_finite(self, batch: Batch) -> list[str]:
        """Names the weights, then the gradients on ``batch``, that hold a NaN or an infinity."""
        names = [f"weight {name}" for name, weight in self.weights.items() if not _finite(weight)]
        if names:
            return names
        gradients = ForwardBackward(self.model, self.optimizer.parameters)
        first = next(iter(_parts(batch, self.parts)))
        values = gradients(*_inputs(first), Tensor(1.0, ms.float32), *_document_columns(first))[2]
        return [f"gradient of {name}" for name, value in zip(self.weights, values, strict=True) if not _finite(value)]

    @property
    def optimizer_state(self) -> dict[str, Parameter]:
        """The optimizer's own parameters by name: moments and powers of the betas."""
        weights = set(self.weights)
        return {item.name: item for item in self.optimizer.get_parameters() if item.name not in weights}

    def tensors(self) -> tuple[dict[str, HostCopy], dict[str, HostCopy]]:
        """Weights and optimizer state as sources for a checkpoint, copied to the host one at a time."""
        state = self.optimizer_state
        return _copies(self.weights), _copies(state)

    def load(self, checkpoint: Checkpoint, with_optimizer: bool) -> None:
        """Puts a checkpoint's weights, and the optimizer's state, into this model.

        Raises:
            UserError: tensors are missing, unknown or misshapen; nothing has been changed then.
        """
        state = self.optimizer_state if with_optimizer else None
        checkpoint.require(signatures(self.weights), signatures(state) if state is not None else None)
        assign(self.weights, checkpoint.weights)
        if state is not None:
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
