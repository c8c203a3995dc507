"""Llama 1, 2 and 3 (Touvron et al., 2023; Grattafiori et al., 2024): names of the weights in Hugging Face's checkpoints."""

from __future__ import annotations

from mindllm.models.families.weight_names import WeightNames

_LAYER = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wq.bias": "self_attn.q_proj.bias",
    "attention.wk.bias": "self_attn.k_proj.bias",
    "attention.wv.bias": "self_attn.v_proj.bias",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "attention.wo.bias": "self_attn.o_proj.bias",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
}

HUGGING_FACE = WeightNames(
    "Hugging Face",
    {
        "model.tok_embeddings.embedding_weight": "model.embed_tokens.weight",
        **{f"model.layers.{{layer}}.{ours}": f"model.layers.{{layer}}.{theirs}" for ours, theirs in _LAYER.items()},
        "model.norm_out.weight": "model.norm.weight",
        "lm_head.weight": "lm_head.weight",
    },
)
