"""Several datasets as one: mixed by weights for training, one after another for evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np

from mindllm.data.loader import SampleSource
from mindllm.errors import UserError

PERIOD = 1 << 16  # samples after which the pattern of datasets repeats: weights are kept to 1/65536


class EndlessDataset(Protocol):
    """Samples without end, some of which are one pass over the data."""

    sample_count: None

    @property
    def samples_per_epoch(self) -> int:
        """Samples of one pass."""

    def sample(self, index: int) -> dict[str, np.ndarray]:
        """Returns sample ``index``."""


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
        """As many samples as all parts have together; the weights decide how often each of them comes."""
        return sum(part.samples_per_epoch for part in self.parts)

    def place(self, index: int) -> tuple[int, int]:
        """Returns which part sample ``index`` comes from, and its number there."""
        period, step = divmod(index, PERIOD)
        part = int(self._part[step])
        return part, period * self._counts[part] + int(self._place[step])

    def sample(self, index: int) -> dict[str, np.ndarray]:
        """Returns sample ``index``."""
        part, number = self.place(index)
        return self.parts[part].sample(number)


class JoinedSamples:
    """The samples of several sources that end, one source after another."""

    def __init__(self, parts: Sequence[SampleSource]) -> None:
        self.parts = parts
        self._ends = list(accumulate(part.sample_count or 0 for part in parts))

    @property
    def sample_count(self) -> int:
        """Samples of all parts."""
        return self._ends[-1]

    def sample(self, index: int) -> dict[str, np.ndarray]:
        """Returns sample ``index``; past the end, padding of the last part."""
        part = min(int(np.searchsorted(self._ends, index, side="right")), len(self.parts) - 1)
        return self.parts[part].sample(index - (self._ends[part - 1] if part else 0))


def shares(weights: Sequence[float], total: int) -> list[int]:
    """Divides ``total`` in proportion to ``weights``; what rounding leaves goes to the largest remainders."""
    exact = np.asarray(weights, dtype=np.float64) / np.sum(weights) * total
    counts = np.floor(exact).astype(np.int64)
    largest = np.argsort(counts - exact, kind="stable")[: total - int(counts.sum())]
    counts[largest] += 1
    return counts.tolist()
