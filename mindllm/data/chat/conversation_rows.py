"""Rows that are made of conversations when they are read: where they are, and what writes and encodes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from mindllm.data.chat.template import ChatTemplate, chat_template_of
from mindllm.data.records import RecordTable, record_files
from mindllm.data.tokenizers.tokenizer import Tokenizer
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
        """Reads row ``number`` and writes it out; raises UserError naming it where it cannot be used."""

    def fault(self, number: int) -> str:
        """Why row ``number`` cannot be used, with its place; empty where it can."""
        try:
            self.check(number)
        except UserError as error:
            return str(error)
        return ""
