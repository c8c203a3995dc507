"""Recompute what routers add to the loss (`aux_loss_types`, `aux_loss_factors`, `z_loss_factor`) and the biases of experts.

Keys are read independently of the code that builds the model. With N experts of which a token t of T chooses K, scores s and
choices c (1 or 0), P is the mean of s over tokens, and f is N / K times the mean of c over tokens. A sequence adds

- ``expert``: Σ f P over experts (DeepSeek-V2, equations 23 to 25; scores that are sigmoids are divided by their sum first,
  DeepSeek-V3, equations 17 to 20);
- ``switch``: the same of means over all tokens of a part of the batch (Switch Transformers, equations 4 to 6, there with K = 1);
- ``global``: N · Σ f P with the part f of all choices of the step before (Qiu et al., 2025, "Demons in the detail");
- ``device``: Σ over groups of experts of the mean of f and the sum of P (DeepSeek-V2, equations 26 to 28);
- ``communication``: Σ over groups of the sum of P, and D / M times the part of tokens that chose any of a group's experts, of D
  groups of which a token chooses M (DeepSeek-V2, equations 29 to 31);
- z-loss: the mean over tokens of (log Σ exp(logit))² (ST-MoE, equation 5).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import numpy as np

from mindllm.config import RunConfig
from mindllm.config.model import ModelConfig
from mindllm.verify.recomputed.step_values import RouterValues

ROUTER = re.compile(r"model\.layers\.(\d+)\.feed_forward\.router\.weight")
ROUTER_PREFIX = "model.layers.{}.feed_forward.router."
BIAS, SHARES = "bias", "balance.shares"
COUNTER = "layers.{}.feed_forward.load.probe"
MEAN_TOLERANCE = 2e-3
"""Relative distance of a load from the mean within which a bias may stay."""
TOLERANCE = 1e-5
"""Relative to what a router adds, which is a mean of some hundred fp32 numbers."""
ROUNDED_CHOICES = 0.01
"""Largest share of tokens with scores so close that rounding chooses other experts."""
Z_LOSS = "z_loss_factor"


def balance_problems(config: RunConfig, values: RouterValues | None, before: Mapping[str, np.ndarray]) -> Iterator[str]:
    """Yield routers that add another value to the loss than the YAML's, choose other experts, or weight them differently.

    Args:
        config: the run on one device.
        values: results of its routers in a step; None if none adds to the loss.
        before: weights and optimizer state before the step, by name.
    """
    model, layers = config.model.config, _routers(before)
    expected = len(layers) if model.z_loss_factor or any(model.aux_loss_factors) else 0
    count = 0 if values is None else values.logits.shape[1]
    if count != expected:
        yield f"{count} routers add to the loss instead of {expected} (aux_loss_factors, {Z_LOSS})"
    if values is None or count != expected:
        return
    for number, layer in enumerate(layers):
        bias, shares = (before.get(f"{ROUTER_PREFIX.format(layer)}{name}") for name in (BIAS, SHARES))
        logits, choices = values.logits[:, number].astype(np.float64), values.choices[:, number].astype(np.float64)
        yield from _choice_problems(model, layer, logits, choices, bias)
        yield from _weight_problems(model, layer, logits, choices, values.weights[:, number].astype(np.float64))
        terms = dict(_terms(model, logits, choices, shares))
        yield from _added_problems(layer, values.added[:, number].astype(np.float64), terms)


def share_problems(
    columns: Mapping[str, np.ndarray], values: RouterValues, after: Mapping[str, np.ndarray]
) -> Iterator[str]:
    """Yield where the state of the loss ``global`` has other shares of choices. Rows count by their tokens with a loss.

    Args:
        columns: the batch, ``[rows, seq]`` each.
        values: results of routers for it.
        after: weights and optimizer state after the update, by name.
    """
    tokens = columns["loss_mask"].sum(1, dtype=np.float64)
    for number, layer in enumerate(_routers(after)):
        name = f"{ROUTER_PREFIX.format(layer)}{SHARES}"
        if name not in after:
            continue
        row_choices = values.choices[:, number].astype(np.float64).mean(2).reshape(len(tokens), -1)
        expected = tokens @ row_choices / np.sum(tokens @ row_choices)
        error = float(np.max(np.abs(after[name] - expected)))
        if not error <= TOLERANCE:
            yield f"{name} (aux_loss_types global): off by {error:.2e} from the share of choices of an expert"


def bias_problems(
    config: RunConfig,
    counted: Mapping[str, np.ndarray],
    before: Mapping[str, np.ndarray],
    after: Mapping[str, np.ndarray],
) -> Iterator[str]:
    """Yield wrong changes of router biases: by ``topk_bias_update_rate``, up for experts with fewer tokens than the mean.

    Loads close to the mean may go either way (Wang et al., 2024, algorithm 1).

    Args:
        config: the run.
        counted: counters of the step by name: for each layer the tokens of its experts, and of dropped tokens.
        before: weights before the step, by name.
        after: weights after it.
    """
    rate = config.model.config.topk_bias_update_rate
    for layer in _routers(after):
        name = f"{ROUTER_PREFIX.format(layer)}{BIAS}"
        counter = next((key for key in counted if key.endswith(COUNTER.format(layer))), None)
        if name not in after or counter is None:
            continue
        load = counted[counter][:-1].astype(np.float64)
        away = load.mean() - load
        decided = np.abs(away) > MEAN_TOLERANCE * load.mean()
        change = after[name].astype(np.float64) - before[name]
        error = float(np.max(np.abs(change - rate * np.sign(away))[decided], initial=0.0))
        if not error <= TOLERANCE * (rate + float(np.max(np.abs(before[name]), initial=0.0))):
            yield f"{name} (topk_bias_update_rate {rate:g}): off by {error:.2e} from the update by its experts' tokens"


def _routers(weights: Mapping[str, np.ndarray]) -> list[int]:
    """Return the layers with a router."""
    return sorted(int(match[1]) for match in map(ROUTER.fullmatch, weights) if match)


def _added_problems(layer: int, added: np.ndarray, terms: Mapping[str, np.ndarray]) -> Iterator[str]:
    """Compare what a router adds with the sum of its terms, all ``[parts, rows]``."""
    expected = sum(terms.values(), np.zeros_like(added))
    allowed = TOLERANCE * np.max(expected)
    if np.max(np.abs(added - expected)) <= allowed:  # NaN is not
        return
    part, row = np.unravel_index(np.argmax(np.abs(added - expected)), added.shape)
    cause = _cause(added - expected, terms, allowed)
    yield (
        f"the router of layer {layer} adds {added[part, row]:.7g} to the loss of a row; in float64 it is "
        f"{expected[part, row]:.7g} of the same logits ({cause})"
    )


def _cause(error: np.ndarray, terms: Mapping[str, np.ndarray], allowed: float) -> str:
    """Return the key of the term that explains the whole error by a factor, else all keys."""
    for key, term in terms.items():
        factor = float(np.vdot(error, term) / np.vdot(term, term))
        if error.size > 1 and np.max(np.abs(error - factor * term)) <= allowed:
            return f"{key}, about {1 + factor:.4g} times"
    return ", ".join(terms)


def _terms(
    model: ModelConfig, logits: np.ndarray, choices: np.ndarray, shares: np.ndarray | None
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield what each key with a factor adds to the loss of each row, ``[parts, rows]``."""
    scores = _scores(model, logits)
    scores = scores / scores.sum(-1, keepdims=True)
    chosen = choices * model.expert_num / model.num_experts_chosen
    for kind, factor in zip(model.aux_loss_types, model.aux_loss_factors, strict=True):
        if factor:
            yield f"aux_loss_types {kind}", factor * _LOSSES[kind](model, scores, chosen, shares)
    if model.z_loss_factor:
        yield Z_LOSS, model.z_loss_factor * np.mean(np.log(np.sum(np.exp(logits), -1)) ** 2, -1)


def _expert(model: ModelConfig, scores: np.ndarray, chosen: np.ndarray, shares: np.ndarray | None) -> np.ndarray:
    return np.sum(chosen.mean(2) * scores.mean(2), -1)


def _switch(model: ModelConfig, scores: np.ndarray, chosen: np.ndarray, shares: np.ndarray | None) -> np.ndarray:
    loss = np.sum(chosen.mean((1, 2)) * scores.mean((1, 2)), -1)
    return np.repeat(loss[:, None], scores.shape[1], axis=1)


def _global(model: ModelConfig, scores: np.ndarray, chosen: np.ndarray, shares: np.ndarray | None) -> np.ndarray:
    assert shares is not None
    return model.expert_num * (scores.mean(2) @ shares.astype(np.float64))


def _device(model: ModelConfig, scores: np.ndarray, chosen: np.ndarray, shares: np.ndarray | None) -> np.ndarray:
    return np.sum(_by_group(model, chosen.mean(2)).mean(-1) * _by_group(model, scores.mean(2)).sum(-1), -1)


def _communication(model: ModelConfig, scores: np.ndarray, chosen: np.ndarray, shares: np.ndarray | None) -> np.ndarray:
    sent = np.any(_by_group(model, chosen) > 0, axis=-1).mean(2) * model.n_group / model.topk_group
    return np.sum(sent * _by_group(model, scores.mean(2)).sum(-1), -1)


_LOSSES = {
    "expert": _expert,
    "switch": _switch,
    "global": _global,
    "device": _device,
    "communication": _communication,
}


def _scores(model: ModelConfig, logits: np.ndarray) -> np.ndarray:
    if model.use_gating_sigmoid:
        return 1.0 / (1.0 + np.exp(-logits))
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def _by_group(model: ModelConfig, values: np.ndarray) -> np.ndarray:
    """Reshape ``[…, experts]`` to ``[…, groups, experts of a group]``."""
    return values.reshape(*values.shape[:-1], model.n_group, -1)


def _choice_problems(
    model: ModelConfig, layer: int, logits: np.ndarray, choices: np.ndarray, bias: np.ndarray | None
) -> Iterator[str]:
    """Compare choices with the experts of the best scores, with bias, in the best groups."""
    ranked = _scores(model, logits) + (0.0 if bias is None else bias.astype(np.float64))
    if model.n_group > 1:
        deciding = 2 if model.balance_via_topk_bias else 1
        grouped = _by_group(model, ranked)
        group_scores = np.sort(grouped, -1)[..., -deciding:].sum(-1)
        ranked = np.where(_largest(group_scores, model.topk_group)[..., None], grouped, -np.inf).reshape(ranked.shape)
    wrong = np.any(_largest(ranked, model.num_experts_chosen) != (choices > 0), axis=-1)
    if np.mean(wrong) > ROUNDED_CHOICES:
        yield f"{np.sum(wrong)} of {wrong.size} tokens chose other experts in layer {layer} than those with the best scores"


def _weight_problems(
    model: ModelConfig, layer: int, logits: np.ndarray, choices: np.ndarray, weights: np.ndarray
) -> Iterator[str]:
    """Compare weights with the scores of chosen experts, without bias, normalized if the YAML says so, and scaled."""
    expected = _scores(model, logits) * choices
    if model.norm_topk_prob and model.num_experts_chosen > 1:
        expected = expected / expected.sum(-1, keepdims=True)
    expected = expected * model.routed_scaling_factor
    error = float(np.max(np.abs(weights - expected)))
    if not error <= TOLERANCE * np.max(expected):
        keys = "norm_topk_prob, routed_scaling_factor"
        yield f"experts of layer {layer} count with other weights than their scores give: off by {error:.2e} ({keys})"


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """Return a mask of the ``count`` largest values along the last axis."""
    mask = np.zeros(values.shape, bool)
    np.put_along_axis(mask, np.argsort(-values, -1)[..., :count], True, -1)
    return mask
