"""Sections ``model`` and ``model.model_config``: ``ModelConfig.architecture`` is what the keys of a decoder describe."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mindllm.architecture.decoder import Architecture
from mindllm.config.decoder.architecture import architecture_of, merged_model
from mindllm.config.decoder.keys import ModelKeys
from mindllm.config.section import Section


class ModelConfig(ModelKeys):
    """Section ``model.model_config``: a decoder."""

    @property
    def architecture(self) -> Architecture:
        """What these keys describe."""
        return architecture_of(self)

    @property
    def merged(self) -> ModelConfig:
        """The model that is exported, evaluated and chatted with: what was trained is merged into its weights."""
        return merged_model(self)

    @property
    def layer_count(self) -> int:
        """Layers that are built: ``num_layers``, and those that tuning adds."""
        return len(self.architecture.layers)

    def parameter_count(self) -> int:
        """Number of scalars, exact; adapters are counted, frozen weights too."""
        return self.architecture.parameter_count()

    def flops_per_token(self, seq_length: int | None = None) -> float:
        """Model FLOPs of forward and backward for a token in a sequence of ``seq_length`` (default: as configured)."""
        return self.architecture.flops_per_token(seq_length or self.seq_length)


class ArchConfig(Section):
    """Section ``model.arch``."""

    type: Literal["LlamaForCausalLM"] = Field(default="LlamaForCausalLM", description="Kind of network.")


class ModelSection(Section):
    """Section ``model``. The key ``model_config`` is the attribute ``config``: pydantic keeps the other name."""

    arch: ArchConfig = Field(default_factory=ArchConfig, description="Kind of network.")
    config: ModelConfig = Field(alias="model_config", description="The architecture.")
