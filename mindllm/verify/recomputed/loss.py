"""The loss of a step, and gradients of its last weights, once more in float64 from the logits the program has made.

What a single device and all ranks would get wrong together is seen here: other labels or masks, a mean over another number of
tokens, a term that is missing or weighed otherwise, gradients that are all some factor too large. Columns of the batch are read
by their meaning (:mod:`mindllm.data`), not asked of the model: at position ``i`` stands what is predicted there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from mindllm.config import RunConfig
from mindllm.verify.recomputed.kept_values import StepValues

Columns = Mapping[str, np.ndarray]
TOLERANCE = 1e-5
"""Of a loss: what fp32 leaves."""
LEAST_LOSS = 0.1  # smaller ones, as those of pairs can be, are compared as if they were as large
LEAST = 1e-6
HEAD, FINAL_NORM, TABLE = "lm_head.weight", "model.norm_out.weight", "model.tok_embeddings.embedding_weight"


def loss_problems(config: RunConfig, columns: Columns, loss: float, tokens: int, values: StepValues) -> Iterator[str]:
    """Yield where the loss of a step, or the number of its tokens, is not that of its logits.

    Args:
        config: the run on one device.
        columns: its batch, ``[rows, seq]`` each.
        loss: per token, as the step told it.
        tokens: as the step told it.
        values: what the step made on its way.
    """
    counted = int(columns["loss_mask"].sum())
    if tokens != counted:
        yield f"tokens: {tokens} were counted, the mask of the batch has {counted}"
    with np.errstate(over="ignore"):
        wanted = mean_loss(config, columns, values)
    if not abs(loss - wanted) <= TOLERANCE * max(abs(wanted), LEAST_LOSS):
        yield f"the loss is {loss:.7g}; in float64 it is {wanted:.7g} of the same logits"


def mean_loss(config: RunConfig, columns: Columns, values: StepValues, fixed: np.ndarray | None = None) -> float:
    """The mean loss per token of the whole batch, in nats. ``fixed``: :func:`divergences` in place of those of these values."""
    if config.is_preference_tuning:
        total = _loss_of_pairs(config, columns, values, fixed)
    else:
        losses, weights = _token_losses(values.policy.logits, _labels(config, columns)), _weights(config, columns)
        total = float(np.sum(losses * weights))
    if values.added is not None:
        total += float(np.sum(values.added.astype(np.float64) * columns["loss_mask"].sum(1, dtype=np.float64)))
    return total / float(columns["loss_mask"].sum(dtype=np.float64))


def last_gradients(
    config: RunConfig, columns: Columns, values: StepValues, before: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Gradients of the mean loss for weights behind the layers, by name, in float64: of the head where it has a weight of its
    own, else of the final norm. None for pairs of answers, nor for a tied head behind layers that predict ahead.

    ``before``: weights before the step.
    """
    head, norm = config.model.config.architecture.head, config.model.config.architecture.final_norm
    if config.is_preference_tuning:
        return {}
    of_logits = _gradient_of_logits(config, columns, values.policy.logits)
    hidden = values.policy.hidden.astype(np.float64)
    if not head.tied and not head.normalised:
        return {HEAD: np.einsum("pdtv,pdth->vh", of_logits, hidden, optimize=True)}
    if values.policy.logits.shape[1] > 1:
        return {}
    table = before[TABLE if head.tied else HEAD].astype(np.float64)
    if head.normalised:
        table = table / np.linalg.norm(table, axis=1, keepdims=True)
    factor = before[FINAL_NORM].astype(np.float64) + (1.0 if norm.kind == "rms_one" else 0.0)
    shift = before[FINAL_NORM.replace("weight", "bias")].astype(np.float64) if norm.kind == "layer" else 0.0
    return {FINAL_NORM: np.sum((of_logits @ table) * (hidden - shift) / factor, axis=(0, 1, 2))}


def _gradient_of_logits(config: RunConfig, columns: Columns, logits: np.ndarray) -> np.ndarray:
    """``softmax - onehot``, weighed as the tokens are in the mean loss; through the soft cap, where there is one."""
    labels, weights = _labels(config, columns).reshape(logits.shape[:-1]), _weights(config, columns)
    exact = logits.astype(np.float64)
    found = np.exp(exact - exact.max(-1, keepdims=True))
    found /= found.sum(-1, keepdims=True)
    np.put_along_axis(found, labels[..., None], np.take_along_axis(found, labels[..., None], -1) - 1.0, -1)
    found *= (weights.reshape(logits.shape[:-1]) / columns["loss_mask"].sum(dtype=np.float64))[..., None]
    cap = config.model.config.architecture.head.soft_cap
    return found if cap is None else found * (1.0 - (exact / cap) ** 2)


def _token_losses(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """``log Σ exp(logit) - logit of the label`` of every token, in the shape of ``labels``."""
    exact = logits.astype(np.float64)
    largest = exact.max(-1)
    normaliser = largest + np.log(np.sum(np.exp(exact - largest[..., None]), -1))
    labels = labels.reshape(normaliser.shape)
    return (normaliser - np.take_along_axis(exact, labels[..., None], -1)[..., 0]).reshape(normaliser.shape)


def _labels(config: RunConfig, columns: Columns) -> np.ndarray:
    """What every use of the head predicts, ``[parts, depths, tokens of a part]``: depth ``k`` the label ``k`` positions on."""
    labels = np.maximum(columns["labels"], 0)
    return _by_part(config, [_ahead(labels, depth) for depth in range(_depths(config))])


def _weights(config: RunConfig, columns: Columns) -> np.ndarray:
    """How each of these losses counts in the sum: the mask, that of the predicted token further on, within its document."""
    model, mask = config.model.config, columns["loss_mask"].astype(np.float64)
    starts = columns.get("segment_starts", np.zeros(mask.shape, np.int32))
    found = [mask]
    for depth in range(1, _depths(config)):
        exists = np.arange(mask.shape[1]) + depth < mask.shape[1]
        inside = _ahead(starts, depth) == starts
        found.append(_ahead(mask, depth) * exists * inside * model.mtp_loss_factor / (_depths(config) - 1))
    return _by_part(config, found)


def _depths(config: RunConfig) -> int:
    return 1 + config.model.config.num_nextn_predict_layers


def _ahead(column: np.ndarray, depth: int) -> np.ndarray:
    """What stands ``depth`` positions further in each row; at the end of a row its last element."""
    places = np.minimum(np.arange(column.shape[1]) + depth, column.shape[1] - 1)
    return column[:, places]


def _by_part(config: RunConfig, of_depths: list[np.ndarray]) -> np.ndarray:
    parts = config.runner_config.gradient_accumulation_steps
    return np.stack([column.reshape(parts, -1) for column in of_depths], axis=1)


def divergences(config: RunConfig, columns: Columns, values: StepValues) -> np.ndarray:
    """How far from the reference KTO takes the model to be, at least 0, ``[parts]`` in nats; zeros where it is not asked."""
    present = columns["loss_mask"].sum(1, dtype=np.float64)
    parts = (config.runner_config.gradient_accumulation_steps, -1)
    if not config.preference.estimates_divergence:
        return np.zeros(parts[0])
    of_other = _by_answer(columns, _likelier(columns, values))[1]
    totals = (of_other * present).reshape(parts).sum(1)
    return np.maximum(totals / np.maximum(present.reshape(parts).sum(1), 1), 0.0)


def _likelier(columns: Columns, values: StepValues) -> np.ndarray:
    """Log-probabilities of answers' tokens, less those of the reference if there is one: ``[rows, seq]``, float64."""
    targets = np.maximum(columns["labels"], 0)
    logps = -_token_losses(values.policy.logits, targets).reshape(targets.shape)
    if values.reference is not None:
        logps = logps + _token_losses(values.reference.logits, targets).reshape(targets.shape)
    return logps


def _by_answer(columns: Columns, values: np.ndarray, mean: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Sums, or means, of ``[rows, seq]`` over the tokens of both answers of a row, ``[rows]`` each."""
    answers, second = columns["labels"] >= 0, columns["segment_starts"] > 0
    masks = (answers & ~second, answers & second)
    one, other = (np.sum(values * mask, 1) / (np.maximum(mask.sum(1), 1) if mean else 1) for mask in masks)
    return one, other


def _loss_of_pairs(config: RunConfig, columns: Columns, values: StepValues, fixed: np.ndarray | None) -> float:
    """The sum over pairs of what DPO and its kin make of log-probabilities (see :mod:`mindllm.config.tuning`)."""
    section = config.preference
    assert section is not None
    logps = _likelier(columns, values)
    if section.is_unpaired:
        distances = divergences(config, columns, values) if fixed is None else fixed
        return _loss_of_answers(config, columns, _by_answer(columns, logps)[0], distances)
    chosen, rejected = _by_answer(columns, logps, section.loss_type in ("ipo", "orpo", "simpo"))
    losses = _LOSSES[section.loss_type](chosen, rejected, section)
    return float(np.sum(losses * columns["loss_mask"].sum(1, dtype=np.float64)))


def _loss_of_answers(config: RunConfig, columns: Columns, own: np.ndarray, distances: np.ndarray) -> float:
    """The sum over answers of KTO's loss: ``own`` ``[rows]`` is by how much likelier than to the reference a row's own answer is
    to the model; ``distances``: :func:`divergences`.
    """
    section, marks = config.preference, columns["loss_mask"].astype(np.float64)
    present, sign = marks.sum(1), marks[:, 0] - marks[:, 1]
    beyond = own.reshape(len(distances), -1) - distances[:, None]
    lost = np.exp(-_minus_log_sigmoid(-section.beta * sign * beyond.reshape(-1)))
    return float(np.sum(lost * np.where(sign > 0, section.desirable_weight, section.undesirable_weight) * present))


def _minus_log_sigmoid(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(0.0, -x)


def _log_odds(logps: np.ndarray) -> np.ndarray:
    logps = np.minimum(logps, -LEAST)
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
