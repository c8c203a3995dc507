"""Tiny models with random weights, and generation without a cache to compare with."""

import numpy as np
from mindspore import Tensor, nn
from mindspore import ops as P

from mindllm.config import ModelConfig
from mindllm.config.generation import GenerationConfig
from mindllm.families import with_file_names
from mindllm.models import build_model
from mindllm.models.weights import assign, trained_weights

VOCABULARY = 97
SHAPES = {
    "multi-head": {},
    "grouped": {"n_kv_heads": 2},
    "tied": {"n_kv_heads": 1, "tie_word_embeddings": True},
    "biased": {"n_kv_heads": 2, "qkv_has_bias": True},
}


def tiny_config(seq_length=64, **changes):
    """Two layers, four heads, and a head_dim that is not hidden / heads."""
    fields = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "head_dim": 16}
    return with_file_names(ModelConfig(**(fields | {"intermediate_size": 80, "seq_length": seq_length} | changes)))


def tiny_model(config, seed=0, scale=0.3):
    """A model whose weights are large enough that its next tokens are not close calls; smaller with a smaller ``scale``."""
    model = build_model(config)
    random, weights = np.random.default_rng(seed), trained_weights(model)
    assign(weights, {name: random.normal(0, scale, item.shape).astype(np.float32) for name, item in weights.items()})
    return model


def options(max_new_tokens, **changes):
    return GenerationConfig(max_new_tokens=max_new_tokens, **changes)


class FullForward(nn.Cell):
    """Logits of all positions ``[batch, seq, vocab]``, from the cells that training uses and without a cache."""

    def __init__(self, model):
        super().__init__(auto_prefix=False)
        self.model = model

    def construct(self, input_ids):
        decoded = self.model.model(input_ids)
        logits = self.model.logits(decoded[0] if self.model.model.adds_to_loss else decoded)
        return P.reshape(logits, (*input_ids.shape, -1))


def greedy_without_cache(model, config, prompt, count):
    """The most likely token after the whole text, computed anew for every token."""
    forward = FullForward(model)
    forward.set_train(False)
    text = np.zeros((1, config.seq_length), np.int32)  # padding comes after, where causal attention does not look
    text[0, : len(prompt)] = prompt
    for end in range(len(prompt), len(prompt) + count):
        text[0, end] = forward(Tensor(text)).asnumpy()[0, end - 1].argmax()
    return text[0, len(prompt) : len(prompt) + count].tolist()
