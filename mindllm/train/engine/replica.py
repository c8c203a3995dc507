"""The whole model on one device, or one of several replicas that each train on their rows of every batch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

from mindllm.architecture.optimizer_state import is_state
from mindllm.config import RunConfig
from mindllm.config.callbacks import LOGIT
from mindllm.finetune.preference import PreferenceLoss
from mindllm.finetune.unpaired import UnpairedLosses
from mindllm.models.attention.largest_logit import largest_logits
from mindllm.models.causal_lm import for_evaluation
from mindllm.models.weights import (
    HostCopy,
    assign,
    initialise,
    model_weights,
    quantized_parameters,
    shares_of,
    trained_weights,
    values_follow,
)
from mindllm.parallel import build_replica
from mindllm.train.checkpoint import RankTensors
from mindllm.train.compile_cache import cached_compilation
from mindllm.train.device import uses_graph_kernels
from mindllm.train.engine.columns import OPTIONAL_INPUTS, inputs, optional_inputs, split_batch
from mindllm.train.engine.engine import Batch, Engine, StepResult
from mindllm.train.expert_loads import LOAD
from mindllm.train.health import Watched, max_over_ranks, sums_by_weight
from mindllm.train.job.ranks import SINGLE_RANK, Ranks
from mindllm.train.optimizers.build import Optimizer, make_optimizer
from mindllm.train.step import AccumulateStep, ApplyAccumulated, ApplyGradients, ForwardBackward, TrainStep
from mindllm.train.watched import Watch, head_logits_by_layer, make_watch, max_logits_by_layer

LIMITS = 2  # inputs of the step: limits of norm and loss


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


def sum_loss_over_ranks(model: nn.Cell) -> bool:
    """Let a loss that depends on the rows of all processes communicate; return True if the model has such a loss."""
    losses = model.pairs if isinstance(model, PreferenceLoss) else None
    if not isinstance(losses, UnpairedLosses) or not losses.estimates:
        return False
    losses.add_over_ranks()
    return True


class ReplicaEngine(Engine):
    """Engine whose ranks each have the whole model. Graphs are compiled on first use.

    ``loaded``: names of weights that :meth:`load_state` sets before anything else happens; they are not initialized.
    """

    def __init__(
        self, config: RunConfig, training: bool = True, ranks: Ranks = SINGLE_RANK, loaded: Collection[str] = ()
    ) -> None:
        super().__init__(config, ranks)
        self.simulated = ranks.simulated
        with values_follow():
            self.model = build_replica(config, uses_graph_kernels(config))
        self._loss_communicates = ranks.count > 1 and sum_loss_over_ranks(self.model)
        self._compiled_cells: set[int] = set()
        self.weights = trained_weights(self.model)
        self.frozen = {name: item for name, item in model_weights(self.model).items() if name not in self.weights}
        self.frozen |= quantized_parameters(self.model)
        initialise({item.name: item for item in self.model.get_parameters() if item.name not in loaded}, config.seed)
        self._evaluation = SummedLoss(for_evaluation(self.model))
        self._evaluation.set_train(False)
        self.optimizer: Optimizer | None = None
        self._watch: Watch | None = None
        self._counters: list[Parameter] = []  # of experts and preference pairs
        self._used = False  # a compiled graph has used the parameters
        if training:
            self._build_training()

    def _build_training(self) -> None:
        self.optimizer = make_optimizer(
            self.model.trainable_params(),
            self.config,
            shares=shares_of(self.model),
            largest=largest_logits(self.model),
            process=(self.ranks.rank, self.ranks.count),
        )
        self._counters = [item for item in self.optimizer.get_parameters() if item.name.startswith(LOAD)]
        self.parts = self.config.runner_config.gradient_accumulation_steps
        several = self.ranks.count > 1
        self._watch = make_watch(self.config, self.model, self.optimizer, whole=True)
        self._sums: tuple[Tensor, ...] = ()
        self._accumulates = several or self.parts > 1
        if not self._accumulates:
            self._step = TrainStep(self.model, self.optimizer, _largest_norm(self.config), self._watch).set_train()
        else:
            self._accumulate, self._step = accumulating_cells(
                self.config, self.model, self.optimizer, several, self._watch
            )
        self._compiled = False
        self._waited = 0.0

    @property
    def update(self) -> ApplyGradients:
        """The cell that clips and applies gradients."""
        return self._step.update

    def step(
        self, batch: Batch, rate: float, scale: float, limits: Sequence[float] = (), group_rates: Sequence[float] = ()
    ) -> StepResult:
        self._used = True
        scalars = [Tensor(value, ms.float32) for value in (rate, scale)]
        last = self._last_inputs(self.complete_limits(limits), self.complete_group_rates(rate, group_rates))
        with contextlib.nullcontext() if self._compiled else cached_compilation(self.config):
            outputs = self._run(batch, *scalars, *last)
            loss, norm, applied, tokens = (output.asnumpy() for output in outputs[:4])
        self._sums = outputs[4:]
        self._compiled = True
        if self.simulated:
            return StepResult(float("nan"), float("nan"), False, 0)
        return StepResult.of(loss, norm, applied, tokens, self._waited)

    def _last_inputs(self, limits: Sequence[float], group_rates: Sequence[float]) -> tuple[Tensor | None, ...]:
        """Return the limits of norm and loss, then the learning rates of groups; empty if neither is used."""
        inputs: list[Tensor | None] = [Tensor(value, ms.float32) for value in limits]
        if group_rates:
            inputs += [None] * (LIMITS - len(inputs))
        return (*inputs, *(Tensor(value, ms.float32) for value in group_rates))

    def _run(self, batch: Batch, rate: Tensor, scale: Tensor, *last: Tensor | None) -> tuple[Tensor, ...]:
        """Execute the graphs of a step.

        Ranks synchronize before a collective: on CPU MindSpore waits 30 seconds for a late rank, and compilation may take longer.
        """
        if not self._accumulates:
            optional = optional_inputs(batch)
            if last:
                optional = (*optional, *[None] * (OPTIONAL_INPUTS - len(optional)), *last)
            return self._step(*inputs(batch), rate, scale, *optional)
        for part in split_batch(batch, self.parts):
            columns = (*inputs(part), scale, *optional_inputs(part))
            self._synchronize_before(self._accumulate, columns)
            self._accumulate(*columns)
        if self.ranks.count > 1:
            if not self._compiled:
                self._step.compile(rate, scale, *last)
            start = time.perf_counter()
            self.ranks.barrier()
            self._waited = time.perf_counter() - start
        return self._step(rate, scale, *last)

    def _synchronize_before(self, cell: nn.Cell, columns: Sequence[Tensor | None]) -> None:
        """Compile a graph whose loss communicates, and wait for the other ranks before it is called."""
        if not self._loss_communicates:
            return
        if id(cell) not in self._compiled_cells:
            cell.compile(*columns)
            self._compiled_cells.add(id(cell))
        self.ranks.barrier()

    def evaluate(self, batch: Batch) -> tuple[float, int]:
        self._used = True
        columns = (*inputs(batch), *optional_inputs(batch, training=False))
        self._synchronize_before(self._evaluation, columns)
        loss, tokens = self._evaluation(*columns)
        if self._watch is not None and self._watch.logits is not None:
            self._watch.logits.reset()  # drop the logits of evaluated text
        loss, tokens = self.ranks.sum([float(loss.asnumpy()), float(tokens.asnumpy())])
        return loss, int(tokens)

    def not_finite(self, batch: Batch) -> list[str]:
        assert self.optimizer is not None
        if names := self._bad_names("weight", self.weights.values()):
            return names
        gradients = ForwardBackward(self.model, self.optimizer.parameters)
        first = split_batch(batch, self.parts)[0]
        columns = (*inputs(first), Tensor(1.0, ms.float32), *optional_inputs(first))
        self._synchronize_before(gradients, columns)
        values = gradients(*columns)[2]
        return self._bad_names("gradient of", [values[index] for index in self.optimizer.updated])

    def _bad_names(self, kind: str, values: Iterable[Tensor]) -> list[str]:
        is_bad = [float(not np.isfinite(value.asnumpy()).all()) for value in values]
        return [f"{kind} {name}" for name, count in zip(self.weights, self.ranks.sum(is_bad), strict=True) if count]

    def watched(self) -> Watched:
        watch = self._watch
        if watch is None or self.simulated or not self._compiled:
            return {}
        sums: dict[str, Mapping[str, float]] = {}
        if watch.sums is not None:
            sums |= sums_by_weight(watch.sums.kinds, watch.sums.names, self._sums[0].asnumpy())
        if watch.logits is not None and LOGIT in self.config.monitor_config.watched():
            sums[LOGIT] = max_over_ranks(
                max_logits_by_layer({item.name: item.asnumpy() for item in watch.logits.kept}), self.ranks
            )
        return sums

    def largest_logits(self) -> dict[str, np.ndarray]:
        """Return the largest attention logits of the last step in this process, ``[heads]`` by layer."""
        if self._watch is None or self._watch.logits is None:
            return {}
        return head_logits_by_layer({item.name: item.asnumpy() for item in self._watch.logits.kept})

    def counts(self) -> Mapping[str, np.ndarray]:
        return {item.name: item.asnumpy() for item in self._counters}

    @property
    def optimizer_state(self) -> dict[str, Parameter]:
        """Return the optimizer state by name: moments, powers of the betas, choices of experts."""
        owner = self.model if self.optimizer is None else self.optimizer
        return {item.name: item for item in owner.get_parameters() if is_state(item.name)}

    def local_state(self) -> Mapping[int, RankTensors]:
        return {self.ranks.rank: RankTensors(_copies(self.weights), _copies(self.optimizer_state))}

    def load_state(self, arrays: Mapping[str, Any]) -> None:
        parameters = {**self.frozen, **self.weights, **self.optimizer_state}
        assign({name: item for name, item in parameters.items() if name in arrays}, arrays, in_place=self._used)


def accumulating_cells(
    config: RunConfig, model: nn.Cell, optimizer: Optimizer, several: bool = False, watch: Watch | None = None
) -> tuple[AccumulateStep, ApplyAccumulated]:
    """Return the two cells of a step with gradient accumulation: one micro-batch, and the update at the end."""
    accumulate = AccumulateStep(
        model,
        optimizer.parameters,
        config.global_batch_size * config.model.config.seq_length,
        config.optimizer.accumulate_in_float32,
    ).set_train()
    return accumulate, ApplyAccumulated(accumulate, optimizer, _largest_norm(config), several, watch).set_train()


def _largest_norm(config: RunConfig) -> float | None:
    wrapper = config.runner_wrapper
    return wrapper.max_grad_norm if wrapper.use_clip_grad else None


def _copies(parameters: Mapping[str, Parameter]) -> dict[str, HostCopy]:
    return {name: HostCopy(parameter) for name, parameter in parameters.items()}
