"""Answers to what tasks ask of a model: log-likelihoods of continuations, and continuations of prompts.

Texts go through the model in an order in which neighbours begin alike and those of a batch are about as long. Each context goes
through once, whatever follows it. The words of lm-evaluation-harness are put in those of section ``generation``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from pydantic import ValidationError

from mindllm.config.generation import DEFAULT_TOP_K, GenerationConfig
from mindllm.errors import UserError, nearest
from mindllm.generate.choosing.growing import require_finite
from mindllm.generate.choosing.sampling import log_softmax
from mindllm.generate.generator import Generator
from mindllm.generate.session import PrefixSession

Tokens = tuple[int, ...]
SHARED_PART = 0.5  # of a text: with less in common it does not belong to the texts before it
Pair = tuple[Tokens, Tokens]
Score = tuple[float, bool]
Key = TypeVar("Key")
PASSED_ON = {
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "num_beams",
    "length_penalty",
    "early_stopping",
    "seed",
}
OURS = {"until", "max_gen_toks"}


def ordered(texts: Sequence[Tokens]) -> list[Tokens]:
    """Different ``texts``: groups that share their beginning one after the other, inside of each the longest first.

    Texts that share nothing are one group: the last of all, so that whoever waits sees the long ones first there, too.
    """
    groups = list(_groups(sorted(set(texts))))
    several = [group for group in groups if len(group) > 1]
    single = [text for group in groups if len(group) == 1 for text in group]
    several.sort(key=lambda group: -max(map(len, group)))
    return [text for group in [*several, single] for text in sorted(group, key=lambda text: (-len(text), text))]


def batches(texts: Sequence[Tokens], size: int) -> Iterator[Sequence[Tokens]]:
    """``size`` texts after the other; the last batch may be smaller."""
    for start in range(0, len(texts), size):
        yield texts[start : start + size]


def _groups(texts: Sequence[Tokens]) -> Iterator[list[Tokens]]:
    """Sorted texts, cut where one has less than half of itself in common with all of the group before it."""
    group: list[Tokens] = []
    shared = 0
    for text in texts:
        with_text = _common(group[0][:shared], text) if group else 0
        if group and with_text < SHARED_PART * len(text):
            yield group
            group = []
        shared = with_text if group else len(text)
        group.append(text)
    if group:
        yield group


def _common(first: Tokens, second: Tokens) -> int:
    """Number of tokens with which both begin."""
    length = min(len(first), len(second))
    return next((place for place in range(length) if first[place] != second[place]), length)


def scores(generator: Generator, pairs: Sequence[Pair], batch_size: int) -> Iterator[tuple[Pair, Score]]:
    """Yields each different pair of context and continuation with its log-likelihood in nats, and whether it is the greedy text.

    Both must have a token; together they are at most one token longer than the generator's texts. The first tokens of all
    continuations of a context are read from the logits after it; only what follows them is computed for each.

    Raises:
        RunFailed: the model gives logits that are not finite.
    """
    continuations: dict[Tokens, list[Tokens]] = defaultdict(list)
    for context, continuation in dict.fromkeys(pairs):
        continuations[context].append(continuation)
    if not pairs:
        return
    longest = max(len(context) + len(continuation) for context, continuation in pairs)
    session = generator.session(batch_size, longest)
    assert isinstance(session, PrefixSession)
    for batch in batches(ordered(list(continuations)), batch_size):
        contexts = [*batch, *[batch[-1]] * (batch_size - len(batch))]
        logits = session.prefill(contexts)
        require_finite(logits)
        yield from _of_batch(session, batch, log_softmax(logits), continuations)


def _of_batch(
    session: PrefixSession, batch: Sequence[Tokens], after: np.ndarray, continuations: dict[Tokens, list[Tokens]]
) -> Iterator[tuple[Pair, Score]]:
    """What follows the contexts of a batch, one continuation of each at a time; long ones together with long ones.

    ``after``: log-probabilities ``[batch, vocab]`` of the token after each context.
    """
    likeliest = after.argmax(axis=1)
    waiting = []
    for row, context in enumerate(batch):
        several = []
        for continuation in continuations[context]:
            first = float(after[row, continuation[0]]), bool(likeliest[row] == continuation[0])
            if len(continuation) == 1:
                yield (context, continuation), first
            else:
                several.append((continuation, first))
        waiting.append(sorted(several, key=lambda item: -len(item[0])))
    for turn in range(max(map(len, waiting))):
        now = [items[turn][0] if turn < len(items) else (0,) for items in waiting]
        rest = session.score([*now, *[(0,)] * (session.batch - len(now))])
        for context, items, (logprob, greedy) in zip(batch, waiting, rest[: len(batch)], strict=True):
            if turn < len(items):
                continuation, (first_logprob, first_greedy) = items[turn]
                yield (context, continuation), (first_logprob + logprob, first_greedy and greedy)


def generation_options(
    wishes: Mapping[str, Any], max_length: int, ends: tuple[str, ...], settings: Mapping[str, Any] | None = None
) -> GenerationConfig:
    """Return the options of ``wishes``, ``generation_kwargs`` of a task that were normalized by the harness.

    Arguments:
        settings: of the model's generation_config.json, which a task's own replace; whether tokens are drawn is the task's.
        max_length: most tokens of prompt and continuation.
        ends: names of the tokens that end a text; as texts they end a continuation, too.

    Raises:
        UserError: an option is none of ours, or there is no room for the tokens that are asked for.
    """
    room = int(wishes["max_gen_toks"])
    if room >= max_length:
        raise UserError(
            f"{room} new tokens are asked for, and the model works on {max_length} with the prompt "
            "(model.model_config.seq_length): give fewer, such as --gen_kwargs max_gen_toks=64"
        )
    if unknown := [name for name in wishes if name not in PASSED_ON | OURS]:
        raise UserError(f"--gen_kwargs {unknown[0]}: no such option{nearest(unknown[0], PASSED_ON | OURS)}")
    given = {name: value for name, value in (settings or {}).items() if name in PASSED_ON - {"do_sample"}}
    given |= {name: value for name, value in wishes.items() if name in PASSED_ON and value is not None}
    if given.get("do_sample"):
        given.setdefault("top_k", DEFAULT_TOP_K)
    if not given.get("do_sample"):
        given = {name: value for name, value in given.items() if name not in ("temperature", "top_k", "top_p", "min_p")}
    stops = tuple(dict.fromkeys(text for text in (*(wishes.get("until") or ()), *ends) if text))
    try:
        return GenerationConfig(**given, max_new_tokens=room, stop_strings=stops)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise UserError(f"--gen_kwargs {name}: {first['msg']} (value {first['input']})") from None


def in_batches(
    generator: Generator, prompts: Mapping[Key, Tokens], options: GenerationConfig, batch_size: int
) -> Iterator[tuple[Key, list[int]]]:
    """Yields the key of every prompt with the tokens that continue it, of a beam search the best ones."""
    keys: dict[Tokens, list[Key]] = {}
    for key, prompt in prompts.items():
        keys.setdefault(prompt, []).append(key)
    draws = options.do_sample
    waiting = [key for prompt in ordered(list(keys)) for key in (keys[prompt] if draws else keys[prompt][:1])]
    results = generator.generate_in_batches([prompts[key] for key in waiting], options, batch_size)
    flat = (result for batch in results for result in batch[:: options.num_return_sequences])
    for key, result in zip(waiting, flat, strict=True):
        for asked in [key] if draws else keys[prompts[key]]:
            yield asked, result.tokens
