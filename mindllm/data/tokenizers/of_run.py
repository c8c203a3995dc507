"""The tokenizer of a run, checked against its model."""

from __future__ import annotations

from mindllm.config import RunConfig
from mindllm.data.tokenizers.tokenizer import Tokenizer, load_tokenizer


def run_tokenizer(config: RunConfig) -> Tokenizer:
    """Loads ``processor.tokenizer.vocab_file``.

    Raises:
        UserError: the file is missing or no tokenizer, or it has tokens that the model has no row for.
    """
    tokenizer, rows = load_tokenizer(config.processor.tokenizer.vocab_file), config.model.config.vocab_size
    if tokenizer.vocab_size > rows:
        raise config.error(
            "model.model_config.vocab_size",
            f"the tokenizer {tokenizer.path} has {tokenizer.vocab_size} tokens, more than the model's {rows} (value {rows}); "
            "give the tokenizer the model was made with",
        )
    return tokenizer
