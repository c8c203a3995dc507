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
    """Weights with a decay of their own."""

    params: Patterns
    weight_decay: float = Field(ge=0, description="Their decay, of norms and biases too.")


class OptimizerConfig(Section):
    """Section ``optimizer``. The learning rate has one place: ``lr_schedule.learning_rate``."""

    type: Literal["AdamW", "Muon"] = Field(
        default="AdamW",
        description="AdamW: with decoupled weight decay; Muon: momentum of the matrices of layers, made orthogonal, of experts "
        "each by itself, and AdamW of all other weights (embedding, head, norms, biases).",
    )
    bias_correction: bool = Field(
        default=True,
        description="Divides the moments by what they miss in the first steps; false: MindSpore's `AdamWeightDecay`.",
    )
    betas: Annotated[tuple[Beta, Beta], Strict(False)] = Field(
        default=(0.9, 0.95), description="Decay of the first and second moments."
    )
    eps: float = Field(default=1e-8, gt=0, description="Added to the root of the second moment.")
    weight_decay: float = Field(default=0.1, ge=0, description="Decay of matrices; norms and biases are not decayed.")
    momentum: Beta = Field(default=0.95, description="`type: Muon`: decay of the momentum of matrices.")
    nesterov: bool = Field(default=True, description="In it: Nesterov's form of the momentum.")
    matched_adamw_rms: float = Field(
        default=0.2, gt=0, description="In it: root mean square of a step's entries, near that of AdamW's steps."
    )
    ns_steps: PositiveInt = Field(default=5, description="In it: Newton-Schulz steps.")
    ns_coefficients: List[Coefficients] = Field(
        default=(JORDAN,),
        min_length=1,
        description="In it: `a, b, c` of every Newton-Schulz step, which maps a singular value `s` to `a s + b s³ + c s⁵`; the "
        "last ones are repeated.",
    )
    qk_clip_threshold: float | None = Field(
        default=None,
        gt=0,
        description="In it: largest attention logit. Behind the update, rows of query and key weights are scaled back of heads "
        "whose largest logit of the step was above it (QK-clip, Kimi K2: 100); null: none are.",
    )
    state_bits: Literal[8, 32] = Field(
        default=32,
        description="`type: AdamW`: bits of a number of its moments. 8: blocks of codes of dynamic quantization, with a scale "
        "each; weights with one axis, or with fewer than 16 blocks, keep 32.",
    )
    master_weights: bool = Field(
        default=False,
        description="`param_init_type` in half precision: the state keeps a float32 copy of every such parameter, which is "
        "updated and then rounded, as in Megatron-LM; false: the rounded parameter is updated, as in MindFormers.",
    )
    accumulate_in_float32: bool = Field(
        default=False,
        description="`param_init_type` in half precision: gradients of micro-batches are added up in float32, as in Megatron-LM; "
        "false: in the type of the parameters, as in MindFormers.",
    )
    state_block_size: PositiveInt = Field(default=256, description="`state_bits: 8`: numbers of a block.")
    weight_decay_groups: List[DecayGroup] = Field(
        default=(),
        description="Weights with a decay of their own; the first group with a pattern that matches decides.",
    )

    @property
    def needs_cuts(self) -> bool:
        """Whether an update depends on how its weight is cut over devices."""
        return self.type == MUON or self.state_bits == CODE_BITS

    @property
    def block(self) -> int:
        """Numbers of a block of moments in codes; 0: none are."""
        return self.state_block_size if self.state_bits == CODE_BITS else 0

    @property
    def newton_schulz(self) -> tuple[tuple[float, float, float], ...]:
        """The coefficients of every Newton-Schulz step."""
        repeated = (self.ns_coefficients[-1],) * self.ns_steps
        return (*self.ns_coefficients, *repeated)[: self.ns_steps]

    def decay_of(self, name: str, dimensions: int) -> float:
        """The decay of a weight with so many ``dimensions``."""
        for group in self.weight_decay_groups:
            if matches(name, group.params):
                return group.weight_decay
        return self.weight_decay if dimensions > 1 else 0.0


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether one of the shell patterns matches the whole name of a weight."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class Schedule(Section):
    """What every schedule has: a peak, a warm-up, and a length."""

    learning_rate: float | None = Field(
        default=None, gt=0, description="Peak learning rate. The only learning rate. Required to train."
    )
    warmup_steps: int | None = Field(default=None, ge=0, description="Steps of the warm-up; or give `warmup_ratio`.")
    warmup_ratio: Fraction | None = Field(
        default=None, description="Warm-up as a part of all steps; or give `warmup_steps`."
    )
    warmup_lr_init: float = Field(default=0.0, ge=0, description="Learning rate at the first step of the warm-up.")
    total_steps: int = Field(default=-1, ge=-1, description="Length of the schedule in steps; -1: that of the run.")

    @model_validator(mode="after")
    def _one_warmup(self) -> Schedule:
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

    type: Literal["CosineWithRestartsAndWarmUpLR"] = Field(description="Half cosines, each from the peak again.")
    num_cycles: float = Field(default=1.0, gt=0, description="Number of half cosines.")


class PolynomialSchedule(DecayingSchedule):
    """Polynomial decay after the warm-up."""

    type: Literal["PolynomialWithWarmUpLR"] = Field(description="Polynomial decay after the warm-up.")
    power: float = Field(default=1.0, gt=0, description="Exponent of the decay.")


class StableDecaySchedule(DecayingSchedule):
    """Warm-up, constant, then a short decay."""

    type: Literal["WarmUpStableDecayLR"] = Field(description="Warm-up, constant, decay at the end.")
    decay_ratio: Fraction = Field(default=0.1, description="Part of all steps that the final decay takes.")


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
    """Section ``grouped_lr_schedule``: weights with a learning rate of their own; all others follow ``lr_schedule``."""

    grouped: List[LrGroup] = Field(
        default=(), description="Groups of weights; the first one with a pattern that matches decides."
    )

    def group_of(self, name: str) -> int:
        """The number of a weight's rate: 0 that of ``lr_schedule``, then those of the groups in their order."""
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
    scale_factor: float = Field(default=2.0, ge=1, description="Factor of a change.")
    scale_window: PositiveInt = Field(default=1000, description="Steps without overflow before the scale rises.")


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

    window: int = Field(default=128, ge=2, description="Applied steps whose mean and deviation are the range.")
    deviations: float = Field(default=6.0, gt=0, description="Standard deviations above the mean that are too many.")
    watch: List[Literal["loss", "norm"]] = Field(
        default=(), description="What is watched; empty: both, in a pipeline the norm."
    )
    stop_after: int = Field(default=10, ge=0, description="Skipped steps in a row that end the run; 0: none do.")


class RunnerWrapperConfig(Section):
    """Section ``runner_wrapper``: one training step around forward and backward."""

    type: Literal["MFTrainOneStepCell"] = Field(default="MFTrainOneStepCell", description="Kind of step.")
    scale_sense: ScaleSense = Field(default=1.0, description="Loss scale: a number, or a section with `type`.")
    use_clip_grad: bool = Field(default=True, description="Clips gradients by their global norm.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Largest global norm of the gradients.")
    skip_spikes: SkipSpikesConfig | None = Field(
        default=None, description="Skips the update of steps whose loss or norm leaves the running range."
    )
