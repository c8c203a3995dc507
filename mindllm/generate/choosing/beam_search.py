"""Beam search of one prompt on the host: from log-probabilities of every beam's next token to the best whole sequences.

The variant of Hugging Face transformers, whose results it repeats: a finished sequence scores
``log p / length ** length_penalty`` (Wu et al., 2016, in its simpler form), so many candidates are looked at that open beams
remain when others end, and only those among the first ``num_beams`` may finish.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindllm.config.generation import GenerationConfig

NEVER = -1e9  # the score of a beam that does not exist: below any log-probability, and finite


@dataclass(frozen=True)
class Beam:
    """Tokens written so far, their log-probabilities as the model gave them, and the sum that beams are ranked by."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    total: float = 0.0


@dataclass(frozen=True)
class Finished:
    """A whole sequence: ``beam`` with the end-of-sequence token if ``ended``."""

    beam: Beam
    score: float
    ended: bool


class BeamSearch:
    """The open beams and the best finished sequences of one prompt. ``done``: none of the open beams will change the result."""

    def __init__(self, options: GenerationConfig, eos_ids: Sequence[int]) -> None:
        self.beams = [Beam(), *[Beam(total=NEVER)] * (options.num_beams - 1)]
        self.finished: list[Finished] = []
        self.done = False
        self._options = options
        self._eos_ids = eos_ids

    def advance(self, scores: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
        """Takes a step; returns for every new beam the index of the one it continues, int ``[num_beams]``.

        Arguments:
            scores: float64 ``[num_beams, vocab]``, what beams are ranked by: log-probabilities after penalties.
            logprobs: the same before them.
        """
        count, vocab = scores.shape
        totals = (scores + np.array([beam.total for beam in self.beams])[:, None]).ravel()
        best = _largest(totals, count * max(2, 1 + len(self._eos_ids)))
        length = len(self.beams[0].tokens) + 1
        full_length = length == self._options.max_new_tokens
        beams: list[Beam] = []
        parents: list[int] = []
        for rank, index in enumerate(best):
            parent, token = divmod(int(index), vocab)
            beam = self._extended(self.beams[parent], token, float(logprobs[parent, token]), float(totals[index]))
            if full_length or token in self._eos_ids:
                if rank < count:
                    self._finish(beam)
            elif len(beams) < count:
                beams.append(beam)
                parents.append(parent)
        if full_length or not beams:
            self.done = True
            return np.arange(count)
        self.beams = beams
        self._conclude(length)
        return np.array(parents)

    def results(self) -> list[Finished]:
        """The ``num_return_sequences`` best finished sequences, the best first."""
        return self.finished[: self._options.num_return_sequences]

    def _extended(self, beam: Beam, token: int, logprob: float, total: float) -> Beam:
        return Beam((*beam.tokens, token), (*beam.logprobs, logprob), total)

    def _finish(self, beam: Beam) -> None:
        score = beam.total / len(beam.tokens) ** self._options.length_penalty
        finished = [*self.finished, Finished(beam, score, beam.tokens[-1] in self._eos_ids)]
        self.finished = sorted(finished, key=lambda item: -item.score)[: self._options.num_beams]

    def _conclude(self, length: int) -> None:
        """Ends when there are enough finished sequences and, unless that is enough, no open beam may score above the worst."""
        options = self._options
        if len(self.finished) < options.num_beams:
            return
        favours_length = options.early_stopping == "never" and options.length_penalty > 0
        hypothetical = options.max_new_tokens if favours_length else length
        possible = self.beams[0].total / hypothetical**options.length_penalty
        self.done = options.early_stopping is True or possible <= self.finished[-1].score


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """Indices of the ``count`` largest ``values``, the largest first."""
    count = min(count, values.size)
    indices = np.argpartition(-values, count - 1)[:count]
    return indices[np.argsort(-values[indices], kind="stable")]
