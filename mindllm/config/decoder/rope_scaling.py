"""Section ``rope_scaling``: ways of stretching rotary positions to longer contexts than a model was trained on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mindllm.architecture.parts import (
    DynamicRopeScaling,
    LinearRopeScaling,
    Llama3RopeScaling,
    RopeScaling,
    YarnRopeScaling,
)
from mindllm.config.section import PositiveInt, Section


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


class YarnRopeScalingConfig(Section):
    """Low frequencies interpolated, high ones kept, scores sharpened (YaRN; Peng et al., 2023)."""

    type: Literal["yarn"] = Field(
        default="yarn", description="Frequencies with few turns in the original context are divided by `factor`."
    )
    factor: float = Field(gt=0, description="Ratio of the new context length to the original one.")
    beta_fast: float = Field(default=32.0, gt=0, description="Frequencies with more turns than this are kept.")
    beta_slow: float = Field(default=1.0, gt=0, description="Frequencies with fewer turns than this are divided.")
    attention_factor: float | None = Field(
        default=None,
        gt=0,
        description="Factor on the tables; null: 0.1 ln `factor` + 1, or what the two keys below say.",
    )
    mscale: float | None = Field(
        default=None,
        gt=0,
        description="With `mscale_all_dim`, the factor is the ratio of 0.1 m ln `factor` + 1 of both.",
    )
    mscale_all_dim: float | None = Field(
        default=None, gt=0, description="Latent attention multiplies scores by the square of its 0.1 m ln `factor` + 1."
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
    """Return what the section says as a value of an architecture."""
    return None if section is None else VALUES[section.type](**section.model_dump(exclude={"type"}))
