"""The order of operations of MindSpore's ``zero_bubble_v`` on every stage.

Two chunks form a V: a micro-batch goes from the first stage to the last in chunk 0 and back in chunk 1. So the first stage has
the loss and immediately begins the backward pass (Qi et al., 2024, 2405.15362, section 4.1). A stage that would wait computes
gradients of inputs, which other stages need, and defers those of weights; in the steady state both are one pass.
The phases are those of MindSpore 2.10, read from compiled ranks.
"""

from __future__ import annotations

from collections import defaultdict

from mindllm.schedules.operations import BACKWARD, FORWARD, INPUT, WEIGHT, Operation

DOWN, UP = 0, 1  # chunk 0 goes to the last stage, chunk 1 comes back


def stage_order(stage: int, stages: int, micro_batches: int) -> tuple[Operation, ...]:
    """Return the operations of one stage; requires at least ``2 * stages`` micro-batches."""
    later_stages = stages - 1 - stage
    order = _Stage()
    order.add(2 * later_stages, (FORWARD, DOWN))
    order.add(stage + 1, (FORWARD, DOWN), (FORWARD, UP))
    order.add(later_stages, (INPUT, UP), (WEIGHT, UP), (FORWARD, UP))
    order.add(micro_batches - 2 * stages + stage + 1, (BACKWARD, UP), (FORWARD, DOWN), (BACKWARD, DOWN), (FORWARD, UP))
    order.add(later_stages, (BACKWARD, UP), (BACKWARD, DOWN), (FORWARD, UP))
    order.late = (micro_batches - (stages - (stage + 1) // 2), micro_batches - (stage + 1) // 2)
    order.add(stage + 1, (BACKWARD, UP), (BACKWARD, DOWN))
    if stage:
        order.add(later_stages, (WEIGHT, DOWN), (BACKWARD, DOWN))
    else:  # nothing waits for the gradients of the first stage's inputs
        order.add(later_stages, (BACKWARD, DOWN))
    order.finish()
    return tuple(order.operations)


class _Stage:
    """Operations of a stage in their order; each takes the next micro-batch of its kind and chunk.

    ``late``: by chunk the first micro-batch whose backward passes leave the gradients of weights for later.
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.late: tuple[int, ...] | None = None
        self.next: dict[tuple[int, int], int] = defaultdict(int)
        self.waiting: dict[int, list[int]] = defaultdict(list)

    def add(self, times: int, *turn: tuple[int, int]) -> None:
        """Repeat a turn of kinds and chunks; weight gradients that are not pending are left out."""
        for _ in range(times):
            for kind, chunk in turn:
                self._append(kind, chunk)

    def finish(self) -> None:
        """Add all pending weight gradients."""
        for chunk in (DOWN, UP):
            while self.waiting[chunk]:
                self._append(WEIGHT, chunk)

    def _append(self, kind: int, chunk: int) -> None:
        if kind == WEIGHT:
            if self.waiting[chunk]:
                self.operations.append((kind, chunk, self.waiting[chunk].pop(0)))
            return
        direction = FORWARD if kind == FORWARD else BACKWARD
        micro = self.next[direction, chunk]
        self.next[direction, chunk] += 1
        if kind == BACKWARD and self.late is not None and micro >= self.late[chunk]:
            kind = INPUT
        if kind == INPUT:
            self.waiting[chunk].append(micro)
        self.operations.append((kind, chunk, micro))
