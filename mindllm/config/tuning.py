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
ALL_OF_OTHERS = ("all-linear", "all")  # as PEFT, ms-swift and LLaMA-Factory say it
RANK_EPSILON = 1e-5  # PEFT's AdaLoRA adds it to the rank it divides by


def _kind(value: Any) -> Any:
    return BOTTLENECK if value == "adapter" else value  # a synonym, and how checkpoints of earlier releases have it


class PetConfig(Section):
    """Section ``model.model_config.pet_config``: parameter-efficient tuning."""

    pet_type: Annotated[TuningKind, BeforeValidator(_kind, json_schema_input_type=TuningKind | Literal["adapter"])] = (
        Field(
            default="lora",
            description="lora: low-rank adapters are trained, the model is frozen but for `modules_to_save`; adalora: so are "
            "adapters whose ranks go to where they matter; bottleneck: adapters behind attention and feed-forward; llamapro: new "
            "layers between frozen ones; galore: all, with projected moments; lisa: a few layers at a time; full: the model is "
            "trained but for what is frozen by pattern.",
        )
    )
    lora_rank: PositiveInt = Field(default=8, description="Rank of the adapters.")
    lora_alpha: float = Field(default=16.0, gt=0, description="Adapters are scaled by `lora_alpha / lora_rank`.")
    use_rslora: bool = Field(
        default=False, description="Adapters are scaled by `lora_alpha / sqrt(lora_rank)` instead."
    )
    use_dora: bool = Field(
        default=False, description="DoRA: the length of every row of an adapted weight is trained by itself."
    )
    lora_dropout: float = Field(default=0.0, ge=0, lt=1, description="Part of an adapter's input that is dropped.")
    target_modules: str | List[str] = Field(
        default=ALL,
        description="Projections with adapters: ALL (or `all-linear`), a list of names (ours or those of the family's files), or "
        "a regular expression over whole paths, such as `.*wq|.*wv`. `pet_type: bottleneck`: ALL, or of `attention`, "
        "`feed_forward`.",
    )
    modules_to_save: List[str] = Field(
        default=(), description="Parts trained whole beside the adapters, by name: norm_out, tok_embeddings, lm_head, …"
    )
    frozen_dtype: DType | None = Field(
        default=None,
        description="Type of matrices that are not trained; null: `param_init_type`. What is computed with them is not changed "
        "by it, but for their rounding. Embeddings of a CPU, norms and biases have their own type, and codes stay codes.",
    )
    lora_plus_lr_ratio: float | None = Field(
        default=None, gt=0, description="LoRA+: learning rate of the second matrices relative to that of the first."
    )
    adalora_init_r: PositiveInt = Field(
        default=12, description="`pet_type: adalora`: rank that every adapter begins with."
    )
    adalora_target_r: PositiveInt = Field(default=8, description="In it: rank that is left at the end, on average.")
    adalora_tinit: int = Field(default=0, ge=0, description="In it: steps before the first ranks are removed.")
    adalora_tfinal: int = Field(default=0, ge=0, description="In it: steps at the end of the run with the last choice.")
    adalora_delta_t: PositiveInt = Field(default=1, description="In it: steps from one choice of ranks to the next.")
    adalora_beta1: float = Field(default=0.85, gt=0, lt=1, description="In it: decay of the mean of importance.")
    adalora_beta2: float = Field(default=0.85, gt=0, lt=1, description="In it: decay of the mean of its changes.")
    adalora_orth_reg_weight: float = Field(
        default=0.5,
        ge=0,
        description="In it: weight of the penalty that keeps ranks orthogonal; its gradient alone is computed.",
    )
    adapter_length: PositiveInt = Field(default=128, description="`pet_type: bottleneck`: width of the bottlenecks.")
    num_new_blocks: PositiveInt = Field(
        default=4,
        description="`pet_type: llamapro`: so many layers are copied behind themselves, the last of every group of equally many; "
        "a copy begins by adding nothing.",
    )
    galore_rank: PositiveInt = Field(
        default=128, description="`pet_type: galore`: rank of the gradients that the moments of matrices see."
    )
    galore_update_proj_gap: PositiveInt = Field(
        default=200, description="In it: steps from one choice of the projections to the next."
    )
    galore_scale: float = Field(default=1.0, gt=0, description="In it: factor on what is projected back.")
    lisa_activated_layers: PositiveInt = Field(
        default=2,
        description="`pet_type: lisa`: layers that are trained at a time, beside embeddings, final norm and head.",
    )
    lisa_step_interval: PositiveInt = Field(default=20, description="In it: steps from one draw of layers to the next.")
    freeze_include: List[str] = Field(
        default=(),
        description="`pet_type: full`: weights that are not trained, by shell patterns (`*tok_embeddings*`).",
    )
    freeze_exclude: List[str] = Field(
        default=(), description="`pet_type: full`: all but the weights of these patterns are not trained."
    )
    neftune_noise_alpha: float | None = Field(
        default=None, gt=0, description="NEFTune: strength of the noise on embeddings while training; null: none."
    )

    @field_validator("target_modules")
    @classmethod
    def _is_expression(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if value in (*ALL_OF_OTHERS, *((name,) for name in ALL_OF_OTHERS)):
            return ALL
        if isinstance(value, str):
            try:
                re.compile(value)
            except re.error as error:
                raise PydanticCustomError(
                    "expression", "is no regular expression: {why}", {"why": str(error)}
                ) from None
        return value

    def rate_factor(self, name: str, dimensions: int) -> float:
        """The learning rate of a weight relative to that of the run: LoRA+ lets second matrices, and vectors, learn faster."""
        faster = name.endswith(f".{B}") or dimensions == 1
        return self.lora_plus_lr_ratio if self.lora_plus_lr_ratio and faster else 1.0

    @property
    def tuner(self) -> Tuner:
        """How the model is tuned."""
        return TUNERS[self.pet_type]

    @property
    def rank(self) -> int:
        """Of adapters beside projections, as they are built."""
        return self.adalora_init_r if self.pet_type == ADALORA else self.lora_rank

    @property
    def scale(self) -> float:
        """The factor on what adapters add."""
        if self.pet_type == ADALORA:
            return self.lora_alpha / (self.adalora_init_r + RANK_EPSILON)
        return self.lora_alpha / (math.sqrt(self.lora_rank) if self.use_rslora else self.lora_rank)

    @property
    def tuning(self) -> Tuning:
        """What of it an architecture knows."""
        values = {field.name: getattr(self, field.name) for field in fields(Tuning)}
        return Tuning(**values | {"frozen_dtype": self.frozen_dtype or "float32"})


class PreferenceConfig(Section):
    """The loss of a pair, from how much likelier than the reference the model makes the chosen answer and the rejected one.

    ORPO and SimPO have no reference: how likely the answers are decides.
    """

    loss_type: Literal["sigmoid", "hinge", "ipo", "orpo", "simpo", "kto", "apo_zero_unpaired"] = Field(
        default="sigmoid",
        description="sigmoid: DPO; hinge: SLiC; ipo: IPO, with means over the tokens of an answer in place of sums; orpo, simpo: "
        "such means without a reference, so that all weights may be trained. kto, apo_zero_unpaired: rows of one answer each, "
        "which is desirable or not; pairs become two such rows.",
    )
    beta: float = Field(
        default=0.1,
        gt=0,
        description="How far the model may go from the reference: smaller, farther. ipo: its τ; orpo: its λ, the weight of the "
        "odds ratio; simpo: what log-probabilities are multiplied by, 2 to 10 in the paper.",
    )
    simpo_gamma: float = Field(
        default=0.5, ge=0, description="`loss_type: simpo`: by how much the chosen answer's reward should be larger."
    )
    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=0.5,
        description="`loss_type: sigmoid`: part of the pairs taken to be the wrong way round.",
    )

    desirable_weight: float = Field(
        default=1.0,
        gt=0,
        description="`loss_type: kto`, `apo_zero_unpaired`: weight of the losses of desirable answers.",
    )
    undesirable_weight: float = Field(default=1.0, gt=0, description="The same of the other answers.")

    @property
    def is_unpaired(self) -> bool:
        """Whether a row has one answer, which is desirable or not."""
        return self.loss_type in ("kto", "apo_zero_unpaired")

    @property
    def estimates_divergence(self) -> bool:
        """Whether rows have another row's answer, too, by which the distance from the reference is estimated."""
        return self.loss_type == "kto"

    @property
    def has_reference(self) -> bool:
        """Whether the model is compared with what it was before."""
        return self.loss_type not in ("orpo", "simpo")
