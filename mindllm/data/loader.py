"""Batches by step number and sample offset, and blends of data sets.

Without other state, resuming and prefetching change nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from typing import Protocol

import numpy as np

from mindllm.errors import UserError
from mindllm.random_keys import RANDOM_KEYS, random_keys

Batch = dict[str, np.ndarray]


class SampleSource(Protocol):
    """What a stream draws from: samples by number, each a dict of arrays with the same keys and shapes."""

    @property
    def sample_count(self) -> int | None:
        """Return the number of samples; None if they have no end."""

    def sample(self, index: int) -> dict[str, np.ndarray]:
        """Return sample ``index``; beyond the end, one of padding without loss."""


class BatchStream:
    """The batches of a run: row r of step s (from 0) is sample ``offset + s * global_batch_size + r``.

    ``offset`` is not 0 where earlier steps of the run had another batch size: samples then follow those consumed before.
    Of ``rank_count`` data-parallel readers, reader ``rank`` gets its consecutive slice of the rows: all slices in the order of
    ranks are the batch of a single reader. Where ``vocab_size`` is given, a larger token is a UserError: on a device it would
    read beyond the embedding table. With a ``random_seed`` batches have the column ``random_keys``.
    """

    def __init__(
        self,
        source: SampleSource,
        global_batch_size: int,
        *,
        rank: int = 0,
        rank_count: int = 1,
        vocab_size: int | None = None,
        random_seed: int | None = None,
        offset: int = 0,
    ) -> None:
        if global_batch_size % rank_count or not 0 <= rank < rank_count:
            raise UserError(
                f"a global batch of {global_batch_size} samples cannot be divided among {rank_count} readers"
            )
        self.source = source
        self.global_batch_size = global_batch_size
        self.vocab_size = vocab_size
        self.random_seed = random_seed
        self.offset = offset
        local = global_batch_size // rank_count
        self._rows = range(rank * local, (rank + 1) * local)

    def batch(self, step: int) -> Batch:
        """Return this reader's rows of ``step``: input_ids int32 [B, S], labels int32 [B, S], loss_mask float32 [B, S]."""
        first = self.offset + step * self.global_batch_size
        numbers = [first + row for row in self._rows]
        samples = [self.source.sample(number) for number in numbers]
        batch = {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
        if self.random_seed is not None:
            length = batch["input_ids"].shape[1]
            batch[RANDOM_KEYS] = np.stack([random_keys(self.random_seed, number, length) for number in numbers])
        if self.vocab_size is not None:
            largest = max(int(batch["input_ids"].max()), int(batch["labels"].max()))
            if self.vocab_size is not None and largest >= self.vocab_size:
                raise UserError(
                    f"batch {step} holds token {largest}, the model's vocab_size is {self.vocab_size}: set vocab_size to that "
                    "of the tokenizer the corpus was made with"
                )
        return batch

    def iterate(self, first: int, stop: int, ahead: int = 2) -> Iterator[Batch]:
        """Yield the batches of steps ``first`` to ``stop`` (exclusive), read by one thread up to ``ahead`` batches in advance.

        An error of reading is raised at the batch it belongs to. Leaving the loop in any way ends the thread.
        """
        steps = iter(range(first, stop))
        pending: deque[Future[Batch]] = deque()
        executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        try:
            while True:
                while len(pending) <= ahead and (step := next(steps, None)) is not None:
                    pending.append(executor.submit(self.batch, step))
                if not pending:
                    return
                yield pending.popleft().result()
        finally:
            executor.shutdown(wait=True, cancel_futures=True)


class EvaluationStream(BatchStream):
    """The batches of a source that ends; rows beyond its end are padding without loss. ``max_batches`` 0 means all."""

    def __init__(
        self,
        source: SampleSource,
        global_batch_size: int,
        *,
        max_batches: int = 0,
        rank: int = 0,
        rank_count: int = 1,
        vocab_size: int | None = None,
        random_seed: int | None = None,
    ) -> None:
        super().__init__(
            source,
            global_batch_size,
            rank=rank,
            rank_count=rank_count,
            vocab_size=vocab_size,
            random_seed=random_seed,
        )
        if source.sample_count is None:
            raise ValueError("an evaluation needs a source that ends")
        batches = -(-source.sample_count // global_batch_size)
        self._length = min(batches, max_batches) if max_batches else batches

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        return self.iterate(0, len(self))


PERIOD = 1 << 16  # samples after which the pattern of datasets repeats: weights are kept to 1/65536


class EndlessDataset(Protocol):
    """Samples without end, in passes over the data."""

    sample_count: None

    @property
    def samples_per_epoch(self) -> int:
        """Return the samples of one pass."""

    def sample(self, index: int) -> dict[str, np.ndarray]:
        """Return sample ``index``."""


class BlendedDataset:
    """Samples of ``parts`` in proportion to ``weights``, each part in its own order without gaps.

    Sample i is a function of the weights, the parts and i, and needs no look at the samples before it: the datasets follow
    one another in a pattern of ``PERIOD`` samples, in which those of each are spread evenly.
    """

    sample_count = None  # endless

    def __init__(self, parts: Sequence[EndlessDataset], weights: Sequence[float]) -> None:
        self.parts = parts
        self._counts = shares(weights, PERIOD)
        if 0 in self._counts:
            smallest = weights[self._counts.index(0)]
            raise UserError(
                f"data_path: weight {smallest:g} is less than 1/{PERIOD} of the sum; leave that part out or weigh it more"
            )
        due = [(np.arange(count) + 0.5) / count for count in self._counts]
        part = np.repeat(np.arange(len(parts)), self._counts)
        order = np.argsort(np.concatenate(due), kind="stable")
        self._part = part[order]
        self._place = np.concatenate([np.arange(count) for count in self._counts])[order]

    @property
    def samples_per_epoch(self) -> int:
        """Return the sum of samples over all parts; weights decide the share of each part."""
        return sum(part.samples_per_epoch for part in self.parts)

    def place(self, index: int) -> tuple[int, int]:
        """Return which part sample ``index`` comes from, and its number there."""
        period, step = divmod(index, PERIOD)
        part = int(self._part[step])
        return part, period * self._counts[part] + int(self._place[step])

    def sample(self, index: int) -> dict[str, np.ndarray]:
        """Return sample ``index``."""
        part, number = self.place(index)
        return self.parts[part].sample(number)


class JoinedSamples:
    """The samples of several sources that end, one source after another."""

    def __init__(self, parts: Sequence[SampleSource]) -> None:
        self.parts = parts
        self._ends = list(accumulate(part.sample_count or 0 for part in parts))

    @property
    def sample_count(self) -> int:
        """Return the samples of all parts."""
        return self._ends[-1]

    def sample(self, index: int) -> dict[str, np.ndarray]:
        """Return sample ``index``; past the end, padding of the last part."""
        part = min(int(np.searchsorted(self._ends, index, side="right")), len(self.parts) - 1)
        return self.parts[part].sample(index - (self._ends[part - 1] if part else 0))


def shares(weights: Sequence[float], total: int) -> list[int]:
    """Divide ``total`` in proportion to ``weights``; the largest remainders get what rounding leaves."""
    exact = np.asarray(weights, dtype=np.float64) / np.sum(weights) * total
    counts = np.floor(exact).astype(np.int64)
    largest = np.argsort(counts - exact, kind="stable")[: total - int(counts.sum())]
    counts[largest] += 1
    return counts.tolist()
