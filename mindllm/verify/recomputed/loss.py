"""Recompute the loss of a step, and gradients of its last weights, in float64 from the recorded logits.

This reveals what a single device and all ranks get wrong together: labels or masks, the token count of a mean, missing terms or
other weights of them, a factor of all gradients. Columns of the batch are read by their meaning (:mod:`mindllm.data`), not by
the model's code: position ``i`` contains what is predicted there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from mindllm.config import RunConfig
from mindllm.verify.recomputed.step_values import StepValues

Columns = Mapping[str, np.ndarray]
TOLERANCE = 1e-5
"""Relative error of a loss in fp32."""
SMALLEST_LOSS = 0.1  # scale of smaller losses, such as those of preference pairs
SMALLEST_LOG = 1e-6
HEAD, FINAL_NORM, TABLE = "lm_head.weight", "model.norm_out.weight", "model.tok_embeddings.embedding_weight"


def loss_problems(config: RunConfig, columns: Columns, loss: float, tokens: int, values: StepValues) -> Iterator[str]:
    """Yield where the loss of a step, or the number of its tokens, does not follow from its logits.

    Args:
        config: the run on one device.
        columns: its batch, ``[rows, seq]`` each.
        loss: per token, as the step returned it.
        tokens: as the step returned them.
        values: recorded in the step.
    """
    counted = int(columns["loss_mask"].sum())
    if tokens != counted:
        yield f"tokens: {tokens} were counted, the mask of the batch has {counted}"
    with np.errstate(over="ignore"):
        expected = mean_loss(config, columns, values)
    if not abs(loss - expected) <= TOLERANCE * max(abs(expected), SMALLEST_LOSS):
        yield f"the loss is {loss:.7g}; in float64 it is {expected:.7g} of the same logits"


def mean_loss(config: RunConfig, columns: Columns, values: StepValues, fixed: np.ndarray | None = None) -> float:
    """Return the mean loss per token of the whole batch, in nats. ``fixed``: known :func:`divergences`."""
    if config.is_preference_tuning:
        total = _preference_loss(config, columns, values, fixed)
    else:
        losses, weights = _token_losses(values.policy.logits, _labels(config, columns)), _weights(config, columns)
        total = float(np.sum(losses * weights))
    if values.added is not None:
        total += float(np.sum(values.added.astype(np.float64) * columns["loss_mask"].sum(1, dtype=np.float64)))
    return total / float(columns["loss_mask"].sum(dtype=np.float64))


def last_gradients(
    config: RunConfig, columns: Columns, values: StepValues, before: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return gradients of the mean loss for weights after the layers, by name, in float64.

    That is the head if it has its own weight, else the final norm. Preference pairs, and a tied head with prediction layers, have
    none here.

    Args:
        config: the run on one device.
        columns: its batch.
        values: recorded in the step.
        before: weights before the step.
    """
    head, norm = config.model.config.architecture.head, config.model.config.architecture.final_norm
    if config.is_preference_tuning:
        return {}
    logit_gradients = _logit_gradients(config, columns, values.policy.logits)
    hidden = values.policy.hidden.astype(np.float64)
    if not head.tied and not head.normalised:
        return {HEAD: np.einsum("pdtv,pdth->vh", logit_gradients, hidden, optimize=True)}
    if values.policy.logits.shape[1] > 1:
        return {}
    table = before[TABLE if head.tied else HEAD].astype(np.float64)
    if head.normalised:
        table = table / np.linalg.norm(table, axis=1, keepdims=True)
    factor = before[FINAL_NORM].astype(np.float64) + (1.0 if norm.kind == "rms_one" else 0.0)
    shift = before[FINAL_NORM.replace("weight", "bias")].astype(np.float64) if norm.kind == "layer" else 0.0
    return {FINAL_NORM: np.sum((logit_gradients @ table) * (hidden - shift) / factor, axis=(0, 1, 2))}


def _logit_gradients(config: RunConfig, columns: Columns, logits: np.ndarray) -> np.ndarray:
    """Return ``softmax - onehot``, weighted like the tokens in the mean loss, through the soft cap if there is one."""
    labels, weights = _labels(config, columns).reshape(logits.shape[:-1]), _weights(config, columns)
    exact = logits.astype(np.float64)
    gradients = np.exp(exact - exact.max(-1, keepdims=True))
    gradients /= gradients.sum(-1, keepdims=True)
    np.put_along_axis(gradients, labels[..., None], np.take_along_axis(gradients, labels[..., None], -1) - 1.0, -1)
    gradients *= (weights.reshape(logits.shape[:-1]) / columns["loss_mask"].sum(dtype=np.float64))[..., None]
    cap = config.model.config.architecture.head.soft_cap
    return gradients if cap is None else gradients * (1.0 - (exact / cap) ** 2)


def _token_losses(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return ``log Σ exp(logit) - logit of the label`` of every token, in the shape of ``labels``."""
    exact = logits.astype(np.float64)
    largest = exact.max(-1)
    normaliser = largest + np.log(np.sum(np.exp(exact - largest[..., None]), -1))
    labels = labels.reshape(normaliser.shape)
    return (normaliser - np.take_along_axis(exact, labels[..., None], -1)[..., 0]).reshape(normaliser.shape)


def _labels(config: RunConfig, columns: Columns) -> np.ndarray:
    """Return the labels of every use of the head, ``[parts, depths, tokens of a part]``, shifted by the depth."""
    labels = np.maximum(columns["labels"], 0)
    return _by_part(config, [_shift(labels, depth) for depth in range(_depths(config))])


def _weights(config: RunConfig, columns: Columns) -> np.ndarray:
    """Return the weight of each loss in the sum: the mask of the predicted token, within its document."""
    model, mask = config.model.config, columns["loss_mask"].astype(np.float64)
    starts = columns.get("segment_starts", np.zeros(mask.shape, np.int32))
    weights = [mask]
    for depth in range(1, _depths(config)):
        exists = np.arange(mask.shape[1]) + depth < mask.shape[1]
        inside = _shift(starts, depth) == starts
        weights.append(_shift(mask, depth) * exists * inside * model.mtp_loss_factor / (_depths(config) - 1))
    return _by_part(config, weights)


def _depths(config: RunConfig) -> int:
    return 1 + config.model.config.num_nextn_predict_layers


def _shift(column: np.ndarray, depth: int) -> np.ndarray:
    """Return the values ``depth`` positions later in each row. The last element repeats at the end of a row."""
    places = np.minimum(np.arange(column.shape[1]) + depth, column.shape[1] - 1)
    return column[:, places]


def _by_part(config: RunConfig, columns: list[np.ndarray]) -> np.ndarray:
    parts = config.runner_config.gradient_accumulation_steps
    return np.stack([column.reshape(parts, -1) for column in columns], axis=1)


def divergences(config: RunConfig, columns: Columns, values: StepValues) -> np.ndarray:
    """Return KTO's estimate of the divergence from the reference, at least 0, ``[parts]`` in nats; zeros if it is not used."""
    present = columns["loss_mask"].sum(1, dtype=np.float64)
    parts = (config.runner_config.gradient_accumulation_steps, -1)
    if not config.preference.estimates_divergence:
        return np.zeros(parts[0])
    other_answers = _by_answer(columns, _log_ratios(columns, values))[1]
    totals = (other_answers * present).reshape(parts).sum(1)
    return np.maximum(totals / np.maximum(present.reshape(parts).sum(1), 1), 0.0)


def _log_ratios(columns: Columns, values: StepValues) -> np.ndarray:
    """Return log-probabilities of the answers' tokens, minus those of the reference if there is one: ``[rows, seq]``, float64."""
    targets = np.maximum(columns["labels"], 0)
    logps = -_token_losses(values.policy.logits, targets).reshape(targets.shape)
    if values.reference is not None:
        logps = logps + _token_losses(values.reference.logits, targets).reshape(targets.shape)
    return logps


def _by_answer(columns: Columns, values: np.ndarray, mean: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return sums, or means, of ``[rows, seq]`` over the tokens of the two answers of a row, ``[rows]`` each."""
    answers, second = columns["labels"] >= 0, columns["segment_starts"] > 0
    masks = (answers & ~second, answers & second)
    first, last = (np.sum(values * mask, 1) / (np.maximum(mask.sum(1), 1) if mean else 1) for mask in masks)
    return first, last


def _preference_loss(config: RunConfig, columns: Columns, values: StepValues, fixed: np.ndarray | None) -> float:
    """Return the sum over pairs of the loss of DPO or a related method (see :mod:`mindllm.config.tuning`)."""
    section = config.preference
    assert section is not None
    logps = _log_ratios(columns, values)
    if section.is_unpaired:
        distances = divergences(config, columns, values) if fixed is None else fixed
        return _unpaired_loss(config, columns, _by_answer(columns, logps)[0], distances)
    chosen, rejected = _by_answer(columns, logps, section.loss_type in ("ipo", "orpo", "simpo"))
    losses = _LOSSES[section.loss_type](chosen, rejected, section)
    return float(np.sum(losses * columns["loss_mask"].sum(1, dtype=np.float64)))


def _unpaired_loss(config: RunConfig, columns: Columns, log_ratios: np.ndarray, distances: np.ndarray) -> float:
    """Return the sum over answers of KTO's loss.

    Args:
        config: the run on one device.
        columns: its batch.
        log_ratios: of each row's answer, model against reference, ``[rows]``.
        distances: from :func:`divergences`.
    """
    section, marks = config.preference, columns["loss_mask"].astype(np.float64)
    present, sign = marks.sum(1), marks[:, 0] - marks[:, 1]
    margins = log_ratios.reshape(len(distances), -1) - distances[:, None]
    losses = np.exp(-_minus_log_sigmoid(-section.beta * sign * margins.reshape(-1)))
    return float(np.sum(losses * np.where(sign > 0, section.desirable_weight, section.undesirable_weight) * present))


def _minus_log_sigmoid(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(0.0, -x)


def _log_odds(logps: np.ndarray) -> np.ndarray:
    logps = np.minimum(logps, -SMALLEST_LOG)
    return logps - np.log1p(-np.exp(logps))


_LOSSES = {
    "sigmoid": lambda a, b, c: (
        (1 - c.label_smoothing) * _minus_log_sigmoid(c.beta * (a - b))
        + c.label_smoothing * _minus_log_sigmoid(-c.beta * (a - b))
    ),
    "hinge": lambda a, b, c: np.maximum(0.0, 1.0 - c.beta * (a - b)),
    "ipo": lambda a, b, c: (a - b - 0.5 / c.beta) ** 2,
    "simpo": lambda a, b, c: _minus_log_sigmoid(c.beta * (a - b) - c.simpo_gamma),
    "orpo": lambda a, b, c: c.beta * _minus_log_sigmoid(_log_odds(a) - _log_odds(b)) - a,
}
