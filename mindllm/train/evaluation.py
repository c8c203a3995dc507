"""Held-out loss of a split: nats per token, perplexity and bits per byte. Every token is predicted once."""

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
    """Loss over ``tokens`` held-out tokens.

    Attributes:
        loss: nats per token.
        perplexity: exponential of the loss.
        bits_per_byte: loss per byte of text, comparable between tokenizers; None if unknown.
        tokens: number of tokens.
        unigram_loss: loss of predicting each token by its frequency in the training split; None for conversations.
    """

    loss: float
    perplexity: float
    bits_per_byte: float | None
    tokens: int
    unigram_loss: float | None

    def describe(self) -> str:
        if math.isnan(self.loss) and not self.tokens:
            return "executed (a simulation computes no loss)"
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
    """Mean loss of ``answers`` held-out answers, each labeled desirable or undesirable."""

    loss: float
    answers: int

    def describe(self) -> str:
        return f"loss: {self.loss:.4f} per answer ({self.answers} answers)"


RowResult = PairEvaluationResult | AnswerEvaluationResult
"""Results of rows that have one loss each."""


class Evaluator:
    """Evaluates a model on the batches of a stream. Collective: all ranks of a run call it."""

    def __init__(
        self,
        stream: EvaluationStream,
        unigram_loss: float | None,
        bytes_per_token: float | None,
        progress: Progress = unwatched,
        row_result: type[RowResult] | None = None,
    ):
        self.stream = stream
        self.unigram_loss = unigram_loss
        self.bytes_per_token = bytes_per_token
        self.progress = progress
        self.row_result = row_result

    def run(self, engine: Engine) -> EvaluationResult | RowResult:
        """Return the mean over all batches.

        Raises:
            UserError: no token counts, because all answers were truncated.
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
                "all answers of the held-out rows are beyond model.model_config.seq_length; increase it, or use other rows"
            )
        mean = total / tokens
        if self.row_result is not None:
            return self.row_result(mean, int(tokens))
        bits = None if self.bytes_per_token is None else bits_per_byte(mean, self.bytes_per_token)
        return EvaluationResult(mean, math.exp(min(mean, 700.0)), bits, int(tokens), self.unigram_loss)
