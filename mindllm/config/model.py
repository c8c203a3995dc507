"""Sections ``model`` and ``model.model_config``, and the architecture that their keys describe."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal, TypeVar

from pydantic import Field

from mindllm.architecture.adapters import PARTS, WEIGHT, AdapterSpec, BottleneckSpec
from mindllm.architecture.decoder import Architecture, EmbeddingSpec, HeadSpec
from mindllm.architecture.experts import ExpertsSpec, RouterSpec
from mindllm.architecture.layer import LayerSpec
from mindllm.architecture.parts import (
    AlibiSpec,
    AttentionSpec,
    FeedForwardSpec,
    LatentAttentionSpec,
    NormSpec,
    Position,
    RotarySpec,
    Shapes,
    YarnRopeScaling,
)
from mindllm.architecture.quantization import CodeSpec
from mindllm.architecture.tuners import ADALORA, FULL_TUNING, is_trained, layer_origins
from mindllm.config.model_keys import Files, ModelKeys, rope_scaling
from mindllm.config.quantization import code_spec
from mindllm.config.section import Section
from mindllm.config.tuning import ALL, PetConfig


class ModelConfig(ModelKeys):
    """Section ``model.model_config``: a decoder."""

    @property
    def architecture(self) -> Architecture:
        """Return the architecture that these keys describe."""
        return build_architecture(self)

    @property
    def merged(self) -> ModelConfig:
        """Return the model to export, evaluate and chat with: trained adapters are merged into its weights."""
        return merged_model(self)

    @property
    def layer_count(self) -> int:
        """Return the number of layers, including those that tuning adds."""
        return len(self.architecture.layers)

    def parameter_count(self) -> int:
        """Return the exact number of parameters, including adapters and frozen weights."""
        return self.architecture.parameter_count()

    def flops_per_token(self, seq_length: int | None = None) -> float:
        """Return the model FLOPs of forward and backward per token, for ``seq_length`` (default: as configured)."""
        return self.architecture.flops_per_token(seq_length or self.seq_length)


class ArchConfig(Section):
    """Section ``model.arch``."""

    type: Literal["LlamaForCausalLM"] = Field(default="LlamaForCausalLM", description="Kind of network.")


class ModelSection(Section):
    """Section ``model``. The key ``model_config`` is the attribute ``config``: pydantic keeps the other name."""

    arch: ArchConfig = Field(default_factory=ArchConfig, description="Kind of network.")
    config: ModelConfig = Field(alias="model_config", description="The architecture.")


Model = TypeVar("Model", bound=ModelKeys)
FULL, SLIDING = "full_attention", "sliding_attention"


def build_architecture(model: ModelKeys) -> Architecture:
    """Return the architecture of ``model`` with the adapters of its ``pet_config``."""
    if model.pet_config is None:
        return _plain_architecture(model)
    needs_names = model.pet_config.tuner.low_rank or model.quantization_config is not None
    return _tuned_architecture(model, tuple(model.projections_in_files.items()) if needs_names else ())


@lru_cache(maxsize=64)
def _tuned_architecture(model: ModelKeys, names: tuple[tuple[str, tuple[str, ...]], ...]) -> Architecture:
    plain, pet = _plain_architecture(model), model.pet_config
    assert pet is not None
    tuning, files = replace(pet.tuning, frozen_dtype=model.frozen_dtype), dict(names)
    adapters = {spec: adapter_specs(pet, spec, files) for spec in plain.specifications()}
    bottlenecks, layers = bottleneck_specs(pet, plain.hidden_size), []
    for origin in layer_origins(tuning, len(plain.layers)):
        layer, path = plain.layers[origin.number], f"model.layers.{origin.number}"
        frozen = tuple(name for name in layer.weights() if not (origin.copied or is_trained(tuning, f"{path}.{name}")))
        held = _quantized_projections(model, layer, frozen, files)
        layers.append(replace(layer, adapters=adapters[layer], bottlenecks=bottlenecks, frozen=frozen, codes=held))
    embedding = replace(plain.embedding, noise=pet.neftune_noise_alpha)
    return replace(plain, embedding=embedding, layers=tuple(layers), pet=tuning)


def _quantized_projections(
    model: ModelKeys, layer: LayerSpec, frozen: tuple[str, ...], files: Files
) -> tuple[CodeSpec, ...]:
    """Return the frozen projections of a layer that are stored as quantized codes."""
    section = model.quantization_config
    if section is None or model.quantized_base == "dequantize":
        return ()
    return tuple(
        code_spec(section, module, shape)
        for module, shape in layer.adaptable().items()
        if not (isinstance(layer.attention, LatentAttentionSpec) and module.startswith("attention."))
        and f"{module}{WEIGHT}" in frozen
        and section.converts(aliases(module, files))
    )


def _plain_architecture(model: ModelKeys) -> Architecture:
    norm = _norm(model)
    with_experts, types = (
        (*kinds, *kinds[-1:] * (model.placed_layers - len(kinds)))
        for kinds in (_with_experts(model), _with_windows(model))
    )
    kinds = {
        (kind, experts): _layer(model, norm, kind == SLIDING, experts)
        for kind in (FULL, SLIDING)
        for experts in {*with_experts}
    }
    layers = [kinds[kind] for kind in zip(types, with_experts, strict=False)]
    learned = model.position_embedding_type == "learned_absolute"
    return Architecture(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        embedding=EmbeddingSpec(
            scale=math.sqrt(model.hidden_size) if model.scale_embeddings else None,
            learned_positions=model.max_position_embedding if learned else None,
            norm=norm if model.embedding_norm else None,
            dropout=model.embedding_dropout,
        ),
        layers=tuple(replace(layer, is_mtp=number >= model.num_layers) for number, layer in enumerate(layers)),
        final_norm=norm,
        head=HeadSpec(model.tie_word_embeddings, model.norm_head, model.final_logit_softcapping),
    )


def layer_types(model: ModelKeys) -> tuple[str, ...]:
    """Return ``full_attention`` or ``sliding_attention`` for each layer, without multi-token prediction layers."""
    return _with_windows(model)[: model.num_layers]


def _with_windows(model: ModelKeys) -> tuple[str, ...]:
    if model.layer_types is not None:
        return model.layer_types
    if model.sliding_window is None:
        return (FULL,) * model.num_layers
    every = model.sliding_window_pattern
    return tuple(
        FULL if every is not None and number % every == 0 else SLIDING for number in range(1, model.num_layers + 1)
    )


def expert_layers(model: ModelKeys) -> tuple[bool, ...]:
    """Return for each layer whether its feed-forward is a mixture of experts, without multi-token prediction layers."""
    return _with_experts(model)[: model.num_layers]


def _with_experts(model: ModelKeys) -> tuple[bool, ...]:
    if model.expert_num == 1:
        return (False,) * model.num_layers
    every = model.moe_layer_freq
    chosen = [number % every == 0 for number in range(model.num_layers)] if isinstance(every, int) else map(bool, every)
    return tuple(number >= model.first_k_dense_replace and has for number, has in enumerate(chosen))


def keys_for_layers(model: ModelKeys, layers: Sequence[LayerSpec]) -> dict[str, Any]:
    """Return the keys of ``model_config`` for a model that has only the given layers of ``model``, in this order.

    Multi-token prediction layers come last.
    """
    mtp_layers = sum(layer.is_mtp for layer in layers)
    keys: dict[str, Any] = {"num_layers": len(layers) - mtp_layers}
    if model.num_nextn_predict_layers:
        keys["num_nextn_predict_layers"] = mtp_layers
    windows = {layer.attention.window for layer in build_architecture(model).layers}
    if len(windows) > 1 or model.layer_types is not None:
        keys["layer_types"] = [FULL if layer.attention.window is None else SLIDING for layer in layers]
    if model.pet_config is not None and model.pet_config.tuner.by_layer:
        # freeze the weights of these layers and those outside layers by name
        architecture, pet = build_architecture(model), model.pet_config
        assert pet is not None
        outside = [name for name in architecture.weight_shapes() if not name.startswith("model.layers.")]
        frozen = [name for name in outside if not is_trained(architecture.pet, name)]
        frozen += [f"model.layers.{number}.{name}" for number, layer in enumerate(layers) for name in layer.frozen]
        section = {"pet_type": FULL_TUNING, "freeze_include": frozen, "neftune_noise_alpha": pet.neftune_noise_alpha}
        keys["pet_config"] = type(pet).model_validate(section).model_dump()
    if model.expert_num > 1:
        keys["moe_layer_freq"] = [int(isinstance(layer.feed_forward, ExpertsSpec)) for layer in layers]
        keys["first_k_dense_replace"] = 0
    return keys


def merged_model(model: Model) -> Model:
    """Return the model whose weights are those of ``model`` after merging adapters; added layers become ordinary layers.

    Bottleneck adapters cannot be merged, and stay.
    """
    pet, plain = model.pet_config, model.base
    if pet is not None and pet.tuner.own_format:
        return model
    if pet is None or not pet.tuner.inserts_layers:
        return plain
    layers = build_architecture(plain).layers
    keys = keys_for_layers(plain, [layers[origin.number] for origin in layer_origins(pet.tuning, len(layers))])
    merged = type(model).model_validate({**plain.model_dump(exclude_unset=True), **keys})
    return merged.name_projections(model.named_projections)


def _norm(model: ModelKeys) -> NormSpec:
    if model.normalization == "LayerNorm":
        return NormSpec("layer", model.rms_norm_eps)
    return NormSpec("rms_one" if model.layernorm_zero_centered_gamma else "rms", model.rms_norm_eps)


def _layer(model: ModelKeys, norm: NormSpec, sliding: bool, experts: bool) -> LayerSpec:
    attention = _latent_attention(model) if model.kv_lora_rank is not None else _attention(model, norm, sliding)
    feed_forward = _experts(model) if experts else _feed_forward(model, model.intermediate_size)
    return LayerSpec(attention, feed_forward, norm, model.sandwich_norm, model.hidden_dropout)


def _attention(model: ModelKeys, norm: NormSpec, sliding: bool) -> AttentionSpec:
    return AttentionSpec(
        hidden_size=model.hidden_size,
        num_heads=model.num_heads,
        num_kv_heads=model.n_kv_heads,
        head_dim=model.head_dim,
        scale=1.0 / math.sqrt(model.query_pre_attn_scalar or model.head_dim),
        position=_position(model, sliding),
        qkv_bias=model.qkv_has_bias,
        out_bias=model.attn_proj_has_bias,
        window=model.sliding_window if sliding else None,
        soft_cap=model.attn_logit_softcapping,
        query_key_norm=norm if model.qk_layernorm else None,
        dropout=model.attention_dropout,
    )


def _latent_attention(model: ModelKeys) -> LatentAttentionSpec:
    """Return latent attention. YaRN's ``mscale_all_dim`` scales queries and keys (DeepSeek-V2's code)."""
    assert model.kv_lora_rank is not None
    scaling, scale = rope_scaling(model.rope_scaling), 1.0 / math.sqrt(model.head_dim)
    if isinstance(scaling, YarnRopeScaling) and scaling.mscale_all_dim:
        scale *= scaling.sharpened(scaling.mscale_all_dim) ** 2
    return LatentAttentionSpec(
        hidden_size=model.hidden_size,
        num_heads=model.num_heads,
        q_lora_rank=model.q_lora_rank,
        kv_lora_rank=model.kv_lora_rank,
        qk_nope_head_dim=model.qk_nope_head_dim,
        qk_rope_head_dim=model.qk_rope_head_dim,
        value_dim=model.v_head_dim,
        scale=scale,
        position=RotarySpec(model.theta, model.qk_rope_head_dim, scaling, model.max_position_embedding),
        dropout=model.attention_dropout,
    )


def _feed_forward(model: ModelKeys, width: int) -> FeedForwardSpec:
    return FeedForwardSpec(
        model.hidden_size,
        width,
        model.hidden_act,
        model.gated_linear_unit,
        model.mlp_has_bias,
        model.mlp_proj_has_bias and not model.mlp_has_bias,
    )


def _experts(model: ModelKeys) -> ExpertsSpec:
    router = RouterSpec(
        experts=model.expert_num,
        top_k=model.num_experts_chosen,
        sigmoid=model.use_gating_sigmoid,
        renormalise=model.norm_topk_prob,
        scale=model.routed_scaling_factor,
        groups=model.n_group,
        chosen_groups=model.topk_group,
        bias=model.balance_via_topk_bias,
        balance_losses=tuple(zip(model.aux_loss_types, model.aux_loss_factors, strict=False)),
        z_loss=model.z_loss_factor,
    )
    shared = model.moe_shared_expert_intermediate_size
    return ExpertsSpec(
        router,
        _feed_forward(model, model.moe_intermediate_size),
        _feed_forward(model, shared) if shared else None,
        model.use_shared_expert_gating,
        model.capacity_factor,
        model.moe_grouped_gemm,
        model.moe_grouped_gemm and model.moe_token_dispatcher_type == "alltoall",
    )


def _position(model: ModelKeys, sliding: bool) -> Position:
    if model.position_embedding_type == "alibi":
        return AlibiSpec()
    if model.position_embedding_type == "learned_absolute":
        return None
    rotary_dim = 2 * round(model.head_dim * model.partial_rotary_factor / 2)
    if sliding and model.rope_local_base_freq is not None:
        return RotarySpec(model.rope_local_base_freq, rotary_dim)
    return RotarySpec(model.theta, rotary_dim, rope_scaling(model.rope_scaling), model.max_position_embedding)


def bottleneck_specs(pet: PetConfig, hidden_size: int) -> tuple[BottleneckSpec, ...]:
    """Return the bottleneck adapters of every layer."""
    if not pet.tuner.own_format:
        return ()
    chosen = [part for part in PARTS if pet.target_modules == ALL or part in pet.target_modules]
    return tuple(BottleneckSpec(part, hidden_size, pet.adapter_length) for part in chosen)


def adapter_specs(pet: PetConfig, layer: LayerSpec, files: Files) -> tuple[AdapterSpec, ...]:
    """Return the low-rank adapters of a layer."""
    if not pet.tuner.low_rank:
        return ()
    modules = layer.adaptable()
    return tuple(_adapters(pet, modules, [module for module in modules if targets(pet, module, files)], files))


def _adapters(pet: PetConfig, modules: Shapes, chosen: list[str], files: Files) -> Iterator[AdapterSpec]:
    for module in chosen:
        # projections that are one matrix in the files share the first adapter matrix
        shared = next((name for group in files.values() if module in group for name in group if name in chosen), module)
        out_features, in_features = modules[module]
        yield AdapterSpec(
            module,
            out_features,
            in_features,
            pet.rank,
            pet.scale,
            pet.use_dora,
            pet.lora_dropout,
            "" if shared == module else shared,
            pet.pet_type == ADALORA,
        )


def targets(pet: PetConfig, module: str, files: Files, layer: int = 0) -> bool:
    """Return True if ``target_modules`` selects a projection such as ``attention.wq``."""
    selection = pet.target_modules
    if selection == ALL:
        return True
    if isinstance(selection, str):
        return any(re.fullmatch(selection, f"model.layers.{layer}.{name}") for name in aliases(module, files))
    return any(names(name, module, files) for name in selection)


def names(name: str, module: str, files: Files) -> bool:
    """Return whether ``name`` is that of a projection, or the end of it."""
    return any(alias == name or alias.endswith(f".{name}") for alias in aliases(module, files))


def aliases(module: str, files: Files) -> tuple[str, ...]:
    """Return the names of a projection: in mindllm and in the files of the family."""
    return (module, *(name for name, modules in files.items() if module in modules))
