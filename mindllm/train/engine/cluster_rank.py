"""One rank of a cluster whose devices share the model, on its device or in MindSpore's dry run.

MindSpore's compiler decides which part of each weight a rank keeps. So graphs are compiled first, and the rank initializes or
loads its parts afterwards (the order that MindSpore documents for distributed checkpoints).
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
from mindllm.train.health import Watched, max_over_ranks, sums_by_weight
from mindllm.train.job.ranks import BatchShard, Ranks
from mindllm.train.watched import STEP_PREFIX, column_names, max_logits_by_layer, summed_kinds

logger = logging.getLogger(__name__)
NAN = float("nan")


class ClusterRankEngine(Engine):
    """The part of the model on ``ranks.rank``. Every method is collective: all ranks call it, in the same order."""

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
        self._parameters, self._layouts = _local_parameters(main, config)
        if not self.simulated:
            self._draw_weights()

    def _compile(self, cell: nn.Cell) -> None:
        start = time.monotonic()
        shapes = self.config if self._training else evaluation_config(self.config)
        with refusals_explained(cell):
            cell.compile(*example_inputs(shapes, self._training))
        logger.info("rank %d: compiled in %.1f s", self.ranks.rank, time.monotonic() - start)

    def _draw_weights(self) -> None:
        """Draw one whole tensor at a time and keep this rank's part, so that weights do not depend on the layout."""
        for name, parameter in self._parameters.items():
            value = drawn_value(name, self._layouts[name].full_shape, parameter, self.config.seed)
            if value is not None:
                self._put(name, value)

    def step(
        self, batch: Batch, rate: float, scale: float, limits: Sequence[float] = (), group_rates: Sequence[float] = ()
    ) -> StepResult:
        assert self._step is not None
        extra = (*self.complete_limits(limits), *self.complete_group_rates(rate, group_rates))
        scalars = [Tensor(value, ms.float32) for value in (rate, scale, *extra)]
        loss, norm, applied, tokens, *self._sums = self._step(*inputs(batch, self._columns), *scalars)
        loss, norm, applied, tokens = (output.asnumpy() for output in (loss, norm, applied, tokens))
        if self.simulated:
            return StepResult(NAN, NAN, False, 0)
        loss, *self._pairs = self._from_last_stage([float(loss), *self._local_pair_figures()])
        return StepResult.of(loss, norm, applied, tokens)

    def evaluate(self, batch: Batch) -> tuple[float, int]:
        loss = float(self._evaluation(*inputs(batch, self._columns)).asnumpy())
        if self._step is not None:
            self._step.reset_logits()
        return self._from_last_stage([loss])[0], self._tokens(batch)

    def _tokens(self, batch: Batch) -> int:
        """Return the tokens of the global batch. Each slice is counted by the first rank that reads it."""
        count = float(batch["loss_mask"].sum())
        share = batch_shard(self.config, self.ranks.rank)
        if share.count == 1:
            return int(count)
        first = self.ranks.rank == share.index * self.mesh.stage_device_num // share.count
        return int(self.ranks.sum([count if first else 0.0])[0])

    def _from_last_stage(self, values: list[float]) -> list[float]:
        """Return, on every rank, the values that the stage with the head has computed."""
        if self.mesh.pipeline_stage == 1:
            return values
        first_of_last = self.config.last_stage * self.mesh.stage_device_num
        return list(self.ranks.sum(values if self.ranks.rank == first_of_last else [0.0] * len(values)))

    def _local_pair_figures(self) -> list[float]:
        """Return the figures of preference pairs in this step; zeros if another stage computes their losses."""
        if not self.config.is_preference_tuning:
            return []
        figures = UNPAIRED_FIGURES if self.config.preference.is_unpaired else FIGURES
        return self._local_counts().get(LOAD + PAIRS_PROBE, np.zeros(len(figures) + 1)).tolist()

    def not_finite(self, batch: Batch) -> list[str]:
        """Return the names of weights that are not finite. Gradients of sharded weights are not accessible from the host."""
        names = list(weight_signatures(self.config))
        is_bad = [
            float(name in self._parameters and not np.isfinite(self._parameters[name].asnumpy()).all())
            for name in names
        ]
        return [f"weight {name}" for name, count in zip(names, self.ranks.sum(is_bad), strict=True) if count]

    def watched(self) -> Watched:
        figures = self.config.monitor_config.watched()
        if not figures or self._step is None or self.simulated:
            return {}
        kinds, names = summed_kinds(figures), column_names(self.config)
        sums: dict[str, Mapping[str, float]] = {}
        if kinds:
            total = np.array(self.ranks.sum(self._local_sums(names).ravel().tolist()))
            sums |= sums_by_weight(kinds, names, total.reshape(len(kinds), len(names)))
        if LOGIT in figures:
            kept = {
                item.name: item.asnumpy() for item in self._step.get_parameters() if item.name.startswith(STEP_PREFIX)
            }
            sums[LOGIT] = max_over_ranks(max_logits_by_layer(kept), self.ranks)
        return sums

    def _local_sums(self, names: Sequence[str]) -> np.ndarray:
        """Return the sums of squares of the parts whose first copy is on this rank, ``[kinds, weights]``."""
        rank = self.ranks.rank
        first = [name in self._layouts and self._layouts[name].copies_before(rank) == 0 for name in names]
        return np.where(first, self._sums[0].asnumpy().astype(np.float64), 0.0)

    def counts(self) -> Mapping[str, np.ndarray]:
        """Return the counters of this rank's stage; those of preference pairs on every rank."""
        if self._step is None or self.simulated:
            return {}
        pairs = {LOAD + PAIRS_PROBE: np.array(self._pairs)} if self._pairs else {}
        return {**self._local_counts(), **pairs}

    def _local_counts(self) -> dict[str, np.ndarray]:
        assert self._step is not None
        return {item.name: item.asnumpy() for item in self._step.get_parameters() if item.name.startswith(LOAD)}

    def local_state(self) -> Mapping[int, RankTensors]:
        state = {name for name in self._parameters if is_state(name)}
        updated = set(updated_weights(state))
        trained = [name for name in self._parameters if name in updated]
        weights, optimizer = ({name: self._part(name) for name in names} for names in (trained, sorted(state)))
        return {self.ranks.rank: RankTensors(weights, optimizer)}

    def _part(self, name: str) -> Part:
        layout, rank = self._layouts[name], self.ranks.rank
        # Every rank of every stage has the scalars.
        earlier = rank if name in SCALARS else layout.copies_before(rank)
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


def batch_shard(config: RunConfig, rank: int) -> BatchShard:
    """Return the rows of a global batch that a rank reads: all, or its slice with ``full_batch: false``."""
    slices, devices = input_slices(config), mesh_of(config).stage_device_num
    return BatchShard(rank % devices * slices // devices, slices)


def _initialise_with_zeros(parameters: Iterable[Parameter]) -> None:
    """Initialize weights with zeros, whose pages the operating system does not allocate before they are written.

    MindSpore would initialize each part separately, with values that depend on the layout.
    """
    for parameter in parameters:
        if parameter.has_init and hasattr(parameter, "initial_std"):
            parameter.init_mode.init = Zero()


def _local_parameters(cell: nn.Cell, config: RunConfig) -> tuple[dict[str, Parameter], dict[str, ParameterLayout]]:
    """Return the weights, codes and optimizer state that the compiler keeps on this rank, and the layout of each."""
    weights, compiled_layouts = weight_signatures(config), cell.parameter_layout_dict
    state_layouts: Mapping[str, ParameterLayout] = getattr(cell, "state_layouts", {})
    rank = ms.get_auto_parallel_context("global_rank")
    parameters: dict[str, Parameter] = {}
    layouts: dict[str, ParameterLayout] = {}
    for parameter in cell.get_parameters():
        name = parameter.name
        is_model_state = name in weights or is_state(name) or is_quantized_parameter(parameter)
        if name in state_layouts:
            if name.partition(".")[2] in compiled_layouts:  # otherwise its weight is on another stage
                parameters[name], layouts[name] = parameter, state_layouts[name]
        elif is_model_state and (name in compiled_layouts or name in SCALARS):
            parameters[name] = parameter
            layouts[name] = _layout(name, parameter, compiled_layouts.get(name), rank, mesh_of(config).device_num)
    return parameters, layouts


def _group_ranks(group: str, devices: int) -> tuple[int, ...]:
    """Return the ranks of a communication group. MindSpore's dry run does not know the world group."""
    if group == GlobalComm.WORLD_COMM_GROUP:
        return tuple(range(devices))
    return tuple(get_process_group_ranks(group))


def _layout(name: str, parameter: Parameter, compiled_layout: Any, rank: int, devices: int) -> ParameterLayout:
    shape = tuple(parameter.shape)
    if compiled_layout is None:
        return ParameterLayout((1,), (-1,) * len(shape), shape, shape)
    layout = ParameterLayout.from_front_end(compiled_layout)
    if layout.optimizer_group:
        layout = replace(layout, optimizer_ranks=_group_ranks(layout.optimizer_group, devices))
    part = tuple(cut.stop - cut.start for cut in layout.slices(rank))
    if part != shape:
        raise RunFailed(f"rank {rank}: MindSpore keeps shape {list(shape)} of {name}, but its layout has {list(part)}")
    return layout
