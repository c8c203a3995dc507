"""Records as documents: which of their keys hold the text, and the forms that ModelLink's pretraining handlers know."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mindllm.data.chat.conversations import alpaca
from mindllm.data.records import Record
from mindllm.errors import UserError, nearest


@dataclass(frozen=True)
class DocumentReader:
    """Makes a document of a record: the texts of ``keys``, or what ``handler`` makes of it."""

    keys: tuple[str, ...] = ("text",)
    handler: str = "GeneralPretrainHandler"

    @property
    def columns(self) -> tuple[str, ...]:
        """The keys that are read, where the handler does not choose them by the record; else nothing."""
        return self.keys if self.handler == "GeneralPretrainHandler" else ()

    def text(self, record: Record, place: str) -> str:
        """Returns the text of ``record``; raises UserError, naming it as ``place``, where keys are missing or no text."""
        try:
            parts = HANDLERS[self.handler](record, self.keys)
        except KeyError as error:
            raise UserError(
                f"{place}: has no key {error}{nearest(str(error).strip(chr(39)), record)}; name the keys with --json-keys, or "
                "read files as they are with --format text"
            ) from None
        except (TypeError, AttributeError, ValueError) as error:
            raise UserError(f"{place}: not a record for {self.handler} ({error})") from None
        wrong = next((part for part in parts if not isinstance(part, str)), None)
        if wrong is not None:
            raise UserError(
                f"{place}: holds {repr(wrong)[:40]} where a text should be; name other keys with --json-keys"
            )
        return "\n".join(parts)


def general(record: Record, keys: Sequence[str]) -> list[str]:
    """The texts of ``keys``, joined by line breaks; a key that is null is left out."""
    return [record[key] for key in keys if record[key] is not None]


def alpaca_pretrain(record: Record, keys: Sequence[str]) -> list[str]:
    """An alpaca row as running text: every part under a heading, as the plain chat template has it."""
    headings = {"system": "", "user": "### Instruction:\n", "assistant": "### Response:\n"}
    return ["\n\n".join(headings[message["role"]] + message["content"] for message in alpaca(record))]


def stack_overflow_python(record: Record, keys: Sequence[str]) -> list[str]:
    """A question of Stack Overflow about Python, and its answer."""
    return [
        f"In python, {record['title']}\n### Question:\n{record['question_body']}\n### Response:\n{record['answer_body']}\n"
    ]


HANDLERS: Mapping[str, Callable[[Record, Sequence[str]], list[str]]] = {
    "GeneralPretrainHandler": general,
    "AlpacaPretrainHandler": alpaca_pretrain,
    "StackOverflowPythonPretrainHandler": stack_overflow_python,
}
