"""Answers that are each desirable or not, as samples: what was asked with its own answer, then with the answer of another row.

Both are documents of one row, as those of :mod:`mindllm.data.chat.pairs`. The first is learnt from; by the second the distance
from the reference is estimated (KTO: Ethayarajh et al., 2024). An answer has one loss, which stands at the first place of its row
where it is desirable and at the second where it is not.

Forms are told apart by their keys: TRL's unpaired preferences (``prompt``, ``completion``, ``label``), and conversations that
end with the answer, beside ``label`` (ms-swift) or ``kto_tag`` (LLaMA-Factory). Pairs become two such rows, as TRL's
``unpair_preference_dataset`` has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import numpy as np

from mindllm.data.chat.conversations import (
    HANDLERS,
    Conversation,
    Message,
    detect,
    messages_of,
    tools_of,
    turns_of,
    variables_of,
)
from mindllm.data.chat.messages import is_learned
from mindllm.data.chat.pairs import Arrays, PairRows, before_answer, is_pair, pair_of, pair_sample
from mindllm.data.records import Record
from mindllm.data.rows import Row
from mindllm.data.tokenizers.tokenizer import Tokenizer
from mindllm.errors import UserError

READER = "unpaired answers"
LABELS = ("label", "kto_tag")
SAID = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
"""What a label says; files of tables have numbers and texts."""
FORMS = "prompt and completion, messages, conversations, or instruction and output, with label: true or false; or pairs"
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
        """All that was said."""
        return Conversation((*self.asked, *self.answer), self.tools, self.variables)


def has_label(record: Record) -> bool:
    """Whether a row says that its answer is desirable or not."""
    return any(key in record for key in LABELS)


def answer_in(record: Record, place: str, side: int = 0) -> Answer:
    """The answer in a record, of a pair the chosen one (``side`` 0) or the rejected one; ``place`` names it in errors.

    Raises UserError where keys are missing, nobody asks or answers, or the label is neither true nor false.
    """
    context = tools_of(record, place), variables_of(record, place)
    if is_pair(record):
        pair = pair_of(record, place)
        chosen, rejected = pair.chosen.messages, pair.rejected.messages
        shared = len(list(takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False))))
        said = rejected if side else chosen
        return Answer(said[:shared], said[shared:], not side, *context)
    key = next((key for key in LABELS if key in record), None)
    if key is None:
        raise UserError(f"{place}: no label (keys: {', '.join(record)}); a row has {FORMS}")
    if (desirable := SAID.get(str(record[key]).lower())) is None:
        raise UserError(f"{place}: {key} is {record[key]!r}; write true or false")
    if "completion" in record:
        asked, answer = (
            messages_of(record, read, READER, place)
            for read in (before_answer, lambda row: turns_of(row["completion"], "assistant"))
        )
    else:
        said = messages_of(record, HANDLERS[detect(record, place)], READER, place)
        asked, answer = said[:-1], said[-1:]
    if not any(map(is_learned, answer)):
        raise UserError(f"{place}: ends with the {answer[-1]['role'] if answer else 'question'}, not with an answer")
    if not asked:
        raise UserError(f"{place}: begins with an answer; give the question in prompt")
    return Answer(asked, answer, desirable, *context)


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
        """One line for people."""
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
        """The answer of row ``number``; raises UserError naming it where it is none, or of another form than the first row."""
        record, side = divmod(number, self.sides)
        row, place = self.table[record], self.table.name(record)
        if is_pair(row) != (self.sides == SIDES):
            first = "a pair" if self.sides == SIDES else "no pair"
            raise UserError(f"{place}: all rows are pairs or none is, and the first is {first}")
        return answer_in(row, place, side)

    def other_answer(self, number: int) -> Answer:
        """The answer of the row before that can be used, of a pair that of the same side."""
        for further in range(1, len(self.table)):
            try:
                return self.answer((number - further * self.sides) % len(self))
            except UserError:
                continue
        raise UserError(f"{self.table.name(number // self.sides)}: no other row has an answer")

    def whole_rows(self, number: int) -> list[Row]:
        """The question with its own answer, and with the other one, in their full length."""
        own, place = self.answer(number), self.table.name(number // self.sides)
        said = [own] if self.alone else [own, own.answered_by(self.other_answer(number))]
        shared = sum(message["role"] == "assistant" for message in own.asked)
        return [self._row(one.conversation, shared, place) for one in said]

    def check(self, number: int) -> list[Row]:
        """As :meth:`whole_rows`; a UserError, too, where the answer is cut away altogether."""
        whole = self.whole_rows(number)
        row, kept = whole[0], self._kept(whole)[0]
        if row.trained[1:].any() and not row.trained[1 : kept + 1].any():
            raise UserError(
                f"{self.table.name(number // self.sides)}: nothing of the answer is left of {row.places} places in a row of "
                f"{self.seq_length}; raise model.model_config.seq_length to {sum(each.places for each in whole)}"
            )
        return whole

    def samples(self, numbers: Sequence[int]) -> list[Arrays]:
        """A sample for each of these."""
        return [self._sample(number) for number in numbers]

    def _sample(self, number: int) -> Arrays:
        sample = pair_sample(self._cut(self.whole_rows(number), number // self.sides), self.seq_length)
        if not self.answer(number).desirable:
            sample["loss_mask"] = np.roll(sample["loss_mask"], 1)
        return sample

    def _kept(self, rows: list[Row]) -> list[int]:
        return [min(rows[0].places, self.seq_length)] if self.alone else super()._kept(rows)

    def count(self, numbers: Iterable[int]) -> AnswerCounts:  # type: ignore[override]
        """Tokenizes these answers once, keeping only what they come to."""
        answers = desirable = tokens = trained = truncated = without = self._spelled_out = 0
        self._truncation_is_told = True  # this tells all of it
        for number in numbers:
            whole = self.whole_rows(number)
            rows = self._cut(whole, number // self.sides)
            learnt = int(rows[0].trained[1:].sum())
            answers += 1
            desirable += self.answer(number).desirable
            tokens += sum(len(row.tokens) for row in rows)
            trained += learnt
            truncated += [row.places for row in rows] != [row.places for row in whole]
            without += not learnt
        return AnswerCounts(answers, desirable, tokens, trained, truncated, without, self._spelled_out)
