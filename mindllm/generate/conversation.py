"""Conversations as prompts: written out by the chat template of training, else the tokenizer's own, else a plain one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mindllm.config import RunConfig
from mindllm.config.dataset import ConversationDataConfig
from mindllm.data.chat.conversations import ROLES, Conversation, Message
from mindllm.data.chat.instruction import encode_chat
from mindllm.data.chat.template import chat_template_of
from mindllm.data.tokenizers.tokenizer import Tokenizer

Encoder = Callable[[Sequence[Message]], list[int]]
__all__ = ["ROLES", "Encoder", "Message", "conversation_encoder"]


def conversation_encoder(config: RunConfig, tokenizer: Tokenizer) -> Encoder:
    """Returns the function that makes of messages the prompt whose continuation is the next answer.

    The prompt is what a model was trained to see there: special tokens of the template are tokens, their names in messages are
    words. Raises UserError for a template that is none; the function, for a conversation that the template refuses.
    """
    data = config.train_dataset.data_loader.config
    given = data.chat_template if isinstance(data, ConversationDataConfig) else ""
    template = chat_template_of(tokenizer, given)

    def encode(messages: Sequence[Message]) -> list[int]:
        chat = template.render_prompt(Conversation(tuple(messages)), "the conversation")
        ids, _ = encode_chat(chat, tokenizer)
        return ids

    return encode
