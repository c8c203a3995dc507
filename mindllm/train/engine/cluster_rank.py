"""One rank of a cluster whose devices share the model, on its own device or in MindSpore's dry run.

Which parts of the weights a rank keeps is decided by MindSpore's compiler, so graphs are compiled first; then the rank draws
or reads the parts that are its own (the order MindSpore documents for distributed checkpoints: compile, then load).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.common.initializer import Zero
from mindspore.communication import GlobalComm, get_process_group_ranks

from mindllm.architecture.optimizer_state import SCALARS, is_state, updated_weights
from mindllm.config import RunConfig
from mindllm.config.callbacks import LOGIT
from mindllm.errors import RunFailed
from mindllm.finetune.preference import FIGURES
from mindllm.finetune.unpaired import UNPAIRED_FIGURES
from mindllm.models.experts.expert_load import PAIRS_PROBE
from mindllm.models.weights import HostCopy, drawn_value, in_value_type, is_quantized_parameter
from mindllm.parallel import build_parallel_model, mesh_of, set_parallel_context
from mindllm.parallel.context import input_columns
from mindllm.parallel.parameter_layout import ParameterLayout
from mindllm.parallel.refusals import refusals_explained
from mindllm.train.checkpoint import Part, RankTensors, read_slices
from mindllm.train.distributed_step import distributed_loss, distributed_step, example_inputs, input_slices
from mindllm.train.engine.columns import inputs
from mindllm.train.engine.engine import Batch, Engine, StepResult, evaluation_config, weight_signatures
from mindllm.train.expert_loads import LOAD
from mindllm.train.health import Watched, by_weight, largest_of
from mindllm.train.job.ranks import BatchShard, Ranks
from mindllm.train.watched import OF_STEP, column_names, logits_of, sums_of

logger = logging.getLogger(__name__)
NAN = float("nan")


class ClusterRankEngine(Engine):
    """The part of the model that ``ranks.rank`` keeps. Every method is called by all ranks, in the same order."""

    holds_all = False

    def __init__(self, config: RunConfig, ranks: Ranks, training: bool = True) -> None:
        super().__init__(config, ranks)
        self.mesh = mesh_of(config)
        self._columns = input_columns(config)
        self.simulated = ranks.simulated
        set_parallel_context(config, ranks.rank)
        parallel = build_parallel_model(config)
        self.parts = parallel.parts
        self._training = training
        self._step = distributed_step(config, parallel, ranks.rank) if training else None
        self._evaluation = distributed_loss(parallel)
        main: nn.Cell = self._step if self._step is not None else self._evaluation
        _initialise_with_zeros(main.get_parameters())
        self._sums: list[Tensor] = []
        self._pairs: list[float] = []
        self._compile(main)
        self._parameters, self._layouts = _own_parameters(main, config)
        if not self.simulated:
            self._draw_weights()

    def _compile(self, cell: nn.Cell) -> None:
        begun = time.monotonic()
        shapes = self.config if self._training else evaluation_config(self.config)
        with refusals_explained(cell):
            cell.compile(*example_inputs(shapes, self._training))
        logger.info("rank %d: compiled in %.1f s", self.ranks.rank, time.monotonic() - begun)

    def _draw_weights(self) -> None:
        """One whole tensor at a time, of which the own part is kept: the weights of a single device, whatever the layout."""
        for name, parameter in self._parameters.items():
            value = drawn_value(name, self._layouts[name].full_shape, parameter, self.config.seed)
            if value is not None:
                self._put(name, value)

    def step(
        self, batch: Batch, rate: float, scale: float, limits: Sequence[float] = (), group_rates: Sequence[float] = ()
    ) -> StepResult:
        assert self._step is not None
        further = (*self.limits_or_none(limits), *self.rates_of_groups(rate, group_rates))
        scalars = [Tensor(value, ms.float32) for value in (rate, scale, *further)]
        loss, norm, applied, tokens, *self._sums = self._step(*inputs(batch, self._columns), *scalars)
        loss, norm, applied, tokens = (output.asnumpy() for output in (loss, norm, applied, tokens))
        if self.simulated:
            return StepResult(NAN, NAN, False, 0)
        loss, *self._pairs = self._of_last_stage([float(loss), *self._own_pairs()])
        return StepResult.of(loss, norm, applied, tokens)

    def evaluate(self, batch: Batch) -> tuple[float, int]:
        loss = float(self._evaluation(*inputs(batch, self._columns)).asnumpy())
        if self._step is not None:
            self._step.forget_logits()
        return self._of_last_stage([loss])[0], self._tokens(batch)

    def _tokens(self, batch: Batch) -> int:
        """Tokens of the whole batch: of every slice of it, those that the first rank with it counts."""
        own = float(batch["loss_mask"].sum())
        share = share_of(self.config, self.ranks.rank)
        if share.count == 1:
            return int(own)
        first = self.ranks.rank == share.index * self.mesh.stage_device_num // share.count
        return int(self.ranks.sum([own if first else 0.0])[0])

    def _of_last_stage(self, values: list[float]) -> list[float]:
        """What the stage with the head has computed, on every rank."""
        if self.mesh.pipeline_stage == 1:
            return values
        first_of_last = self.config.last_stage * self.mesh.stage_device_num
        own = self.ranks.rank == first_of_last
        return list(self.ranks.sum(values if own else [0.0] * len(values)))

    def _own_pairs(self) -> list[float]:
        """What the step counted of pairs of answers; zeros where their losses stand on another stage."""
        if not self.config.is_preference_tuning:
            return []
        figures = UNPAIRED_FIGURES if self.config.preference.is_unpaired else FIGURES
        return self._own_counts().get(LOAD + PAIRS_PROBE, np.zeros(len(figures) + 1)).tolist()

    def not_finite(self, batch: Batch) -> list[str]:
        """Weights only: gradients of sharded weights are not left where the host could look at them."""
        names = list(weight_signatures(self.config))
        bad = self.ranks.sum([float(name in self._parameters and not self._is_finite(name)) for name in names])
        return [f"weight {name}" for name, count in zip(names, bad, strict=True) if count]

    def _is_finite(self, name: str) -> bool:
        return bool(np.isfinite(self._parameters[name].asnumpy()).all())

    def watched(self) -> Watched:
        figures = self.config.monitor_config.watched()
        if not figures or self._step is None or self.simulated:
            return {}
        kinds, names = sums_of(figures), column_names(self.config)
        found: dict[str, Mapping[str, float]] = {}
        if kinds:
            total = np.array(self.ranks.sum(self._own_sums(names).ravel().tolist()))
            found |= by_weight(kinds, names, total.reshape(len(kinds), len(names)))
        if LOGIT in figures:
            kept = {item.name: item.asnumpy() for item in self._step.get_parameters() if item.name.startswith(OF_STEP)}
            found[LOGIT] = largest_of(logits_of(kept), self.ranks)
        return found

    def _own_sums(self, names: Sequence[str]) -> np.ndarray:
        """Sums of squares of the parts that no rank before this one has, ``[kinds, weights]``."""
        rank = self.ranks.rank
        first = [name in self._layouts and self._layouts[name].copies_before(rank) == 0 for name in names]
        return np.where(first, self._sums[0].asnumpy().astype(np.float64), 0.0)

    def counts(self) -> Mapping[str, np.ndarray]:
        """Those of this rank's stage; those of pairs of answers on every rank."""
        if self._step is None or self.simulated:
            return {}
        pairs = {LOAD + PAIRS_PROBE: np.array(self._pairs)} if self._pairs else {}
        return {**self._own_counts(), **pairs}

    def _own_counts(self) -> dict[str, np.ndarray]:
        assert self._step is not None
        return {item.name: item.asnumpy() for item in self._step.get_parameters() if item.name.startswith(LOAD)}

    def local_state(self) -> Mapping[int, RankTensors]:
        state = {name for name in self._parameters if is_state(name)}
        updated = set(updated_weights(state))
        owned = [name for name in self._parameters if name in updated]
        weights, optimizer = ({name: self._part(name) for name in names} for names in (owned, sorted(state)))
        return {self.ranks.rank: RankTensors(weights, optimizer)}

    def _part(self, name: str) -> Part:
        layout, rank = self._layouts[name], self.ranks.rank
        earlier = rank if name in SCALARS else layout.copies_before(rank)  # every rank of every stage has them
        return Part(layout.full_shape, layout.slices(rank), HostCopy(self._parameters[name]), earlier)

    def load_state(self, arrays: Mapping[str, Any]) -> None:
        for name in self._parameters:
            if name in arrays:
                self._put(name, arrays[name])

    def _put(self, name: str, array: Any) -> None:
        parameter = self._parameters[name]
        part = in_value_type(read_slices(array, self._layouts[name].slices(self.ranks.rank)), parameter)
        part = np.ascontiguousarray(part)
        parameter.set_data(Tensor(part.reshape(parameter.shape), parameter.dtype), slice_shape=True)


def share_of(config: RunConfig, rank: int) -> BatchShard:
    """The rows of a global batch that a rank of a cluster is given: all, or with ``full_batch: false`` its slice."""
    slices, devices = input_slices(config), mesh_of(config).stage_device_num
    return BatchShard(rank % devices * slices // devices, slices)


def _initialise_with_zeros(parameters: Iterable[Parameter]) -> None:
    """Weights become zeros until their values are known: memory that nobody touches, so it is never really taken.

    MindSpore itself would draw each part for itself, other values under every layout.
    """
    for parameter in parameters:
        if parameter.has_init and hasattr(parameter, "initial_std"):
            parameter.init_mode.init = Zero()


def _own_parameters(cell: nn.Cell, config: RunConfig) -> tuple[dict[str, Parameter], dict[str, ParameterLayout]]:
    """Weights, codes and optimizer state that the compiler has left on this rank, and how each is cut."""
    weights, found = weight_signatures(config), cell.parameter_layout_dict
    of_state: Mapping[str, ParameterLayout] = getattr(cell, "state_layouts", {})
    rank = ms.get_auto_parallel_context("global_rank")
    parameters: dict[str, Parameter] = {}
    layouts: dict[str, ParameterLayout] = {}
    for parameter in cell.get_parameters():
        name = parameter.name
        known = name in weights or is_state(name) or is_quantized_parameter(parameter)
        if name in of_state:
            if name.partition(".")[2] in found:  # else its weight is another stage's
                parameters[name], layouts[name] = parameter, of_state[name]
        elif known and (name in found or name in SCALARS):
            parameters[name] = parameter
            layouts[name] = _layout(name, parameter, found.get(name), rank, mesh_of(config).device_num)
    return parameters, layouts


def _ranks_of(group: str, devices: int) -> tuple[int, ...]:
    """The ranks of one of the compiler's groups; MindSpore's dry run does not answer for the group of all."""
    if group == GlobalComm.WORLD_COMM_GROUP:
        return tuple(range(devices))
    return tuple(get_process_group_ranks(group))


def _layout(name: str, parameter: Parameter, found: Any, rank: int, devices: int) -> ParameterLayout:
    shape = tuple(parameter.shape)
    if found is None:
        return ParameterLayout((1,), (-1,) * len(shape), shape, shape)
    layout = ParameterLayout.from_front_end(found)
    if layout.optimizer_group:
        layout = replace(layout, optimizer_ranks=_ranks_of(layout.optimizer_group, devices))
    part = tuple(cut.stop - cut.start for cut in layout.slices(rank))
    if part != shape:
        raise RunFailed(f"rank {rank}: MindSpore keeps {list(shape)} of {name}, its layout says {list(part)}")
    return layout
