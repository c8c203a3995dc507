"""Decoders of published code that kept Llama's structure and names: Baichuan 1 and 2, InternLM 1, Aquila 1 and 2, TeleChat 3.

What differs: Baichuan packs query, key and value in ``W_pack``, its 13B has ALiBi instead of rotations, Baichuan 2 scores against
the normalised rows of its head; InternLM has biases at all four projections of the attention (``bias``); Aquila has no difference
(its 34B groups the queries), nor has TeleChat 3. Read in modeling_baichuan.py, modeling_internlm.py and modeling_aquila.py of
their directories.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from references import parts

TINY = {
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 97,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
}
ROTARY, ALIBI = {"max_position_embeddings": 64}, {"model_max_length": 64, "num_attention_heads": 5, "hidden_size": 40}
SECOND = {"z_loss_weight": 0}
FAMILIES = {
    "baichuan-7b": {"architectures": ["BaiChuanForCausalLM"], "model_type": "baichuan", **ROTARY},
    "baichuan-13b": {"architectures": ["BaichuanForCausalLM"], "model_type": "baichuan", **ALIBI},
    "baichuan2-7b": {"architectures": ["BaichuanForCausalLM"], "model_type": "baichuan", **ROTARY, **SECOND},
    "baichuan2-13b": {"architectures": ["BaichuanForCausalLM"], "model_type": "baichuan", **ALIBI, **SECOND},
    "internlm": {"architectures": ["InternLMForCausalLM"], "model_type": "internlm", "bias": True, **ROTARY},
    "aquila": {"architectures": ["AquilaForCausalLM"], "model_type": "aquila", **ROTARY},
    "aquila-grouped": {
        "architectures": ["AquilaForCausalLM"],
        "model_type": "aquila",
        "num_key_value_heads": 2,
        **ROTARY,
    },
    "telechat3": {
        "architectures": ["TeleChat3ForCausalLM"],
        "model_type": "telechat3",
        "num_key_value_heads": 2,
        **ROTARY,
    },
}
VOCABULARY_OF_BAICHUAN_2 = 125_696  # its 13B says nothing else about the head


def has_alibi(config: dict) -> bool:
    """Only the directories of Baichuan's 13B leave out ``max_position_embeddings``: ALiBi has no table of positions."""
    return config["model_type"] == "baichuan" and "max_position_embeddings" not in config


def has_norm_head(config: dict) -> bool:
    second = "z_loss_weight" in config or config["vocab_size"] == VOCABULARY_OF_BAICHUAN_2
    return config["model_type"] == "baichuan" and second


class Attention(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        width, self.heads = config["hidden_size"], config["num_attention_heads"]
        self.kv_heads = config.get("num_key_value_heads", self.heads)
        self.theta, self.alibi = config.get("rope_theta", 10000.0), has_alibi(config)
        self.kv_width = width // self.heads * self.kv_heads
        bias = config.get("bias", False)
        if config["model_type"] == "baichuan":
            self.W_pack = parts.linear(width, 3 * width)
        else:
            self.q_proj = parts.linear(width, width, bias)
            self.k_proj = parts.linear(width, self.kv_width, bias)
            self.v_proj = parts.linear(width, self.kv_width, bias)
        self.o_proj = parts.linear(width, width, bias)
        if not self.alibi and not has_norm_head(config):
            self.rotary_emb = parts.InverseFrequencies(width // self.heads, self.theta)

    def forward(self, hidden: Tensor) -> Tensor:
        if hasattr(self, "W_pack"):
            query, key, value = self.W_pack(hidden).chunk(3, dim=-1)
        else:
            query, key, value = self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)
        query = parts.split_heads(query, self.heads)
        key, value = (parts.split_heads(states, self.kv_heads) for states in (key, value))
        if self.alibi:
            return self.o_proj(parts.causal_attention(query, key, value, parts.alibi(self.heads, hidden.shape[1])))
        query, key = (parts.rotated_halves(states, self.theta) for states in (query, key))
        return self.o_proj(parts.causal_attention(query, key, value))


class FeedForward(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        width, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj, self.up_proj = parts.linear(width, inner), parts.linear(width, inner)
        self.down_proj = parts.linear(inner, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Layer(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["rms_norm_eps"]
        self.self_attn, self.mlp = Attention(config), FeedForward(config)
        self.input_layernorm, self.post_attention_layernorm = parts.RMSNorm(width, eps), parts.RMSNorm(width, eps)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class NormHead(nn.Module):
    """The head of Baichuan 2: logits are products with the rows of the weight scaled to length 1, in every pass of training.

    The published code scales the weight itself once it predicts; the logits are the same, and the weight here stays as stored.
    """

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, width))

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, F.normalize(self.weight, dim=1))


class LlamaNames(parts.Reference):
    def __init__(self, config: dict) -> None:
        super().__init__(config)
        width, vocabulary = config["hidden_size"], config["vocab_size"]
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(vocabulary, width)
        self.model.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.model.norm = parts.RMSNorm(width, config["rms_norm_eps"])
        self.lm_head = NormHead(width, vocabulary) if has_norm_head(config) else parts.linear(width, vocabulary)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.model.embed_tokens(input_ids)
        for layer in self.model.layers:
            hidden = layer(hidden)
        return self.lm_head(self.model.norm(hidden))


def random_tiny(family: str, seed: int = 0, **changes: object) -> LlamaNames:
    """A tiny random model of a name in :data:`FAMILIES`."""
    return LlamaNames({**TINY, **FAMILIES[family], **changes}).randomized(seed)
