"""Sections ``model`` and ``model.model_config``: the architecture. What follows from other values is filled in.

Defaults of the feed-forward width follow Meta's Llama reference code (``llama/model.py``, class ``FeedForward``).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from mindllm.config import model_size
from mindllm.config.layer_counts import Offset
from mindllm.config.section import DType, List, PositiveInt, Section


class LinearRopeScaling(Section):
    """Positions divided by ``factor`` (Chen et al. 2023, position interpolation)."""

    type: Literal["linear"] = Field(default="linear", description="Positions are divided by `factor`.")
    factor: float = Field(gt=0, description="Ratio of the new context length to the original one.")


class Llama3RopeScaling(Section):
    """Frequencies scaled by wavelength, as in Llama 3.1."""

    type: Literal["llama3"] = Field(
        default="llama3", description="Low frequencies are divided by `factor`, high ones kept."
    )
    factor: float = Field(gt=0, description="Divisor of the low frequencies.")
    low_freq_factor: float = Field(
        default=1.0, gt=0, description="Wavelengths above original / this are low frequencies."
    )
    high_freq_factor: float = Field(
        default=4.0, gt=0, description="Wavelengths below original / this are high frequencies."
    )
    original_max_position_embeddings: PositiveInt = Field(
        default=8192, description="Context length of the original training."
    )


TokenId = Annotated[int, Field(ge=0)]
RopeScaling = Annotated[LinearRopeScaling | Llama3RopeScaling, Field(discriminator="type")]


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


# Values that follow from others. A value that was refused is absent from ``data``; its own error is reported then, and what
# follows from it is not looked at.


def _default_kv_heads(data: dict[str, Any]) -> int:
    return data.get("num_heads", 1)


def _default_head_dim(data: dict[str, Any]) -> int:
    return max(1, data.get("hidden_size", 1) // data.get("num_heads", 1))


def _default_intermediate_size(data: dict[str, Any]) -> int:
    multiple_of, multiplier = data.get("multiple_of", 1), data.get("ffn_dim_multiplier")
    return model_size.llama_intermediate_size(data.get("hidden_size", 1), multiple_of, multiplier)


def _default_max_position(data: dict[str, Any]) -> int:
    return data.get("seq_length", 1)


class ModelConfig(Section):
    """Section ``model.model_config``: a Llama-shaped decoder."""

    type: Literal["LlamaConfig"] = Field(default="LlamaConfig", description="Kind of configuration.")
    vocab_size: PositiveInt = Field(description="Rows of the embedding table.")
    hidden_size: PositiveInt = Field(description="Width of the residual stream.")
    num_layers: PositiveInt = Field(description="Decoder layers.")
    num_heads: PositiveInt = Field(description="Query heads.")
    n_kv_heads: PositiveInt = Field(
        default_factory=_default_kv_heads, description="Key and value heads; default: `num_heads`."
    )
    head_dim: PositiveInt = Field(
        default_factory=_default_head_dim,
        description="Width of one head; default: `hidden_size / num_heads`.",
    )
    multiple_of: PositiveInt = Field(
        default=256, description="The default of `intermediate_size` is rounded up to a multiple."
    )
    ffn_dim_multiplier: float | None = Field(
        default=None, gt=0, description="Factor on the default of `intermediate_size`."
    )
    intermediate_size: PositiveInt = Field(
        default_factory=_default_intermediate_size,
        description="Width of the feed-forward; default: 8/3 `hidden_size`, multiplied and rounded up as above.",
    )
    seq_length: PositiveInt = Field(description="Tokens of one sample. The only sequence length.")
    max_position_embedding: PositiveInt = Field(
        default_factory=_default_max_position, description="Longest context; default: `seq_length`."
    )
    theta: float = Field(default=10000.0, gt=0, description="Base of the rotary frequencies.")
    rope_scaling: RopeScaling | None = Field(
        default=None, description="Stretching of the rotary positions; null: none."
    )
    rms_norm_eps: float = Field(default=1e-5, gt=0, description="Added to the mean square in RMSNorm.")
    tie_word_embeddings: bool = Field(default=False, description="The output head is the embedding table.")
    qkv_has_bias: bool = Field(default=False, description="Bias on the query, key and value projections.")
    attn_proj_has_bias: bool = Field(default=False, description="Bias on the output projection of the attention.")
    initializer_range: float = Field(default=0.02, gt=0, description="Standard deviation of the initial weights.")
    compute_dtype: DType = Field(default="float32", description="Type of matrix multiplications.")
    layernorm_compute_type: DType = Field(default="float32", description="Type inside the norms.")
    softmax_compute_type: DType = Field(default="float32", description="Type of the attention's softmax.")
    rotary_dtype: DType = Field(default="float32", description="Type in which the rotation is applied.")
    param_init_type: Literal["float32"] = Field(default="float32", description="Type of the parameters.")
    use_flash_attention: bool | Literal["auto"] = Field(
        default="auto", description="Fused attention kernel; auto: where the device has it."
    )
    loss_chunks: PositiveInt = Field(
        default=1, description="Slices in which the cross entropy is computed, to save memory."
    )
    bos_token_id: int | None = Field(default=None, ge=0, description="Begin of sequence; null: the tokenizer's.")
    eos_token_id: TokenId | List[TokenId] | None = Field(
        default=None, description="End of document, or a list of tokens that are one; null: the tokenizer's."
    )
    pad_token_id: int | None = Field(default=None, ge=0, description="Padding; null: the tokenizer's.")
    offset: Annotated[Offset, PlainValidator(_offset)] = Field(
        default=0,
        description="Layers beyond the even share: one number, one per stage, or one list of stages per chunk.",
    )
    pp_interleave_num: PositiveInt = Field(default=1, description="Chunks of layers per pipeline stage.")

    @model_validator(mode="before")
    @classmethod
    def _null_means_default(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        derived = ("n_kv_heads", "head_dim", "intermediate_size", "max_position_embedding")
        return {key: value for key, value in data.items() if not (key in derived and value is None)}

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a document, as a tuple in every case; none where the key is null."""
        if self.eos_token_id is None:
            return ()
        return (self.eos_token_id,) if isinstance(self.eos_token_id, int) else self.eos_token_id

    def parameter_count(self) -> int:
        """Number of trainable scalars, exact."""
        return model_size.parameter_count(self)

    def flops_per_token(self, seq_length: int | None = None) -> float:
        """Model FLOPs of forward and backward for a token in a sequence of ``seq_length`` (default: as configured)."""
        return model_size.flops_per_token(self, seq_length or self.seq_length)


class ArchConfig(Section):
    """Section ``model.arch``."""

    type: Literal["LlamaForCausalLM"] = Field(default="LlamaForCausalLM", description="Kind of network.")


class ModelSection(Section):
    """Section ``model``. The key ``model_config`` is the attribute ``config``: pydantic keeps the other name."""

    arch: ArchConfig = Field(default_factory=ArchConfig, description="Kind of network.")
    config: ModelConfig = Field(alias="model_config", description="The architecture.")
