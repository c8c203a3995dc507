"""Sections ``pet_config`` and ``preference``: which weights are trained, with which adapters, and losses of preference tuning.

LoRA: Hu et al., 2021; rsLoRA: Kalajdzievski, 2023; LoRA+: Hayou et al., 2024; DoRA: Liu et al., 2024; AdaLoRA: Zhang et al.,
2023; bottlenecks: Houlsby et al., 2019; LLaMA Pro: Wu et al., 2024; GaLore: Zhao et al., 2024; LISA: Pan et al., 2024; NEFTune:
Jain et al., 2023.
DPO: Rafailov et al., 2023; hinge: Zhao et al., 2023 (SLiC-HF); IPO: Azar et al., 2023; label smoothing: Mitchell, 2023 (cDPO);
ORPO: Hong et al., 2024; SimPO: Meng et al., 2024; KTO: Ethayarajh et al., 2024; APO-zero: D'Oosterlinck et al., 2024.
"""

from __future__ import annotations

import math
import re
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator
from pydantic_core import PydanticCustomError

from mindllm.architecture.adapters import B
from mindllm.architecture.tuners import ADALORA, BOTTLENECK, TUNERS, Tuner, Tuning, TuningKind
from mindllm.config.section import DType, List, PositiveInt, Section

ALL = "ALL"
ALL_SYNONYMS = ("all-linear", "all")  # as PEFT, ms-swift and LLaMA-Factory say it
RANK_EPSILON = 1e-5  # PEFT's AdaLoRA adds it to the rank it divides by


def _kind(value: Any) -> Any:
    return BOTTLENECK if value == "adapter" else value  # a synonym, and how checkpoints of earlier releases have it


class PetConfig(Section):
    """Section ``model.model_config.pet_config``: parameter-efficient tuning."""

    pet_type: Annotated[TuningKind, BeforeValidator(_kind, json_schema_input_type=TuningKind | Literal["adapter"])] = (
        Field(
            default="lora",
            description="lora: low-rank adapters, other weights frozen except `modules_to_save`; adalora: low-rank adapters "
            "with adaptive ranks; bottleneck: adapters after attention and feed-forward; llamapro: new layers "
            "between frozen ones; galore: all weights, with projected moments; lisa: a few layers at a time; "
            "full: all weights except those frozen by pattern.",
        )
    )
    lora_rank: PositiveInt = Field(default=8, description="Rank of the adapters.")
    lora_alpha: float = Field(default=16.0, gt=0, description="Adapters are scaled by `lora_alpha / lora_rank`.")
    use_rslora: bool = Field(
        default=False, description="Adapters are scaled by `lora_alpha / sqrt(lora_rank)` instead."
    )
    use_dora: bool = Field(
        default=False, description="DoRA: the magnitude of every row of an adapted weight is trained separately."
    )
    lora_dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout rate of the adapter input.")
    target_modules: str | List[str] = Field(
        default=ALL,
        description="Projections with adapters: ALL (or `all-linear`), a list of names (of mindllm or of the family's "
        "files), or a regular expression over paths, such as `.*wq|.*wv`. `pet_type: bottleneck`: ALL, or "
        "`attention` and `feed_forward`.",
    )
    modules_to_save: List[str] = Field(
        default=(),
        description="Modules that are trained in full in addition to adapters: norm_out, tok_embeddings, lm_head, …",
    )
    frozen_dtype: DType | None = Field(
        default=None,
        description="Type of frozen matrices; null: `param_init_type`. It rounds the matrices and has no other effect on "
        "the computation. Embeddings on a CPU, norms, biases and quantized weights are not affected.",
    )
    lora_plus_lr_ratio: float | None = Field(
        default=None, gt=0, description="LoRA+: learning rate of the second matrices relative to the first."
    )
    adalora_init_r: PositiveInt = Field(default=12, description="`pet_type: adalora`: initial rank of every adapter.")
    adalora_target_r: PositiveInt = Field(default=8, description="`pet_type: adalora`: mean rank at the end.")
    adalora_tinit: int = Field(default=0, ge=0, description="`pet_type: adalora`: steps before ranks are pruned.")
    adalora_tfinal: int = Field(default=0, ge=0, description="`pet_type: adalora`: final steps with fixed ranks.")
    adalora_delta_t: PositiveInt = Field(default=1, description="`pet_type: adalora`: steps between two prunings.")
    adalora_beta1: float = Field(
        default=0.85, gt=0, lt=1, description="`pet_type: adalora`: decay of the mean importance."
    )
    adalora_beta2: float = Field(
        default=0.85, gt=0, lt=1, description="`pet_type: adalora`: decay of the mean uncertainty."
    )
    adalora_orth_reg_weight: float = Field(
        default=0.5,
        ge=0,
        description="`pet_type: adalora`: weight of the orthogonality penalty; only its gradient is computed.",
    )
    adapter_length: PositiveInt = Field(default=128, description="`pet_type: bottleneck`: width of the bottlenecks.")
    num_new_blocks: PositiveInt = Field(
        default=4,
        description="`pet_type: llamapro`: number of new layers. Each is a copy of the last layer of a group of equal "
        "size, and its output starts at zero.",
    )
    galore_rank: PositiveInt = Field(
        default=128, description="`pet_type: galore`: rank of the projected gradients of matrices."
    )
    galore_update_proj_gap: PositiveInt = Field(
        default=200, description="`pet_type: galore`: steps between two updates of the projections."
    )
    galore_scale: float = Field(
        default=1.0, gt=0, description="`pet_type: galore`: factor on the update after projecting it back."
    )
    lisa_activated_layers: PositiveInt = Field(
        default=2,
        description="`pet_type: lisa`: layers trained at a time, in addition to embeddings, final norm and head.",
    )
    lisa_step_interval: PositiveInt = Field(
        default=20, description="`pet_type: lisa`: steps between two draws of layers."
    )
    freeze_include: List[str] = Field(
        default=(),
        description="`pet_type: full`: frozen weights, by shell patterns (`*tok_embeddings*`).",
    )
    freeze_exclude: List[str] = Field(
        default=(), description="`pet_type: full`: only weights with these patterns are trained."
    )
    neftune_noise_alpha: float | None = Field(
        default=None, gt=0, description="NEFTune: strength of the noise on embeddings in training; null: none."
    )

    @field_validator("target_modules")
    @classmethod
    def _is_expression(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if value in (*ALL_SYNONYMS, *((name,) for name in ALL_SYNONYMS)):
            return ALL
        if isinstance(value, str):
            try:
                re.compile(value)
            except re.error as error:
                raise PydanticCustomError(
                    "expression", "invalid regular expression: {why}", {"why": str(error)}
                ) from None
        return value

    def rate_factor(self, name: str, dimensions: int) -> float:
        """Return the learning rate of a weight relative to the run. With LoRA+, second matrices and vectors learn faster."""
        faster = name.endswith(f".{B}") or dimensions == 1
        return self.lora_plus_lr_ratio if self.lora_plus_lr_ratio and faster else 1.0

    @property
    def tuner(self) -> Tuner:
        """Return the tuning method."""
        return TUNERS[self.pet_type]

    @property
    def rank(self) -> int:
        """Return the initial rank of the adapters."""
        return self.adalora_init_r if self.pet_type == ADALORA else self.lora_rank

    @property
    def scale(self) -> float:
        """Return the factor on the output of adapters."""
        if self.pet_type == ADALORA:
            return self.lora_alpha / (self.adalora_init_r + RANK_EPSILON)
        return self.lora_alpha / (math.sqrt(self.lora_rank) if self.use_rslora else self.lora_rank)

    @property
    def tuning(self) -> Tuning:
        """Return the settings that the architecture depends on."""
        values = {field.name: getattr(self, field.name) for field in fields(Tuning)}
        return Tuning(**values | {"frozen_dtype": self.frozen_dtype or "float32"})


class PreferenceConfig(Section):
    """Loss of a pair, from the log-probability ratios of model and reference for the chosen and the rejected answer.

    ORPO and SimPO have no reference and use the log-probabilities of the answers.
    """

    loss_type: Literal["sigmoid", "hinge", "ipo", "orpo", "simpo", "kto", "apo_zero_unpaired"] = Field(
        default="sigmoid",
        description="sigmoid: DPO; hinge: SLiC; ipo: IPO, with means over the tokens of an answer instead of sums; orpo, "
        "simpo: means without a reference, so that all weights can be trained; kto, apo_zero_unpaired: rows "
        "with one answer that is desirable or not; a pair becomes two such rows.",
    )
    beta: float = Field(
        default=0.1,
        gt=0,
        description="Strength of the penalty for moving away from the reference; smaller values allow more. ipo: τ; "
        "orpo: λ, the weight of the odds ratio; simpo: factor on log-probabilities, 2 to 10 in the paper.",
    )
    simpo_gamma: float = Field(
        default=0.5, ge=0, description="`loss_type: simpo`: target margin between the rewards of the two answers."
    )
    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=0.5,
        description="`loss_type: sigmoid`: assumed fraction of pairs with swapped labels.",
    )

    desirable_weight: float = Field(
        default=1.0,
        gt=0,
        description="`loss_type: kto`, `apo_zero_unpaired`: loss weight of desirable answers.",
    )
    undesirable_weight: float = Field(
        default=1.0, gt=0, description="`loss_type: kto`, `apo_zero_unpaired`: loss weight of undesirable answers."
    )

    @property
    def is_unpaired(self) -> bool:
        """Return True if a row has one answer, which is desirable or not."""
        return self.loss_type in ("kto", "apo_zero_unpaired")

    @property
    def estimates_divergence(self) -> bool:
        """Return True if rows also have the answer of another row, to estimate the divergence from the reference."""
        return self.loss_type == "kto"

    @property
    def has_reference(self) -> bool:
        """Return True if the loss compares the model with a reference model."""
        return self.loss_type not in ("orpo", "simpo")
