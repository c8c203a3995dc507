"""Sections about the update: ``optimizer``, ``lr_schedule`` and ``runner_wrapper`` (loss scale, gradient clipping)."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Strict, Tag, model_validator
from pydantic_core import PydanticCustomError

from mindllm.architecture.optimizer_state import CODE_BITS, MUON
from mindllm.config.section import Fraction, List, PositiveInt, Section

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


Coefficients = Annotated[tuple[float, float, float], Strict(False)]
JORDAN = (3.4445, -4.7750, 2.0315)
"""Coefficients of Jordan et al. (2024): steep at zero, so that five steps are enough."""
Patterns = Annotated[
    List[str],
    Field(min_length=1, description="Weights of the group, by shell patterns over their names (`*tok_embeddings*`)."),
]


class DecayGroup(Section):
    """Weights with a separate weight decay."""

    params: Patterns
    weight_decay: float = Field(ge=0, description="Weight decay of the group, including norms and biases.")


class OptimizerConfig(Section):
    """Section ``optimizer``. The learning rate has one place: ``lr_schedule.learning_rate``."""

    type: Literal["AdamW", "Muon"] = Field(
        default="AdamW",
        description="AdamW: decoupled weight decay; Muon: orthogonalized momentum for the matrices of layers (each "
        "expert separately), AdamW for other weights (embedding, head, norms, biases).",
    )
    bias_correction: bool = Field(
        default=True,
        description="Corrects the bias of the moments in the first steps; false: MindSpore's `AdamWeightDecay`.",
    )
    betas: Annotated[tuple[Beta, Beta], Strict(False)] = Field(
        default=(0.9, 0.95), description="Decay of the first and second moments."
    )
    eps: float = Field(default=1e-8, gt=0, description="Added to the square root of the second moment.")
    weight_decay: float = Field(default=0.1, ge=0, description="Weight decay of matrices; norms and biases have none.")
    momentum: Beta = Field(default=0.95, description="`type: Muon`: decay of the momentum of matrices.")
    nesterov: bool = Field(default=True, description="`type: Muon`: Nesterov momentum.")
    matched_adamw_rms: float = Field(
        default=0.2, gt=0, description="`type: Muon`: root mean square of an update, similar to that of AdamW."
    )
    ns_steps: PositiveInt = Field(default=5, description="`type: Muon`: Newton-Schulz steps.")
    ns_coefficients: List[Coefficients] = Field(
        default=(JORDAN,),
        min_length=1,
        description="`type: Muon`: `a, b, c` of every Newton-Schulz step, which maps a singular value `s` to `a s + b s³ "
        "+ c s⁵`; the last ones are repeated.",
    )
    qk_clip_threshold: float | None = Field(
        default=None,
        gt=0,
        description="`type: Muon`: largest attention logit. After the update, query and key weights of heads with a "
        "larger logit in this step are scaled down (QK-clip, Kimi K2: 100); null: off.",
    )
    state_bits: Literal[8, 32] = Field(
        default=32,
        description="`type: AdamW`: bits per number of the moments. 8: blocks with dynamic quantization and one scale "
        "each; weights with one axis, or with fewer than 16 blocks, keep 32.",
    )
    master_weights: bool = Field(
        default=False,
        description="With `param_init_type` in half precision: the optimizer state has a float32 copy of every "
        "parameter, which is updated and then rounded, as in Megatron-LM; false: the rounded parameter is "
        "updated, as in MindFormers.",
    )
    accumulate_in_float32: bool = Field(
        default=False,
        description="With `param_init_type` in half precision: gradients of micro batches are accumulated in float32, as "
        "in Megatron-LM; false: in the type of the parameters, as in MindFormers.",
    )
    state_block_size: PositiveInt = Field(default=256, description="`state_bits: 8`: numbers per block.")
    weight_decay_groups: List[DecayGroup] = Field(
        default=(),
        description="Weights with a separate weight decay; the first group with a matching pattern applies.",
    )

    @property
    def needs_cuts(self) -> bool:
        """Return True if an update depends on how its weight is sharded."""
        return self.type == MUON or self.state_bits == CODE_BITS

    @property
    def block(self) -> int:
        """Return the numbers per block of quantized moments; 0 without quantization."""
        return self.state_block_size if self.state_bits == CODE_BITS else 0

    @property
    def newton_schulz(self) -> tuple[tuple[float, float, float], ...]:
        """Return the coefficients of every Newton-Schulz step."""
        repeated = (self.ns_coefficients[-1],) * self.ns_steps
        return (*self.ns_coefficients, *repeated)[: self.ns_steps]

    def decay_of(self, name: str, dimensions: int) -> float:
        """Return the weight decay of a weight with this number of ``dimensions``."""
        for group in self.weight_decay_groups:
            if matches(name, group.params):
                return group.weight_decay
        return self.weight_decay if dimensions > 1 else 0.0


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Return True if a shell pattern matches the complete name of a weight."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class Schedule(Section):
    """What every schedule has: a peak, a warm-up, and a length."""

    learning_rate: float | None = Field(
        default=None, gt=0, description="Peak learning rate. The only learning rate. Required to train."
    )
    warmup_steps: int | None = Field(
        default=None, ge=0, description="Steps of the warm-up; alternative to `warmup_ratio`."
    )
    warmup_ratio: Fraction | None = Field(
        default=None, description="Warm-up as a fraction of all steps; alternative to `warmup_steps`."
    )
    warmup_lr_init: float = Field(default=0.0, ge=0, description="Learning rate at the first step of the warm-up.")
    total_steps: int = Field(default=-1, ge=-1, description="Length of the schedule in steps; -1: that of the run.")

    @model_validator(mode="after")
    def _check_warmup(self) -> Schedule:
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise PydanticCustomError("warmup", "warmup_steps and warmup_ratio are both given; set one of them to null")
        return self


class DecayingSchedule(Schedule):
    """A schedule that ends at ``lr_end``."""

    lr_end: float = Field(default=0.0, ge=0, description="Learning rate at the end.")


class ConstantSchedule(Schedule):
    """Constant after the warm-up."""

    type: Literal["ConstantWarmUpLR"] = Field(description="Constant after the warm-up.")


class LinearSchedule(DecayingSchedule):
    """Linear decay after the warm-up."""

    type: Literal["LinearWithWarmUpLR"] = Field(description="Linear decay after the warm-up.")


class CosineSchedule(DecayingSchedule):
    """Half a cosine after the warm-up."""

    type: Literal["CosineWithWarmUpLR"] = Field(description="Half a cosine after the warm-up.")


class CosineRestartsSchedule(DecayingSchedule):
    """Several half cosines after the warm-up."""

    type: Literal["CosineWithRestartsAndWarmUpLR"] = Field(description="Half cosines, each restarting at the peak.")
    num_cycles: float = Field(default=1.0, gt=0, description="Number of half cosines.")


class PolynomialSchedule(DecayingSchedule):
    """Polynomial decay after the warm-up."""

    type: Literal["PolynomialWithWarmUpLR"] = Field(description="Polynomial decay after the warm-up.")
    power: float = Field(default=1.0, gt=0, description="Exponent of the decay.")


class StableDecaySchedule(DecayingSchedule):
    """Warm-up, constant, then a short decay."""

    type: Literal["WarmUpStableDecayLR"] = Field(description="Warm-up, constant, decay at the end.")
    decay_ratio: Fraction = Field(default=0.1, description="Fraction of all steps for the final decay.")


class GroupedSchedule(Section):
    """What makes a schedule that of a group of weights."""

    params: Patterns


class ConstantGroup(GroupedSchedule, ConstantSchedule):
    """A group whose rate is constant after the warm-up."""


class LinearGroup(GroupedSchedule, LinearSchedule):
    """A group with a linear decay."""


class CosineGroup(GroupedSchedule, CosineSchedule):
    """A group with half a cosine."""


class CosineRestartsGroup(GroupedSchedule, CosineRestartsSchedule):
    """A group with several half cosines."""


class PolynomialGroup(GroupedSchedule, PolynomialSchedule):
    """A group with a polynomial decay."""


class StableDecayGroup(GroupedSchedule, StableDecaySchedule):
    """A group whose rate is constant, then decays."""


LrGroup = Annotated[
    ConstantGroup | LinearGroup | CosineGroup | CosineRestartsGroup | PolynomialGroup | StableDecayGroup,
    Field(discriminator="type"),
]


class GroupedLrSchedule(Section):
    """Section ``grouped_lr_schedule``: weights with a separate learning rate. Others follow ``lr_schedule``."""

    grouped: List[LrGroup] = Field(
        default=(), description="Groups of weights; the first group with a matching pattern applies."
    )

    def group_of(self, name: str) -> int:
        """Return the index of a weight's learning rate: 0 for ``lr_schedule``, then the groups in order."""
        numbers = (number for number, group in enumerate(self.grouped, 1) if matches(name, group.params))
        return next(numbers, 0)


LrSchedule = Annotated[
    ConstantSchedule
    | LinearSchedule
    | CosineSchedule
    | CosineRestartsSchedule
    | PolynomialSchedule
    | StableDecaySchedule,
    Field(discriminator="type"),
]


class DynamicLossScale(Section):
    """A loss scale that falls on overflow and rises after a while without one."""

    type: Literal["DynamicLossScaleUpdateCell"] = Field(
        description="Divided on overflow, multiplied after `scale_window`."
    )
    loss_scale_value: float = Field(default=65536.0, ge=1, description="Loss scale at the start.")
    scale_factor: float = Field(default=2.0, ge=1, description="Factor by which the scale changes.")
    scale_window: PositiveInt = Field(default=1000, description="Steps without overflow before the scale increases.")


class FixedLossScale(Section):
    """A constant loss scale; steps that overflow are skipped."""

    type: Literal["FixedLossScaleUpdateCell"] = Field(description="Constant; steps that overflow are skipped.")
    loss_scale_value: float = Field(default=65536.0, ge=1, description="Loss scale.")


def _scale_kind(value: Any) -> str | None:
    if isinstance(value, dict):
        return value.get("type")
    return getattr(value, "type", "number")


ScaleSense = Annotated[
    Annotated[float, Field(gt=0), Tag("number")]
    | Annotated[DynamicLossScale, Tag("DynamicLossScaleUpdateCell")]
    | Annotated[FixedLossScale, Tag("FixedLossScaleUpdateCell")],
    Discriminator(_scale_kind),
]


class SkipSpikesConfig(Section):
    """A guard against loss spikes: a step whose loss or gradient norm leaves its running range changes nothing."""

    window: int = Field(default=128, ge=2, description="Applied steps from which mean and deviation are computed.")
    deviations: float = Field(
        default=6.0, gt=0, description="Standard deviations above the mean that count as a spike."
    )
    watch: List[Literal["loss", "norm"]] = Field(
        default=(), description="Figures to watch; empty: both, in a pipeline the norm."
    )
    stop_after: int = Field(default=10, ge=0, description="Consecutive skipped steps that end the run; 0: unlimited.")


class RunnerWrapperConfig(Section):
    """Section ``runner_wrapper``: one training step around forward and backward."""

    type: Literal["MFTrainOneStepCell"] = Field(default="MFTrainOneStepCell", description="Kind of step.")
    scale_sense: ScaleSense = Field(default=1.0, description="Loss scale: a number, or a section with `type`.")
    use_clip_grad: bool = Field(default=True, description="Clips gradients by their global norm.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Maximum global norm of the gradients.")
    skip_spikes: SkipSpikesConfig | None = Field(
        default=None, description="Skips updates whose loss or norm leaves its running range."
    )
