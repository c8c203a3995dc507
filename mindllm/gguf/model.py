"""Architectures of llama.cpp: a GGUF header as the content of a ``config.json``, and its tensors by Hugging Face's names.

llama.cpp changes some tensors when it writes a file: it reorders rows of queries and keys (Llama) and adds 1 to norms (Gemma).
Values that only its code has are those of its ``src/llama-model.cpp``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mindllm.errors import UserError, shortened
from mindllm.gguf.header import Header

LAYER = "model.layers.{layer}."
OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
DENSE = {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SANDWICH = {
    **DENSE,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
QWEN_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
}
FREQUENCIES = "rope_freqs.weight"
"""The tensor of divisors of the rotary frequencies (Llama 3.1 and later), which is an entry of the config here."""
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
END_TOKENS = ("eos", "eot", "eom")
Content = dict[str, Any]


@dataclass(frozen=True)
class GgufArchitecture:
    """An architecture of llama.cpp.

    Attributes:
        model_type: Hugging Face's name of the architecture.
        layer: llama.cpp's names of tensors in a layer to Hugging Face's; ``{expert}`` marks a stack of all experts.
        extra_config: additional keys of ``config.json``.
        rotated: True if rows of queries and keys have the order that rotates neighbors together.
        norms_plus_one: True if norms have 1 added.
    """

    model_type: str
    layer: Mapping[str, str] = field(default_factory=lambda: {**ATTENTION, **DENSE})
    extra_config: Callable[[ArchitectureKeys], Content] = lambda keys: {}
    rotated: bool = False
    norms_plus_one: bool = False


class ArchitectureKeys:
    """The values of a header's keys that begin with the name of its architecture."""

    def __init__(self, header: Header) -> None:
        self.header = header

    def error(self, key: str, problem: str) -> UserError:
        """Return an error about ``key``."""
        return UserError(f"{self.header.path}: {self.full_name(key)}: {problem}")

    def full_name(self, key: str) -> str:
        """Return a key with its prefix."""
        return f"{self.header.architecture}.{key}"

    def integer(self, key: str, required: bool = False) -> int:
        """Return an integer, 0 if it is absent."""
        value = self.header.get(self.full_name(key), int)
        if value is None and required:
            raise self.error(key, "missing")
        return value or 0

    def real(self, key: str, default: float) -> float:
        """Return a number in fp32 as the shortest one that rounds to it: 1e-05, not 9.999999747378752e-06."""
        value = self.header.get(self.full_name(key), (float, int), default)
        return float(str(np.float32(value))) if math.isfinite(value) else value

    def uniform(self, key: str, required: bool = False) -> int:
        """Return an integer that may be stored as a list with one equal entry per layer."""
        value = self.header.get(self.full_name(key), (int, list))
        if not isinstance(value, list):
            return self.integer(key, required)
        if not value or len({*value}) > 1 or type(value[0]) is not int:
            raise self.error(key, f"layers with different values are unsupported (value {shortened(value)})")
        return value[0]

    def head_dim(self) -> int:
        """Return the width of a head."""
        heads = self.uniform("attention.head_count")
        return self.integer("attention.key_length") or self.integer("embedding_length") // max(heads, 1)


def find_architecture(header: Header) -> GgufArchitecture:
    """Return the architecture of a file.

    Raises:
        UserError: the architecture is missing or unsupported.
    """
    name = header.architecture
    if name == "llama" and header.get("llama.expert_count", int, 0):
        return MIXTRAL
    if name not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise UserError(
            f"{header.path}: general.architecture: unsupported (value {shortened(name)}); supported are {supported}"
        )
    return ARCHITECTURES[name]


def architecture_config(header: Header) -> Content:
    """Return the content of the ``config.json`` of a file's model.

    Raises:
        UserError: the architecture is unsupported, or a value is missing, has another type, or an unsupported form.
    """
    architecture, keys = find_architecture(header), ArchitectureKeys(header)
    heads = keys.uniform("attention.head_count", required=True)
    hidden = keys.integer("embedding_length", required=True)
    head_dim = keys.head_dim()
    for key in ("attention.value_length", "rope.dimension_count"):
        value = keys.integer(key)
        if value not in (0, head_dim):
            raise keys.error(key, f"must be the size of a head, {head_dim} (value {value})")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise UserError(f"{header.path}: token_embd.weight, the embedding of the model, is missing")
    content: Content = {
        "model_type": architecture.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": keys.integer("block_count", required=True),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.uniform("attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "intermediate_size": keys.uniform("feed_forward_length", required=True),
        "max_position_embeddings": keys.integer("context_length", required=True),
        "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_theta": keys.real("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(keys, head_dim),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    ids = [header.get(f"tokenizer.ggml.{role}_token_id", int) for role in END_TOKENS]
    ends = list(dict.fromkeys(id for id in ids if id is not None))
    if ends:
        content["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    if header.architecture == "llama":
        content["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    return {**content, **architecture.extra_config(keys)}


def _rope_scaling(keys: ArchitectureKeys, head_dim: int) -> Content | None:
    kind = keys.header.get(keys.full_name("rope.scaling.type"), str, "none")
    factor = keys.real("rope.scaling.factor", 0.0)
    if FREQUENCIES in keys.header.tensors:
        return _llama3_scaling(keys, head_dim)
    if kind == "none" or factor in (0.0, 1.0):
        return None
    if kind == "linear":
        return {"rope_type": kind, "factor": factor}
    if kind != "yarn":
        raise keys.error("rope.scaling.type", f"unsupported (value {shortened(kind)}); supported are linear, yarn")
    scaling: Content = {"rope_type": kind, "factor": factor}
    if original := keys.integer("rope.scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = original
    attention = keys.real("rope.scaling.attn_factor", 1.0)
    if attention != 1:
        scaling["attention_factor"] = attention * (1 + 0.1 * math.log(factor))
    for key in ("beta_fast", "beta_slow"):
        if value := keys.real(f"rope.scaling.yarn_{key}", 0.0):
            scaling[key] = value
    return scaling


def _llama3_scaling(keys: ArchitectureKeys, head_dim: int) -> Content:
    """Return the scaling of Llama 3.1 for the divisors in the file. Its factor is the largest divisor."""
    path, blocks = keys.header.path, keys.header.tensors[FREQUENCIES]
    if blocks.type != "F32" or blocks.shape != (head_dim // 2,):
        raise UserError(f"{path}: {FREQUENCIES}: must be {head_dim // 2} values of F32")
    divisors = np.fromfile(blocks.path, "<f4", head_dim // 2, offset=blocks.offset)
    scaling = {"rope_type": "llama3", "factor": float(divisors.max(initial=1.0)), **LLAMA3}
    expected = llama3_divisors(scaling, keys.real("rope.freq_base", 10000.0), head_dim)
    if not np.allclose(divisors, expected, rtol=1e-3):
        raise UserError(f"{path}: {FREQUENCIES}: differs from the divisors of Llama 3.1, the only supported ones")
    return scaling


def llama3_divisors(scaling: Content, theta: float, head_dim: int) -> np.ndarray:
    """Return divisors ``[head_dim / 2]`` of the rotary frequencies, as llama.cpp writes them for type llama3."""
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _gemma2(keys: ArchitectureKeys) -> Content:
    # llama.cpp recognizes the 27B model by its layers.
    is_27b = keys.integer("block_count") == 46
    return {
        "sliding_window": keys.integer("attention.sliding_window") or 4096,
        "query_pre_attn_scalar": _hidden_per_head(keys) if is_27b else keys.head_dim(),
        "attn_logit_softcapping": keys.real("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.real("final_logit_softcapping", 30.0),
    }


def _gemma3(keys: ArchitectureKeys) -> Content:
    is_27b = keys.integer("block_count") == 62
    return {
        "sliding_window": keys.integer("attention.sliding_window"),
        "query_pre_attn_scalar": _hidden_per_head(keys) if is_27b else keys.head_dim(),
        "rope_theta": keys.real("rope.freq_base", 1e6),
        "rope_local_base_freq": keys.real("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": keys.real("final_logit_softcapping", 0.0) or None,
    }


def _hidden_per_head(keys: ArchitectureKeys) -> int:
    return keys.integer("embedding_length") // max(keys.uniform("attention.head_count"), 1)


def _mixtral(keys: ArchitectureKeys) -> Content:
    return {
        "num_local_experts": keys.integer("expert_count", required=True),
        "num_experts_per_tok": keys.integer("expert_used_count", required=True),
    }


def _qwen_moe(keys: ArchitectureKeys) -> Content:
    content = {
        "num_experts": keys.integer("expert_count", required=True),
        "num_experts_per_tok": keys.integer("expert_used_count", required=True),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length", required=True),
        "norm_topk_prob": keys.header.architecture == "qwen3moe",
    }
    if shared := keys.integer("expert_shared_feed_forward_length"):
        content["shared_expert_intermediate_size"] = shared
    return content


QWEN_MOE_LAYER = {**ATTENTION, **DENSE, **QWEN_EXPERTS}
MIXTRAL = GgufArchitecture("mixtral", {**ATTENTION, **DENSE, **MIXTRAL_EXPERTS}, _mixtral, rotated=True)
ARCHITECTURES = {
    "llama": GgufArchitecture("llama", rotated=True),
    "qwen2": GgufArchitecture("qwen2"),
    "qwen3": GgufArchitecture("qwen3"),
    "qwen2moe": GgufArchitecture("qwen2_moe", QWEN_MOE_LAYER, _qwen_moe),
    "qwen3moe": GgufArchitecture("qwen3_moe", QWEN_MOE_LAYER, _qwen_moe),
    "gemma": GgufArchitecture("gemma", norms_plus_one=True),
    "gemma2": GgufArchitecture("gemma2", {**ATTENTION, **SANDWICH}, _gemma2, norms_plus_one=True),
    "gemma3": GgufArchitecture("gemma3_text", {**ATTENTION, **SANDWICH}, _gemma3, norms_plus_one=True),
}


def hugging_face_name(architecture: GgufArchitecture, name: str) -> str:
    """Return Hugging Face's name of a tensor, with ``{expert}`` for a stack of experts. Unknown names stay unchanged."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in architecture.layer:
        return OUTSIDE.get(name, name)
    return f"{LAYER.format(layer=match[1])}{architecture.layer[match[2]]}.{match[3]}"
