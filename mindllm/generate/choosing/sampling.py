"""The next token from logits on the host: the most likely one, or a draw that a seed repeats.

The distribution that is drawn from, for logits ``z``, in this order:

- temperature ``T`` (Ackley et al., 1985): ``p_i ∝ exp(z_i / T)``;
- top-k (Fan et al., 2018): the ``k`` most likely tokens, and those that are as likely as the last of them;
- top-p (Holtzman et al., 2020): of what is left, renormalised, the fewest most likely tokens that sum to at least ``p``;
- min-p (Nguyen et al., 2024): of what is left, the tokens at least ``p`` times as likely as the most likely one.

A draw is the inverse of the cumulative distribution at a uniform number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from mindllm.config.generation import GenerationConfig

# Logits lowered for what was written already, before a token is chosen in whatever way.
#
# - repetition (Keskar et al., 2019): for tokens of the prompt and the continuation, ``z / r`` where ``z > 0``, else ``z · r``;
# - presence and frequency (OpenAI's API reference): ``z - presence - frequency · count`` for tokens of the continuation.


def penalise(
    logits: np.ndarray, prompt: Sequence[int], written: Sequence[int], options: GenerationConfig
) -> np.ndarray:
    """Returns ``logits`` ``[vocab]`` with the penalties of ``options``, the repetition penalty first; the input is kept."""
    if options.repetition_penalty != 1.0:
        seen = np.unique(np.concatenate([np.asarray(prompt, np.int64), np.asarray(written, np.int64)]))
        values = logits[seen]
        logits = logits.copy()
        logits[seen] = np.where(values < 0, values * options.repetition_penalty, values / options.repetition_penalty)
    if written and (options.presence_penalty or options.frequency_penalty):
        tokens, counts = np.unique(np.asarray(written, np.int64), return_counts=True)
        logits = logits.copy()
        logits[tokens] -= options.presence_penalty + options.frequency_penalty * counts
    return logits


def greedy(logits: np.ndarray) -> int:
    """The most likely token of ``logits`` ``[vocab]``; of equal ones the first."""
    return int(np.argmax(logits))


def candidates(
    logits: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that may be drawn from ``logits`` ``[vocab]`` and their probabilities, float64 and of sum 1.

    ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 leave all tokens. The tokens are in the order of their ids, or, where ``top_p``
    chose among them, the most likely first.
    """
    tokens = np.arange(logits.size)
    if 0 < top_k < tokens.size:
        tokens = np.flatnonzero(logits >= np.partition(logits, -top_k)[-top_k])
    probabilities = softmax(logits[tokens].astype(np.float64) / temperature)
    if top_p < 1.0:
        # Tokens of less than (1 - p) / n each sum to less than 1 - p: the others hold the nucleus, and only they are sorted.
        likely = np.flatnonzero(probabilities >= min((1.0 - top_p) / tokens.size, probabilities.max()))
        order = likely[np.argsort(-logits[tokens[likely]], kind="stable")]
        order = order[: 1 + int(np.searchsorted(np.cumsum(probabilities[order]), top_p))]
        tokens, probabilities = tokens[order], probabilities[order]
    if min_p > 0.0:
        kept = probabilities >= min_p * probabilities.max()
        tokens, probabilities = tokens[kept], probabilities[kept]
    return tokens, probabilities / probabilities.sum()


def softmax(logits: np.ndarray) -> np.ndarray:
    """``exp(z_i) / Σ exp(z_j)`` of ``[vocab]``, shifted by the maximum."""
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities, float64, over the last axis of ``logits``."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def draw(logits: np.ndarray, uniform: float, **limits: float) -> int:
    """The token of ``logits`` ``[vocab]`` that ``uniform``, in ``[0, 1)``, falls on; ``limits`` as of ``candidates``. Pure."""
    tokens, probabilities = candidates(logits, **limits)  # type: ignore[arg-type]
    index = int(np.searchsorted(np.cumsum(probabilities), uniform, side="right"))
    return int(tokens[min(index, len(tokens) - 1)])  # the sum may end a rounding below 1


def random_streams(prompts: Sequence[Sequence[int]], seed: int) -> list[np.random.Generator]:
    """One stream of uniform numbers per prompt: a function of the seed, the prompt, and how many equal ones stand before it.

    So a prompt continues alike alone and in any batch, while the same prompt given twice continues in two ways. Philox is
    keyed with a hash of the three (counter-based generator: Salmon et al., 2011).
    """
    seen: dict[tuple[int, ...], int] = {}
    streams = []
    for prompt in map(tuple, prompts):
        repetition = seen[prompt] = seen.get(prompt, -1) + 1
        key = hashlib.sha256(f"{seed}:{repetition}:{','.join(map(str, prompt))}".encode()).digest()[:16]
        streams.append(np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little"))))
    return streams
