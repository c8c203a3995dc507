"""Preference pairs and single answers as samples.

Both conversations of a pair are in one row, as documents that do not attend to each other, the chosen answer first. Labels are
``IGNORED`` outside the answers. A pair has one loss, at the first place of its row, so the sum of ``loss_mask`` is the number of
pairs.

Rows of files are recognized by their keys: TRL (``prompt``, ``chosen``, ``rejected``), LLaMA-Factory (``conversations`` or
``instruction``, with ``chosen`` and ``rejected``) and ms-swift (``messages``, or ``query`` and ``response``, with
``rejected_response``). Rows with one answer have a label (KTO).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import numpy as np

from mindllm.data.chat.conversations import (
    ASKED,
    HANDLERS,
    Conversation,
    Message,
    detect,
    earlier,
    instructed,
    is_learned,
    messages,
    messages_of,
    prompt,
    role_of,
    sharegpt,
    tools_of,
    turns_of,
    variables_of,
)
from mindllm.data.chat.instruction import ConversationRows, encode_chat, trained_tokens
from mindllm.data.mind_record import IGNORED
from mindllm.data.records import Record
from mindllm.data.rows import HeldOutRows, Row, RowDataset, assemble
from mindllm.data.tokenizers.tokenizer import Tokenizer
from mindllm.errors import UserError

READER = "pairs of answers"
FORMS = (
    "prompt, conversations, instruction or nothing, with chosen and rejected; or messages, or query and response, with "
    "rejected_response"
)
logger = logging.getLogger(__name__)
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Pair:
    """Two conversations whose first ``shared`` turns of the assistant are equal. The answers follow these turns."""

    chosen: Conversation
    rejected: Conversation
    shared: int


def is_pair(record: Record) -> bool:
    """Return True if a row has two answers."""
    return "rejected_response" in record or {"chosen", "rejected"} <= record.keys()


def pair_of(record: Record, place: str) -> Pair:
    """Return the pair in a record; ``place`` names it in errors.

    Raises UserError for missing keys, missing text of the assistant or the user, or equal answers.
    """
    if not is_pair(record):
        raise UserError(f"{place}: no pair of answers (keys: {', '.join(record)}); a row has {FORMS}")
    chosen, rejected = (
        messages_of(record, lambda row, name=name: _conversation(row, name), READER, place)  # type: ignore[misc]
        for name in ("chosen", "rejected")
    )
    shared_turns = list(takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False)))
    for name, conversation in (("chosen", chosen), ("rejected", rejected)):
        if not any(map(is_learned, conversation[len(shared_turns) :])):
            advice = "; chosen and rejected are the same" if chosen == rejected else ""
            raise UserError(f"{place}: {name} has no separate answer{advice}; remove the row")
        if conversation[0]["role"] == "assistant":
            raise UserError(f"{place}: {name} begins with an answer; give the question in prompt")
    context = tools_of(record, place), variables_of(record, place)
    shared = sum(first["role"] == "assistant" for first, _ in shared_turns)
    return Pair(Conversation(chosen, *context), Conversation(rejected, *context), shared)


def _conversation(record: Record, name: str) -> Iterable[Mapping[str, Any]]:
    """Return all messages up to and including the answer ``name``. An answer that begins earlier is a complete conversation."""
    if "rejected_response" in record:
        *before, last = messages(record) if "messages" in record else prompt(record)
        if role_of(last) != "assistant":
            raise ValueError(f"messages end with the {role_of(last)}, not with the chosen answer")
        return [*before, *([last] if name == "chosen" else turns_of(record["rejected_response"], "assistant"))]
    answer = turns_of(record[name], "assistant")
    return answer if answer and role_of(answer[0]) not in ("assistant", "tool") else [*before_answer(record), *answer]


def before_answer(record: Record) -> list[Mapping[str, Any]]:
    """Return the messages before the answers of a record."""
    if "conversations" in record:
        return list(sharegpt(record))
    question: object = (
        instructed(record) if "instruction" in record else next((record[key] for key in ASKED if key in record), [])
    )
    return [*earlier(record), *turns_of(question, "user")]


def _with_shared_turns(conversation: Conversation, count: int) -> Conversation:
    """Return the conversation without loss on its first ``count`` turns of the assistant."""
    turns = [at for at, message in enumerate(conversation.messages) if message["role"] == "assistant"][:count]
    messages = ({**message, "loss": 0} if at in turns else message for at, message in enumerate(conversation.messages))
    return replace(conversation, messages=tuple(messages))


@dataclass(frozen=True)
class PairCounts:
    """What pairs come to: ``truncated`` ones lost an end, of ``without_answer`` ones an answer lost all its words."""

    pairs: int
    tokens: int
    trained_tokens: int
    truncated: int
    without_answer: int
    spelled_out: int = 0

    def describe(self, seq_length: int) -> str:
        """Return one line for people."""
        text = f"{self.pairs} pairs, {self.tokens} tokens, {self.trained_tokens} of them of answers"
        if self.truncated:
            text += f"; {self.truncated} pairs are longer than the {seq_length} places of a row and cut"
        if self.without_answer:
            text += f"; {self.without_answer} pairs lose a complete answer by truncation"
        if self.spelled_out:
            text += f"; {self.spelled_out} names of special tokens in messages are encoded as words (allowed_special_tokens)"
        return text


class PairRows(ConversationRows):
    """Rows of two answers each, tokenized when they are read."""

    def whole_rows(self, number: int) -> list[Row]:
        """Return chosen and rejected rows of pair ``number`` without truncation; raise UserError if it is not a pair."""
        place = self.table.name(number)
        pair = pair_of(self.table[number], place)
        return [self._row(conversation, pair.shared, place) for conversation in (pair.chosen, pair.rejected)]

    def _row(self, conversation: Conversation, shared: int, place: str) -> Row:
        chat = self.template.render(_with_shared_turns(conversation, shared), place)
        self._spelled_out += len(chat.seams)
        ids, places = encode_chat(chat, self.tokenizer)
        return Row(np.array(ids, dtype=np.int32), trained_tokens(places, chat.spans))

    def check(self, number: int) -> list[Row]:
        """Check pair ``number`` like :meth:`whole_rows`, and that truncation leaves a part of each answer."""
        rows = self.whole_rows(number)
        for side, row, kept_places in zip(("chosen", "rejected"), rows, self._kept_lengths(rows), strict=True):
            if row.trained[1:].any() and not row.trained[1 : kept_places + 1].any():
                raise UserError(
                    f"{self.table.name(number)}: nothing of the {side} answer is left of {row.places} places in a row of "
                    f"{self.seq_length}; raise model.model_config.seq_length to {sum(each.places for each in rows)}"
                )
        return rows

    def rows(self, numbers: Sequence[int]) -> list[Row]:
        """Return chosen and rejected rows of each pair in turn, truncated to fit a sample together."""
        return [row for number in numbers for row in self._cut(self.whole_rows(number), number)]

    def samples(self, numbers: Sequence[int]) -> list[Arrays]:
        """Return a sample for each of these pairs."""
        rows = self.rows(numbers)
        return [pair_sample(rows[2 * index : 2 * index + 2], self.seq_length) for index in range(len(numbers))]

    def nothing(self) -> Arrays:
        """Return an empty sample that fills a batch."""
        return pair_sample([], self.seq_length)

    def _cut(self, rows: list[Row], number: int) -> list[Row]:
        places, lengths = [row.places for row in rows], self._kept_lengths(rows)
        if lengths == places:
            return rows
        if not self._truncation_is_told:
            self._truncation_is_told = True
            message = "%s takes %s places, a row has seq_length = %d; ends are cut, so with every longer row"
            logger.warning(message, self.table.name(number), " + ".join(map(str, places)), self.seq_length)
        return [Row(row.tokens[: n + 1], row.trained[: n + 1]) for row, n in zip(rows, lengths, strict=True)]

    def _kept_lengths(self, rows: list[Row]) -> list[int]:
        return shared_out([row.places for row in rows], self.seq_length)

    def count(self, numbers: Iterable[int]) -> PairCounts:
        """Tokenize these pairs once and count tokens."""
        pairs = tokens = trained = truncated = without = self._spelled_out = 0
        self._truncation_is_told = True  # a pair is counted in full
        for number in numbers:
            pair_rows = self.whole_rows(number)
            rows = self._cut(pair_rows, number)
            learnt = [int(row.trained[1:].sum()) for row in rows]
            pairs += 1
            tokens += sum(len(row.tokens) for row in rows)
            trained += sum(learnt)
            truncated += [row.places for row in rows] != [row.places for row in pair_rows]
            without += 0 in learnt
        return PairCounts(pairs, tokens, trained, truncated, without, self._spelled_out)


def shared_out(places: Sequence[int], room: int) -> list[int]:
    """Return how many of the places two rows keep: a short row all, a long row the rest, two long rows half each."""
    first, second = places
    half = room // 2
    if first + second <= room:
        return [first, second]
    if second <= half:
        return [room - second, second]
    share = min(first, room - half)
    return [share, room - share]


class PairDataset(RowDataset):
    """Samples of pairs without end; each is input_ids, labels, segment_starts, position_ids int32 and loss_mask float32."""

    source: PairRows

    def _samples(self, groups: Sequence[np.ndarray]) -> list[Arrays]:
        return self.source.samples(np.concatenate(groups).tolist())


class HeldOutPairs(HeldOutRows):
    """Pairs for evaluation, in order; those past the end are padding without loss."""

    source: PairRows

    def sample(self, index: int) -> Arrays:
        """Return sample ``index`` like :class:`PairDataset`."""
        if index < len(self.numbers):
            return self.source.samples([self.numbers[index]])[0]
        return self.source.nothing()


def pair_sample(rows: Sequence[Row], seq_length: int) -> Arrays:
    """Return one sample of chosen and rejected rows, or an empty one."""
    sample = assemble(rows, seq_length, packed=True)
    sample["labels"] = np.where(sample["loss_mask"] > 0, sample["labels"], np.int32(IGNORED))
    sample["loss_mask"] = np.zeros(seq_length, np.float32)
    sample["loss_mask"][0] = float(bool(rows))
    return sample


UNPAIRED_READER = "unpaired answers"
LABELS = ("label", "kto_tag")
LABEL_VALUES = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
"""Labels by their text; tabular files have numbers and texts."""
UNPAIRED_FORMS = (
    "prompt and completion, messages, conversations, or instruction and output, with label: true or false; or pairs"
)
SIDES = 2  # answers of a pair


@dataclass(frozen=True)
class Answer:
    """What was asked and what was answered, and whether that was desirable."""

    asked: tuple[Message, ...]
    answer: tuple[Message, ...]
    desirable: bool
    tools: list[Any] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    def answered_by(self, other: Answer) -> Answer:
        """Return the question with the answer of another row."""
        return replace(self, answer=other.answer)

    @property
    def conversation(self) -> Conversation:
        """Return all messages."""
        return Conversation((*self.asked, *self.answer), self.tools, self.variables)


def has_label(record: Record) -> bool:
    """Return True if a row has a label for its answer."""
    return any(key in record for key in LABELS)


def answer_in(record: Record, place: str, side: int = 0) -> Answer:
    """Return the answer in a record, of a pair the chosen one (``side`` 0) or the rejected one; ``place`` names it in errors.

    Raises UserError for missing keys or text, or a label that is neither true nor false.
    """
    context = tools_of(record, place), variables_of(record, place)
    if is_pair(record):
        pair = pair_of(record, place)
        chosen, rejected = pair.chosen.messages, pair.rejected.messages
        shared = len(list(takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False))))
        value = rejected if side else chosen
        return Answer(value[:shared], value[shared:], not side, *context)
    key = next((key for key in LABELS if key in record), None)
    if key is None:
        raise UserError(f"{place}: no label (keys: {', '.join(record)}); a row has {UNPAIRED_FORMS}")
    if (desirable := LABEL_VALUES.get(str(record[key]).lower())) is None:
        raise UserError(f"{place}: {key} is {record[key]!r}; write true or false")
    if "completion" in record:
        question, answer = (
            messages_of(record, read, UNPAIRED_READER, place)
            for read in (before_answer, lambda row: turns_of(row["completion"], "assistant"))
        )
    else:
        value = messages_of(record, HANDLERS[detect(record, place)], UNPAIRED_READER, place)
        question, answer = value[:-1], value[-1:]
    if not any(map(is_learned, answer)):
        raise UserError(f"{place}: ends with the {answer[-1]['role'] if answer else 'question'}, not with an answer")
    if not question:
        raise UserError(f"{place}: begins with an answer; give the question in prompt")
    return Answer(question, answer, desirable, *context)


@dataclass(frozen=True)
class AnswerCounts:
    """What answers come to: ``truncated`` rows lost an end, of ``without_answer`` ones the answer lost all its words."""

    answers: int
    desirable: int
    tokens: int
    trained_tokens: int
    truncated: int
    without_answer: int
    spelled_out: int = 0

    def describe(self, seq_length: int) -> str:
        """Return one line for people."""
        text = f"{self.answers} answers, {self.desirable} of them desirable; "
        text += f"{self.tokens} tokens, {self.trained_tokens} of them of answers"
        if self.truncated:
            text += f"; {self.truncated} rows are longer than the {seq_length} places of a row and cut"
        if self.without_answer:
            text += f"; of {self.without_answer} answers nothing remains"
        if self.spelled_out:
            text += f"; {self.spelled_out} names of special tokens in messages are encoded as words (allowed_special_tokens)"
        return text


class AnswerRows(PairRows):
    """Rows of one answer each, and unless ``alone`` the answer of the row before under the same question, of the first row that
    of the last. Of a file of pairs row ``2 n`` is the chosen answer of pair ``n``, the next one its rejected answer; the other
    answer is that of the same side.

    Raises:
        UserError: there is one record, which has no other answer.
    """

    def __init__(
        self, paths: Sequence[str], tokenizer: Tokenizer, seq_length: int, *, alone: bool = False, **chat: Any
    ) -> None:
        super().__init__(paths, tokenizer, seq_length, **chat)
        self.alone = alone
        self.sides = SIDES if len(self.table) and is_pair(self.table[0]) else 1
        if not alone and len(self.table) == 1:
            raise UserError(
                f"{self.table.name(0)}: is the only row; how far a model goes is estimated by answers of others"
            )

    def __len__(self) -> int:
        return len(self.table) * self.sides

    def answer(self, number: int) -> Answer:
        """Return the answer of row ``number``; raise UserError if it has none, or another form than the first row."""
        record, side = divmod(number, self.sides)
        row, place = self.table[record], self.table.name(record)
        if is_pair(row) != (self.sides == SIDES):
            first = "a pair" if self.sides == SIDES else "no pair"
            raise UserError(f"{place}: all rows are pairs or none is, and the first is {first}")
        return answer_in(row, place, side)

    def other_answer(self, number: int) -> Answer:
        """Return the answer of the last valid row before it, of a pair the answer of the same side."""
        for distance in range(1, len(self.table)):
            try:
                return self.answer((number - distance * self.sides) % len(self))
            except UserError:
                continue
        raise UserError(f"{self.table.name(number // self.sides)}: no other row has an answer")

    def whole_rows(self, number: int) -> list[Row]:
        """Return the question with its own answer and with the other answer, without truncation."""
        answer, place = self.answer(number), self.table.name(number // self.sides)
        answers = [answer] if self.alone else [answer, answer.answered_by(self.other_answer(number))]
        shared = sum(message["role"] == "assistant" for message in answer.asked)
        return [self._row(entry.conversation, shared, place) for entry in answers]

    def check(self, number: int) -> list[Row]:
        """Check row ``number`` like :meth:`whole_rows`, and that truncation leaves a part of the answer."""
        rows = self.whole_rows(number)
        row, length = rows[0], self._kept_lengths(rows)[0]
        if row.trained[1:].any() and not row.trained[1 : length + 1].any():
            raise UserError(
                f"{self.table.name(number // self.sides)}: nothing of the answer is left of {row.places} places in a row of "
                f"{self.seq_length}; raise model.model_config.seq_length to {sum(each.places for each in rows)}"
            )
        return rows

    def samples(self, numbers: Sequence[int]) -> list[Arrays]:
        """Return a sample for each of these rows."""
        return [self._sample(number) for number in numbers]

    def _sample(self, number: int) -> Arrays:
        sample = pair_sample(self._cut(self.whole_rows(number), number // self.sides), self.seq_length)
        if not self.answer(number).desirable:
            sample["loss_mask"] = np.roll(sample["loss_mask"], 1)
        return sample

    def _kept_lengths(self, rows: list[Row]) -> list[int]:
        return [min(rows[0].places, self.seq_length)] if self.alone else super()._kept_lengths(rows)

    def count(self, numbers: Iterable[int]) -> AnswerCounts:  # type: ignore[override]
        """Tokenize these answers once and count tokens."""
        answers = desirable = tokens = trained = truncated = without = self._spelled_out = 0
        self._truncation_is_told = True  # a pair is counted in full
        for number in numbers:
            answer_rows = self.whole_rows(number)
            rows = self._cut(answer_rows, number // self.sides)
            learnt = int(rows[0].trained[1:].sum())
            answers += 1
            desirable += self.answer(number).desirable
            tokens += sum(len(row.tokens) for row in rows)
            trained += learnt
            truncated += [row.places for row in rows] != [row.places for row in answer_rows]
            without += not learnt
        return AnswerCounts(answers, desirable, tokens, trained, truncated, without, self._spelled_out)
