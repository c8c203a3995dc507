"""A Llama in plain PyTorch, as fast as eager code gets: the opponent of the training-step benchmark.

Its parameters have the names of :mod:`mindllm.models`, so that weights can be loaded as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

THETA = 10000.0
EPSILON = 1e-5


class Norm(nn.Module):
    """RMS norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, EPSILON)


class Attention(nn.Module):
    """Rotary causal attention through PyTorch's fused kernel, ``[batch, seq, hidden]``."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        self.heads, self.kv_heads = sizes["heads"], sizes["kv_heads"]
        hidden = sizes["hidden"]
        self.head_dim = hidden // self.heads
        self.wq = nn.Linear(hidden, self.heads * self.head_dim, bias=False)
        self.wk = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(self.heads * self.head_dim, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        query = rotate(self.wq(x).view(batch, seq, self.heads, -1).transpose(1, 2), cos, sin)
        key = rotate(self.wk(x).view(batch, seq, self.kv_heads, -1).transpose(1, 2), cos, sin)
        value = self.wv(x).view(batch, seq, self.kv_heads, -1).transpose(1, 2)
        grouped = {"enable_gqa": True} if self.kv_heads != self.heads else {}
        context = functional.scaled_dot_product_attention(query, key, value, is_causal=True, **grouped)
        return self.wo(context.transpose(1, 2).reshape(batch, seq, -1))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, intermediate, bias=False)
        self.w3 = nn.Linear(hidden, intermediate, bias=False)
        self.w2 = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    """A pre-norm decoder layer."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        self.attention_norm = Norm(sizes["hidden"])
        self.attention = Attention(sizes)
        self.ffn_norm = Norm(sizes["hidden"])
        self.feed_forward = FeedForward(sizes["hidden"], sizes["intermediate"])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Embedding(nn.Module):
    """Token embedding."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.embedding_weight = nn.Parameter(torch.empty(vocab, hidden))

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self.embedding_weight)


class Decoder(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        self.tok_embeddings = Embedding(sizes["vocab"], sizes["hidden"])
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes["layers"]))
        self.norm_out = Norm(sizes["hidden"])
        cos, sin = rotary_tables(sizes["seq"], sizes["hidden"] // sizes["heads"])
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.norm_out(x)


class TorchLlama(nn.Module):
    """Tokens ``[batch, seq]`` -> logits ``[batch, seq, vocab]``; ``sizes`` are those of the benchmark."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        self.model = Decoder(sizes)
        self.lm_head = nn.Linear(sizes["hidden"], sizes["vocab"], bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.model(tokens))


def rotary_tables(length: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[length, head_dim]``, both halves alike."""
    frequencies = THETA ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies).repeat(1, 2)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates pairs that are half a head apart."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
