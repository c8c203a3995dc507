"""AdamW (Loshchilov & Hutter, 2019) with fp32 state; with bias correction, equal to PyTorch's ``torch.optim.AdamW``.

Weight decay is decoupled and falls on matrices only: norms and biases (one axis) are a group without decay, as in
Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import ops as P

from mindllm.architecture.optimizer_state import MASTER, MOMENTS, POWERS
from mindllm.config import OptimizerConfig
from mindllm.config.optimizer import GroupedLrSchedule
from mindllm.config.tuning import PetConfig
from mindllm.models.experts.expert_load import is_probe
from mindllm.models.weights import is_half
from mindllm.train.expert_loads import ExpertLoads
from mindllm.train.optimizers.half_weights import (
    clone_state,
    in_float32,
    rounded_to,
    stores_half,
    value_rounding,
    value_types,
)

update = ops.MultitypeFuncGraph("adamw_update")


update_at_own_rate = ops.MultitypeFuncGraph("adamw_update_at_own_rate")


update_by_group = ops.MultitypeFuncGraph("adamw_update_by_group")


update_masters = ops.MultitypeFuncGraph("adamw_update_masters")


scaled = ops.MultitypeFuncGraph("scaled")


@scaled.register("Tensor", "Tensor")
def _scaled(coefficient, gradient):
    return gradient * coefficient


@update.register("Function", "Tensor", "Tensor", "Tensor", "Tensor", "Tensor", "Tensor", "Tensor", "Tensor", "Tensor")
def _update_one(kernel, rate, correction1, correction2, coefficient, decay, weight, moment1, moment2, gradient):
    """Updates one weight and its moments in place with ``coefficient * gradient``."""
    return kernel(weight, moment1, moment2, rate, correction1, correction2, decay, gradient, coefficient)


@update_at_own_rate.register(
    "Function", "Tensor", "Tensor", "Tensor", "Tensor", "Tensor", "Tensor", "Tensor", "Tensor", "Tensor", "Tensor"
)
def _update_at_own_rate(
    kernel, rate, correction1, correction2, coefficient, factor, decay, weight, moment1, moment2, gradient
):
    """The same at ``factor`` times the rate."""
    return kernel(weight, moment1, moment2, rate * factor, correction1, correction2, decay, gradient, coefficient)


@update_by_group.register(
    "Function", "Tensor", "Tensor", "Tensor", "Tensor", "Tensor", "Tensor", "Tensor", "Tensor", "Tensor"
)
def _update_by_group(kernel, correction1, correction2, coefficient, rate, decay, weight, moment1, moment2, gradient):
    """The same where every weight has a rate."""
    return kernel(weight, moment1, moment2, rate, correction1, correction2, decay, gradient, coefficient)


@update_masters.register(
    "Function",
    "Tensor",
    "Tensor",
    "Tensor",
    "Tensor",
    "Tensor",
    "Tensor",
    "Tensor",
    "Tensor",
    "Tensor",
    "Tensor",
    "Tensor",
)
def _update_master(
    kernel, begins, correction1, correction2, coefficient, rate, decay, weight, master, moment1, moment2, gradient
):
    """Updates the float32 copy of a weight, and assigns it to the weight; ``begins``: 1 in the first step, which makes the copy
    from the weight, else 0. Of a weight in float32 the copy is the weight.
    """
    wide = in_float32(ops.depend(weight, coefficient))  # or all casts would be there at once
    begun = ops.assign(master, wide * begins + master * (1.0 - begins))
    gradient = ops.depend(gradient, begun)
    done = kernel(master, moment1, moment2, rate, correction1, correction2, decay, gradient, coefficient)
    return ops.assign(weight, ops.cast(ops.depend(master, done), weight.dtype))


class AdamW(nn.Cell):
    """Updates ``parameters`` in place; state: ``adam_m.*``, ``adam_v.*`` (fp32, shapes of the weights), powers of the betas, and
    with master weights ``master.*`` (fp32) of those in half precision.

    Among the parameters may be counters of the tokens of experts, which have gradients and are no weights: those of a step are
    kept as ``load.*``. By them biases that keep experts balanced change by ``bias_rate`` towards experts with fewer tokens, and
    ``shares`` become the part of all choices that fell on each expert. ``pet`` may multiply the learning rates of weights; with
    ``groups`` weights have the rates of their groups.

    Attributes:
        updated: which of the parameters are weights.
        prepare: makes of gradients, and what turns them into those of the mean loss per token, the gradients of a step; or None.
        finish: takes part in a step when weights have changed: gradients of weights, coefficient, what is done before; or None.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        config: OptimizerConfig,
        bias_rate: float = 0.0,
        pet: PetConfig | None = None,
        prepare: nn.Cell | None = None,
        finish: nn.Cell | None = None,
        groups: GroupedLrSchedule | None = None,
        shares: Sequence[Parameter] = (),
    ) -> None:
        super().__init__(auto_prefix=False)
        self.prepare, self.finish = prepare, finish
        self.parameters = ParameterTuple(parameters)
        weights = [parameter for parameter in parameters if not is_probe(parameter.name)]
        self.weights = ParameterTuple(weights)
        self.updated = tuple(index for index, item in enumerate(parameters) if not is_probe(item.name))
        self.counts = len(weights) < len(parameters)
        if self.counts:
            self.expert_loads = ExpertLoads(parameters, bias_rate, shares)
        self.moments1 = clone_state(self.weights, MOMENTS[0])
        self.moments2 = clone_state(self.weights, MOMENTS[1])
        self.rounding, self.types = value_rounding(weights), value_types(weights)
        self.rounds = self.rounding.rounds if self.rounding is not None else ()
        self.has_masters = config.master_weights
        if self.has_masters:
            copied = [clone_state(ParameterTuple([item]), MASTER)[0] if is_half(item) else item for item in weights]
            self.masters = ParameterTuple(copied)
        self.beta1_power = Parameter(Tensor(1.0, ms.float32), name=POWERS[0], requires_grad=False)
        self.beta2_power = Parameter(Tensor(1.0, ms.float32), name=POWERS[1], requires_grad=False)
        self.decays = decays_of(weights, config)
        rates = [pet.rate_factor(weight.name, weight.ndim) for weight in weights] if pet is not None else []
        own = set(rates) - {1.0}
        self.update = update_at_own_rate if own else update
        self.columns: tuple[tuple[Tensor, ...], ...] = (self.decays,)
        if own:
            self.columns = (tuple(Tensor(rate, ms.float32) for rate in rates), self.decays)
        self.grouped = groups is not None and bool(groups.grouped)
        if groups is not None and groups.grouped:
            self.group_of = tuple(groups.group_of(weight.name) for weight in weights)
            self.factors = tuple(rates) or (1.0,) * len(weights)
        self.beta1, self.beta2 = config.betas
        self.kernel = FusedAdam(config, stores_half(weights))
        self.map = ops.HyperMap()

    def construct(self, gradients: tuple[Tensor, ...], coefficient: Tensor, rate: Tensor) -> Tensor:
        """One step with ``coefficient * gradients``; ``rate`` and ``coefficient`` are fp32 scalars, with groups there is a tuple
        of rates: that of weights without a group, then those of the groups.
        """
        power1 = self.beta1_power * self.beta1
        power2 = self.beta2_power * self.beta2
        of_weights = tuple([gradients[index] for index in self.updated]) if self.counts else gradients
        done = self.updates(of_weights, coefficient, rate, 1.0 - power1, 1.0 - power2)
        power1 = ops.depend(power1, done)
        if self.rounding is not None:
            power1 = self.round_weights(power1)
        if self.counts:
            power1 = ops.depend(power1, self.expert_loads(gradients, coefficient, power1))
        if self.finish is not None:
            power1 = ops.depend(power1, self.finish(of_weights, coefficient, power1))
        ops.assign(self.beta1_power, power1)
        ops.assign(self.beta2_power, power2)
        return power1

    def updates(
        self, gradients: tuple[Tensor, ...], coefficient: Tensor, rate, correction1: Tensor, correction2: Tensor
    ):
        """The update of every weight."""
        if self.has_masters:
            begins = ops.cast(self.beta1_power == 1.0, ms.float32)
            common = ops.partial(update_masters, self.kernel, begins, correction1, correction2, coefficient)
            rates = self.rates(rate) if self.grouped else (rate,) * len(self.weights)
            return self.map(
                common, rates, self.decays, self.weights, self.masters, self.moments1, self.moments2, gradients
            )
        if self.rounding is not None:
            gradients = self.rounding(self.map(ops.partial(scaled, coefficient), gradients))
            coefficient = Tensor(1.0, ms.float32)
        if self.grouped:
            common = ops.partial(update_by_group, self.kernel, correction1, correction2, coefficient)
            return self.map(
                common, self.rates(rate), self.decays, self.weights, self.moments1, self.moments2, gradients
            )
        common = ops.partial(self.update, self.kernel, rate, correction1, correction2, coefficient)
        return self.map(common, *self.columns, self.weights, self.moments1, self.moments2, gradients)

    def round_weights(self, done: Tensor) -> Tensor:
        """Round every weight behind ``done`` to the values it holds; return ``done`` behind that."""
        for index in range(len(self.types)):
            if self.rounds[index]:
                weight = ops.depend(self.weights[index], done)
                done = ops.depend(done, ops.assign(self.weights[index], rounded_to(weight, self.types[index])))
        return done

    def rates(self, of_groups: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The rate of every weight."""
        found: tuple[Tensor, ...] = ()
        for group, factor in zip(self.group_of, self.factors):  # noqa: B905 - compiled, which knows no other zip
            found = (*found, of_groups[group] if factor == 1.0 else of_groups[group] * factor)
        return found


def decays_of(weights: Sequence[Parameter], config: OptimizerConfig) -> tuple[Tensor, ...]:
    """The decay of every weight, fp32 scalars; equal ones are one constant of the graph."""
    found = [config.decay_of(weight.name, weight.ndim) for weight in weights]
    shared = {decay: Tensor(decay, ms.float32) for decay in found}
    return tuple(shared[decay] for decay in found)


class FusedAdam(nn.Cell):
    """One kernel per weight, which updates it and its moments with ``coefficient · gradient``.

    It takes weight and moments through memory once; only the scaled gradient is alive beside them.

    Written in elementary operators, the update would set the peak: the back end orders operators by depth, the first of
    every weight, then the second, with the temporaries of all weights alive at once (12 of 29 GiB for a stage of Llama 2 70B).

    ``AdamWeightDecay`` knows no bias correction: its rate, epsilon and decay are scaled so that it does AdamW's update.
    (``Adam`` with a separate decay is not used: graph-kernel fusion of MindSpore 2.10 executes one of them twice.)
    """

    def __init__(self, config: OptimizerConfig, in_half: bool = False) -> None:
        super().__init__()
        self.in_half = in_half
        self.adam = P.AdamWeightDecay()
        self.corrects = config.bias_correction
        self.beta1, self.beta2 = (Tensor(beta, ms.float32) for beta in config.betas)
        self.eps = config.eps
        self.sqrt = P.Sqrt()

    def construct(self, weight, moment1, moment2, rate, correction1, correction2, decay, gradient, coefficient):
        """``correction1`` and ``correction2`` are ``1 - betaᵗ``; all but weight, moments and gradient are scalars."""
        gradient = self.scaled(weight, gradient, coefficient)
        if not self.corrects:
            return self.adam(weight, moment1, moment2, rate, self.beta1, self.beta2, self.eps, decay, gradient)
        root = self.sqrt(correction2)
        ratio = root / correction1
        return self.adam(
            weight, moment1, moment2, rate * ratio, self.beta1, self.beta2, self.eps * root, decay / ratio, gradient
        )

    def scaled(self, weight: Tensor, gradient: Tensor, coefficient: Tensor) -> Tensor:
        """Return the gradient that the update reads, in the type of the weight, as the operator takes it.

        In half precision it is scaled in float32, and cast behind the coefficient: the casts that the norm reads must not stay
        alive until here.
        """
        if not self.in_half:
            return gradient * coefficient
        return ops.cast(in_float32(ops.depend(gradient, coefficient)) * coefficient, weight.dtype)


last_update = ops.MultitypeFuncGraph("adamw_last_update")


@last_update.register("Tensor", "Tensor", "Tensor", "Tensor", "Tensor", "Tensor", "Tensor", "Tensor")
def _last_update(rate, ratio, eps, factor, decay, weight, moment1, moment2):
    """What the step with these moments has added to a weight, with the other sign; the decay was of the weight before it."""
    rate, decay, weight = rate * ratio * factor, decay / ratio, in_float32(weight)
    direction = moment1 / (ops.sqrt(moment2) + eps)
    before = (weight + rate * direction) / (1.0 - rate * decay)
    return rate * (direction + decay * before)


class LastUpdate(nn.Cell):
    """From the rate, or rates, what :class:`AdamW` has just subtracted from every weight, by the moments: no copy of the weights
    is kept.
    """

    def __init__(self, optimizer: AdamW) -> None:
        super().__init__(auto_prefix=False)
        self.weights, self.moments1, self.moments2 = optimizer.weights, optimizer.moments1, optimizer.moments2
        self.beta1_power, self.beta2_power = optimizer.beta1_power, optimizer.beta2_power
        self.one = Tensor(1.0, ms.float32)
        self.grouped = optimizer.grouped
        if self.grouped:
            self.optimizer = optimizer
        self.factors = optimizer.columns[0] if len(optimizer.columns) > 1 else (self.one,) * len(self.weights)
        self.decays = optimizer.decays
        self.corrects, self.eps = optimizer.kernel.corrects, optimizer.kernel.eps
        self.map = ops.HyperMap()

    def construct(self, rate: Tensor) -> tuple[Tensor, ...]:
        ratio, eps = self.one, self.one * self.eps
        if self.corrects:
            root = ops.sqrt(1.0 - self.beta2_power)
            ratio, eps = root / (1.0 - self.beta1_power), root * self.eps
        factors = self.factors
        if self.grouped:
            rate, factors = self.one, self.optimizer.rates(rate)
        common = ops.partial(last_update, rate, ratio, eps)
        return self.map(common, factors, self.decays, self.weights, self.moments1, self.moments2)
