"""What a micro-batch costs in the two chunks of a V, and what a stage may keep."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mindllm.planning.zero_bubble.operation_order import Needs

DOWN, UP = 0, 1  # chunks
F0, F1, B0, B1, W0, W1 = range(6)  # passes through each chunk: forward, gradients of inputs, of weights


@dataclass(frozen=True)
class FoldedCosts:
    """What one micro-batch costs in each chunk and stage, ``[2, stages]``, and what activations may take, ``[stages]``.

    Attributes:
        forward, backward, weight: times; ``backward`` without gradients of weights.
        held: MB from the forward pass to the gradients of weights.
        limit: MB.
        delay: of a tensor between stages.
    """

    forward: np.ndarray
    backward: np.ndarray
    weight: np.ndarray
    held: np.ndarray
    limit: np.ndarray
    delay: float = 0.0

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.limit)

    @cached_property
    def durations(self) -> list[list[float]]:
        """Time by kind of operation and stage."""
        return np.concatenate([self.forward, self.backward, self.weight]).tolist()

    @cached_property
    def changes(self) -> list[list[float]]:
        """MB that an operation takes, by kind and stage."""
        return np.concatenate([self.held, 0 * self.held, -self.held]).tolist()

    def needed(self, stage: int) -> Needs:
        """Stage and kind of what each kind of operation needs of the same micro-batch."""
        last = self.stages - 1
        return (
            (stage - 1, F0) if stage else None,
            (stage + 1, F1) if stage < last else (stage, F0),
            (stage + 1, B0) if stage < last else (stage, B1),
            (stage - 1, B1) if stage else (stage, F1),
            (stage, B0),
            (stage, B1),
        )

    @property
    def times(self) -> np.ndarray:
        """For the simulator, by kind of operation and place, ``[4, places]``; no backward pass is whole."""
        backward = self.backward + self.weight
        return np.stack([self.forward, backward, self.weight, self.backward]).reshape(4, -1)
