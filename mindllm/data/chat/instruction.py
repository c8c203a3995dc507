"""Conversations as rows, tokenized on access, with loss on the text of the assistant only."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import numpy as np

from mindllm.data.chat.conversations import Conversation, Message, read_conversation
from mindllm.data.chat.template import ChatTemplate, RenderedChat, Span, chat_template_of
from mindllm.data.records import RecordTable, record_files
from mindllm.data.rows import Row
from mindllm.data.tokenizers.tokenizer import Tokenizer, is_cuttable
from mindllm.errors import UserError


class ConversationRows(ABC):
    """The rows of ``paths`` (files or directories), as the chat template writes them.

    Of plain jsonl files only the places of lines are held.
    """

    def __init__(
        self,
        paths: Sequence[str],
        tokenizer: Tokenizer,
        seq_length: int,
        chat_template: str = "",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        allowed_special_tokens: Sequence[str] = (),
    ) -> None:
        self.table = RecordTable(record_files(paths))
        self.tokenizer = tokenizer
        self.seq_length = seq_length
        self.template: ChatTemplate = chat_template_of(
            tokenizer, chat_template, chat_template_kwargs, allowed_special_tokens
        )
        self._truncation_is_told = False
        self._spelled_out = 0  # names of special tokens in rows that were read so far

    def __len__(self) -> int:
        return len(self.table)

    @abstractmethod
    def check(self, number: int) -> Any:
        """Read and render row ``number``; raise UserError with its place if it is invalid."""

    def fault(self, number: int) -> str:
        """Return why row ``number`` is invalid, with its place; empty if it is valid."""
        try:
            self.check(number)
        except UserError as error:
            return str(error)
        return ""


logger = logging.getLogger(__name__)
ANSWER = "answer"  # of a conversation that shows how a template ends a turn


@dataclass(frozen=True)
class RowCounts:
    """What rows become. ``places``: int32 [rows], what each takes in a sample; 0 where nothing would be learnt from it.

    ``truncated`` rows lost their end, ``without_loss`` ones (some of them truncated) have no token of the assistant left.
    ``spelled_out``: names of special tokens in messages that are encoded as words.
    """

    places: np.ndarray
    truncated: int
    without_loss: int
    tokens: int
    trained_tokens: int
    spelled_out: int = 0

    def describe(self, seq_length: int) -> str:
        """Return one line for people."""
        share = self.trained_tokens / max(1, self.tokens)
        text = f"{len(self.places)} rows, {self.tokens} tokens, {share:.0%} of them trained"
        if self.truncated:
            text += f"; {self.truncated} rows are longer than {seq_length + 1} tokens and cut there"
        if self.without_loss:
            text += f"; {self.without_loss} rows have no answer in what remains"
        if self.spelled_out:
            text += f"; {self.spelled_out} names of special tokens in messages are encoded as words (allowed_special_tokens)"
        return text


class InstructionRows(ConversationRows):
    """Rows of one conversation each, as ``handler`` reads them; tokenized when they are read.

    A row of more than ``seq_length`` + 1 tokens is cut there.
    """

    def __init__(
        self,
        paths: Sequence[str],
        tokenizer: Tokenizer,
        seq_length: int,
        *,
        handler: str = "auto",
        chat_template: str = "",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        allowed_special_tokens: Sequence[str] = (),
    ) -> None:
        super().__init__(paths, tokenizer, seq_length, chat_template, chat_template_kwargs, allowed_special_tokens)
        self.handler = handler

    def chat(self, number: int) -> RenderedChat:
        """Return the text of row ``number``; raise UserError with its place if it is not a conversation."""
        place = self.table.name(number)
        return self.template.render(read_conversation(self.table[number], self.handler, place), place)

    def check(self, number: int) -> RenderedChat:
        """Check row ``number`` like :meth:`chat`, without tokenizing it."""
        return self.chat(number)

    def whole_row(self, number: int) -> Row:
        """Return row ``number`` without truncation."""
        chat = self.chat(number)
        self._spelled_out += len(chat.seams)
        ids, places = encode_chat(chat, self.tokenizer)
        return Row(np.array(ids, dtype=np.int32), trained_tokens(places, chat.spans))

    def rows(self, numbers: Sequence[int]) -> list[Row]:
        """Return the rows with these numbers, in this order, truncated to the sequence length."""
        return [self._cut(self.whole_row(number), number) for number in numbers]

    def _cut(self, row: Row, number: int) -> Row:
        if row.places <= self.seq_length:
            return row
        if not self._truncation_is_told:
            self._truncation_is_told = True
            logger.warning(
                "%s has %d tokens, seq_length + 1 = %d are kept; so with every longer row (count them: "
                "mindllm view --count)",
                self.table.name(number),
                len(row.tokens),
                self.seq_length + 1,
            )
        return Row(row.tokens[: self.seq_length + 1], row.trained[: self.seq_length + 1])

    def count(self, numbers: Iterable[int]) -> RowCounts:
        """Tokenize all rows of ``numbers`` once and count tokens."""
        places: list[int] = []
        truncated = without_loss = tokens = trained = self._spelled_out = 0
        self._truncation_is_told = True  # the row is counted in full
        for number in numbers:
            full_row = self.whole_row(number)
            row = self._cut(full_row, number)
            learnt = int(row.trained[1:].sum())
            truncated += len(full_row.tokens) > len(row.tokens)
            without_loss += not learnt
            tokens += len(row.tokens)
            trained += learnt
            places.append(row.places if learnt else 0)
        return RowCounts(np.array(places, dtype=np.int32), truncated, without_loss, tokens, trained, self._spelled_out)


def encode_chat(chat: RenderedChat, tokenizer: Tokenizer) -> tuple[list[int], list[Span]]:
    """Return the ids of a rendered chat, including special tokens of the template, and their places in the text.

    The text is encoded as a whole, as transformers does. A token that would cross from the prompt into the answer is split there,
    because in generation the prompt is encoded alone. A tokenizer that puts a space before every text cannot be split.
    """
    ids, places = _encode_parts(chat.text, chat.seams, tokenizer)
    crossed = _crossed(places, chat.spans)
    if crossed and is_cuttable(tokenizer):
        ids, places = _encode_parts(chat.text, sorted({*chat.seams, *crossed}), tokenizer)
    return ids, places


def end_ids(own: Sequence[int], tokenizer: Tokenizer | None, chat_template: str = "") -> tuple[int, ...]:
    """Return the tokens that end a text: a model's ``own``, the tokenizer's, and the end of an answer in the chat template."""
    if tokenizer is None:
        return tuple(own)
    eos = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    template = answer_end_ids(chat_template_of(tokenizer, chat_template), tokenizer)
    return tuple(dict.fromkeys((*own, *eos, *tokenizer.end_ids, *template)))


def answer_end_ids(template: ChatTemplate, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the special token that ends an answer in ``template``, which training learns to write; empty if there is none."""
    messages: tuple[Message, ...] = ({"role": "user", "content": ANSWER}, {"role": "assistant", "content": ANSWER})
    try:
        chat = template.render(Conversation(messages), "a conversation")
    except UserError:  # the template rejects such a short conversation, or does not separate turns
        return ()
    ids, places = encode_chat(chat, tokenizer)
    end = chat.text.rfind(ANSWER) + len(ANSWER)
    learned, special = trained_tokens(places, chat.spans), set(tokenizer.special_names)
    ends = (
        id
        for id, (first, _), learn in zip(ids, places, learned, strict=True)
        if first >= end and learn and tokenizer.token(id) in special
    )
    return tuple(islice(ends, 1))


def _crossed(places: Sequence[Span], spans: Sequence[Span]) -> list[int]:
    """Return the borders of ``spans`` inside a token."""
    if not spans or not places:
        return []
    first, last = np.array(places).T
    borders = np.unique(np.array(spans))
    token = np.maximum(
        np.searchsorted(first, borders, side="left") - 1, 0
    )  # the last one that begins before the border
    return borders[(first[token] < borders) & (borders < last[token])].tolist()


def _encode_parts(text: str, seams: Sequence[int], tokenizer: Tokenizer) -> tuple[list[int], list[Span]]:
    ids: list[int] = []
    places: list[Span] = []
    for start, stop in pairwise([0, *seams, len(text)]):
        part_ids, part_places = tokenizer.encode_marked(text[start:stop])
        ids += part_ids
        places += [(start + first, start + last) for first, last in part_places]
    return ids, places


def trained_tokens(places: Sequence[Span], spans: Sequence[Span]) -> np.ndarray:
    """Return the tokens that lie completely within a span: bool [tokens]. A token across a border is not trained.

    Spans are in order and do not overlap. A token without characters (bytes before the last one of a character) is at its start.
    """
    if not spans or not places:
        return np.zeros(len(places), dtype=bool)
    first, last = np.array(places).T
    begins, ends = np.array(spans).T
    span = np.searchsorted(begins, first, side="right") - 1
    return (span >= 0) & (first < ends[span]) & (last <= ends[span])
