"""Section ``model.model_config``: a flat list of keys, mostly those of MindFormers, with ``rope_scaling`` and derived defaults.

Defaults of the feed-forward width follow Meta's Llama reference code (``llama/model.py``, class ``FeedForward``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from mindllm.architecture.experts import BalanceLoss
from mindllm.architecture.layer_counts import Offset
from mindllm.architecture.parts import (
    Activation,
    DynamicRopeScaling,
    LinearRopeScaling,
    Llama3RopeScaling,
    RopeScaling,
    YarnRopeScaling,
)
from mindllm.config.quantization import QuantizationConfig
from mindllm.config.section import UNCHANGED_SERIALIZER, DType, List, PositiveInt, Section
from mindllm.config.tuning import PetConfig


class LinearRopeScalingConfig(Section):
    """Positions divided by ``factor`` (Chen et al. 2023, position interpolation)."""

    type: Literal["linear"] = Field(default="linear", description="Positions are divided by `factor`.")
    factor: float = Field(gt=0, description="Ratio of the new context length to the original one.")


class DynamicRopeScalingConfig(Section):
    """The base grows with the length of the sequence (NTK-aware scaling; bloc97, 2023)."""

    type: Literal["dynamic"] = Field(
        default="dynamic", description="The base grows where sequences are longer than the original context."
    )
    factor: float = Field(gt=0, description="Ratio of the new context length to the original one.")
    original_max_position_embeddings: PositiveInt | None = Field(
        default=None, description="Context length of the original training; null: `max_position_embedding`."
    )


class Llama3RopeScalingConfig(Section):
    """Frequencies scaled by wavelength, as in Llama 3.1."""

    type: Literal["llama3"] = Field(
        default="llama3", description="Low frequencies are divided by `factor`, high ones unchanged."
    )
    factor: float = Field(gt=0, description="Divisor of the low frequencies.")
    low_freq_factor: float = Field(
        default=1.0, gt=0, description="Wavelengths above original context / this are low frequencies."
    )
    high_freq_factor: float = Field(
        default=4.0, gt=0, description="Wavelengths below original context / this are high frequencies."
    )
    original_max_position_embeddings: PositiveInt = Field(
        default=8192, description="Context length of the original training."
    )


class YarnRopeScalingConfig(Section):
    """Low frequencies interpolated, high ones kept, scores sharpened (YaRN; Peng et al., 2023)."""

    type: Literal["yarn"] = Field(
        default="yarn", description="Frequencies with few turns in the original context are divided by `factor`."
    )
    factor: float = Field(gt=0, description="Ratio of the new context length to the original one.")
    beta_fast: float = Field(default=32.0, gt=0, description="Frequencies with more turns than this are unchanged.")
    beta_slow: float = Field(default=1.0, gt=0, description="Frequencies with fewer turns than this are divided.")
    attention_factor: float | None = Field(
        default=None,
        gt=0,
        description="Factor on the rotary tables; null: 0.1 ln `factor` + 1, or the value that the next two keys give.",
    )
    mscale: float | None = Field(
        default=None,
        gt=0,
        description="With `mscale_all_dim`, the factor is the ratio of 0.1 m ln `factor` + 1 for the two values.",
    )
    mscale_all_dim: float | None = Field(
        default=None,
        gt=0,
        description="Latent attention multiplies scores by the square of 0.1 m ln `factor` + 1 for this value.",
    )
    original_max_position_embeddings: PositiveInt | None = Field(
        default=None, description="Context length of the original training; null: `max_position_embedding`."
    )


RopeScalingConfig = Annotated[
    LinearRopeScalingConfig | DynamicRopeScalingConfig | Llama3RopeScalingConfig | YarnRopeScalingConfig,
    Field(discriminator="type"),
]


VALUES: dict[str, type[RopeScaling]] = {
    "linear": LinearRopeScaling,
    "dynamic": DynamicRopeScaling,
    "llama3": Llama3RopeScaling,
    "yarn": YarnRopeScaling,
}


def rope_scaling(section: RopeScalingConfig | None) -> RopeScaling | None:
    """Return the section as a value of an architecture."""
    return None if section is None else VALUES[section.type](**section.model_dump(exclude={"type"}))


NORM_WEIGHT = re.compile(r"norm\w*\.(weight|bias)$")
FLOAT32_WEIGHT = re.compile(r"(^|\.)router\.\w+$|\.lora_(e|magnitude)$|(^|\.)probe$")
"""Names of weights that stay float32: routers, per-row and per-rank scales of adapters, and counters."""
Files = Mapping[str, tuple[str, ...]]
"""Projections of a layer by their name in the family's files. Several projections may be one matrix there."""
LayerType = Literal["full_attention", "sliding_attention"]
TokenId = Annotated[int, Field(ge=0)]
_OffsetRow = Annotated[tuple[int, ...], Field(min_length=1)]
WrittenOffset = int | _OffsetRow | Annotated[tuple[_OffsetRow, ...], Field(min_length=1)]


def _offset(value: Any) -> Offset:
    if _is_int(value):
        return value
    if isinstance(value, list | tuple) and value:
        if all(map(_is_int, value)):
            return tuple(value)
        if all(isinstance(row, list | tuple) and row and all(map(_is_int, row)) for row in value):
            return tuple(tuple(row) for row in value)
    raise PydanticCustomError(
        "form", "must be an integer, a list with one per stage, or a list of such lists per chunk"
    )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# Derived defaults. An invalid value is absent from ``data``: its own error is reported, so any default will do.


def _default_kv_heads(data: dict[str, Any]) -> int:
    return data.get("num_heads", 1)


def _default_head_dim(data: dict[str, Any]) -> int:
    if data.get("kv_lora_rank") is not None:
        return data.get("qk_nope_head_dim", 1) + data.get("qk_rope_head_dim", 1)
    return max(1, data.get("hidden_size", 1) // data.get("num_heads", 1))


LARGEST_WIDTH = 2**53  # of integers that floating point counts; any model is narrower (LIMITS in checks/all.py)


def _default_intermediate_size(data: dict[str, Any]) -> int:
    multiple_of, multiplier = data.get("multiple_of", 1), data.get("ffn_dim_multiplier")
    return llama_intermediate_size(data.get("hidden_size", 1), multiple_of, multiplier)


def llama_intermediate_size(hidden_size: int, multiple_of: int, ffn_dim_multiplier: float | None) -> int:
    """Return the width of Llama's feed-forward: 2/3 of four times ``hidden_size``, multiplied, rounded up to ``multiple_of``."""
    width = 2 * 4 * hidden_size // 3
    if ffn_dim_multiplier is not None:
        width = int(min(ffn_dim_multiplier * min(width, LARGEST_WIDTH), float(LARGEST_WIDTH)))
    return multiple_of * max(1, (width + multiple_of - 1) // multiple_of)


def _default_expert_width(data: dict[str, Any]) -> int:
    return data.get("intermediate_size", 1)


def _default_max_position(data: dict[str, Any]) -> int:
    return data.get("seq_length", 1)


@dataclass(frozen=True)
class FileNames:
    """Names of projections in the files of a model's family; None: not looked up yet. Equality of models ignores them."""

    projections: Files | None = field(default=None, compare=False)


class ModelKeys(Section):
    """Keys of section ``model.model_config``. :class:`~mindllm.config.model.ModelConfig` adds the architecture they describe."""

    type: Literal["LlamaConfig"] = Field(default="LlamaConfig", description="Kind of configuration.")
    model_type: str | None = Field(
        default=None,
        description="Family of the model, as in Hugging Face's `config.json`; null: the first family with this "
        "architecture.",
    )
    vocab_size: PositiveInt = Field(description="Rows of the embedding table.")
    hidden_size: PositiveInt = Field(description="Width of the residual stream.")
    num_layers: PositiveInt = Field(description="Decoder layers.")
    num_heads: PositiveInt = Field(description="Query heads.")
    n_kv_heads: PositiveInt = Field(
        default_factory=_default_kv_heads, description="Key and value heads; default: `num_heads`."
    )
    kv_lora_rank: PositiveInt | None = Field(
        default=None,
        description="Multi-head latent attention: width of the key and value latent; null: ordinary attention.",
    )
    q_lora_rank: PositiveInt | None = Field(
        default=None,
        description="Latent attention: width of the query latent; null: queries come from the hidden states.",
    )
    qk_nope_head_dim: PositiveInt = Field(
        default=128, description="Latent attention: channels of a query or key head without position."
    )
    qk_rope_head_dim: PositiveInt = Field(
        default=64, description="Latent attention: channels of a query or key head with rotary positions."
    )
    v_head_dim: PositiveInt = Field(default=128, description="Latent attention: channels of a value head.")
    head_dim: PositiveInt = Field(
        default_factory=_default_head_dim,
        description="Width of a query or key head; default: `hidden_size / num_heads`, or the sum of the keys above.",
    )
    multiple_of: PositiveInt = Field(
        default=256, description="The default of `intermediate_size` is rounded up to a multiple of this."
    )
    ffn_dim_multiplier: float | None = Field(
        default=None, gt=0, description="Factor on the default of `intermediate_size`."
    )
    intermediate_size: PositiveInt = Field(
        default_factory=_default_intermediate_size,
        description="Width of the feed-forward; default: 8/3 `hidden_size`, multiplied and rounded up as above.",
    )
    seq_length: PositiveInt = Field(description="Tokens per sample. The only sequence length.")
    max_position_embedding: PositiveInt = Field(
        default_factory=_default_max_position, description="Maximum context length; default: `seq_length`."
    )
    position_embedding_type: Literal["rope", "alibi", "learned_absolute"] = Field(
        default="rope",
        description="Rotary positions, a slope per head on the distance (ALiBi), or a learned vector per position.",
    )
    theta: float = Field(default=10000.0, gt=0, description="Base of the rotary frequencies.")
    partial_rotary_factor: float = Field(
        default=1.0, gt=0, le=1, description="Fraction of the channels of a head with rotary positions."
    )
    rope_scaling: RopeScalingConfig | None = Field(
        default=None, description="Scaling of rotary positions to longer contexts; null: none."
    )
    sliding_window: PositiveInt | None = Field(
        default=None,
        description="Keys that a query attends to, including itself, in layers with a window; null: no windows.",
    )
    sliding_window_pattern: PositiveInt | None = Field(
        default=None, description="Every N-th layer has no window; null: all layers have the window, if there is one."
    )
    layer_types: List[LayerType] | None = Field(
        default=None,
        description="Attention of each layer, with or without a window; null: as given by the two keys above.",
    )
    rope_local_base_freq: float | None = Field(
        default=None,
        gt=0,
        description="Base of the rotary frequencies in layers with a window, without scaling; null: as in other layers.",
    )
    rms_norm_eps: float = Field(default=1e-5, gt=0, description="Added to the mean square or variance in norms.")
    normalization: Literal["RMSNorm", "LayerNorm"] = Field(
        default="RMSNorm", description="RMS norm, or layer norm with a bias."
    )
    layernorm_zero_centered_gamma: bool = Field(default=False, description="Norms multiply by 1 + weight (Gemma).")
    sandwich_norm: bool = Field(
        default=False,
        description="Additional norms on the outputs of attention and feed-forward, before the residual addition.",
    )
    qk_layernorm: bool = Field(default=False, description="Norm on every query and key head.")
    query_pre_attn_scalar: float | None = Field(
        default=None, gt=0, description="Scores are divided by its square root; null: `head_dim`."
    )
    attn_logit_softcapping: float | None = Field(
        default=None, gt=0, description="Soft cap of the attention scores, by tanh; null: none."
    )
    final_logit_softcapping: float | None = Field(
        default=None, gt=0, description="Soft cap of the logits, by tanh; null: none."
    )
    hidden_act: Activation = Field(default="silu", description="Activation of the feed-forward.")
    gated_linear_unit: bool = Field(
        default=True, description="The activation is multiplied by a second projection (SwiGLU, GeGLU)."
    )
    mlp_has_bias: bool = Field(default=False, description="Bias on the projections of the feed-forward.")
    mlp_proj_has_bias: bool = Field(default=False, description="Bias on the last projection of the feed-forward.")
    expert_num: PositiveInt = Field(
        default=1, description="Experts per layer; 1: dense feed-forward. The next keys configure experts."
    )
    num_experts_chosen: PositiveInt = Field(default=1, description="Experts chosen per token.")
    moe_intermediate_size: PositiveInt = Field(
        default_factory=_default_expert_width, description="Width of one expert; default: `intermediate_size`."
    )
    moe_shared_expert_intermediate_size: PositiveInt | None = Field(
        default=None, description="Width of the shared expert, which processes all tokens; null: none."
    )
    use_shared_expert_gating: bool = Field(
        default=False, description="The output of the shared expert is multiplied by a sigmoid gate of its input."
    )
    first_k_dense_replace: int = Field(default=0, ge=0, description="Number of first layers that are dense.")
    moe_layer_freq: PositiveInt | List[Literal[0, 1]] = Field(
        default=1, description="Every N-th layer, counted from the first, has experts; or a list with 1 or 0 per layer."
    )
    use_gating_sigmoid: bool = Field(
        default=False, description="Router scores are sigmoids of the logits; false: softmax."
    )
    norm_topk_prob: bool = Field(
        default=True, description="Weights of the chosen experts are normalized to a sum of 1."
    )
    routed_scaling_factor: float = Field(default=1.0, gt=0, description="Factor on the weights of the experts.")
    n_group: PositiveInt = Field(default=1, description="Groups of experts.")
    topk_group: PositiveInt = Field(default=1, description="Groups from which the experts of a token are chosen.")
    balance_via_topk_bias: bool = Field(
        default=False,
        description="A bias per expert, used only to choose experts, balances their load (DeepSeek-V3).",
    )
    topk_bias_update_rate: float = Field(default=0.0, ge=0, description="Change of that bias per step.")
    aux_loss_types: List[BalanceLoss] = Field(
        default=(),
        description="Auxiliary balance losses: `expert` per sequence; `switch` per micro batch; `global` per global "
        "batch, with the choices of the previous step; `device` and `communication` for the groups of "
        "`n_group`.",
    )
    aux_loss_factors: List[float] = Field(default=(), description="Factors of the auxiliary losses.")
    z_loss_factor: float = Field(default=0.0, ge=0, description="Factor of the router's z-loss.")
    capacity_factor: float | None = Field(
        default=None,
        gt=0,
        description="Maximum tokens of a sequence per expert, relative to an even share; null: no limit.",
    )
    moe_grouped_gemm: bool = Field(
        default=False,
        description="Tokens are sorted by expert and multiplied by a grouped GEMM: no token is dropped and no padding "
        "computed. Requires `capacity_factor: null`.",
    )
    moe_token_dispatcher_type: Literal["allgather", "alltoall"] = Field(
        default="allgather",
        description="How expert-parallel ranks exchange sorted tokens: `allgather` gathers all tokens on every rank; "
        "`alltoall` sends each choice to the rank of its expert (AlltoAllV). Requires `moe_grouped_gemm`.",
    )
    num_nextn_predict_layers: int = Field(
        default=0,
        ge=0,
        description="Multi-token prediction layers after the last layer, used in training only (DeepSeek-V3). `offset` "
        "and the lists of `recompute_config` count them as the last layers.",
    )
    mtp_loss_factor: float = Field(default=0.1, ge=0, description="Factor of the mean multi-token prediction loss.")
    scale_embeddings: bool = Field(
        default=False, description="Embeddings are multiplied by the square root of `hidden_size`."
    )
    embedding_norm: bool = Field(default=False, description="Norm on the embeddings (Bloom).")
    embedding_dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout of the embeddings in training.")
    attention_dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Dropout of the attention weights in training. It disables the fused kernel.",
    )
    hidden_dropout: float = Field(
        default=0.0, ge=0, lt=1, description="Dropout in training of the outputs of attention and feed-forward."
    )
    tie_word_embeddings: bool = Field(default=False, description="The output head shares the embedding table.")
    norm_head: bool = Field(
        default=False, description="Rows of the output head are normalized to length 1 (Baichuan 2)."
    )
    qkv_has_bias: bool = Field(default=False, description="Bias on the query, key and value projections.")
    attn_proj_has_bias: bool = Field(default=False, description="Bias on the output projection of the attention.")
    initializer_range: float = Field(default=0.02, gt=0, description="Standard deviation of the initial weights.")
    compute_dtype: DType = Field(default="float32", description="Type of matrix multiplications.")
    fp32_residual_connection: bool = Field(
        default=False,
        description="The residual stream is float32; false: `compute_dtype`.",
    )
    layernorm_compute_type: DType = Field(default="float32", description="Type in which norms are computed.")
    softmax_compute_type: DType = Field(default="float32", description="Type of the attention softmax.")
    rotary_dtype: DType = Field(default="float32", description="Type in which the rotation is applied.")
    param_init_type: DType = Field(
        default="float32",
        description="Type of the parameters, of their gradients, and of the communication of both. With half precision, "
        "moments stay float32; the update is computed in float32 and rounded (`optimizer.master_weights` "
        "keeps a float32 copy). Norms then have `layernorm_compute_type`; routers stay float32.",
    )
    use_flash_attention: bool | Literal["auto"] = Field(
        default="auto",
        description="Fused attention kernel, on devices that have one; auto: if it supports this attention.",
    )
    loss_chunks: PositiveInt = Field(
        default=1, description="Chunks in which the cross entropy is computed, to save memory."
    )
    bos_token_id: int | None = Field(
        default=None, ge=0, description="Beginning-of-sequence token; null: that of the tokenizer."
    )
    eos_token_id: TokenId | List[TokenId] | None = Field(
        default=None, description="End-of-document token, or a list of such tokens; null: that of the tokenizer."
    )
    pad_token_id: int | None = Field(default=None, ge=0, description="Padding token; null: that of the tokenizer.")
    offset: Annotated[Offset, PlainValidator(_offset, json_schema_input_type=WrittenOffset), UNCHANGED_SERIALIZER] = (
        Field(
            default=0,
            description="Layers added to the even share of stages: 0, a list with one number per stage, or one such list per "
            "chunk.",
        )
    )
    pp_interleave_num: PositiveInt = Field(default=1, description="Chunks of layers per pipeline stage.")
    fine_grain_interleave: PositiveInt = Field(
        default=1,
        description="Parts into which a layer splits its tokens outside attention, so that the computation of one "
        "overlaps the tensor-parallel communication of another; 1: no split.",
    )
    pet_config: PetConfig | None = Field(
        default=None, description="Parameter-efficient tuning; null: all weights are trained."
    )
    quantization_config: QuantizationConfig | None = Field(
        default=None, description="Quantization of the projections in the files, from `config.json`."
    )
    quantized_base: Literal["keep", "dequantize"] = Field(
        default="keep",
        description="`keep`: frozen projections of a quantized model stay packed and are dequantized on use; "
        "`dequantize`: they become float32.",
    )

    _file_names: FileNames = PrivateAttr(default_factory=FileNames)

    @model_validator(mode="before")
    @classmethod
    def _null_means_default(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if "quantised_base" in data:  # in YAMLs and checkpoints of earlier releases
            former = {"codes": "keep", "float32": "dequantize"}
            data = {"quantized_base" if key == "quantised_base" else key: value for key, value in data.items()}
            data["quantized_base"] = former.get(data["quantized_base"], data["quantized_base"])
        derived = ("n_kv_heads", "head_dim", "intermediate_size", "max_position_embedding", "moe_intermediate_size")
        return {key: value for key, value in data.items() if not (key in derived and value is None)}

    @property
    def frozen_dtype(self) -> DType:
        """Return the type of matrices that are not trained."""
        return (self.pet_config and self.pet_config.frozen_dtype) or self.param_init_type

    def parameter_type(self, name: str) -> DType:
        """Return the type of a trained weight of this name.

        Where others are in half precision, norms have ``layernorm_compute_type``, as ``LlamaRMSNorm`` of MindFormers 1.0 to 1.8
        has it, and routers are float32, its ``router_dense_type``. Its mcore networks and GLM have ``params_dtype`` for both:
        their memory is negligible, their precision is not.
        """
        if not self.has_half_parameters or FLOAT32_WEIGHT.search(name):
            return "float32"
        return self.layernorm_compute_type if NORM_WEIGHT.search(name) else self.param_init_type

    @property
    def has_half_parameters(self) -> bool:
        """Return True if parameters are in half precision."""
        return self.param_init_type != "float32"

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Return the tokens that end a document as a tuple; empty if the key is null."""
        if self.eos_token_id is None:
            return ()
        return (self.eos_token_id,) if isinstance(self.eos_token_id, int) else self.eos_token_id

    @property
    def placed_layers(self) -> int:
        """Return the number of layers on pipeline stages, including multi-token prediction layers."""
        return self.num_layers + self.num_nextn_predict_layers

    def name_projections(self, names: Files | None) -> Self:
        """Store the names of projections in the files of the family, once while loading, and return this model."""
        self._file_names = FileNames(names)
        return self

    @property
    def named_projections(self) -> Files | None:
        """Return :attr:`projections_in_files`, or None if they were not looked up."""
        return self._file_names.projections

    @property
    def projections_in_files(self) -> Files:
        """Return projections by their name in the files of the family; empty for a model without a family.

        Raises:
            RuntimeError: the names were not looked up; ``mindllm.families.with_file_names`` does that.
        """
        if self.named_projections is None:
            raise RuntimeError("names of projections are not resolved: load_config and with_file_names do that")
        return self.named_projections

    @property
    def base(self) -> Self:
        """Return the model without adapters and without frozen weights, as files of weights describe it."""
        return self if self.pet_config is None else self.model_copy(update={"pet_config": None})

    @property
    def frozen(self) -> Self:
        """Return the model without adapters and without trained weights. Quantized projections stay quantized."""
        if self.quantization_config is None:
            return self.base
        return self.model_copy(update={"pet_config": PetConfig(pet_type="full", freeze_include=("*",))})
