"""Logits lowered for what was written already, before a token is chosen in whatever way.

- repetition (Keskar et al., 2019): for tokens of the prompt and the continuation, ``z / r`` where ``z > 0``, else ``z · r``;
- presence and frequency (OpenAI's API reference): ``z - presence - frequency · count`` for tokens of the continuation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mindllm.config.generation import GenerationConfig


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
