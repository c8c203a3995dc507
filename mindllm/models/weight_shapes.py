"""Names and shapes of the weights of an architecture, known without building it."""

from __future__ import annotations

from mindllm.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]


def weight_shapes(model: ModelConfig) -> Shapes:
    """Shape of every weight by its name, in the order of the layers: what ``trained_weights`` of the built model has."""
    table = (model.vocab_size, model.hidden_size)
    shapes: Shapes = {"model.tok_embeddings.embedding_weight": table}
    for layer in range(model.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer(model).items()}
    shapes["model.norm_out.weight"] = (model.hidden_size,)
    return shapes if model.tie_word_embeddings else {**shapes, "lm_head.weight": table}


def _layer(model: ModelConfig) -> Shapes:
    hidden, inner = model.hidden_size, model.intermediate_size
    query, key_value = model.num_heads * model.head_dim, model.n_kv_heads * model.head_dim
    matrices: Shapes = {
        "attention.wq": (query, hidden),
        "attention.wk": (key_value, hidden),
        "attention.wv": (key_value, hidden),
        "attention.wo": (hidden, query),
        "feed_forward.w1": (inner, hidden),
        "feed_forward.w3": (inner, hidden),
        "feed_forward.w2": (hidden, inner),
    }
    biased = ["attention.wq", "attention.wk", "attention.wv"] if model.qkv_has_bias else []
    biased += ["attention.wo"] if model.attn_proj_has_bias else []
    return {
        "attention_norm.weight": (hidden,),
        "ffn_norm.weight": (hidden,),
        **{f"{name}.weight": shape for name, shape in matrices.items()},
        **{f"{name}.bias": matrices[name][:1] for name in biased},
    }
