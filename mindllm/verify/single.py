"""The reference: the run's model on a single CPU device, with weights and batches that reveal every mistake."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from mindspore import Parameter, Tensor, ops

from mindllm.config import RunConfig, override_config
from mindllm.data.mind_record import IGNORED
from mindllm.models.weights import assign, constant, in_value_type, quantized_parameters
from mindllm.random_keys import RANDOM_KEYS, random_keys
from mindllm.train.engine import ReplicaEngine, StepResult
from mindllm.verify.initial import name_in_tables
from mindllm.verify.recomputed.step_values import StepValues, ValueRecorder

Arrays = dict[str, np.ndarray]
SPREAD = 0.02  # standard deviation of the noise on weights
LEARNING_RATE = 1e-2
LOSS_SCALE, OTHER_SCALE = 1024.0, 256.0  # of the first step, and of later ones
OVERFLOWING_SCALE = float(np.finfo(np.float32).max)
BEYOND_NORMS = 1e6
"""A clipping threshold above any gradient norm."""
FINAL_NORM = "model.norm_out.weight"
ENLARGED = 2000.0
"""Factor on the final norm's weight, and so on all logits, in a step that overflows anyway. Exponents beyond 88 are infinite in
fp32.
"""


@dataclass(frozen=True)
class Task:
    """An optimizer step for both sides.

    Attributes:
        batch: global batch.
        rate: learning rate.
        scale: loss scale.
        spoiled: the only rank on which a gradient overflows, whatever the scale (-1: the last one).
        enlarged: factor on the logits in this step.
        group_rates: learning rates of groups of weights.
        clips: whether gradients are clipped if the run clips; otherwise the threshold is above any norm.
    """

    batch: Mapping[str, np.ndarray]
    rate: float
    scale: float
    spoiled: int | None = None
    enlarged: float = 1.0
    group_rates: tuple[float, ...] = ()
    clips: bool = True

    def rate_of(self, config: RunConfig, name: str) -> float:
        """Return the learning rate of a weight."""
        return (self.rate, *self.group_rates)[config.grouped_lr_schedule.group_of(name)]

    @property
    def overflows(self) -> bool:
        """Return True if its gradients must not be finite."""
        return self.scale == OVERFLOWING_SCALE or self.spoiled is not None


OVERFLOWS = ((OVERFLOWING_SCALE, None), (LOSS_SCALE, 0), (LOSS_SCALE, -1))
"""Loss scale and spoiled rank of the overflowing steps: everywhere, on the first rank only, on the last rank only."""


def tasks(config: RunConfig, steps: int, seed: int) -> list[Task]:
    """Return ``steps`` steps, and overflowing ones after the first: weights must stay, and accumulators must be cleared.

    The last step does not clip.
    """
    kinds: list[tuple[float, int | None]] = [(LOSS_SCALE, None), *OVERFLOWS, *[(OTHER_SCALE, None)] * (steps - 1)]
    rates = tuple(LEARNING_RATE / (2 + number) for number in range(len(config.grouped_lr_schedule.grouped)))
    result = [
        Task(batch(config, seed + number), LEARNING_RATE, *kind, group_rates=rates) for number, kind in enumerate(kinds)
    ]
    if steps > 1:
        result[-1] = replace(result[-1], clips=False)
    if config.is_preference_tuning or config.model.config.compute_dtype != "float32":
        # a preference loss is close to zero for large logits; in half precision all ranks would overflow
        return result
    first = next(number for number, task in enumerate(result) if task.spoiled is not None)
    result[first] = replace(result[first], enlarged=ENLARGED)
    return result


def batch(config: RunConfig, seed: int) -> Arrays:
    """Return random tokens ``[batch, seq]``. Each row masks another share, so that no two devices count equally many."""
    random = np.random.default_rng(seed)
    shape = (config.global_batch_size, config.model.config.seq_length)
    tokens = random.integers(0, config.model.config.vocab_size, (2, *shape)).astype(np.int32)
    unmasked = random.uniform(0.3, 1.0, (shape[0], 1))
    columns = {
        "input_ids": tokens[0],
        "labels": tokens[1],
        "loss_mask": (random.random(shape) < unmasked).astype(np.float32),
    }
    if config.is_preference_tuning:
        columns |= _pairs(random, tokens[1])
        if config.preference.is_unpaired:  # about half of the rows have the mark of undesirable answers
            marked = (np.arange(shape[1]) == random.integers(0, 2, (shape[0], 1))).astype(np.float32)
            columns["loss_mask"] = marked
    elif config.train_dataset.document_columns:
        columns |= _documents(random, shape)
    if config.model.config.architecture.drops:
        columns[RANDOM_KEYS] = np.stack([random_keys(seed, row, shape[1]) for row in range(shape[0])])
    return columns


def _documents(random: np.random.Generator, shape: tuple[int, int]) -> Arrays:
    """Return rows of several documents: the start of each token's document, and the token's position in it."""
    places = np.arange(shape[1], dtype=np.int32)
    begins = random.random(shape) < 3 / shape[1]
    starts = np.maximum.accumulate(np.where(begins, places, 0), axis=1).astype(np.int32)
    return {"segment_starts": starts, "position_ids": places - starts}


def _pairs(random: np.random.Generator, labels: np.ndarray) -> Arrays:
    """Return rows of two documents with answers and one loss, as ``mindllm/data/chat/pairs.py`` makes them."""
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
    """The model of a run on one CPU device. ``begins``: weights with which a run starts. The check trains others."""

    def __init__(self, config: RunConfig) -> None:
        config = override_config(config, {"model.model_config.loss_chunks": 1})  # the head computes all logits at once
        self.engine = ReplicaEngine(config)
        self.recorder = ValueRecorder(config, self.engine.model)
        self.threshold = ClipThreshold(self.engine, config) if config.runner_wrapper.use_clip_grad else None
        weights = {**self.engine.frozen, **self.engine.weights}
        self.begins = self._arrays(weights)
        codes = quantized_parameters(self.engine.model)  # codes stay: their parts differ, and a sum would be no code
        assign(weights, {name: item if name in codes else _disturb(name, item) for name, item in self.begins.items()})

    def state(self) -> Arrays:
        """Return weights and optimizer state by name."""
        return self._arrays(self._trained())

    def _trained(self) -> dict[str, Parameter]:
        return {**self.engine.weights, **self.engine.optimizer_state}

    def frozen(self) -> Arrays:
        """Return the weights that training does not change."""
        return self._arrays(self.engine.frozen)

    def tables(self) -> Arrays:
        """Return constants of the model, such as rotary angles, by their name within the model's tables."""
        parameters = self.engine.model.get_parameters()
        tables = (item for item in parameters if getattr(item, "is_constant", False))
        return self._arrays({name_in_tables(item.name): item for item in tables})

    def step(self, task: Task) -> StepResult:
        """Run an optimizer step."""
        scale = OVERFLOWING_SCALE if task.overflows else task.scale
        if self.threshold is not None:
            self.threshold.set(task.clips)
        norm = {**self.engine.frozen, **self.engine.weights}[FINAL_NORM]
        value = norm.asnumpy().copy()
        if task.enlarged != 1:
            _write(norm, value * task.enlarged)
        result = self.engine.step(task.batch, task.rate, scale, group_rates=task.group_rates)
        if task.enlarged != 1:
            _write(norm, value)  # the step was skipped
        return result

    def values(self) -> StepValues:
        """Return intermediate values of the last step."""
        return self.recorder.values()

    @contextmanager
    def with_state(self, arrays: Mapping[str, np.ndarray]) -> Iterator[None]:
        """Use these weights and optimizer state, by name, inside the context."""
        parameters = {name: item for name, item in self._trained().items() if name in arrays}
        original = self._arrays(parameters)
        for name, item in parameters.items():
            _write(item, arrays[name])
        try:
            yield
        finally:
            for name, item in parameters.items():
                _write(item, original[name])

    def values_with(self, arrays: Mapping[str, np.ndarray], task: Task) -> StepValues:
        """Return intermediate values of a skipped step with other weights, by name."""
        with self.with_state(arrays):
            self.engine.step(task.batch, task.rate, OVERFLOWING_SCALE, group_rates=task.group_rates)
            return self.values()

    def counts(self) -> Arrays:
        """Return the counters of the last step by name."""
        return {name: np.array(counted) for name, counted in self.engine.counts().items()}

    def largest_logits(self) -> Arrays:
        """Return the largest attention logits of the last step, ``[heads]`` by layer, if layers keep them."""
        return {name: np.array(logits) for name, logits in self.engine.largest_logits().items()}

    @staticmethod
    def _arrays(parameters: Mapping) -> Arrays:
        return {name: in_value_type(item.asnumpy(), item).copy() for name, item in parameters.items()}


class ClipThreshold:
    """The clipping threshold as a parameter of the compiled step, so that it can change between steps."""

    def __init__(self, engine: ReplicaEngine, config: RunConfig) -> None:
        self.threshold, update = config.runner_wrapper.max_grad_norm, engine.update
        self.parameter = constant("clip_threshold", np.array(self.threshold, np.float32))
        del update.max_grad_norm
        update.max_grad_norm = self.parameter

    def set(self, clips: bool) -> None:
        """Set the threshold of the run, or one above any norm."""
        _write(self.parameter, np.array(self.threshold if clips else BEYOND_NORMS, np.float32))


def _write(parameter: Parameter, array: np.ndarray) -> None:
    """Change a parameter in place. If two graphs use it, one of them does not see ``set_data`` (MindSpore 2.10)."""
    ops.assign(parameter, Tensor(array, parameter.dtype))


def _disturb(name: str, array: np.ndarray) -> np.ndarray:
    """Return weights without equal parts. Zeros of biases and ones of norms would hide mistakes."""
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    return array + np.random.default_rng(key).normal(0, SPREAD, array.shape).astype(np.float32)
