"""Conversations as prompts: messages written out by a chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from mindllm.config import ModelConfig
from mindllm.data.tokenizer import Tokenizer
from mindllm.generate.prompts import encode_prompt

Message = Mapping[str, str]
ROLES = ("system", "user", "assistant")
HEADINGS = {"user": "### Instruction:\n", "assistant": "### Response:\n"}  # of the plain template


class ChatTemplate(Protocol):
    """How a model was taught to read a conversation."""

    def apply_chat_template(self, messages: Sequence[Message]) -> str:
        """Writes out ``messages``, each with ``role`` and ``content``, up to where the next answer begins."""


class PlainTemplate:
    """Headings and paragraphs, for models whose tokenizer brings no template."""

    def apply_chat_template(self, messages: Sequence[Message]) -> str:
        """The messages under headings, the system message without one, and the heading of the answer."""
        parts = [HEADINGS.get(message["role"], "") + message["content"] for message in messages]
        return "\n\n".join([*parts, HEADINGS["assistant"]])


def encode_conversation(
    messages: Sequence[Message], template: ChatTemplate, config: ModelConfig, tokenizer: Tokenizer
) -> list[int]:
    """The prompt whose continuation is the next answer."""
    return encode_prompt(template.apply_chat_template(messages), config, tokenizer)
