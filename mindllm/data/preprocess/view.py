"""A sample as text: trained tokens in one color, other tokens in another, documents under separate headings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.text import Text

from mindllm.data import Tokenizer
from mindllm.terminal.text import visible

TRAINED, READ, PADDING = "bold green", "dim", "dim red"
BREAK = "↵"


@dataclass(frozen=True)
class Segment:
    """Tokens of a sample that see each other, from place ``start``: ``labels`` int [n], which are ``trained`` bool [n].

    ``compared``: nothing of it is learnt; by its answer the distance from the reference is estimated.
    """

    start: int
    first: int
    labels: np.ndarray
    trained: np.ndarray
    compared: bool = False

    @property
    def is_padding(self) -> bool:
        """Return True if it has no trained token and only zeros."""
        return not (self.trained.any() or self.labels.any() or self.first)


def segments(sample: dict[str, np.ndarray], learnt: int | None = None) -> Iterator[Segment]:
    """Yield the segments of a sample; a sample without segment starts is one. Padding at its end is a separate segment.

    ``learnt``: number of non-empty segments that are trained; None: all. The others estimate a divergence.
    """
    length = len(sample["labels"])
    labels, trained = _read_and_trained(sample)
    starts = np.unique(sample["segment_starts"]).tolist() if "segment_starts" in sample else _starts(sample)
    for number, (start, stop) in enumerate(zip(starts, [*starts[1:], length], strict=True)):
        part = slice(start, stop)
        segment = Segment(start, int(sample["input_ids"][start]), labels[part], trained[part])
        if learnt is not None and number >= learnt and not segment.is_padding:
            segment = replace(segment, trained=np.zeros_like(segment.trained), compared=True)
        yield segment


def _starts(sample: dict[str, np.ndarray]) -> list[int]:
    """Return where a row begins that has a sample to itself, and where its padding does: zeros without a loss."""
    used = (sample["input_ids"] != 0) | (sample["labels"] != 0) | (sample["loss_mask"] > 0)
    end = int(np.flatnonzero(used)[-1]) + 1 if used.any() else 0
    return [0] if end in (0, len(used)) else [0, end]


def _read_and_trained(sample: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return labels, and which of them are trained. Pairs have labels of answers only: other labels are the next tokens."""
    labels = sample["labels"]
    if not (labels < 0).any():
        return labels, sample["loss_mask"] > 0
    following = np.append(sample["input_ids"][1:], 0)
    ends = np.append(np.diff(sample["segment_starts"]) > 0, True)  # the label after the last input of a document
    return np.where(labels < 0, np.where(ends, 0, following), labels), labels >= 0


def coloured(segment: Segment, tokenizer: Tokenizer, *, ids: bool = False) -> Text:
    """Return the text of a segment: its first token, which nothing predicts, then its labels. ``ids``: with token numbers."""
    text = Text()
    tokens = [(segment.first, READ), *zip(segment.labels.tolist(), map(token_style, segment.trained), strict=True)]
    if ids:
        for token, style in tokens:
            piece = tokenizer.decode([token]).replace("\n", BREAK)
            text.append(visible(piece), style=style).append(f"·{token} ", style="blue")
        return text
    for run, style in runs(tokens):
        text.append(visible(tokenizer.decode(run)), style=style)
    return text


def token_style(trained: bool) -> str:
    """Return the color of a token."""
    return TRAINED if trained else READ


def runs(tokens: list[tuple[int, str]]) -> Iterator[tuple[list[int], str]]:
    """Yield consecutive tokens of one style together, so that characters of several tokens are decoded as a whole."""
    run: list[int] = []
    previous = ""
    for token, style in tokens:
        if run and style != previous:
            yield run, previous
            run = []
        run.append(token)
        previous = style
    if run:
        yield run, previous


def description(
    index: int, sample: dict[str, np.ndarray], tokenizer: Tokenizer, learnt: int | None = None
) -> dict[str, Any]:
    """Return the JSON object of ``--json``: places, trained and padded ones, and the parts of each segment as (text, trained)."""
    parts = [segment for segment in segments(sample, learnt) if not segment.is_padding]
    return {
        "sample": index,
        "places": len(sample["labels"]),
        "trained": sum(int(segment.trained.sum()) for segment in parts),
        "padding": len(sample["labels"]) - sum(len(segment.labels) for segment in parts),
        "segments": [
            {
                "start": segment.start,
                "trained": int(segment.trained.sum()),
                "compared": segment.compared,
                "parts": [
                    {"text": tokenizer.decode(run), "trained": style == TRAINED}
                    for run, style in runs(
                        [
                            (segment.first, READ),
                            *zip(segment.labels.tolist(), map(token_style, segment.trained), strict=True),
                        ]
                    )
                ],
            }
            for segment in parts
        ],
    }
