"""Qwen 1 as its published code computes it (modeling_qwen.py of Qwen-7B), within ``seq_length``.

``intermediate_size`` counts both halves of the gated network, each is half as wide, and the *second* matrix is the gate. Beyond
``seq_length`` the published code changes its rotations and scales the queries (``use_dynamic_ntk``, ``use_logn_attn``): not here.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from references import parts

TINY = {
    "architectures": ["QWenLMHeadModel"],
    "model_type": "qwen",
    "attn_dropout_prob": 0.0,
    "emb_dropout_prob": 0.0,
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "kv_channels": 8,
    "layer_norm_epsilon": 1e-6,
    "max_position_embeddings": 64,
    "no_bias": True,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "rotary_emb_base": 10000,
    "rotary_pct": 1.0,
    "scale_attn_weights": True,
    "seq_length": 64,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "use_dynamic_ntk": True,
    "use_logn_attn": True,
    "vocab_size": 97,
}


class Attention(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        width, self.heads = config["hidden_size"], config["num_attention_heads"]
        inner = config["kv_channels"] * self.heads
        self.theta = float(config["rotary_emb_base"])
        self.c_attn = parts.linear(width, 3 * inner, bias=True)
        self.c_proj = parts.linear(inner, width, bias=not config["no_bias"])

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (parts.split_heads(states, self.heads) for states in self.c_attn(hidden).chunk(3, dim=-1))
        query, key = (parts.rotated_halves(states, self.theta) for states in (query, key))
        return self.c_proj(parts.causal_attention(query, key, value))


class FeedForward(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        width, inner, bias = config["hidden_size"], config["intermediate_size"] // 2, not config["no_bias"]
        self.w1, self.w2 = parts.linear(width, inner, bias), parts.linear(width, inner, bias)
        self.c_proj = parts.linear(inner, width, bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.c_proj(self.w1(hidden) * F.silu(self.w2(hidden)))


class Layer(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["layer_norm_epsilon"]
        self.ln_1, self.ln_2 = parts.RMSNorm(width, eps), parts.RMSNorm(width, eps)
        self.attn, self.mlp = Attention(config), FeedForward(config)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attn(self.ln_1(hidden))
        return hidden + self.mlp(self.ln_2(hidden))


class Qwen(parts.Reference):
    def __init__(self, config: dict) -> None:
        super().__init__(config)
        width, vocabulary = config["hidden_size"], config["vocab_size"]
        self.transformer = nn.Module()
        self.transformer.wte = nn.Embedding(vocabulary, width)
        self.transformer.h = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.transformer.ln_f = parts.RMSNorm(width, config["layer_norm_epsilon"])
        self.lm_head = parts.linear(width, vocabulary)

    def forward(self, input_ids: Tensor) -> Tensor:
        length, limit = input_ids.shape[1], self.config["seq_length"]
        if length > limit:
            raise ValueError(f"{length} tokens: the published model computes otherwise beyond seq_length {limit}")
        hidden = self.transformer.wte(input_ids)
        for layer in self.transformer.h:
            hidden = layer(hidden)
        return self.lm_head(self.transformer.ln_f(hidden))


def random_tiny(seed: int = 0, **changes: object) -> Qwen:
    return Qwen({**TINY, **changes}).randomized(seed)
