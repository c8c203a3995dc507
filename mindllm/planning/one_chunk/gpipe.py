"""GPipe: all forward passes, then all backward passes.

Micro-batches are equal, so each of the two is a flow shop of equal jobs: the times of all stages once, and the longest stage once
more for every further micro-batch. The step is A + (m - 1) (max f + max b), A the sum of all forward and backward times.
"""

from __future__ import annotations

import numpy as np

from mindllm.planning.one_chunk.split_program import Ahead, SplitProgram


class GPipe(SplitProgram):
    """Numbers of a partial plan: the sum of its times, the longest backward pass and the longest forward pass."""

    numbers = 3

    def alone(self) -> np.ndarray:
        """The stage's passes of all micro-batches but one."""
        return self.more * self.total

    def extend(
        self,
        stage: int,
        values: np.ndarray,
        forward: np.ndarray,
        backward: np.ndarray,
        rest: np.ndarray,
        near: np.ndarray,
    ) -> Ahead:
        """Adds times and longest passes of the stage."""
        found = np.stack(
            [values[0] + forward + backward, np.maximum(values[1], backward), np.maximum(values[2], forward)]
        )
        return Ahead(found, self.more * (found[1] + found[2]), np.zeros(len(rest)))
