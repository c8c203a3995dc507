"""A tiny GGUF file with a tokenizer of words, which conversations and text are made of."""

import json

import pytest

from mindllm.data.tokenizers.sentencepiece_tokenizer import train_byte_level_bpe
from tests.tiny_chat import TOKENS, WORDS


def save_tiny_chat_gguf(path):
    """Writes a random Llama of two layers in Q8_0 with a byte-level tokenizer; returns the file."""
    pytest.importorskip("gguf")
    from hugging_face import random_llama
    from tiny_gguf import write_gguf

    def add_tokenizer(writer):
        model = json.loads(train_byte_level_bpe(WORDS * 4, TOKENS, at_most=True).to_str())
        tokens = sorted(model["model"]["vocab"], key=model["model"]["vocab"].get)
        controls = {added["content"] for added in model["added_tokens"]}
        tokens += [f"<unused_{number}>" for number in range(TOKENS - len(tokens))]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types([3 if token in controls or token.startswith("<unused") else 1 for token in tokens])
        writer.add_token_merges(
            [" ".join(pair) if isinstance(pair, list) else pair for pair in model["model"]["merges"]]
        )
        writer.add_eos_token_id(tokens.index(sorted(controls)[0]))

    model = random_llama(std=0.1, vocab_size=TOKENS, hidden_size=64, intermediate_size=96, max_position_embeddings=256)
    return write_gguf(path, model, "llama", "Q8_0", add_tokenizer)
