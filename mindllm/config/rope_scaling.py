"""Key ``rope_scaling``: ways of stretching rotary positions to longer contexts than a model was trained on."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from mindllm.config.section import PositiveInt, Section


class LinearRopeScaling(Section):
    """Positions divided by ``factor`` (Chen et al. 2023, position interpolation)."""

    type: Literal["linear"] = Field(default="linear", description="Positions are divided by `factor`.")
    factor: float = Field(gt=0, description="Ratio of the new context length to the original one.")


class DynamicRopeScaling(Section):
    """The base grows with the length of the sequence (NTK-aware scaling; bloc97, 2023)."""

    type: Literal["dynamic"] = Field(
        default="dynamic", description="The base grows where sequences are longer than the original context."
    )
    factor: float = Field(gt=0, description="Ratio of the new context length to the original one.")
    original_max_position_embeddings: PositiveInt | None = Field(
        default=None, description="Context length of the original training; null: `max_position_embedding`."
    )


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


class YarnRopeScaling(Section):
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

    def sharpened(self, share: float = 1.0) -> float:
        """``0.1 · share · ln factor + 1``, by which scores grow with the context."""
        return 0.1 * share * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    @property
    def magnitude(self) -> float:
        """Factor on both rotary tables."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.sharpened(self.mscale) / self.sharpened(self.mscale_all_dim)
        return self.sharpened()


RopeScaling = Annotated[
    LinearRopeScaling | DynamicRopeScaling | Llama3RopeScaling | YarnRopeScaling, Field(discriminator="type")
]
