"""TeleChat 1 and 2 as their published code computes them (modeling_telechat.py), within ``base_seqlen``: Llama's mathematics with
a bias on ``dense`` and ``down_proj``. The rows of ``key_value`` go by key head: the key, then its value.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from references import parts

TINY = {
    "architectures": ["TelechatForCausalLM"],
    "model_type": "telechat",
    "apply_residual_connection_post_layernorm": False,
    "attention_dropout": 0.0,
    "base_seqlen": 64,
    "embed_layernorm": False,
    "ffn_hidden_size": 80,
    "hidden_dropout": 0.0,
    "hidden_size": 32,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-5,
    "logn": False,
    "n_head": 4,
    "n_layer": 2,
    "num_key_value_heads": 2,
    "seq_length": 64,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "training_seqlen": 64,
    "vocab_size": 97,
    "eos_token_id": 2,
    "pad_token_id": 3,
}
THETA = 10000.0


class Attention(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        width, self.heads, self.groups = config["hidden_size"], config["n_head"], config["num_key_value_heads"]
        self.head_width = width // self.heads
        self.query = parts.linear(width, width)
        self.key_value = parts.linear(width, 2 * self.groups * self.head_width)
        self.dense = parts.linear(width, width, True)

    def forward(self, hidden: Tensor) -> Tensor:
        query = parts.split_heads(self.query(hidden), self.heads)
        both = parts.split_heads(self.key_value(hidden), self.groups)
        key, value = both.split(self.head_width, dim=-1)
        query, key = (parts.rotated_halves(states, THETA) for states in (query, key))
        return self.dense(parts.causal_attention(query, key, value))


class FeedForward(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        width, inner = config["hidden_size"], config["ffn_hidden_size"]
        self.gate_proj, self.up_proj = parts.linear(width, inner), parts.linear(width, inner)
        self.down_proj = parts.linear(inner, width, True)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Layer(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["layer_norm_epsilon"]
        self.input_layernorm, self.post_attention_layernorm = parts.RMSNorm(width, eps), parts.RMSNorm(width, eps)
        self.self_attention, self.mlp = Attention(config), FeedForward(config)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.self_attention(self.input_layernorm(hidden))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class TeleChat(parts.Reference):
    def __init__(self, config: dict) -> None:
        super().__init__(config)
        width, vocabulary = config["hidden_size"], config["vocab_size"]
        self.transformer = nn.Module()
        self.transformer.word_embeddings = nn.Embedding(vocabulary, width)
        self.transformer.h = nn.ModuleList(Layer(config) for _ in range(config["n_layer"]))
        self.transformer.ln_f = parts.RMSNorm(width, config["layer_norm_epsilon"])
        self.lm_head = parts.linear(width, vocabulary)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.transformer.word_embeddings(input_ids)
        for layer in self.transformer.h:
            hidden = layer(hidden)
        return self.lm_head(self.transformer.ln_f(hidden))


def random_tiny(seed: int = 0, **changes: object) -> TeleChat:
    return TeleChat({**TINY, **changes}).randomized(seed)
