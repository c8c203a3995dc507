"""Learning from pairs of answers (DPO: Rafailov et al., 2023): a model next to its own base, the reference.

ORPO (Hong et al., 2024) and SimPO (Meng et al., 2024) compare the answers of the model without a reference, so that all weights
may be trained.

A row has two documents: the prompt with the chosen answer, then with the rejected one. Both models compute the loss of every
token in one graph. The reference has the same weights without adapters, so there is no second copy of them.
"""

from __future__ import annotations

from collections.abc import Callable

import mindspore as ms
from mindspore import Tensor, nn
from mindspore import ops as P

from mindllm.config import ModelConfig
from mindllm.config.tuning import PreferenceConfig
from mindllm.finetune.counted_figures import CountedFigures
from mindllm.finetune.unpaired import UnpairedLosses
from mindllm.models import CausalLM, Kernels

FIGURES = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "logps/chosen", "logps/rejected")
"""The figures of every pair, in the order of the counter's elements. The last element counts the pairs."""


class PreferenceLoss(nn.Cell):
    """The summed loss of pairs, or of unpaired answers, in the columns that :mod:`mindllm.data.chat.pairs` describes.

    Args:
        length: positions of a row.
        crossings: numbers of the layers that begin a later stage of a pipeline. There the hidden states of both models are sent
            as one tensor ``[pairs · seq, 2 · hidden]``: every message needs one with a gradient, and MindSpore 2.10 fails where
            the whole gradient is zero ("The pointer[fg_cnode] is null").
    """

    def __init__(
        self,
        policy: CausalLM,
        reference: CausalLM | None,
        config: PreferenceConfig,
        length: int,
        crossings: tuple[int, ...] = (),
    ) -> None:
        super().__init__(auto_prefix=False)
        self.policy = policy
        self.reference = reference
        self.pairs = make_losses(config, length)
        self.crossings = crossings if reference is not None else ()
        self.joins = nn.CellList([BothStates() for _ in self.crossings])
        self.parts = nn.CellList([StatesOfEach() for _ in self.crossings])
        self.reshape = P.Reshape()

    def construct(
        self,
        input_ids: Tensor,
        labels: Tensor,
        loss_mask: Tensor,
        segment_starts: Tensor,
        position_ids: Tensor,
        random: Tensor | None = None,
    ) -> Tensor:
        """Return the loss. All inputs are ``[pairs, seq]``; ``random``: the keys of the policy's dropout."""
        targets = self.reshape(self.pairs.targets(labels), (-1,))
        if self.reference is None:
            hidden = self.policy.model(input_ids, None, segment_starts, position_ids, random)
            policy_values = self.policy.losses(hidden, self.policy.head_weight(), targets)
            return self.pairs(policy_values, None, labels, loss_mask, segment_starts)
        if self.crossings:
            hidden, reference_hidden = self.side_by_side(input_ids, segment_starts, position_ids, random)
            reference_values = self.reference.losses(reference_hidden, self.reference.head_weight(), targets)
        else:
            reference_hidden = self.reference.model(input_ids, None, segment_starts, position_ids)
            reference_values = self.reference.losses(reference_hidden, self.reference.head_weight(), targets)
            hidden = self.policy.model(input_ids, None, segment_starts, position_ids, random)
        policy_values = self.policy.losses(hidden, self.policy.head_weight(), targets)
        return self.pairs(policy_values, P.stop_gradient(reference_values), labels, loss_mask, segment_starts)

    def side_by_side(
        self, input_ids: Tensor, segment_starts: Tensor, position_ids: Tensor, random: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return hidden states ``[pairs · seq, hidden]`` of the policy and of the reference, computed layer by layer."""
        policy, batch = self.policy.model, input_ids.shape[0]
        reference = self.reference.model  # type: ignore[union-attr]
        row_tables = policy.all_row_tables(segment_starts, position_ids)
        policy_hidden, reference_hidden = (
            policy.embedded(input_ids, batch, position_ids, random),
            reference.embedded(input_ids, batch, position_ids),
        )
        crossed = 0
        for index, layer in enumerate(policy.layers):
            if index in self.crossings:
                policy_hidden, reference_hidden = self.parts[crossed](
                    self.joins[crossed](policy_hidden, reference_hidden)
                )
                crossed = crossed + 1
            tables, mask = policy.layer_tables(index, row_tables)
            reference_hidden = reference.layers[index](reference_hidden, batch, tables, mask)
            if policy.drops[index] and random is not None:
                policy_hidden = layer(
                    policy_hidden, batch, tables, mask, None, policy.dropout_keys[index](random, policy_hidden)
                )
            else:
                policy_hidden = layer(policy_hidden, batch, tables, mask)
        return policy.norm_out(policy_hidden), reference.norm_out(reference_hidden)


class BothStates(nn.Cell):
    """Concatenates hidden states of policy and reference, ``[tokens, hidden]`` each, to ``[tokens, 2 · hidden]``."""

    def __init__(self) -> None:
        super().__init__()
        self.join = P.Concat(axis=1)

    def construct(self, policy_values: Tensor, reference_values: Tensor) -> Tensor:
        return self.join((policy_values, P.stop_gradient(reference_values)))


class StatesOfEach(nn.Cell):
    """Splits the hidden states that :class:`BothStates` concatenates."""

    def __init__(self) -> None:
        super().__init__()
        self.ours, self.theirs = P.StridedSlice(), P.StridedSlice()

    def construct(self, both: Tensor) -> tuple[Tensor, Tensor]:
        tokens, width = both.shape[0], both.shape[1] // 2
        policy_values = self.ours(both, (0, 0), (tokens, width), (1, 1))
        return policy_values, P.stop_gradient(self.theirs(both, (0, width), (tokens, 2 * width), (1, 1)))


class PairLosses(CountedFigures):
    """Computes the loss of all pairs, a scalar, from token losses ``[pairs · seq]`` of the policy and the reference, if any.

    The gradient of ``probe`` is the sum of FIGURES over the pairs, and the number of pairs.
    """

    def __init__(self, config: PreferenceConfig) -> None:
        super().__init__(len(FIGURES) + 1)
        self.beta = config.beta
        self.means = config.loss_type in ("ipo", "orpo", "simpo")
        self.odds, self.compares = config.loss_type == "orpo", config.has_reference
        self.is_answer = P.GreaterEqual()
        self.is_rejected = P.Greater()
        self.cast = P.Cast()
        self.of_rejected = P.Mul()
        self.of_chosen = P.Sub()
        self.gain = P.Sub() if self.compares else P.Neg()
        self.mask = P.Mul()
        self.sum = P.ReduceSum()
        self.negative = P.Neg()
        if self.means:
            self.at_least_one = P.Maximum()
            self.mean = P.Div()
        self.margin = P.Sub()
        self.loss = LOSSES[config.loss_type](config)
        self.weigh = P.Mul()
        self.sum_pairs = P.ReduceSum()
        self.reward = P.Mul()
        self.is_right = P.Greater()

    def construct(
        self,
        policy_values: Tensor,
        reference_values: Tensor | None,
        labels: Tensor,
        loss_mask: Tensor,
        segment_starts: Tensor,
    ) -> Tensor:
        answers = self.cast(self.is_answer(labels, 0), ms.float32)
        rejected = self.of_rejected(answers, self.cast(self.is_rejected(segment_starts, 0), ms.float32))
        chosen = self.of_chosen(answers, rejected)
        policy_values = self.reshape(policy_values, labels.shape)
        # losses are negative log-probabilities
        gains = (
            self.gain(self.reshape(reference_values, labels.shape), policy_values)
            if self.compares
            else self.gain(policy_values)
        )
        chosen_gain, rejected_gain = self.over(gains, chosen), self.over(gains, rejected)
        scores = (chosen_gain, rejected_gain)
        present = self.sum(self.cast(loss_mask, ms.float32), 1)
        if self.means:
            scores = (self.per_token(chosen_gain, chosen), self.per_token(rejected_gain, rejected))
        if not self.compares:
            chosen_gain, rejected_gain = scores
        losses = self.loss(*scores) if self.odds else self.loss(self.margin(*scores))
        loss = self.sum_pairs(self.weigh(losses, present))
        figures = (
            self.reward(chosen_gain, self.beta),
            self.reward(rejected_gain, self.beta),
            self.cast(self.is_right(chosen_gain, rejected_gain), ms.float32),
            self.negative(self.over(policy_values, chosen)),
            self.negative(self.over(policy_values, rejected)),
            present,
        )
        return self.add_nothing(loss, self.counted(figures, present))

    def over(self, values: Tensor, mask: Tensor) -> Tensor:
        """Return the masked sums ``[pairs]`` of values ``[pairs, seq]``."""
        return self.sum(self.mask(values, mask), 1)

    def per_token(self, total: Tensor, mask: Tensor) -> Tensor:
        """Return the sum over the tokens of an answer as their mean."""
        return self.mean(total, self.at_least_one(self.sum(mask, 1), 1.0))


class SigmoidLoss(nn.Cell):
    """``-(1 - ε) log σ(β m) - ε log σ(-β m)`` of margins ``m`` ``[pairs]``: DPO, and with ``ε > 0`` its conservative form."""

    def __init__(self, config: PreferenceConfig, beta: float | None = None) -> None:
        super().__init__()
        self.beta, self.smoothing = config.beta if beta is None else beta, config.label_smoothing
        self.scale = P.Mul()
        self.negative = P.Neg()
        self.larger = P.Maximum()
        self.sub = P.Sub()
        self.exp = P.Exp()
        self.sum = P.Add()
        self.log = P.Log()
        self.back = P.Add()
        if self.smoothing:
            self.share = P.Mul()
            self.smooth = P.Add()

    def construct(self, margins: Tensor) -> Tensor:
        """Compute ``log(1 + exp(-x))`` without overflow, as ``m + log(exp(-m) + exp(-x - m))`` with the larger exponent ``m``."""
        logits = self.scale(margins, self.beta)
        exponent = self.negative(logits)
        largest = P.stop_gradient(self.larger(exponent, 0.0))
        total = self.sum(self.exp(self.negative(largest)), self.exp(self.sub(exponent, largest)))
        loss = self.back(largest, self.log(total))
        return self.smooth(loss, self.share(logits, self.smoothing)) if self.smoothing else loss


class HingeLoss(nn.Cell):
    """``max(0, 1 - β m)``."""

    def __init__(self, config: PreferenceConfig) -> None:
        super().__init__()
        self.beta = config.beta
        self.scale = P.Mul()
        self.add = P.Add()
        self.relu = P.ReLU()

    def construct(self, margins: Tensor) -> Tensor:
        return self.relu(self.add(self.scale(margins, -self.beta), 1.0))


class IpoLoss(nn.Cell):
    """``(m - 1 / (2 β))²`` of margins between means per token."""

    def __init__(self, config: PreferenceConfig) -> None:
        super().__init__()
        self.wanted = 0.5 / config.beta
        self.add = P.Add()
        self.square = P.Square()

    def construct(self, margins: Tensor) -> Tensor:
        return self.square(self.add(margins, -self.wanted))


class SimpoLoss(nn.Cell):
    """``-log σ(β m - γ)`` of margins between mean log-probabilities of a token (Meng et al., 2024, equation 6)."""

    def __init__(self, config: PreferenceConfig) -> None:
        super().__init__()
        self.target = config.simpo_gamma / config.beta
        self.add = P.Add()
        self.sigmoid = SigmoidLoss(config)

    def construct(self, margins: Tensor) -> Tensor:
        return self.sigmoid(self.add(margins, -self.target))


class OddsRatioLoss(nn.Cell):
    """``-a - λ log σ(log odds(a) - log odds(b))`` of mean log-probabilities of a token: ``a`` of chosen answers, ``b`` of others.

    ``odds(a) = eᵃ / (1 - eᵃ)`` (Hong et al., 2024, equations 4 to 7). Answers that are likelier than ``-LEAST`` have its
    odds, and so do pairs that only fill a batch, whose probability would be one.
    """

    def __init__(self, config: PreferenceConfig) -> None:
        super().__init__()
        self.weight = config.beta
        self.bound = P.Minimum()
        self.exp = P.Exp()
        self.rest = P.Sub()
        self.log = P.Log()
        self.log_odds = P.Sub()
        self.ratio = P.Sub()
        self.sigmoid = SigmoidLoss(config, beta=1.0)
        self.share = P.Mul()
        self.add = P.Sub()

    def construct(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        ratio = self.ratio(self.odds(chosen), self.odds(rejected))
        return self.add(self.share(self.sigmoid(ratio), self.weight), chosen)

    def odds(self, logps: Tensor) -> Tensor:
        """Return the logarithms of the odds ``[pairs]``."""
        logps = self.bound(logps, -LEAST)
        return self.log_odds(logps, self.log(self.rest(1.0, self.exp(logps))))


def make_losses(config: PreferenceConfig, length: int) -> PairLosses | UnpairedLosses:
    """Return the cell that computes the loss of rows of ``length`` positions."""
    return UnpairedLosses(config, length) if config.is_unpaired else PairLosses(config)


LEAST = 1e-6
LOSSES: dict[str, type[nn.Cell]] = {
    "sigmoid": SigmoidLoss,
    "hinge": HingeLoss,
    "ipo": IpoLoss,
    "orpo": OddsRatioLoss,
    "simpo": SimpoLoss,
}


def make_reference(
    policy: CausalLM, model: ModelConfig, kernels: Kernels, place: Callable[[CausalLM], None] | None = None
) -> CausalLM:
    """Return ``policy`` without its adapters: other cells with the same parameters.

    ``place``: places the cells of the reference on the stages of the policy's.
    """
    reference = CausalLM(model.base, kernels)
    if place is not None:
        place(reference)
    policy_cells = dict(policy.cells_and_names())
    for path, cell in reference.cells_and_names():
        for name in list(cell._params):
            setattr(cell, name, getattr(policy_cells[path], name))
    return reference
