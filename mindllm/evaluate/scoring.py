"""Log-likelihoods of continuations: each context goes through the model once, whatever follows it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from mindllm.evaluate.plan import Tokens, batches, ordered
from mindllm.generate.choosing.growing import require_finite
from mindllm.generate.choosing.sampling import log_softmax
from mindllm.generate.generator import Generator
from mindllm.generate.prefix_session import PrefixSession

Pair = tuple[Tokens, Tokens]
Score = tuple[float, bool]


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
