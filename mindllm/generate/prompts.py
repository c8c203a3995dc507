"""Prompts as token ids, and whether they can be continued: known before there is a model.

Conversations are prompts, too: written out by the chat template of training, else the tokenizer's own, else a plain one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mindllm.config import ModelConfig, RunConfig
from mindllm.config.dataset import ConversationDataConfig
from mindllm.data.chat.conversations import Conversation, Message
from mindllm.data.chat.instruction import encode_chat
from mindllm.data.chat.template import chat_template_of
from mindllm.data.tokenizers.tokenizer import Tokenizer
from mindllm.errors import UserError

NARROWEST, WIDEST = 16, 512  # tokens of a prompt that go through the model at once: powers of two between these
CAPACITY_UNIT = 128  # positions of the cache are a multiple, so that few lengths need a compilation of their own
__all__ = ["Conversation", "Encoder", "Message", "conversation_encoder"]
Encoder = Callable[[Conversation], list[int]]


def pieces(longest: int) -> tuple[int, int]:
    """Number and width of the pieces in which prompts of up to ``longest`` tokens go through the model."""
    width = NARROWEST
    while width < min(longest, WIDEST):
        width *= 2
    return -(-longest // width), width


def encode_prompt(text: str, config: ModelConfig, tokenizer: Tokenizer) -> list[int]:
    """The tokens of ``text``, after what begins a text if there is such a thing."""
    begin = tokenizer.prefix_ids if config.bos_token_id is None else (config.bos_token_id,)
    return [*begin, *tokenizer.encode(text)]


def check_prompts(prompts: Sequence[Sequence[int]], config: ModelConfig, max_length: int, max_new_tokens: int) -> None:
    """Raises UserError for the first prompt that is empty, not of the vocabulary, or too long to be continued."""
    for index, prompt in enumerate(prompts):
        name = "the prompt" if len(prompts) == 1 else f"prompt {index + 1} of {len(prompts)}"
        if not len(prompt):
            raise UserError(f"{name} is empty: give at least one token")
        outside = [token for token in prompt if not 0 <= token < config.vocab_size]
        if outside:
            raise UserError(
                f"{name} has token {outside[0]}, but model.model_config.vocab_size is {config.vocab_size}: "
                "give the tokenizer the model was trained with"
            )
        room = max_length - len(prompt)
        if room < max_new_tokens:
            advice = f"generation.max_new_tokens={room} at most" if room > 0 else "a shorter prompt"
            raise UserError(
                f"{name} of {len(prompt)} token(s) with {max_new_tokens} new ones would be longer than the "
                f"{max_length} tokens the model works on (model.model_config.seq_length): give {advice}"
            )


def conversation_encoder(config: RunConfig, tokenizer: Tokenizer) -> Encoder:
    """Return the function that makes of a conversation the prompt whose continuation is the next answer.

    The prompt is what a model was trained to see there: special tokens of the template are tokens, their names in messages are
    words. Raises UserError for a template that is none; the function, for a conversation that the template refuses.
    """
    data = config.train_dataset.data_loader.config
    chat = data.chat if isinstance(data, ConversationDataConfig) else {}
    template = chat_template_of(tokenizer, **chat)

    def encode(conversation: Conversation) -> list[int]:
        ids, _ = encode_chat(template.render_prompt(conversation, "the conversation"), tokenizer)
        return ids

    return encode
