"""Conversations as prompts: messages written out by a chat template, up to where the next answer begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mindllm.config import RunConfig
from mindllm.data.tokenizer import Tokenizer
from mindllm.generate.prompts import encode_prompt

Message = Mapping[str, str]
Encoder = Callable[[Sequence[Message]], list[int]]
ROLES = ("system", "user", "assistant")
HEADINGS = {"user": "### Instruction:\n", "assistant": "### Response:\n"}


def conversation_encoder(config: RunConfig, tokenizer: Tokenizer) -> Encoder:
    """Returns the function that makes of messages the prompt whose continuation is the next answer."""
    return lambda messages: encode_prompt(apply_chat_template(messages), config.model.config, tokenizer)


def apply_chat_template(messages: Sequence[Message]) -> str:
    """Writes ``messages``, each with ``role`` and ``content``, under headings, and the heading of the answer."""
    parts = [HEADINGS.get(message["role"], "") + message["content"].strip() for message in messages]
    return "\n\n".join([*parts, HEADINGS["assistant"]])
