"""Held-out loss: nats per token, perplexity and bits per byte of a split, every token predicted once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mindllm.data import EvaluationStream, bits_per_byte
from mindllm.errors import UserError
from mindllm.launch.heartbeat import heart
from mindllm.terminal.progress import Progress, counted, unwatched

if TYPE_CHECKING:
    from mindllm.train.engine import Engine


@dataclass(frozen=True)
class EvaluationResult:
    """Loss in nats per token over ``tokens`` tokens; ``bits_per_byte`` does not depend on the tokenizer (None: unknown).

    ``unigram_loss`` is that of predicting every token from its frequency in the training split alone: the baseline (None:
    of conversations, where only answers count).
    """

    loss: float
    perplexity: float
    bits_per_byte: float | None
    tokens: int
    unigram_loss: float | None

    def describe(self) -> str:
        if math.isnan(self.loss) and not self.tokens:
            return "executed; in a simulation there is no loss"
        bits = "unknown" if self.bits_per_byte is None else f"{self.bits_per_byte:.4f}"
        baseline = "" if self.unigram_loss is None else f"; unigram baseline: {self.unigram_loss:.4f} nats/token"
        return (
            f"loss: {self.loss:.4f} nats/token, perplexity: {self.perplexity:.2f}, bits per byte: {bits} "
            f"({self.tokens} tokens{baseline})"
        )


@dataclass(frozen=True)
class PairEvaluationResult:
    """Mean loss of ``pairs`` held-out pairs of answers."""

    loss: float
    pairs: int

    def describe(self) -> str:
        return f"loss: {self.loss:.4f} per pair ({self.pairs} pairs)"


@dataclass(frozen=True)
class AnswerEvaluationResult:
    """Mean loss of ``answers`` held-out answers, each desirable or not."""

    loss: float
    answers: int

    def describe(self) -> str:
        return f"loss: {self.loss:.4f} per answer ({self.answers} answers)"


RowResult = PairEvaluationResult | AnswerEvaluationResult
"""What is told of rows that have one loss each."""


class Evaluator:
    """Evaluates a model on the batches of a stream; of a run of several processes, all of them call it."""

    def __init__(
        self,
        stream: EvaluationStream,
        unigram_loss: float | None,
        bytes_per_token: float | None,
        progress: Progress = unwatched,
        of_rows: type[RowResult] | None = None,
    ):
        self.stream = stream
        self.unigram_loss = unigram_loss
        self.bytes_per_token = bytes_per_token
        self.progress = progress
        self.of_rows = of_rows

    def run(self, engine: Engine) -> EvaluationResult | RowResult:
        """The mean over all batches.

        Raises:
            UserError: nothing of them counts: all that is to be learnt was cut off.
        """
        total, tokens = 0.0, 0.0
        for index in counted(range(len(self.stream)), "evaluating", self.progress):
            heart.beat("evaluation")
            loss, count = engine.evaluate(self.stream.batch(index))
            total, tokens = total + loss, tokens + count
        if engine.simulated:
            return EvaluationResult(math.nan, math.nan, None, 0, None)
        if not tokens:
            raise UserError(
                "no token of the held-out rows counts: what is to be answered lies behind model.model_config.seq_length; "
                "write a larger one, or take other rows"
            )
        mean = total / tokens
        if self.of_rows is not None:
            return self.of_rows(mean, int(tokens))
        bits = None if self.bytes_per_token is None else bits_per_byte(mean, self.bytes_per_token)
        return EvaluationResult(mean, math.exp(min(mean, 700.0)), bits, int(tokens), self.unigram_loss)
