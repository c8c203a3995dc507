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
    """Choice and weights of a token's experts, in fp32.

    Attributes:
        experts: number of experts; ``top_k`` of them process a token.
        sigmoid: scores are sigmoids of the logits instead of their softmax.
        renormalise: chosen scores are divided by their sum.
        scale: factor on the weights.
        groups, chosen_groups: experts are in equal groups, and chosen from the best groups only.
        bias: a number per expert is added to the scores for the choice only. A group then scores as its two best experts
            together, otherwise as its best one.
        balance_losses: losses with factors: ``expert`` per sequence (DeepSeek-V2, section 2.2.3), ``switch`` over sequences
            computed together (Fedus et al., 2021), ``global`` over a global batch (Qiu et al., 2025, "Demons in the detail") with
            the choices of the previous step; ``device`` and ``communication`` per sequence and group of experts, which balance
            computation and communication of their devices (DeepSeek-V2, section 2.2.3).
        z_loss: factor of the mean squared log-normalizer of the logits (Zoph et al., 2022).
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
        """Return True if there is an auxiliary loss."""
        return self.z_loss > 0 or any(factor > 0 for _, factor in self.balance_losses)

    @property
    def remembers_choices(self) -> bool:
        """Return True if a loss needs the choices of the previous step: one number per expert next to the optimizer state."""
        return dict(self.balance_losses).get("global", 0.0) > 0


@dataclass(frozen=True)
class ExpertsSpec:
    """``Σ weight · expert(x)`` over the chosen experts, plus an optional ``shared`` expert for all tokens.

    ``shared_gate``: the output of the shared expert is multiplied by a sigmoid of ``x``. ``capacity_factor``: an expert processes
    at most the first ``capacity_factor · top_k · length / experts`` tokens of a sequence; None: no limit. ``grouped``: tokens are
    sorted by expert, without padding. ``sends``: rows are sent to the ranks of their experts; otherwise ranks that share experts
    gather all tokens.
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
        """Return True: there is at least a zero, by whose gradient tokens are counted."""
        return True

    def capacity(self, length: int) -> int:
        """Return the maximum tokens per expert for a sequence of ``length``."""
        if self.capacity_factor is None:
            return length
        return capacity_of(self.capacity_factor, self.router.top_k, length, self.router.experts)

    def matrices(self) -> Shapes:
        """Return the weights of matrix products; experts are stacked in the first dimension."""
        count = self.router.experts
        return {
            "router.weight": (count, self.hidden_size),
            **{f"experts.{name}": (count, *shape) for name, shape in self.expert.matrices().items()},
            **self._always(),
        }

    def weights(self) -> Shapes:
        """Return all weights."""
        matrices = self.matrices()
        bias = {"router.bias": (self.router.experts,)} if self.router.bias else {}
        return {"router.weight": matrices.pop("router.weight"), **bias, **matrices}

    def flops_per_token(self) -> float:
        """Return the FLOPs of forward and backward for the chosen experts and the shared parts."""
        always = self.router.experts * self.hidden_size + scalars(self._always())
        return FORWARD_AND_BACKWARD * (always + self.router.top_k * scalars(self.expert.matrices()))

    def active_parameters(self) -> int:
        """Return the weights used per token."""
        idle = self.router.experts - self.router.top_k
        return scalars(self.weights()) - idle * scalars(self.expert.matrices())

    def _always(self) -> Shapes:
        shared = {} if self.shared is None else self.shared.matrices()
        gate = {"shared_gate.weight": (1, self.hidden_size)} if self.shared_gate else {}
        return {**{f"shared.{name}": shape for name, shape in shared.items()}, **gate}


def capacity_of(factor: float, chosen: int, length: int, experts: int) -> int:
    """Return the maximum tokens of a sequence of ``length`` per expert, with ``chosen`` of ``experts`` experts per token."""
    return min(max(math.ceil(factor * chosen * length / experts), 1), length)
