"""The network of a MindFormers YAML as flat keys of mindllm.

:data:`NETWORKS` maps classes of MindFormers to families. ``mindllm.families`` has the properties of a family and the list of
families. A class that is a variant of a family adds facts: keys of mindllm with values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from mindllm.config.model import ModelConfig
from mindllm.config.reading.document import path_of
from mindllm.errors import nearest
from mindllm.families import BY_TYPE
from mindllm.mindformers.directory import fill_in
from mindllm.mindformers.experts import is_latent, translate_experts
from mindllm.mindformers.reading import Reading, shown

MODEL = "model.model_config"
ACTIVATIONS = {  # theirs: ours
    "silu": "silu",
    "swish": "silu",
    "swiglu": "silu",
    "fusedswiglu": "silu",
    "gelu": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "fast_gelu": "quick_gelu",
}


@dataclass(frozen=True)
class Network:
    """A network class of MindFormers.

    Attributes:
        family: the ``model_type`` of its family in mindllm.
        facts: flat keys of mindllm for properties that other models of the family do not have.
        absent: what the class needs and mindllm does not support.
        defaults: defaults of a legacy class that differ from those of Llama.
    """

    family: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    absent: str = ""
    defaults: dict[str, Any] = field(default_factory=dict)


ALIBI = {"position_embedding_type": "alibi"}
NORM_HEAD = {"norm_head": True}
TIED = {"tie_word_embeddings": True}
NETWORKS = {
    "LlamaForCausalLM": Network(),  # of many families: the first that has such a model
    "Qwen2ForCausalLM": Network("qwen2"),
    "QwenForCausalLM": Network("qwen"),
    "Qwen3ForCausalLM": Network("qwen3"),
    "InternLMForCausalLM": Network("internlm"),
    "InternLM2ForCausalLM": Network("internlm2"),
    "MistralForCausalLM": Network("mistral"),
    "BaichuanForCausalLM": Network("baichuan"),
    "Baichuan13BForCausalLM": Network("baichuan", ALIBI),
    "Baichuan7BV2ForCausalLM": Network("baichuan", NORM_HEAD),
    "Baichuan13BV2ForCausalLM": Network("baichuan", {**ALIBI, **NORM_HEAD}),
    "ChatGLM2ForConditionalGeneration": Network("chatglm"),
    "Glm4ForCausalLM": Network("glm4"),
    "GPT2LMHeadModel": Network("gpt2", TIED),
    "BloomLMHeadModel": Network("bloom", TIED),
    "ChatGLM2WithPtuning2": Network(absent="a trained prefix"),
    "CogVLM2ForCausalLM": Network(absent="image input"),
    "CogVLM2ImageForCausalLM": Network(absent="image input"),
    "WhisperForConditionalGeneration": Network(absent="an audio encoder"),
    "GPT2ForSequenceClassification": Network(absent="a head for classes of text"),
    "TelechatForCausalLM": Network("telechat", defaults={"initializer_range": 0.0048}),
    "TeleChat3ForCausalLM": Network("telechat3"),
    "TeleChat3MoeForCausalLM": Network(absent="TeleChat 3 with experts, which is not a family of mindllm"),
    "YiZhaoForCausalLM": Network(absent="YiZhao, which is not a family of mindllm"),
    "YiZhaoDPOForCausalLM": Network(absent="YiZhao, which is not a family of mindllm"),
    "MixtralForCausalLM": Network("mixtral"),
    "Qwen3MoeForCausalLM": Network("qwen3_moe"),
    "Glm4MoeForCausalLM": Network(absent="GLM-4.5, which is not a family of mindllm"),
    "DeepseekV2ForCausalLM": Network("deepseek_v2"),
    "DeepseekV3ForCausalLM": Network("deepseek_v3"),
    "DeepseekV4ForCausalLM": Network(absent="DeepSeek-V4, which is not a family of mindllm"),
}
CLASS_OF_TYPE = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mistral": "MistralForCausalLM",
    "telechat": "TelechatForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "telechat3": "TeleChat3ForCausalLM",
    "telechat3_moe": "TeleChat3MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
UNTIED_SIZE = "telechat_12b"
TRAINED_MODULES = {  # of a family: patterns over the names of MindFormers, and our parts
    "qwen": {"*wte*": "tok_embeddings", "*lm_head*": "lm_head"},
}
PROJECTIONS = {"gpt2": {"dense1": "wq", "dense2": "wk", "dense3": "wv"}}  # of a family: theirs: ours
YARN_FACTORS = (f"{MODEL}.scaling_factor", f"{MODEL}.rotary_scaling_factor")
YARN_PARTS = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
YARN_CONTEXT = 4096  # of the original training, where the YAML does not say
HALF_STATE = "gradients and accumulators have it, moments and the update are float32, as in MindFormers"
HALF = {  # reasons of parameters in half precision, by the key that asks for them
    "param_init_type": f"{HALF_STATE}; norms have layernorm_compute_type, routers float32",
    "params_dtype": f"{HALF_STATE}; norms have layernorm_compute_type and routers float32, in MindFormers params_dtype",
}
LEGACY_DEFAULTS = {  # of LlamaConfig, where ours are others
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_layers": 32,
    "num_heads": 32,
    "seq_length": 2048,
    "compute_dtype": "float16",
    "param_init_type": "float16",
    "initializer_range": 0.01,
}
MCORE_DEFAULTS = {"compute_dtype": "bfloat16"}


def translate_architecture(reading: Reading) -> None:
    """Translate the keys of the network; report an unsupported network as refused."""
    source, name = _network_class(reading)
    network = NETWORKS.get(name or "", Network())
    if name is None:
        if not reading.get("pretrained_model_dir"):
            reading.refuse("model", "names no network: write model.arch.type, or pretrained_model_dir")
    elif name not in NETWORKS:
        reading.refuse(source, f"this network is not a family of mindllm{nearest(name, NETWORKS)}")
    elif missing := missing_parts(network):
        reading.refuse(source, f"this network is not here yet: it needs {missing}")
    else:
        _named_family(reading, source, network)
    legacy = bool(reading.get("model.arch.type"))
    _attention(reading)
    _feed_forward(reading, legacy)
    _rotary(reading)
    _types(reading)
    _tied(reading)
    # translate net_name of TeleChat 1: all sizes except 12B tie head and embedding
    key = f"{MODEL}.net_name"
    if network.family == "telechat" and reading.get(key) and "tie_word_embeddings" not in _ours(reading):
        tied = reading.get(key) != UNTIED_SIZE
        reading.translate(key, f"{MODEL}.tie_word_embeddings", tied, "as in the code of TeleChat 1 for this name")
    elif reading.has(key):
        reading.idle(key, "other keys describe the network")
    _lengths(reading)
    _tokens(reading)
    translate_experts(reading)
    _adapted_projections(reading, network)
    _trained_modules(reading, network)
    for key in ("model.arch.type", f"{MODEL}.type", f"{MODEL}.architectures", f"{MODEL}.model_type"):
        if reading.has(key) and not reading.claimed(path_of(key)):
            reading.idle(key, "another key names the network")
    if legacy or not reading.get("pretrained_model_dir"):
        for name, value in ({**LEGACY_DEFAULTS, **network.defaults} if legacy else MCORE_DEFAULTS).items():
            if name not in _ours(reading):
                reading.set_omitted(f"{MODEL}.{name}", f"{MODEL}.{name}", value, "left out: what MindFormers has then")
    fill_in(reading)


def missing_parts(network: Network) -> str:
    """Return the parts of ``network`` that mindllm does not support; empty if it supports all."""
    if network.absent:
        return network.absent
    if network.family and network.family not in BY_TYPE:
        return f"the family {network.family}"
    return ", ".join(f"{key} {shown(value)}" for key, value in network.facts.items() if not can_say(key, value))


def can_say(key: str, value: Any) -> bool:
    """Return True if ``model.model_config`` accepts ``value`` under ``key``."""
    info = ModelConfig.model_fields.get(key)
    if info is None or info.annotation is None:
        return False
    try:
        TypeAdapter(info.annotation).validate_python(value)
    except ValidationError:
        return False
    return True


def _network_class(reading: Reading) -> tuple[str, str | None]:
    """Return the key that names the network class, and the class."""
    if reading.get("model.arch.type"):
        return "model.arch.type", reading.word("model.arch.type")
    listed = reading.get(f"{MODEL}.architectures")
    if listed:
        return f"{MODEL}.architectures", str(listed[0] if isinstance(listed, list) else listed)
    kind = reading.word(f"{MODEL}.model_type")
    return f"{MODEL}.model_type", CLASS_OF_TYPE.get(kind, kind) or None


def _named_family(reading: Reading, source: str, network: Network) -> None:
    if not network.family:
        reading.idle(source, "other keys name the family")
        return
    reading.translate(source, f"{MODEL}.model_type", network.family)
    for key, value in {**BY_TYPE[network.family].fixed, **network.facts}.items():
        if key not in _ours(
            reading
        ):  # a written value that differs is refused later, because the family has no such model
            reading.put(f"{MODEL}.{key}", value, path_of(source))


def _ours(reading: Reading) -> dict[str, Any]:
    return reading.ours.data.get("model", {}).get("model_config", {})


def _described(reading: Reading, key: str, ours: str, value: Any) -> None:
    """Translate a property of the network, if ``model.model_config`` supports it."""
    if can_say(ours, value):
        reading.translate(key, f"{MODEL}.{ours}", value)
    else:
        reading.refuse(key, f"{ours} {shown(value)} is not here yet")


def _attention(reading: Reading) -> None:
    grouped, groups = f"{MODEL}.multi_query_attention", f"{MODEL}.multi_query_group_num"
    if reading.has(groups):
        if reading.get(grouped, True):
            reading.translate(groups, f"{MODEL}.n_kv_heads")
        else:
            reading.idle(groups, "multi_query_attention is false")
    if reading.has(grouped):
        reading.idle(grouped, "n_kv_heads applies")
    if reading.is_open(f"{MODEL}.kv_channels"):
        reading.translate(f"{MODEL}.kv_channels", f"{MODEL}.head_dim")
    for key in (f"{MODEL}.attention_bias", f"{MODEL}.has_bias"):
        if reading.get(key):
            reading.translate(key, f"{MODEL}.qkv_has_bias", True, "on query, key, value and output")
            reading.put(f"{MODEL}.attn_proj_has_bias", True, path_of(key))
        elif reading.has(key):
            reading.idle(key, "other keys name all biases")
    kernel = f"{MODEL}.use_flash_attention"
    composed = _ours(reading).get("position_embedding_type") == "alibi" or _ours(reading).get("attention_dropout")
    if reading.get(kernel) is True and composed:
        reading.translate(
            kernel, kernel, "auto", "how ALiBi, or dropout of scores, is computed is chosen for the device"
        )
    elif reading.has(kernel):
        reading.use(kernel)
    norm = f"{MODEL}.qk_layernorm"
    if reading.has(norm) and is_latent(reading):
        reading.idle(norm, "of the narrow vectors of latent attention, which always have one")
    elif reading.has(norm):
        _described(reading, norm, "qk_layernorm", bool(reading.get(norm)))


def _feed_forward(reading: Reading, legacy: bool) -> None:
    act, unit, bias = f"{MODEL}.hidden_act", f"{MODEL}.gated_linear_unit", f"{MODEL}.add_bias_linear"
    if reading.has(act):
        activation = reading.word(act)
        if activation in ACTIVATIONS:
            _described(reading, act, "hidden_act", ACTIVATIONS[activation])
        else:
            reading.refuse(act, f"this activation is not here{nearest(activation, ACTIVATIONS)}")
    if reading.has(f"{MODEL}.activation_func"):
        reading.idle(f"{MODEL}.activation_func", "hidden_act applies")
    if reading.has(unit):
        _described(reading, unit, "gated_linear_unit", bool(reading.get(unit)))
    if reading.has(bias):
        _described(reading, bias, "mlp_has_bias", bool(reading.get(bias)))
    ratio = f"{MODEL}.expand_ratio"
    if reading.has(ratio):
        width = int(reading.count(f"{MODEL}.hidden_size") * reading.number(ratio, 0))
        reading.translate(ratio, f"{MODEL}.intermediate_size", width, "hidden_size x expand_ratio")
    for name in ("rmsnorm", "normalization"):
        key = f"{MODEL}.{name}"
        if reading.has(key):
            norm = {"true": "RMSNorm", "false": "LayerNorm"}.get(reading.word(key), reading.word(key))
            _described(reading, key, "normalization", norm)
    if legacy:
        _width(reading)


def _width(reading: Reading) -> None:
    """Translate the default width of MindFormers, which adds 0.01 to ``ffn_dim_multiplier``."""
    multiplier, multiple = f"{MODEL}.ffn_dim_multiplier", f"{MODEL}.multiple_of"
    if reading.has(f"{MODEL}.intermediate_size"):
        for key in (multiplier, multiple):
            if reading.has(key):
                _ours(reading).pop(key.rpartition(".")[2], None)
                reading.idle(key, "intermediate_size is given")
        return
    if not reading.number(multiplier, 0):
        return
    _ours(reading).pop("ffn_dim_multiplier", None)
    _ours(reading).pop("multiple_of", None)
    step = reading.count(multiple, 256)
    width = int((reading.number(multiplier, 1) + 0.01) * 4 * reading.count(f"{MODEL}.hidden_size", 4096))
    width = -(-int(2 * width / 3) // step) * step
    for key in filter(reading.has, (multiplier, multiple)):
        reading.translate(key, f"{MODEL}.intermediate_size", width, "MindFormers adds 0.01 to the multiplier")


def _rotary(reading: Reading) -> None:
    base, ratio = f"{MODEL}.rotary_emb_base", f"{MODEL}.rope_ratio"
    if reading.is_open(base):
        if "theta" in _ours(reading):
            reading.idle(base, "theta is given")
        else:
            reading.translate(base, f"{MODEL}.theta")
    if reading.has(ratio):
        value = 10000.0 * reading.number(ratio, 0)
        reading.translate(ratio, f"{MODEL}.theta", value, "10000 x rope_ratio")
    method, factor = f"{MODEL}.extend_method", f"{MODEL}.scaling_factor"
    kind = (reading.word(method) or "None").upper()
    if reading.word(f"{MODEL}.position_embedding_type") == "yarn":
        _yarn(reading)
        return
    if kind == "NONE" or (kind in ("PI", "LINEAR") and reading.get(factor, 1) == 1):
        reason = "positions are not stretched"
        for key in (method, factor):
            if reading.has(key):
                reading.idle(key, reason)
    elif kind in ("PI", "LINEAR", "LLAMA3"):
        value = reading.get(factor, 1)
        facts = value if isinstance(value, dict) else {"factor": value}
        scaling = {"type": "llama3" if kind == "LLAMA3" else "linear", **facts}
        for key in filter(reading.has, (method, factor)):
            reading.translate(key, f"{MODEL}.rope_scaling", scaling)
    else:
        reading.refuse(method, "this stretching of positions is not here yet")
        if reading.has(factor):
            reading.refuse(factor, "it goes with extend_method")
    # without YaRN its other keys have no effect
    kind = f"{MODEL}.position_embedding_type"
    if reading.has(kind):
        _described(reading, kind, "position_embedding_type", reading.word(kind) or "rope")
    for key in filter(reading.has, (YARN_FACTORS[1], *(f"{MODEL}.{name}" for name in YARN_PARTS))):
        reading.idle(key, "positions are not stretched")


def _yarn(reading: Reading) -> None:
    """Translate YaRN with the key names of mcore networks."""
    kind = f"{MODEL}.position_embedding_type"
    factor = next((key for key in YARN_FACTORS if reading.get(key) is not None), None)
    if factor is None:
        reading.refuse(kind, f"yarn needs {YARN_FACTORS[0]}")
        return
    original = reading.get(f"{MODEL}.original_max_position_embeddings", YARN_CONTEXT)
    facts = {name: reading.get(f"{MODEL}.{name}") for name in YARN_PARTS}
    scaling = {
        "type": "yarn",
        "factor": reading.get(factor),
        **{name: value for name, value in facts.items() if value is not None},
        "original_max_position_embeddings": original,
    }
    names = ("extend_method", "original_max_position_embeddings", *YARN_PARTS)
    for key in filter(reading.has, (kind, *YARN_FACTORS, *(f"{MODEL}.{name}" for name in names))):
        reading.translate(key, f"{MODEL}.rope_scaling", scaling)


def _types(reading: Reading) -> None:
    _parameter_types(reading)
    softmax = f"{MODEL}.attention_softmax_in_fp32"
    if reading.has(softmax):
        value = "float32" if reading.get(softmax) else reading.get(f"{MODEL}.compute_dtype", "float16")
        reading.translate(softmax, f"{MODEL}.softmax_compute_type", value)
    compute = reading.word(f"{MODEL}.compute_dtype") or "float16"
    for name in ("fp32_residual_connection", "res_dtype", "residual_dtype"):
        key = f"{MODEL}.{name}"
        if not reading.has(key):
            continue
        dtype = {"true": "float32", "false": compute, "": compute}.get(reading.word(key), reading.word(key))
        if dtype == compute:
            reading.idle(key, "hidden states flow in compute_dtype")
        elif dtype == "float32":
            reading.translate(key, f"{MODEL}.fp32_residual_connection", True)
        else:
            instead = f"--{key}={'false' if name.startswith('fp32') else compute}"
            reading.refuse(key, f"hidden states flow in compute_dtype {compute} or float32 here; {instead} says so")


def _parameter_types(reading: Reading) -> None:
    """Translate the type of parameters, and state what else has another type here than in MindFormers."""
    dtype = "float32"
    for name in ("param_init_type", "params_dtype"):
        key = f"{MODEL}.{name}"
        if reading.has(key):
            dtype = reading.word(key)
            reading.translate(key, f"{MODEL}.param_init_type", reason="" if dtype == "float32" else HALF[name])
    table = f"{MODEL}.embedding_init_type"
    if reading.has(table):
        is_same = reading.word(table) == dtype
        reading.idle(
            table, "param_init_type" if is_same else f"the embedding has param_init_type {dtype} here, as all matrices"
        )


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


def _adapted_projections(reading: Reading, network: Network) -> None:
    """Translate the targets of adapters: regular expressions over MindFormers' names."""
    key = f"{MODEL}.pet_config.target_modules"
    if not reading.has(key):
        return
    names, pattern = PROJECTIONS.get(network.family, {}), reading.get(key)
    if not isinstance(pattern, str) or not any(name in pattern for name in names):
        reading.use(key)
        return
    for other_name, ours in names.items():
        pattern = pattern.replace(other_name, ours)
    reading.translate(key, key, pattern)


def _trained_modules(reading: Reading, network: Network) -> None:
    """Translate ``freeze_exclude`` of LoRA: shell patterns of weights that are trained (mindpet's ``freeze_delta``)."""
    key = f"{MODEL}.pet_config.freeze_exclude"
    patterns = reading.get(key)
    if not reading.has(key):
        return
    modules = TRAINED_MODULES.get(network.family, {})
    if not patterns:
        reading.idle(key, "empty")
    elif isinstance(patterns, list) and all(pattern in modules for pattern in patterns):
        parts = [modules[pattern] for pattern in patterns]
        reading.translate(key, f"{MODEL}.pet_config.modules_to_save", parts, "trained in addition to the adapters")
    else:
        reading.refuse(key, "modules_to_save names modules that are trained in addition to adapters")


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
