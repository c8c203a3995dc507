"""InternLM2 as its published code computes it (modeling_internlm2.py): Llama's mathematics, one matrix for query, key and value.

The rows of ``wqkv`` go by group of heads: the queries that share a key, then that key, then its value. Beyond
``max_position_embeddings`` the published code scales its rotations (``rope_scaling: dynamic``): not here.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from references import parts

TINY = {
    "architectures": ["InternLM2ForCausalLM"],
    "model_type": "internlm2",
    "bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": 97,
}


class Attention(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        width, self.heads = config["hidden_size"], config["num_attention_heads"]
        self.groups, self.theta = config["num_key_value_heads"], float(config["rope_theta"])
        self.head_width = width // self.heads
        rows = (self.heads + 2 * self.groups) * self.head_width
        self.wqkv = parts.linear(width, rows, config["bias"])
        self.wo = parts.linear(width, width, config["bias"])

    def forward(self, hidden: Tensor) -> Tensor:
        # [batch, length, groups, queries of a group + key + value, width of a head]
        grouped = self.wqkv(hidden).unflatten(-1, (self.groups, -1, self.head_width))
        query = grouped[:, :, :, :-2].flatten(2, 3).transpose(1, 2)
        key, value = grouped[:, :, :, -2].transpose(1, 2), grouped[:, :, :, -1].transpose(1, 2)
        query, key = (parts.rotated_halves(states, self.theta) for states in (query, key))
        return self.wo(parts.causal_attention(query, key, value))


class FeedForward(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        width, inner = config["hidden_size"], config["intermediate_size"]
        self.w1, self.w3, self.w2 = parts.linear(width, inner), parts.linear(width, inner), parts.linear(inner, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(hidden)) * self.w3(hidden))


class Layer(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["rms_norm_eps"]
        self.attention, self.feed_forward = Attention(config), FeedForward(config)
        self.attention_norm, self.ffn_norm = parts.RMSNorm(width, eps), parts.RMSNorm(width, eps)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.feed_forward(self.ffn_norm(hidden))


class InternLM2(parts.Reference):
    def __init__(self, config: dict) -> None:
        super().__init__(config)
        width, vocabulary = config["hidden_size"], config["vocab_size"]
        self.model = nn.Module()
        self.model.tok_embeddings = nn.Embedding(vocabulary, width)
        self.model.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.model.norm = parts.RMSNorm(width, config["rms_norm_eps"])
        self.output = parts.linear(width, vocabulary)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.model.tok_embeddings(input_ids)
        for layer in self.model.layers:
            hidden = layer(hidden)
        return self.output(self.model.norm(hidden))


def random_tiny(seed: int = 0, **changes: object) -> InternLM2:
    return InternLM2({**TINY, **changes}).randomized(seed)
