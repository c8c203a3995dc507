"""ChatGLM3 as its published code computes it (modeling_chatglm.py of chatglm3-6b); GLM-4 9B as ``chatglm`` is the same.

Only the first half of each head is rotated, in neighbouring pairs; ``rope_ratio`` multiplies the base of the rotations.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from references import parts

TINY = {
    "architectures": ["ChatGLMModel"],
    "model_type": "chatglm",
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "apply_query_key_layer_scaling": True,
    "apply_residual_connection_post_layernorm": False,
    "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "ffn_hidden_size": 80,
    "fp32_residual_connection": False,
    "hidden_dropout": 0.0,
    "hidden_size": 64,
    "kv_channels": 16,
    "layernorm_epsilon": 1e-5,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "num_attention_heads": 4,
    "num_layers": 2,
    "original_rope": True,
    "padded_vocab_size": 97,
    "post_layer_norm": True,
    "rmsnorm": True,
    "seq_length": 64,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
BASE = 10000.0


class Attention(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        self.heads, self.groups, width = (
            config["num_attention_heads"],
            config["multi_query_group_num"],
            config["kv_channels"],
        )
        self.rotated, self.theta = width // 2, BASE * config.get("rope_ratio", 1)
        self.sizes = (self.heads * width, self.groups * width, self.groups * width)
        hidden, bias = config["hidden_size"], config["add_bias_linear"]
        self.query_key_value = parts.linear(hidden, sum(self.sizes), bias or config["add_qkv_bias"])
        self.dense = parts.linear(self.sizes[0], hidden, bias)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.query_key_value(hidden).split(self.sizes, dim=-1)
        query = self._rotate(parts.split_heads(query, self.heads))
        key = self._rotate(parts.split_heads(key, self.groups))
        return self.dense(parts.causal_attention(query, key, parts.split_heads(value, self.groups)))

    def _rotate(self, states: Tensor) -> Tensor:
        turned = parts.rotated_pairs(states[..., : self.rotated], self.theta)
        return torch.cat((turned, states[..., self.rotated :]), dim=-1)


class FeedForward(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        width, inner, bias = config["hidden_size"], config["ffn_hidden_size"], config["add_bias_linear"]
        self.dense_h_to_4h, self.dense_4h_to_h = parts.linear(width, 2 * inner, bias), parts.linear(inner, width, bias)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.dense_h_to_4h(hidden).chunk(2, dim=-1)
        return self.dense_4h_to_h(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["layernorm_epsilon"]
        self.input_layernorm, self.post_attention_layernorm = parts.RMSNorm(width, eps), parts.RMSNorm(width, eps)
        self.self_attention, self.mlp = Attention(config), FeedForward(config)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.self_attention(self.input_layernorm(hidden))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class ChatGLM(parts.Reference):
    def __init__(self, config: dict) -> None:
        super().__init__(config)
        width, vocabulary = config["hidden_size"], config["padded_vocab_size"]
        self.transformer = nn.Module()
        self.transformer.embedding = nn.Module()
        self.transformer.embedding.word_embeddings = nn.Embedding(vocabulary, width)
        self.transformer.rotary_pos_emb = parts.InverseFrequencies(config["kv_channels"] // 2, BASE)
        self.transformer.encoder = nn.Module()
        self.transformer.encoder.layers = nn.ModuleList(Layer(config) for _ in range(config["num_layers"]))
        self.transformer.encoder.final_layernorm = parts.RMSNorm(width, config["layernorm_epsilon"])
        self.transformer.output_layer = parts.linear(width, vocabulary)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.transformer.embedding.word_embeddings(input_ids)
        for layer in self.transformer.encoder.layers:
            hidden = layer(hidden)
        return self.transformer.output_layer(self.transformer.encoder.final_layernorm(hidden))


def random_tiny(seed: int = 0, **changes: object) -> ChatGLM:
    return ChatGLM({**TINY, **changes}).randomized(seed)
