"""What routers add to the loss once more, in float64 from their logits: `aux_loss_types`, `aux_loss_factors`, `z_loss_factor`;
and what the tokens of experts make of their biases.

Keys are read here by themselves, not asked of what builds the model. With N experts of which a token t of T chooses K, its scores
s, and its choices c (1 or 0): P = mean of s over tokens, f = N / K times the mean of c over tokens. A sequence adds

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
from mindllm.verify.recomputed.kept_values import RouterValues

ROUTER = re.compile(r"model\.layers\.(\d+)\.feed_forward\.router\.weight")
OF_ROUTER = "model.layers.{}.feed_forward.router."
BIAS, SHARES = "bias", "balance.shares"
COUNTER = "layers.{}.feed_forward.load.probe"
NEAR_THE_MEAN = 2e-3
"""Relative: loads that differ by less are alike, as a step takes them."""
TOLERANCE = 1e-5
"""Of what a router adds, which means of some hundred fp32 numbers make."""
OTHER_CHOICES = 0.01
"""The most tokens whose scores may be so near to each other that rounding chooses other experts."""
Z_LOSS = "z_loss_factor"


def balance_problems(config: RunConfig, values: RouterValues | None, before: Mapping[str, np.ndarray]) -> Iterator[str]:
    """Yield where a router adds something else to the loss than the YAML asks for, or tokens choose other experts, or these count
    with other weights.

    Args:
        config: the run on one device.
        values: what its routers made in a step; None where none adds to the loss.
        before: weights and optimizer state before the step, by name.
    """
    model, layers = config.model.config, _routers(before)
    asked = layers if model.z_loss_factor or any(model.aux_loss_factors) else []
    found = 0 if values is None else values.logits.shape[1]
    if found != len(asked):
        yield f"{found} routers add to the loss; {len(asked)} are to do so by aux_loss_factors and {Z_LOSS}"
    if values is None or found != len(asked):
        return
    for number, layer in enumerate(layers):
        bias, shares = (before.get(f"{OF_ROUTER.format(layer)}{name}") for name in (BIAS, SHARES))
        logits, choices = values.logits[:, number].astype(np.float64), values.choices[:, number].astype(np.float64)
        yield from _choice_problems(model, layer, logits, choices, bias)
        yield from _weight_problems(model, layer, logits, choices, values.weights[:, number].astype(np.float64))
        terms = dict(_terms(model, logits, choices, shares))
        yield from _added_problems(layer, values.added[:, number].astype(np.float64), terms)


def share_problems(
    columns: Mapping[str, np.ndarray], values: RouterValues, after: Mapping[str, np.ndarray]
) -> Iterator[str]:
    """Yield where the loss of type ``global`` would be told of other choices in the next step: each row's count as its tokens
    that have a loss do.

    Args:
        columns: the batch, ``[rows, seq]`` each.
        values: what routers made of it.
        after: weights and optimizer state behind the update, by name.
    """
    tokens = columns["loss_mask"].sum(1, dtype=np.float64)
    for number, layer in enumerate(_routers(after)):
        name = f"{OF_ROUTER.format(layer)}{SHARES}"
        if name not in after:
            continue
        of_rows = values.choices[:, number].astype(np.float64).mean(2).reshape(len(tokens), -1)
        wanted = tokens @ of_rows / np.sum(tokens @ of_rows)
        error = float(np.max(np.abs(after[name] - wanted)))
        if not error <= TOLERANCE:
            yield f"{name} (aux_loss_types global): off by {error:.2e} from the part of the choices that fell on an expert"


def bias_problems(
    config: RunConfig,
    counted: Mapping[str, np.ndarray],
    before: Mapping[str, np.ndarray],
    after: Mapping[str, np.ndarray],
) -> Iterator[str]:
    """Yield where the bias of a router is not ``topk_bias_update_rate`` more for experts with fewer tokens than the mean, less
    for those with more (Wang et al., 2024, algorithm 1). Next to the mean nothing is asked.

    Args:
        config: the run.
        counted: what the step counted, by name: of each layer the tokens of its experts, and what was dropped.
        before: weights before the step, by name.
        after: the same behind it.
    """
    rate = config.model.config.topk_bias_update_rate
    for layer in _routers(after):
        name = f"{OF_ROUTER.format(layer)}{BIAS}"
        counter = next((one for one in counted if one.endswith(COUNTER.format(layer))), None)
        if name not in after or counter is None:
            continue
        load = counted[counter][:-1].astype(np.float64)
        away = load.mean() - load
        decided = np.abs(away) > NEAR_THE_MEAN * load.mean()
        change = after[name].astype(np.float64) - before[name]
        error = float(np.max(np.abs(change - rate * np.sign(away))[decided], initial=0.0))
        if not error <= TOLERANCE * (rate + float(np.max(np.abs(before[name]), initial=0.0))):
            yield f"{name} (topk_bias_update_rate {rate:g}): off by {error:.2e} from what the tokens of its experts make of it"


def _routers(weights: Mapping[str, np.ndarray]) -> list[int]:
    """The layers that have a router."""
    return sorted(int(found[1]) for found in map(ROUTER.fullmatch, weights) if found)


def _added_problems(layer: int, added: np.ndarray, terms: Mapping[str, np.ndarray]) -> Iterator[str]:
    """``added`` and each term: ``[parts, rows]``."""
    wanted = sum(terms.values(), np.zeros_like(added))
    allowed = TOLERANCE * np.max(wanted)
    if np.max(np.abs(added - wanted)) <= allowed:  # not where it is none
        return
    part, row = np.unravel_index(np.argmax(np.abs(added - wanted)), added.shape)
    found = f"the router of layer {layer} adds {added[part, row]:.7g} to the loss of a row"
    yield f"{found}; in float64 it is {wanted[part, row]:.7g} of the same logits ({_cause(added - wanted, terms, allowed)})"


def _cause(error: np.ndarray, terms: Mapping[str, np.ndarray], allowed: float) -> str:
    """The key whose term, some times as large, explains the whole error, else all keys."""
    for key, term in terms.items():
        more = float(np.vdot(error, term) / np.vdot(term, term))
        if error.size > 1 and np.max(np.abs(error - more * term)) <= allowed:
            return f"{key}, about {1 + more:.4g} times"
    return ", ".join(terms)


def _terms(
    model: ModelConfig, logits: np.ndarray, choices: np.ndarray, shares: np.ndarray | None
) -> Iterator[tuple[str, np.ndarray]]:
    """What each key with a factor adds to the loss of each row, ``[parts, rows]``, by key."""
    scores = _scores(model, logits)
    scores = scores / scores.sum(-1, keepdims=True)
    chosen = choices * model.expert_num / model.num_experts_chosen
    for kind, factor in zip(model.aux_loss_types, model.aux_loss_factors, strict=True):
        if factor:
            yield f"aux_loss_types {kind}", factor * _OF_KINDS[kind](model, scores, chosen, shares)
    if model.z_loss_factor:
        yield Z_LOSS, model.z_loss_factor * np.mean(np.log(np.sum(np.exp(logits), -1)) ** 2, -1)


def _expert(model: ModelConfig, scores: np.ndarray, chosen: np.ndarray, shares: np.ndarray | None) -> np.ndarray:
    return np.sum(chosen.mean(2) * scores.mean(2), -1)


def _switch(model: ModelConfig, scores: np.ndarray, chosen: np.ndarray, shares: np.ndarray | None) -> np.ndarray:
    of_part = np.sum(chosen.mean((1, 2)) * scores.mean((1, 2)), -1)
    return np.repeat(of_part[:, None], scores.shape[1], axis=1)


def _global(model: ModelConfig, scores: np.ndarray, chosen: np.ndarray, shares: np.ndarray | None) -> np.ndarray:
    assert shares is not None
    return model.expert_num * (scores.mean(2) @ shares.astype(np.float64))


def _device(model: ModelConfig, scores: np.ndarray, chosen: np.ndarray, shares: np.ndarray | None) -> np.ndarray:
    return np.sum(_by_group(model, chosen.mean(2)).mean(-1) * _by_group(model, scores.mean(2)).sum(-1), -1)


def _communication(model: ModelConfig, scores: np.ndarray, chosen: np.ndarray, shares: np.ndarray | None) -> np.ndarray:
    sent = np.any(_by_group(model, chosen) > 0, axis=-1).mean(2) * model.n_group / model.topk_group
    return np.sum(sent * _by_group(model, scores.mean(2)).sum(-1), -1)


_OF_KINDS = {
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


def _by_group(model: ModelConfig, of_experts: np.ndarray) -> np.ndarray:
    """``[…, experts]`` as ``[…, groups, experts of a group]``."""
    return of_experts.reshape(*of_experts.shape[:-1], model.n_group, -1)


def _choice_problems(
    model: ModelConfig, layer: int, logits: np.ndarray, choices: np.ndarray, bias: np.ndarray | None
) -> Iterator[str]:
    """The experts of a token are those with the best scores, a bias added, of its best groups."""
    ranked = _scores(model, logits) + (0.0 if bias is None else bias.astype(np.float64))
    if model.n_group > 1:
        deciding = 2 if model.balance_via_topk_bias else 1
        grouped = _by_group(model, ranked)
        of_groups = np.sort(grouped, -1)[..., -deciding:].sum(-1)
        ranked = np.where(_best(of_groups, model.topk_group)[..., None], grouped, -np.inf).reshape(ranked.shape)
    other = np.any(_best(ranked, model.num_experts_chosen) != (choices > 0), axis=-1)
    if np.mean(other) > OTHER_CHOICES:
        yield f"{np.sum(other)} of {other.size} tokens chose other experts in layer {layer} than those with the best scores"


def _weight_problems(
    model: ModelConfig, layer: int, logits: np.ndarray, choices: np.ndarray, weights: np.ndarray
) -> Iterator[str]:
    """Experts count by their scores, without a bias, divided by the sum of the chosen ones if that is asked for, and scaled."""
    wanted = _scores(model, logits) * choices
    if model.norm_topk_prob and model.num_experts_chosen > 1:
        wanted = wanted / wanted.sum(-1, keepdims=True)
    wanted = wanted * model.routed_scaling_factor
    error = float(np.max(np.abs(weights - wanted)))
    if not error <= TOLERANCE * np.max(wanted):
        keys = "norm_topk_prob, routed_scaling_factor"
        yield f"experts of layer {layer} count with other weights than their scores give: off by {error:.2e} ({keys})"


def _best(values: np.ndarray, count: int) -> np.ndarray:
    """Where along the last axis the ``count`` largest are."""
    found = np.zeros(values.shape, bool)
    np.put_along_axis(found, np.argsort(-values, -1)[..., :count], True, -1)
    return found
