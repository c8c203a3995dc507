"""MindFormers' names of the weights of a Llama, as they stand in its checkpoints.

Its legacy models have the names that ours have. Its mcore models have Megatron's, where one matrix is several of ours: the rows
of ``linear_qkv`` go by groups of heads (the queries that share a key, that key, its value), those of ``linear_fc1`` are the gate,
then up. A legacy model of ``qkv_concat`` orders the rows of ``w_qkv`` otherwise from release to release: it has no entry here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mindllm.config.model import ModelConfig
from mindllm.errors import UserError

LAYER = "{layer}"
Piece = Literal["query", "key", "value", "gate", "up"]


@dataclass(frozen=True)
class Origin:
    """The tensor that holds one of our weights, and which part of it that is."""

    name: str
    piece: Piece | None = None


@dataclass(frozen=True)
class Rows:
    """Which rows of a matrix: of each of ``groups`` equal blocks of ``block`` rows, those from ``start`` to ``stop``."""

    groups: int
    block: int
    start: int
    stop: int


def _in_layer(name: str, piece: Piece | None = None) -> Origin:
    return Origin(f"decoder.layers.{LAYER}.{name}", piece)


_ATTENTION: Mapping[str, Piece] = {"wq": "query", "wk": "key", "wv": "value"}
_MCORE_LAYER: Mapping[str, Origin] = {
    "attention_norm.weight": _in_layer("input_layernorm.weight"),
    **{
        f"attention.{ours}.{kind}": _in_layer(f"self_attention.linear_qkv.{kind}", piece)
        for kind in ("weight", "bias")
        for ours, piece in _ATTENTION.items()
    },
    "attention.wo.weight": _in_layer("self_attention.linear_proj.weight"),
    "attention.wo.bias": _in_layer("self_attention.linear_proj.bias"),
    "ffn_norm.weight": _in_layer("pre_mlp_layernorm.weight"),
    "feed_forward.w1.weight": _in_layer("mlp.linear_fc1.weight", "gate"),
    "feed_forward.w3.weight": _in_layer("mlp.linear_fc1.weight", "up"),
    "feed_forward.w2.weight": _in_layer("mlp.linear_fc2.weight"),
}
MCORE: Mapping[str, Origin] = {
    "model.tok_embeddings.embedding_weight": Origin("embedding.word_embeddings.weight"),
    **{f"model.layers.{LAYER}.{ours}": origin for ours, origin in _MCORE_LAYER.items()},
    "model.norm_out.weight": Origin("decoder.final_layernorm.weight"),
    "lm_head.weight": Origin("output_layer.weight"),
}
MCORE_MARK = "embedding.word_embeddings.weight"


def origins(model: ModelConfig, ours: Mapping[str, object], theirs: Mapping[str, object]) -> dict[str, Origin]:
    """Return the tensor of each weight ``ours`` in a checkpoint with the names ``theirs``: those of mcore or legacy.

    Raises:
        UserError: the model has a weight that Llama does not have.
    """
    if MCORE_MARK not in theirs:
        return {name: Origin(name) for name in ours}
    table = {
        template.replace(LAYER, str(layer)): Origin(origin.name.replace(LAYER, str(layer)), origin.piece)
        for template, origin in MCORE.items()
        for layer in (range(model.num_layers) if LAYER in template else (0,))
    }
    unknown = [name for name in ours if name not in table]
    if unknown:
        raise UserError(
            f"mcore checkpoints of MindFormers are read for models like Llama only: {unknown[0]} has no name in them here"
        )
    return {name: table[name] for name in ours}


def rows_of(piece: Piece, model: ModelConfig) -> Rows:
    """Return the rows of ``piece`` in its fused matrix of mcore."""
    if piece in ("gate", "up"):
        first = 0 if piece == "gate" else model.intermediate_size
        return Rows(1, 2 * model.intermediate_size, first, first + model.intermediate_size)
    query = model.num_heads // model.n_kv_heads * model.head_dim
    first, count = {
        "query": (0, query),
        "key": (query, model.head_dim),
        "value": (query + model.head_dim, model.head_dim),
    }[piece]
    return Rows(model.n_kv_heads, query + 2 * model.head_dim, first, first + count)
