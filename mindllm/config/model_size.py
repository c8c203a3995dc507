"""Arithmetic of a decoder's size: parameters, and model FLOPs per token.

FLOPs follow PaLM (Chowdhery et al. 2022, appendix B: 6N + 12 L H Q T) and Megatron-LM (Narayanan et al. 2021, appendix,
without its recomputation pass): a multiply-add is 2 FLOPs, the backward pass is twice the forward, attention is counted
over the whole sequence (NOT halved for the causal mask); embedding lookup, norms, biases and softmax are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mindllm.config.model import ModelConfig


def llama_intermediate_size(hidden_size: int, multiple_of: int, ffn_dim_multiplier: float | None) -> int:
    """Width of Llama's feed-forward: 2/3 of four times ``hidden_size``, multiplied, rounded up to ``multiple_of``."""
    width = int(2 * 4 * hidden_size / 3)
    if ffn_dim_multiplier is not None:
        width = int(ffn_dim_multiplier * width)
    return multiple_of * ((width + multiple_of - 1) // multiple_of)


def parameter_count(config: ModelConfig) -> int:
    """Number of trainable scalars: embedding, layers, final norm, and the head unless it is tied."""
    tables = 1 if config.tie_word_embeddings else 2
    layer = layer_matmul_parameters(config) + 2 * config.hidden_size + bias_parameters(config)
    return tables * config.vocab_size * config.hidden_size + config.num_layers * layer + config.hidden_size


def layer_matmul_parameters(config: ModelConfig) -> int:
    """Scalars of one layer's seven weight matrices: q, k, v, o, gate, up, down."""
    query = config.num_heads * config.head_dim
    key_value = config.n_kv_heads * config.head_dim
    attention = config.hidden_size * (2 * query + 2 * key_value)
    return attention + 3 * config.hidden_size * config.intermediate_size


def bias_parameters(config: ModelConfig) -> int:
    """Scalars of one layer's biases: of query, key and value, and of the output projection."""
    qkv = config.head_dim * (config.num_heads + 2 * config.n_kv_heads) if config.qkv_has_bias else 0
    return qkv + (config.hidden_size if config.attn_proj_has_bias else 0)


def flops_per_token(config: ModelConfig, seq_length: int) -> float:
    """FLOPs of forward and backward per token: 6 for each weight of a matrix product, 12 L H Q T for the attention."""
    weights = config.num_layers * layer_matmul_parameters(config) + config.vocab_size * config.hidden_size
    attention = config.num_layers * config.num_heads * config.head_dim * seq_length
    return 6.0 * weights + 12.0 * attention
