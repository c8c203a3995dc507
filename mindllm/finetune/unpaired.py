"""Learning from single answers that are good or bad (KTO: Ethayarajh et al., 2024, 2402.01306, equations 7 and 8).

A row has two documents: a prompt with its answer, then the same prompt with the answer of another row. The mean gain of the model
over the reference on those unrelated answers, over the rows of a micro-batch, estimates their divergence. Answers are rewarded
for a gain beyond it. Without it: APO-zero, unpaired
(D'Oosterlinck et al., 2024, 2408.06266). The formulas are those of TRL (``kto_loss`` in ``trl/trainer/kto_trainer.py``).
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor
from mindspore import ops as P

from mindllm.config.tuning import PreferenceConfig
from mindllm.finetune.counted_figures import CountedFigures

UNPAIRED_FIGURES = (
    "rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "kl", "desirable",
)  # fmt: skip
"""The figures of every answer, in the order of the counter's elements. The last element counts the answers. The first and the
third are zero for an undesirable answer, the second and the fourth for a desirable one.
"""


class UnpairedLosses(CountedFigures):
    """Computes the loss of all answers, a scalar, from token losses ``[rows · seq]`` of the policy and the reference.

    A row's loss mask has its one at the first position if the answer is desirable, and at the second if it is not. The mean over
    rows covers all data-parallel devices and one micro-batch; it has no gradient. Devices with a common graph sum by its layouts,
    processes with separate graphs after :meth:`add_over_ranks`.
    """

    def __init__(self, config: PreferenceConfig, length: int) -> None:
        super().__init__(len(UNPAIRED_FIGURES) + 1)
        self.beta, self.estimates = config.beta, config.estimates_divergence
        self.desirable_weight, self.undesirable_weight = config.desirable_weight, config.undesirable_weight
        self.second = Tensor((np.arange(length) == 1).astype(np.float32)[None])
        self.is_answer = P.GreaterEqual()
        self.is_other = P.Greater()
        self.cast = P.Cast()
        self.of_other, self.of_own = P.Mul(), P.Sub()
        self.gain = P.Sub()
        self.mask = P.Mul()
        self.at_second = P.Mul()
        self.sum = P.ReduceSum()
        self.desirable = P.Sub()
        self.sign = P.Sub()
        if self.estimates:
            self.weigh_other = P.Mul()
            self.sum_rows = P.ReduceSum()
            self.adds_ranks = False
            self.at_least_one = P.Maximum()
            self.mean = P.Div()
            self.not_negative = P.Maximum()
            self.beyond = P.Sub()
            self.share = P.Mul()
        self.against = P.Mul()
        self.scale = P.Mul()
        self.sigmoid = P.Sigmoid()
        self.weigh_desirable, self.weigh_undesirable = P.Mul(), P.Mul()
        self.weights = P.Add()
        self.weigh = P.Mul()
        self.sum_losses = P.ReduceSum()
        self.reward = P.Mul()
        self.negative = P.Neg()
        self.figure = P.Mul()

    def construct(
        self, policy_values: Tensor, reference_values: Tensor, labels: Tensor, loss_mask: Tensor, segment_starts: Tensor
    ) -> Tensor:
        answers = self.cast(self.is_answer(labels, 0), ms.float32)
        unrelated = self.of_other(answers, self.cast(self.is_other(segment_starts, 0), ms.float32))
        related = self.of_own(answers, unrelated)
        policy_values = self.reshape(policy_values, labels.shape)
        gains = self.gain(
            self.reshape(reference_values, labels.shape), policy_values
        )  # losses are negative log-probabilities
        gain = self.over(gains, related)
        marks = self.cast(loss_mask, ms.float32)
        present, undesirable = self.sum(marks, 1), self.sum(self.at_second(marks, self.second), 1)
        desirable = self.desirable(present, undesirable)
        divergence = self.divergence(self.over(gains, unrelated), present) if self.estimates else None
        beyond = gain if divergence is None else self.beyond(gain, divergence)
        # 1 - σ(β b) of a desirable answer, 1 - σ(-β b) of another
        lost = self.sigmoid(self.scale(self.against(beyond, self.sign(undesirable, desirable)), self.beta))
        weights = self.weights(
            self.weigh_desirable(desirable, self.desirable_weight),
            self.weigh_undesirable(undesirable, self.undesirable_weight),
        )
        loss = self.sum_losses(self.weigh(lost, weights))
        reward, logps = self.reward(gain, self.beta), self.negative(self.over(policy_values, related))
        figures = (
            self.figure(reward, desirable),
            self.figure(reward, undesirable),
            self.figure(logps, desirable),
            self.figure(logps, undesirable),
            self.sign(present, present) if divergence is None else self.share(present, divergence),
            desirable,
            present,
        )
        return self.add_nothing(loss, self.counted(figures, present))

    def add_over_ranks(self) -> None:
        """Extend the mean over the rows of all processes. Call it before compilation."""
        self.adds_ranks = True
        self.add_ranks = P.AllReduce()

    def over(self, values: Tensor, mask: Tensor) -> Tensor:
        """Return the masked sums ``[rows]`` of values ``[rows, seq]``."""
        return self.sum(self.mask(values, mask), 1)

    def divergence(self, gain: Tensor, present: Tensor) -> Tensor:
        """Return the mean of ``gain`` ``[rows]`` over present rows, at least 0 and without a gradient: a scalar in nats."""
        total, rows = self.sum_rows(self.weigh_other(gain, present)), self.sum_rows(present)
        if self.adds_ranks:
            both = self.add_ranks(P.stop_gradient(P.stack((total, rows))))
            total, rows = both[0], both[1]
        return P.stop_gradient(self.not_negative(self.mean(total, self.at_least_one(rows, 1.0)), 0.0))
