"""A tiny Hugging Face directory with a tokenizer, and files of conversations, pairs and text for it."""

import json

from hugging_face import save_llama

from mindllm.data.tokenizers.sentencepiece_tokenizer import save_tokenizer, train_byte_level_bpe

WORDS = ["def main(): return None", "import module", "print(what a list is)", "How do I read a file in Python?"]
TOKENS = 300


def save_tiny_chat_model(directory, **changes):
    """Writes a random Llama of two layers and a byte-level tokenizer beside it; returns the directory."""
    sizes = {"vocab_size": TOKENS, "max_position_embeddings": 256}
    save_llama(directory, **{**sizes, **changes})
    save_tokenizer(train_byte_level_bpe(WORDS * 4, TOKENS, at_most=True), directory / "tokenizer.json")
    return directory


def conversation(number, words=3):
    """One row of conversation ``number``, its answer that many words long."""
    return {"instruction": f"Import number {number}.", "output": " ".join([f"import module_{number}"] * words)}


def write_rows(path, rows):
    """Writes rows as JSON lines; a text is written as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def pair(number):
    """One pair of answers."""
    return {"prompt": f"Import number {number}.", "chosen": f"import module_{number}", "rejected": "no"}
