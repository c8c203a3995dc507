"""A mixture of experts as the feed-forward of a layer (Shazeer et al., 2017), as a value: router, experts, what is always added.

Routing follows the published models: softmax over all experts (Mixtral; Qwen), sigmoid scores with a bias that only the choice
sees (DeepSeek-V3; Wang et al., 2024), experts of the best groups only (DeepSeek-V2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from mindllm.architecture.parts import FORWARD_AND_BACKWARD, FeedForwardSpec, Shapes, scalars

PLACES, ALLGATHER, ALLTOALL = "places", "allgather", "alltoall"
DISPATCHES = (ALLTOALL, ALLGATHER, PLACES)
"""How tokens reach their experts: sorted and sent to the experts' ranks, sorted and gathered on all of these, or in fixed places
of each expert."""
BalanceLoss = Literal["expert", "switch", "global", "device", "communication"]


@dataclass(frozen=True)
class RouterSpec:
    """How a token's experts and their weights are chosen, in fp32.

    Attributes:
        experts: how many there are; ``top_k`` of them see a token.
        sigmoid: scores are sigmoids of the logits, not their softmax.
        renormalise: the chosen scores are divided by their sum.
        scale: factor on the weights.
        groups, chosen_groups: experts are in so many equal groups, and those of the best groups only can be chosen.
        bias: a number per expert is added to the scores for the choice alone; then a group is as good as its two best experts
            together, otherwise as its best one.
        balance_losses: what is added to the loss, with factors: ``expert`` for every sequence by itself (DeepSeek-V2, section
            2.2.3), ``switch`` for all sequences that are computed together (Fedus et al., 2021), ``global`` for those of a global
            batch (Qiu et al., 2025, "Demons in the detail"), whose choices are those of the step before; ``device`` and
            ``communication`` for every sequence by groups of experts, that their devices have as much to compute and to receive
            (DeepSeek-V2, section 2.2.3).
        z_loss: factor of the mean squared log-normaliser of the logits (Zoph et al., 2022).
    """

    experts: int
    top_k: int
    sigmoid: bool = False
    renormalise: bool = True
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    bias: bool = False
    balance_losses: tuple[tuple[BalanceLoss, float], ...] = ()
    z_loss: float = 0.0

    @property
    def adds_to_loss(self) -> bool:
        """Whether there is a loss besides that of the tokens."""
        return self.z_loss > 0 or any(factor > 0 for _, factor in self.balance_losses)

    @property
    def remembers_choices(self) -> bool:
        """Whether a loss asks for the choices of the step before: a number per expert that is kept beside optimizer state."""
        return dict(self.balance_losses).get("global", 0.0) > 0


@dataclass(frozen=True)
class ExpertsSpec:
    """``Σ weight · expert(x)`` over the chosen experts, and a ``shared`` one that sees all tokens, if there is one.

    ``shared_gate``: the shared expert's result is multiplied by a sigmoid of ``x``. ``capacity_factor``: an expert takes at most
    ``capacity_factor · top_k · length / experts`` tokens of a sequence, the first ones; None: all that come. ``grouped``: tokens
    are sorted by expert, and there are no places but those of the choices. ``sends``: their rows are sent to the ranks of their
    experts; otherwise ranks that share experts gather all of their tokens.
    """

    router: RouterSpec
    expert: FeedForwardSpec
    shared: FeedForwardSpec | None = None
    shared_gate: bool = False
    capacity_factor: float | None = None
    grouped: bool = False
    sends: bool = False

    @property
    def hidden_size(self) -> int:
        return self.expert.hidden_size

    @property
    def adds_to_loss(self) -> bool:
        """Always: at least a zero, by whose gradient tokens are counted."""
        return True

    def capacity(self, length: int) -> int:
        """The most tokens of a sequence of ``length`` that one expert takes."""
        if self.capacity_factor is None:
            return length
        return capacity_of(self.capacity_factor, self.router.top_k, length, self.router.experts)

    def matrices(self) -> Shapes:
        """The weights of its matrix products; those of experts have all experts in their first dimension."""
        count = self.router.experts
        return {
            "router.weight": (count, self.hidden_size),
            **{f"experts.{name}": (count, *shape) for name, shape in self.expert.matrices().items()},
            **self._always(),
        }

    def weights(self) -> Shapes:
        """All weights."""
        matrices = self.matrices()
        bias = {"router.bias": (self.router.experts,)} if self.router.bias else {}
        return {"router.weight": matrices.pop("router.weight"), **bias, **matrices}

    def flops_per_token(self) -> float:
        """Forward and backward: the chosen experts, and what is computed for every token."""
        always = self.router.experts * self.hidden_size + scalars(self._always())
        return FORWARD_AND_BACKWARD * (always + self.router.top_k * scalars(self.expert.matrices()))

    def active_parameters(self) -> int:
        """Weights a token meets."""
        idle = self.router.experts - self.router.top_k
        return scalars(self.weights()) - idle * scalars(self.expert.matrices())

    def _always(self) -> Shapes:
        shared = {} if self.shared is None else self.shared.matrices()
        gate = {"shared_gate.weight": (1, self.hidden_size)} if self.shared_gate else {}
        return {**{f"shared.{name}": shape for name, shape in shared.items()}, **gate}


def capacity_of(factor: float, chosen: int, length: int, experts: int) -> int:
    """The most tokens of a sequence of ``length`` that one of ``experts`` takes, where a token has ``chosen`` ones."""
    return min(max(math.ceil(factor * chosen * length / experts), 1), length)
