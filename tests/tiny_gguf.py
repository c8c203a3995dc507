"""Small GGUF files, written by llama.cpp's own package out of models of transformers as its converter writes them."""

import gguf
import numpy as np

PLAIN = {"F32": np.float32, "F16": np.float16}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
TOKENS = ["<s>", "</s>", *map(chr, range(0x100, 0x13D))]


def tensor_name(name, architecture):
    stem, kind = name.rsplit(".", 1)
    if stem in OUTSIDE:
        return f"{OUTSIDE[stem]}.{kind}"
    _, _, layer, below = stem.split(".", 3)
    names = {**LAYER, **SANDWICH} if architecture in ("gemma2", "gemma3") else LAYER
    return f"blk.{layer}.{names[below]}.{kind}"


def as_llama_cpp(name, values, config, architecture):
    """What the converter changes: rows of queries and keys of Llama, norms of Gemma, the one row of a shared expert's gate."""
    if name.endswith("shared_expert_gate.weight"):
        return values.squeeze(0)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for part, count in heads.items():
        if architecture == "llama" and f".{part}." in name:  # LlamaModel.permute of convert_hf_to_gguf.py
            rest = values.shape[1:]
            return values.reshape(count, 2, values.shape[0] // count // 2, *rest).swapaxes(1, 2).reshape(values.shape)
    return values + 1 if architecture.startswith("gemma") and name.endswith("norm.weight") else values


def separate(state):
    """The tensors of a model with gate and up projections of experts apart."""
    for name, value in state.items():
        values = value.float().numpy()
        if name.endswith("experts.gate_up_proj"):
            gate, up = np.split(values, 2, axis=1)
            yield name.replace("gate_up_proj", "gate_proj.weight"), gate
            yield name.replace("gate_up_proj", "up_proj.weight"), up
        else:
            yield name if name.endswith(("weight", "bias")) else f"{name}.weight", values


def write_gguf(path, model, architecture, kind="F32", tokenizer=None, more=None, extra_tensors=None, parts=0):
    """Writes ``model``; ``tokenizer(writer)`` adds one, ``more`` has further keys, by methods of the writer.

    ``parts``: tensors of each file, where the model is split.
    """
    config, writer = model.config, gguf.GGUFWriter(str(path), architecture, split_max_tensors=parts)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    parameters = getattr(config, "rope_parameters", None) or {}
    writer.add_rope_freq_base(parameters.get("full_attention", parameters).get("rope_theta", 10000.0))
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_rope_dimension_count(config.head_dim)
    for method, value in (more or {}).items():
        getattr(writer, method)(value)
    (tokenizer or add_tokenizer)(writer)
    for name, values in separate(model.state_dict()):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = np.ascontiguousarray(as_llama_cpp(name, values, config, architecture))
        add_tensor(writer, tensor_name(name, architecture), values, "F32" if values.ndim == 1 else kind)
    for name, values in (extra_tensors or {}).items():
        add_tensor(writer, name, values, "F32")
    finish(writer)
    return path


def add_tensor(writer, name, values, kind):
    if kind in PLAIN:
        writer.add_tensor(name, values.astype(PLAIN[kind]))
        return
    number = gguf.GGMLQuantizationType[kind]
    codes = values if values.dtype == np.uint8 else gguf.quantize(values, number)
    writer.add_tensor(name, codes, raw_dtype=number)


def add_tokenizer(writer):
    """One that transformers builds, too: single characters and no merges but one."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*TOKENS, "Āā"])
    writer.add_token_types([3, 3, *[1] * (len(TOKENS) - 1)])
    writer.add_token_merges(["Ā ā"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
