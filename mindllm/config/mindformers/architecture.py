"""The network of a MindFormers YAML: which family of ours it is, and its facts in flat keys.

Its classes often stand for several families, and families that differ only in names of weights are one to it; so a class has
several candidates here, and the first that mindllm has is taken. Which ones it has is asked of the code (:func:`known_families`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, get_args

from mindllm.config.mindformers.reading import Reading
from mindllm.config.model import ArchConfig
from mindllm.errors import nearest

MODEL = "model.model_config"
GATED = ("silu", "swiglu", "fusedswiglu", "swish")


@dataclass(frozen=True)
class Network:
    """What one class of MindFormers computes.

    ``families`` of ours that compute it, best first; ``facts``: keys of ours that its YAMLs leave out because the class has them.
    ``activations``: values of ``hidden_act`` that mean what the family has.
    """

    families: tuple[str, ...]
    facts: dict[str, Any] = field(default_factory=dict)
    activations: tuple[str, ...] = GATED
    needs: str = ""  # what keeps it from being a Llama, where it is none


QKV_BIAS = {"qkv_has_bias": True}
NETWORKS = {
    "LlamaForCausalLM": Network(("llama",)),
    "Qwen2ForCausalLM": Network(("qwen2", "llama"), QKV_BIAS),
    "QwenForCausalLM": Network(("qwen", "llama"), QKV_BIAS),
    "InternLMForCausalLM": Network(("internlm", "llama")),
    "InternLM2ForCausalLM": Network(("internlm2", "llama")),
    "MistralForCausalLM": Network(("mistral",), needs="a window of attention"),
    "Baichuan7BV2ForCausalLM": Network(("baichuan2", "baichuan"), needs="a normalised head"),
    "Baichuan13BV2ForCausalLM": Network(("baichuan2", "baichuan"), needs="ALiBi and a normalised head"),
    "Baichuan13BForCausalLM": Network(("baichuan",), needs="ALiBi"),
    "Qwen3ForCausalLM": Network(("qwen3",), needs="norms of query and key"),
    "Gemma2ForCausalLM": Network(("gemma2",), needs="soft caps"),
    "ChatGLM2ForConditionalGeneration": Network(
        ("chatglm3", "chatglm", "glm"), needs="interleaved rotary pairs of half a head"
    ),
    "ChatGLM2WithPtuning2": Network((), needs="a trained prefix"),
    "Glm4ForCausalLM": Network(("glm4",), needs="norms behind attention and feed-forward"),
    "GPT2LMHeadModel": Network(
        ("gpt2",), activations=("gelu", "fast_gelu", "gelu_new"), needs="learned positions and LayerNorm"
    ),
    "BloomLMHeadModel": Network(("bloom",), activations=("gelu", "fast_gelu"), needs="ALiBi and LayerNorm"),
    "GPT2ForSequenceClassification": Network((), needs="a head for classes of text"),
    "TelechatForCausalLM": Network((), needs="TeleChat, which is no family here"),
    "TeleChat3ForCausalLM": Network((), needs="TeleChat, which is no family here"),
    "TeleChat3MoeForCausalLM": Network((), needs="a mixture of experts"),
    "YiZhaoForCausalLM": Network((), needs="YiZhao, which is no family here"),
    "YiZhaoDPOForCausalLM": Network((), needs="YiZhao, which is no family here"),
    "MixtralForCausalLM": Network((), needs="a mixture of experts"),
    "Qwen3MoeForCausalLM": Network((), needs="a mixture of experts"),
    "Glm4MoeForCausalLM": Network((), needs="a mixture of experts"),
    "DeepseekV2ForCausalLM": Network((), needs="latent attention and a mixture of experts"),
    "DeepseekV3ForCausalLM": Network((), needs="latent attention and a mixture of experts"),
    "DeepseekV4ForCausalLM": Network((), needs="sparse latent attention and a mixture of experts"),
}
OF_MODEL_TYPE = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mistral": "MistralForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "telechat3": "TeleChat3ForCausalLM",
    "telechat3_moe": "TeleChat3MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
LEGACY_DEFAULTS = {  # of LlamaConfig, where ours are others
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_layers": 32,
    "num_heads": 32,
    "seq_length": 2048,
    "compute_dtype": "float16",
    "initializer_range": 0.01,
}
MCORE_DEFAULTS = {"compute_dtype": "bfloat16"}


def known_families() -> set[str]:
    """The families that mindllm has."""
    classes = get_args(ArchConfig.model_fields["type"].annotation)
    return {name.removesuffix("ForCausalLM").lower() for name in classes}


def translate_architecture(reading: Reading) -> str | None:
    """Writes the family's flat keys; returns the family, or None where there is none (which is noted) or a directory says it."""
    source, name = _class_of(reading)
    if name is None:
        if not reading.get("pretrained_model_dir"):
            reading.refuse("model", "names no network: write model.arch.type, or pretrained_model_dir")
        return _finish(reading, None, Network(("llama",)))
    network = NETWORKS.get(name)
    if network is None:
        reading.refuse(source, f"this network is no family of mindllm{nearest(name, NETWORKS)}")
        return None
    family = next((family for family in network.families if family in known_families()), None)
    if family is None:
        needs = f": it needs {network.needs}" if network.needs else ""
        reading.refuse(source, f"this network is not here yet{needs}")
    else:
        _names_of_the_network(reading, source, family)
    return _finish(reading, family, network)


def _class_of(reading: Reading) -> tuple[str, str | None]:
    """The class of the network, and the key that names it."""
    if reading.get("model.arch.type"):
        return "model.arch.type", str(reading.get("model.arch.type"))
    listed = reading.get(f"{MODEL}.architectures")
    if listed:
        return f"{MODEL}.architectures", str(listed[0] if isinstance(listed, list) else listed)
    kind = reading.get(f"{MODEL}.model_type")
    return f"{MODEL}.model_type", OF_MODEL_TYPE.get(str(kind), str(kind)) if kind else None


def _names_of_the_network(reading: Reading, source: str, family: str) -> None:
    for key in ("model.arch.type", f"{MODEL}.type", f"{MODEL}.architectures", f"{MODEL}.model_type"):
        if not reading.has(key):
            continue
        if key == source:
            reading.translate(key, "model.arch.type", "LlamaForCausalLM", f"family {family}")
        else:
            reading.idle(key, f"{source} names the network")


def _finish(reading: Reading, family: str | None, network: Network) -> str | None:
    legacy = bool(reading.get("model.arch.type"))
    _attention(reading, network)
    _feed_forward(reading, network, legacy)
    _rotary(reading)
    _types(reading)
    _tied(reading)
    _lengths(reading)
    _tokens(reading)
    _absent_parts(reading, family)
    for key in ("model.arch.type", f"{MODEL}.type", f"{MODEL}.architectures", f"{MODEL}.model_type"):
        if reading.has(key) and not reading.claimed(tuple(key.split("."))):
            reading.idle(key, "another key names the network")
    for name, value in {**network.facts, **(LEGACY_DEFAULTS if legacy else MCORE_DEFAULTS)}.items():
        if name not in _ours(reading) and not (
            reading.get("pretrained_model_dir") and name in LEGACY_DEFAULTS and legacy
        ):
            reading.left_out(f"{MODEL}.{name}", f"{MODEL}.{name}", value, "left out: what MindFormers has then")
    return family


def _ours(reading: Reading) -> dict[str, Any]:
    return reading.ours.data.get("model", {}).get("model_config", {})


def _attention(reading: Reading, network: Network) -> None:
    grouped, groups = f"{MODEL}.multi_query_attention", f"{MODEL}.multi_query_group_num"
    if reading.has(groups):
        if reading.get(grouped, True):
            reading.translate(groups, f"{MODEL}.n_kv_heads")
        else:
            reading.idle(groups, "multi_query_attention is false")
    if reading.has(grouped):
        reading.idle(grouped, "n_kv_heads says it")
    if reading.has(f"{MODEL}.kv_channels"):
        reading.translate(f"{MODEL}.kv_channels", f"{MODEL}.head_dim")
    for key in (f"{MODEL}.attention_bias", f"{MODEL}.has_bias"):
        if reading.get(key):
            reading.translate(key, f"{MODEL}.qkv_has_bias", True, "on query, key, value and output")
            reading.put(f"{MODEL}.attn_proj_has_bias", True, tuple(key.split(".")))
        elif reading.has(key):
            reading.idle(key, "no biases beside those that other keys name")
    norm = f"{MODEL}.qk_layernorm"
    if reading.has(norm):
        if "qwen3" in network.families and "qwen3" in known_families():
            reading.idle(norm, "the family has it")
        elif reading.get(norm):
            reading.refuse(norm, "norms of query and key are not here yet")
        else:
            reading.idle(norm, "off")


def _feed_forward(reading: Reading, network: Network, legacy: bool) -> None:
    gated = network.activations is GATED
    act, unit, bias = f"{MODEL}.hidden_act", f"{MODEL}.gated_linear_unit", f"{MODEL}.add_bias_linear"
    if reading.has(act):
        if reading.get(act) in network.activations:
            reading.idle(act, "the activation of the family")
        else:
            reading.refuse(act, f"the family has another activation; valid: {', '.join(network.activations)}")
    if reading.has(f"{MODEL}.activation_func"):
        reading.idle(f"{MODEL}.activation_func", "hidden_act says it")
    if reading.has(unit):
        if bool(reading.get(unit)) == gated:
            reading.idle(unit, "the feed-forward of the family")
        else:
            reading.refuse(unit, "the family has another feed-forward")
    if reading.has(bias):
        if not reading.get(bias) or not gated:
            reading.idle(bias, "the biases of the family")
        else:
            reading.refuse(bias, "the family has no biases in its feed-forward")
    ratio = f"{MODEL}.expand_ratio"
    if reading.has(ratio):
        width = reading.get(f"{MODEL}.hidden_size", 0) * reading.get(ratio)
        reading.translate(ratio, f"{MODEL}.intermediate_size", width, "hidden_size x expand_ratio")
    for name in ("rmsnorm", "normalization"):
        key = f"{MODEL}.{name}"
        if reading.has(key):
            if reading.get(key) in (True, "RMSNorm"):
                reading.idle(key, "the norm of the family")
            else:
                reading.refuse(key, "the family has another norm")
    if legacy:
        _width(reading)


def _width(reading: Reading) -> None:
    """The width MindFormers computes where none is given: ``ffn_dim_multiplier`` is raised by 0.01 there."""
    multiplier, multiple = f"{MODEL}.ffn_dim_multiplier", f"{MODEL}.multiple_of"
    if reading.has(f"{MODEL}.intermediate_size"):
        for key in (multiplier, multiple):
            if reading.has(key):
                _ours(reading).pop(key.rpartition(".")[2], None)
                reading.idle(key, "intermediate_size is given")
        return
    if reading.get(multiplier) is None:
        return
    _ours(reading).pop("ffn_dim_multiplier", None)
    _ours(reading).pop("multiple_of", None)
    step = reading.get(multiple, 256)
    width = int((reading.get(multiplier) + 0.01) * 4 * reading.get(f"{MODEL}.hidden_size", 4096))
    width = -(-int(2 * width / 3) // step) * step
    for key in filter(reading.has, (multiplier, multiple)):
        reading.translate(key, f"{MODEL}.intermediate_size", width, "MindFormers adds 0.01 to the multiplier")


def _rotary(reading: Reading) -> None:
    base, ratio = f"{MODEL}.rotary_emb_base", f"{MODEL}.rope_ratio"
    if reading.has(base):
        if "theta" in _ours(reading):
            reading.idle(base, "theta is given")
        else:
            reading.translate(base, f"{MODEL}.theta")
    if reading.has(ratio):
        value = 10000.0 * reading.get(ratio)
        reading.translate(ratio, f"{MODEL}.theta", value, "10000 x rope_ratio")
    method, factor = f"{MODEL}.extend_method", f"{MODEL}.scaling_factor"
    kind = str(reading.get(method, "None")).upper()
    if kind == "NONE" or (kind in ("PI", "LINEAR") and reading.get(factor, 1) == 1):
        reason = "positions are not stretched"
        for key in (method, factor):
            if reading.has(key):
                reading.idle(key, reason)
    elif kind in ("PI", "LINEAR", "LLAMA3"):
        _stretched(reading, method, factor, kind)
    else:
        reading.refuse(method, "this stretching of positions is not here yet")
        if reading.has(factor):
            reading.refuse(factor, "it goes with extend_method")
    _yarn(reading)


def _stretched(reading: Reading, method: str, factor: str, kind: str) -> None:
    value = reading.get(factor, 1)
    facts = value if isinstance(value, dict) else {"factor": value}
    scaling = {"type": "llama3" if kind == "LLAMA3" else "linear", **facts}
    for key in filter(reading.has, (method, factor)):
        reading.translate(key, f"{MODEL}.rope_scaling", scaling)


def _yarn(reading: Reading) -> None:
    """The names of mcore networks."""
    kind = f"{MODEL}.position_embedding_type"
    parts = [
        f"{MODEL}.{name}" for name in ("rotary_scaling_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    ]
    stretched = reading.get(kind, "rope") not in ("rope", "none")
    if reading.has(kind):
        if stretched:
            reading.refuse(kind, "this kind of positions is not here yet")
        else:
            reading.idle(kind, "the positions of the family")
    for key in filter(reading.has, parts):
        if stretched:
            reading.refuse(key, "it goes with position_embedding_type")
        else:
            reading.idle(key, "positions are not stretched")


def _types(reading: Reading) -> None:
    for name in ("param_init_type", "params_dtype"):
        key = f"{MODEL}.{name}"
        if reading.has(key):
            same = reading.get(key) == "float32"
            reason = (
                "" if same else "parameters and optimizer state are float32 everywhere: their memory is that of float32"
            )
            reading.translate(key, f"{MODEL}.param_init_type", "float32", reason)
    softmax = f"{MODEL}.attention_softmax_in_fp32"
    if reading.has(softmax):
        value = "float32" if reading.get(softmax) else reading.get(f"{MODEL}.compute_dtype", "float16")
        reading.translate(softmax, f"{MODEL}.softmax_compute_type", value)
    compute = reading.get(f"{MODEL}.compute_dtype", "float16")
    for name in ("fp32_residual_connection", "res_dtype", "residual_dtype"):
        key = f"{MODEL}.{name}"
        if not reading.has(key):
            continue
        wanted = {True: "float32", False: compute, None: compute}.get(reading.get(key), reading.get(key))
        if wanted == compute:
            reading.idle(key, "hidden states flow in compute_dtype")
        else:
            instead = f"--{key}={'false' if name.startswith('fp32') else compute}"
            reading.refuse(key, f"hidden states flow in compute_dtype {compute} here; {instead} says so")


def _tied(reading: Reading) -> None:
    key = f"{MODEL}.untie_embeddings_and_output_weights"
    if not reading.has(key):
        return
    tied = not reading.get(key)
    if "tie_word_embeddings" in _ours(reading) and _ours(reading)["tie_word_embeddings"] != tied:
        reading.refuse(key, f"contradicts tie_word_embeddings {str(not tied).lower()}")
    else:
        reading.translate(key, f"{MODEL}.tie_word_embeddings", tied)


def _lengths(reading: Reading) -> None:
    length = reading.get(f"{MODEL}.seq_length", 2048)
    for name in ("max_position_embedding", "max_position_embeddings"):
        key = f"{MODEL}.{name}"
        if not reading.has(key):
            continue
        longest = reading.get(key)
        if isinstance(longest, int) and isinstance(length, int) and longest < length:
            reading.idle(key, f"below seq_length {length}, which is learned anyway")
        elif longest is None:
            reading.idle(key, "empty")
        else:
            reading.translate(key, f"{MODEL}.max_position_embedding")


def _tokens(reading: Reading) -> None:
    key = f"{MODEL}.pad_token_id"
    if reading.has(key):
        value = reading.get(key)
        if (isinstance(value, int) and value < 0) or value is None:
            reading.idle(key, "none")
        else:
            reading.use(key)
    sliced = f"{MODEL}.input_sliced_sig"
    if reading.has(sliced):
        reading.idle(sliced, "samples are shifted when they are read")


def _absent_parts(reading: Reading, family: str | None) -> None:
    """Experts, latent attention, prediction layers: refused where they are switched on, idle where they are not."""
    from mindllm.config.mindformers.keys_model import MODEL_KEYS, NO_EXPERTS, NO_LATENT, NO_PREDICTION
    from mindllm.config.mindformers.keys_parallel import MOE_KEYS

    numbers = ("num_experts", "n_routed_experts", "num_moe_experts")
    experts = max(
        [_number(reading, f"{MODEL}.{name}") for name in numbers] + [_number(reading, "moe_config.expert_num")]
    )
    latent = bool(reading.get(f"{MODEL}.multi_latent_attention") or reading.get(f"{MODEL}.kv_lora_rank"))
    ahead = max(
        _number(reading, f"{MODEL}.{name}") for name in ("mtp_depth", "num_nextn_predict_layers", "mtp_num_layers")
    )
    switched = {NO_EXPERTS: experts > 1, NO_LATENT: latent, NO_PREDICTION: ahead > 0}
    none = {
        NO_EXPERTS: "there are no experts",
        NO_LATENT: "attention is not latent",
        NO_PREDICTION: "one token is predicted",
    }
    for name, rule in MODEL_KEYS.items():
        key = f"{MODEL}.{name}"
        if rule.reason in switched and rule.decided and reading.has(key):
            reading.refuse(key, rule.reason) if switched[rule.reason] else reading.idle(key, none[rule.reason])
    for name in MOE_KEYS:
        key = f"moe_config.{name}"
        if reading.has(key):
            reading.refuse(key, NO_EXPERTS) if experts > 1 else reading.idle(key, none[NO_EXPERTS])
    if reading.has(f"{MODEL}.mla_qkv_concat"):
        reading.idle(f"{MODEL}.mla_qkv_concat", "it only joins weight matrices; the product is the same")


def _number(reading: Reading, key: str) -> int:
    value = reading.get(key, 0)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
