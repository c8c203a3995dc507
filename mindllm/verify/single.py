"""The reference: the run's model on a single CPU device, with weights and batches that leave no mistake unseen.

Its tables (angles of the rotary embedding, masks) are held against those that ranks keep beside their weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from mindspore import Parameter, Tensor, ops

from mindllm.compiled.execute.state import slices_of, whole_shape
from mindllm.compiled.graph.compiled_graph import CompiledGraph
from mindllm.config import RunConfig, override_config
from mindllm.data.mind_record import IGNORED
from mindllm.models.weights import assign, constant, in_value_type, quantized_parameters
from mindllm.random_keys import RANDOM_KEYS, random_keys
from mindllm.train.engine import ReplicaEngine, StepResult
from mindllm.verify.recomputed.kept_values import StepValues, ValueKeeper

Arrays = dict[str, np.ndarray]
SPREAD = 0.02
LEARNING_RATE = 1e-2
LOSS_SCALE, OTHER_SCALE = 1024.0, 256.0  # of the first step, and of those behind it
OVERFLOWING_SCALE = float(np.finfo(np.float32).max)
ROUNDING = 1e-6
TABLES = "tables."
BEYOND_NORMS = 1e6
"""A threshold of clipping that no norm of gradients reaches."""
FINAL_NORM = "model.norm_out.weight"
ENLARGED = 2000.0
"""By which the final norm's weight, and so all logits, are multiplied in a step that overflows anyway: exponents beyond 88 are
infinite in fp32.
"""


@dataclass(frozen=True)
class Task:
    """One optimizer step to be done on both sides: a global batch, a rate, a loss scale, the rates of groups of weights.

    ``clips``: whether gradients are clipped where the run clips them; else no norm is large enough for it.
    ``spoiled`` is the rank of the cluster (-1: the last one) on which alone a gradient overflows, whatever the scale. Logits are
    ``enlarged`` for this step alone.
    """

    batch: Mapping[str, np.ndarray]
    rate: float
    scale: float
    spoiled: int | None = None
    enlarged: float = 1.0
    group_rates: tuple[float, ...] = ()
    clips: bool = True

    def rate_of(self, config: RunConfig, name: str) -> float:
        """The learning rate of a weight."""
        return (self.rate, *self.group_rates)[config.grouped_lr_schedule.group_of(name)]

    @property
    def overflows(self) -> bool:
        """Whether its gradients are meant not to be finite."""
        return self.scale == OVERFLOWING_SCALE or self.spoiled is not None


OVERFLOWS = ((OVERFLOWING_SCALE, None), (LOSS_SCALE, 0), (LOSS_SCALE, -1))
"""Loss scale and spoiled rank of the steps that overflow: everywhere, on the first rank alone, on the last rank alone."""


def tasks(config: RunConfig, steps: int, seed: int) -> list[Task]:
    """``steps`` steps, and behind the first one others that overflow: weights must stay, accumulators must be cleared. The
    last one does not clip.
    """
    kinds: list[tuple[float, int | None]] = [(LOSS_SCALE, None), *OVERFLOWS, *[(OTHER_SCALE, None)] * (steps - 1)]
    rates = tuple(LEARNING_RATE / (2 + number) for number in range(len(config.grouped_lr_schedule.grouped)))
    work = [
        Task(batch(config, seed + number), LEARNING_RATE, *kind, group_rates=rates) for number, kind in enumerate(kinds)
    ]
    if steps > 1:
        work[-1] = replace(work[-1], clips=False)
    if config.is_preference_tuning or config.model.config.compute_dtype != "float32":
        return work  # such a loss is next to zero where logits are large; such gradients would overflow on all ranks
    first = next(number for number, task in enumerate(work) if task.spoiled is not None)
    work[first] = replace(work[first], enlarged=ENLARGED)
    return work


def batch(config: RunConfig, seed: int) -> Arrays:
    """Random tokens ``[batch, seq]``; every row has another share of masked ones, so that no two devices count as many."""
    random = np.random.default_rng(seed)
    shape = (config.global_batch_size, config.model.config.seq_length)
    tokens = random.integers(0, config.model.config.vocab_size, (2, *shape)).astype(np.int32)
    kept = random.uniform(0.3, 1.0, (shape[0], 1))
    columns = {
        "input_ids": tokens[0],
        "labels": tokens[1],
        "loss_mask": (random.random(shape) < kept).astype(np.float32),
    }
    if config.is_preference_tuning:
        columns |= _pairs(random, tokens[1])
        if config.preference.is_unpaired:  # the one of every other row, about, stands where undesirable answers have it
            marked = (np.arange(shape[1]) == random.integers(0, 2, (shape[0], 1))).astype(np.float32)
            columns["loss_mask"] = marked
    elif config.train_dataset.document_columns:
        columns |= _documents(random, shape)
    if config.model.config.architecture.drops:
        columns[RANDOM_KEYS] = np.stack([random_keys(seed, row, shape[1]) for row in range(shape[0])])
    return columns


def _documents(random: np.random.Generator, shape: tuple[int, int]) -> Arrays:
    """Rows of several documents: where that of each token begins, and the token's position in it."""
    places = np.arange(shape[1], dtype=np.int32)
    begins = random.random(shape) < 3 / shape[1]
    starts = np.maximum.accumulate(np.where(begins, places, 0), axis=1).astype(np.int32)
    return {"segment_starts": starts, "position_ids": places - starts}


def _pairs(random: np.random.Generator, labels: np.ndarray) -> Arrays:
    """Rows of two documents each, with answers of some of their tokens, and one loss (``mindllm/data/chat/pairs.py``)."""
    rows, length = labels.shape
    places = np.arange(length, dtype=np.int32)
    middles = random.integers(length // 3, 2 * length // 3, (rows, 1)).astype(np.int32)
    starts = np.where(places < middles, np.int32(0), middles)
    answers = random.random(labels.shape) < 0.6
    first = np.broadcast_to((places == 0).astype(np.float32), labels.shape)
    return {
        "labels": np.where(answers, labels, np.int32(IGNORED)),
        "loss_mask": np.ascontiguousarray(first),
        "segment_starts": starts,
        "position_ids": places - starts,
    }


class SingleDevice:
    """The model of a run on one CPU device. ``begins``: the weights that a run would begin with; here others train."""

    def __init__(self, config: RunConfig) -> None:
        config = override_config(config, {"model.model_config.loss_chunks": 1})  # so the head makes all logits at once
        self.engine = ReplicaEngine(config)
        self.keeper = ValueKeeper(config, self.engine.model)
        self.threshold = ClipThreshold(self.engine, config) if config.runner_wrapper.use_clip_grad else None
        weights = {**self.engine.frozen, **self.engine.weights}
        self.begins = self._arrays(weights)
        codes = quantized_parameters(
            self.engine.model
        )  # no two parts of them are equal, and any sum with them would be none
        assign(weights, {name: item if name in codes else _disturbed(name, item) for name, item in self.begins.items()})

    def state(self) -> Arrays:
        """Weights and optimizer state by name."""
        return self._arrays(self._changing())

    def _changing(self) -> dict[str, Parameter]:
        return {**self.engine.weights, **self.engine.optimizer_state}

    def frozen(self) -> Arrays:
        """Weights that training does not change."""
        return self._arrays(self.engine.frozen)

    def tables(self) -> Arrays:
        """What belongs to the graph and is not trained, by its name below the model's tables."""
        parameters = self.engine.model.get_parameters()
        tables = (item for item in parameters if getattr(item, "is_constant", False))
        return self._arrays({below_tables(item.name): item for item in tables})

    def step(self, task: Task) -> StepResult:
        """One optimizer step."""
        scale = OVERFLOWING_SCALE if task.overflows else task.scale
        if self.threshold is not None:
            self.threshold.put(task.clips)
        norm = {**self.engine.frozen, **self.engine.weights}[FINAL_NORM]
        begins = norm.asnumpy().copy()
        if task.enlarged != 1:
            _write(norm, begins * task.enlarged)
        result = self.engine.step(task.batch, task.rate, scale, group_rates=task.group_rates)
        if task.enlarged != 1:
            _write(norm, begins)  # the step was skipped
        return result

    def values(self) -> StepValues:
        """What the last step made on its way to the loss."""
        return self.keeper.values()

    @contextmanager
    def holding(self, arrays: Mapping[str, np.ndarray]) -> Iterator[None]:
        """Has these weights and optimizer state, by name, meanwhile; those it had are put back."""
        held = {name: item for name, item in self._changing().items() if name in arrays}
        begins = self._arrays(held)
        for name, item in held.items():
            _write(item, arrays[name])
        try:
            yield
        finally:
            for name, item in held.items():
                _write(item, begins[name])

    def values_with(self, arrays: Mapping[str, np.ndarray], task: Task) -> StepValues:
        """What a step that is skipped makes with other weights, by name, on its way to the loss."""
        with self.holding(arrays):
            self.engine.step(task.batch, task.rate, OVERFLOWING_SCALE, group_rates=task.group_rates)
            return self.values()

    def counts(self) -> Arrays:
        """What the last step counted, by the counter's name."""
        return {name: np.array(counted) for name, counted in self.engine.counts().items()}

    def largest_logits(self) -> Arrays:
        """The largest attention logits of the last step, ``[heads]`` by layer, where layers keep them."""
        return {name: np.array(logits) for name, logits in self.engine.largest_logits().items()}

    @staticmethod
    def _arrays(parameters: Mapping) -> Arrays:
        return {name: in_value_type(item.asnumpy(), item).copy() for name, item in parameters.items()}


class ClipThreshold:
    """The norm that a single device clips to, as a parameter of its step: known when it is compiled, it could not change."""

    def __init__(self, engine: ReplicaEngine, config: RunConfig) -> None:
        self.asked, update = config.runner_wrapper.max_grad_norm, engine.update
        self.held = constant("clip_threshold", np.array(self.asked, np.float32))
        del update.max_grad_norm
        update.max_grad_norm = self.held

    def put(self, clips: bool) -> None:
        """The threshold of the run, or one that no norm reaches."""
        _write(self.held, np.array(self.asked if clips else BEYOND_NORMS, np.float32))


def _write(parameter: Parameter, array: np.ndarray) -> None:
    """Changes a parameter where it is: of two graphs that use it, one does not see data that are set (MindSpore 2.10)."""
    ops.assign(parameter, Tensor(array, parameter.dtype))


def _disturbed(name: str, array: np.ndarray) -> np.ndarray:
    """Weights without two equal parts: biases begin as zeros and norms as ones, which would hide what is done to them."""
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    return array + np.random.default_rng(key).normal(0, SPREAD, array.shape).astype(np.float32)


def below_tables(name: str) -> str:
    """``contexts.0.rotary_cos`` of ``model.tables.1.contexts.0.rotary_cos``, and of the same without a stage's number."""
    inside = name.rpartition(TABLES)[2]
    stage, dot, rest = inside.partition(".")
    return rest if dot and stage.isdecimal() else inside


def table_problems(
    graphs: Sequence[CompiledGraph], tables: Mapping[str, np.ndarray], positions: np.ndarray
) -> Iterator[str]:
    """Tables of each rank that are not those of the single device, by their names below those of a stage's tables.

    ``positions``: of the tokens of a sequence as they stand on the ranks. Of a table that ranks of a sequence share, each rank's
    part is compared. One that has another shape or dtype there, such as the
    mask of a fused attention, is seen only where it is used.
    """
    for graph in graphs:
        for parameter in graph.parameters.values():
            found, wanted = parameter.initial, tables.get(below_tables(parameter.name))
            if found is None or wanted is None:
                continue
            if found.shape == parameter.shape and wanted.shape == whole_shape(parameter):
                ordered = wanted[positions] if len(wanted) == len(positions) else wanted
                wanted = ordered[slices_of(parameter, graph.rank)]
            if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
                continue
            error = float(np.max(np.abs(np.subtract(found, wanted, dtype=np.float64)), initial=0.0))
            if not error <= ROUNDING:
                yield f"{parameter.name} on rank {graph.rank}: off by {error:.2e} from the table of a single device"
