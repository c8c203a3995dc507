"""The architecture in a GGUF header as the content of a ``config.json``, and the names of its tensors in Hugging Face's files.

What llama.cpp changed when it wrote the file is said here, too: rows of queries and keys in another order (Llama), norms that
have 1 added (Gemma). What its code decides and no file says is as in its ``src/llama-model.cpp``.
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
"""Divisors of the rotary frequencies, of Llama 3.1 and later; here a key of the architecture."""
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
ENDS = ("eos", "eot", "eom")
Content = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """An architecture of llama.cpp.

    Attributes:
        model_type: what Hugging Face calls it.
        layer: names of tensors below a layer, theirs to Hugging Face's; ``{expert}``: a stack of all experts.
        more: further keys of ``config.json``.
        rotated: rows of queries and keys are in the order in which neighbours are turned together.
        norms_plus_one: norms have 1 added.
    """

    model_type: str
    layer: Mapping[str, str] = field(default_factory=lambda: {**ATTENTION, **DENSE})
    more: Callable[[Header], Content] = lambda header: {}
    rotated: bool = False
    norms_plus_one: bool = False


def kind_of(header: Header) -> Kind:
    """The architecture of a file.

    Raises:
        UserError: it names none, or one that is not read.
    """
    name = header.architecture
    if name == "llama" and header.get("llama.expert_count", int, 0):
        return MIXTRAL
    if name not in KINDS:
        known = ", ".join(KINDS)
        raise UserError(
            f"{header.path}: general.architecture: this model is not read from GGUF (value {shortened(name)}); read are {known}"
        )
    return KINDS[name]


def config_content(header: Header) -> Content:
    """The content of the ``config.json`` that a file's model had, as far as the file says it.

    Raises:
        UserError: the architecture is not read, or a value is missing, of another type, or of a form that is not computed.
    """
    kind, name = kind_of(header), header.architecture
    of = _Keys(header)
    heads = of.uniform("attention.head_count", required=True)
    hidden = of.whole("embedding_length", required=True)
    head_dim = of.whole("attention.key_length") or hidden // max(heads, 1)
    of.refuse_other("attention.value_length", head_dim)
    of.refuse_other("rope.dimension_count", head_dim)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise UserError(f"{header.path}: has no token_embd.weight, the embedding of a model")
    content: Content = {
        "model_type": kind.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": of.whole("block_count", required=True),
        "num_attention_heads": heads,
        "num_key_value_heads": of.uniform("attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "intermediate_size": of.uniform("feed_forward_length", required=True),
        "max_position_embeddings": of.whole("context_length", required=True),
        "rms_norm_eps": of.real("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_theta": of.real("rope.freq_base", 10000.0),
        "rope_scaling": _scaling(header, of, head_dim),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        **_ends(header),
    }
    if name == "llama":
        content["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    return {**content, **kind.more(header)}


class _Keys:
    """Values of the keys of a file's architecture."""

    def __init__(self, header: Header) -> None:
        self.header = header

    def name(self, key: str) -> str:
        return f"{self.header.architecture}.{key}"

    def whole(self, key: str, required: bool = False) -> int:
        value = self.header.get(self.name(key), int)
        if value is None and required:
            raise UserError(f"{self.header.path}: {self.name(key)}: missing")
        return value or 0

    def real(self, key: str, default: float) -> float:
        """A number of fp32 as the shortest one that rounds to it: 1e-05, not 9.999999747378752e-06."""
        value = self.header.get(self.name(key), (float, int), default)
        return float(str(np.float32(value))) if math.isfinite(value) else value

    def uniform(self, key: str, required: bool = False) -> int:
        """A whole number, or a list with one for each layer, all of which are equal."""
        value = self.header.get(self.name(key), (int, list))
        if isinstance(value, list):
            if not value or len({*value}) > 1 or type(value[0]) is not int:
                raise UserError(
                    f"{self.header.path}: {self.name(key)}: layers differ, which is not read (value {shortened(value)})"
                )
            return value[0]
        return self.whole(key, required)

    def refuse_other(self, key: str, wanted: int) -> None:
        value = self.whole(key)
        if value not in (0, wanted):
            raise UserError(
                f"{self.header.path}: {self.name(key)}: must be the size of a head, {wanted} (value {value})"
            )


def _scaling(header: Header, of: _Keys, head_dim: int) -> Content | None:
    kind = header.get(of.name("rope.scaling.type"), str, "none")
    factor = of.real("rope.scaling.factor", 0.0)
    if FREQUENCIES in header.tensors:
        return _llama3(header, of, head_dim)
    if kind == "none" or factor in (0.0, 1.0):
        return None
    if kind == "linear":
        return {"rope_type": kind, "factor": factor}
    if kind != "yarn":
        key = of.name("rope.scaling.type")
        raise UserError(f"{header.path}: {key}: not read (value {shortened(kind)}); read are linear, yarn")
    scaling: Content = {"rope_type": kind, "factor": factor}
    if original := of.whole("rope.scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = original
    attention = of.real("rope.scaling.attn_factor", 1.0)
    if attention != 1:
        scaling["attention_factor"] = attention * (1 + 0.1 * math.log(factor))
    for key in ("beta_fast", "beta_slow"):
        if value := of.real(f"rope.scaling.yarn_{key}", 0.0):
            scaling[key] = value
    return scaling


def _llama3(header: Header, of: _Keys, head_dim: int) -> Content:
    """The scaling of Llama 3.1 whose divisors the file holds; the largest of them is its factor."""
    stored = header.tensors[FREQUENCIES]
    if stored.type != "F32" or stored.shape != (head_dim // 2,):
        raise UserError(f"{header.path}: {FREQUENCIES}: must be {head_dim // 2} values of F32")
    found = np.fromfile(stored.path, "<f4", head_dim // 2, offset=stored.offset)
    scaling = {"rope_type": "llama3", "factor": float(found.max(initial=1.0)), **LLAMA3}
    wanted = llama3_divisors(scaling, of.real("rope.freq_base", 10000.0), head_dim)
    if not np.allclose(found, wanted, rtol=1e-3):
        raise UserError(f"{header.path}: {FREQUENCIES}: not the divisors of Llama 3.1, and no others are read")
    return scaling


def llama3_divisors(scaling: Content, theta: float, head_dim: int) -> np.ndarray:
    """Divisors ``[head_dim / 2]`` of the rotary frequencies, as llama.cpp writes them for a ``rope_scaling`` of type llama3."""
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _ends(header: Header) -> Content:
    ids = [header.get(f"tokenizer.ggml.{role}_token_id", int) for role in ENDS]
    ends = list(dict.fromkeys(id for id in ids if id is not None))
    return {} if not ends else {"eos_token_id": ends[0] if len(ends) == 1 else ends}


def _gemma2(header: Header) -> Content:
    of = _Keys(header)
    layers, heads = of.whole("block_count"), max(of.uniform("attention.head_count"), 1)
    of_hidden = of.whole("embedding_length") // heads  # of 27B, which llama.cpp knows by its layers
    head_dim = of.whole("attention.key_length") or of_hidden
    return {
        "sliding_window": of.whole("attention.sliding_window") or 4096,
        "query_pre_attn_scalar": of_hidden if layers == 46 else head_dim,
        "attn_logit_softcapping": of.real("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": of.real("final_logit_softcapping", 30.0),
    }


def _gemma3(header: Header) -> Content:
    of = _Keys(header)
    layers, heads = of.whole("block_count"), max(of.uniform("attention.head_count"), 1)
    of_hidden = of.whole("embedding_length") // heads
    head_dim = of.whole("attention.key_length") or of_hidden
    cap = of.real("final_logit_softcapping", 0.0)
    return {
        "sliding_window": of.whole("attention.sliding_window"),
        "query_pre_attn_scalar": of_hidden if layers == 62 else head_dim,
        "rope_theta": of.real("rope.freq_base", 1e6),
        "rope_local_base_freq": of.real("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": cap or None,
    }


def _experts(header: Header) -> Content:
    of = _Keys(header)
    return {"num_experts": of.whole("expert_count", True), "num_experts_per_tok": of.whole("expert_used_count", True)}


def _mixtral(header: Header) -> Content:
    experts = _experts(header)
    return {"num_local_experts": experts["num_experts"], "num_experts_per_tok": experts["num_experts_per_tok"]}


def _qwen_moe(header: Header) -> Content:
    of = _Keys(header)
    shared = of.whole("expert_shared_feed_forward_length")
    return {
        **_experts(header),
        "moe_intermediate_size": of.whole("expert_feed_forward_length", True),
        "norm_topk_prob": header.architecture == "qwen3moe",
        **({"shared_expert_intermediate_size": shared} if shared else {}),
    }


QWEN_MOE_LAYER = {**ATTENTION, **DENSE, **QWEN_EXPERTS}
MIXTRAL = Kind("mixtral", {**ATTENTION, **DENSE, **MIXTRAL_EXPERTS}, _mixtral, rotated=True)
KINDS = {
    "llama": Kind("llama", rotated=True),
    "qwen2": Kind("qwen2"),
    "qwen3": Kind("qwen3"),
    "qwen2moe": Kind("qwen2_moe", QWEN_MOE_LAYER, _qwen_moe),
    "qwen3moe": Kind("qwen3_moe", QWEN_MOE_LAYER, _qwen_moe),
    "gemma": Kind("gemma", norms_plus_one=True),
    "gemma2": Kind("gemma2", {**ATTENTION, **SANDWICH}, _gemma2, norms_plus_one=True),
    "gemma3": Kind("gemma3_text", {**ATTENTION, **SANDWICH}, _gemma3, norms_plus_one=True),
}


def file_name(kind: Kind, name: str) -> str:
    """What Hugging Face's files call a tensor; ``{expert}`` stands in it where it is a stack. Unknown names stay as they are."""
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if found is None or found[2] not in kind.layer:
        return OUTSIDE.get(name, name)
    return f"{LAYER.format(layer=found[1])}{kind.layer[found[2]]}.{found[3]}"
