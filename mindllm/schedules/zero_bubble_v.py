"""The order of operations of MindSpore's ``zero_bubble_v``, on every stage.

Two chunks lie in a V: a micro-batch goes from the first stage to the last in chunk 0 and back in chunk 1, so the first stage has
the loss and begins the backward pass at once (Qi et al., 2024, 2405.15362, section 4.1). Where a stage would wait for another it
computes gradients of inputs alone, which others wait for, and those of weights later; in the steady state both are one pass.
The phases are those by which MindSpore 2.10 orders its graphs, read off compiled ranks.
"""

from __future__ import annotations

from collections import defaultdict

from mindllm.schedules.operations import BACKWARD, FORWARD, INPUT, WEIGHT, Operation

DOWN, UP = 0, 1  # chunk 0 goes to the last stage, chunk 1 comes back


def stage_order(stage: int, stages: int, micro_batches: int) -> tuple[Operation, ...]:
    """The operations of one stage; needs at least ``2 * stages`` micro-batches."""
    behind = stages - 1 - stage
    found = _Stage()
    found.add(2 * behind, (FORWARD, DOWN))
    found.add(stage + 1, (FORWARD, DOWN), (FORWARD, UP))
    found.add(behind, (INPUT, UP), (WEIGHT, UP), (FORWARD, UP))
    found.add(micro_batches - 2 * stages + stage + 1, (BACKWARD, UP), (FORWARD, DOWN), (BACKWARD, DOWN), (FORWARD, UP))
    found.add(behind, (BACKWARD, UP), (BACKWARD, DOWN), (FORWARD, UP))
    found.late = (micro_batches - (stages - (stage + 1) // 2), micro_batches - (stage + 1) // 2)
    found.add(stage + 1, (BACKWARD, UP), (BACKWARD, DOWN))
    if stage:
        found.add(behind, (WEIGHT, DOWN), (BACKWARD, DOWN))
    else:  # nothing waits for the gradients of the first stage's inputs
        found.add(behind, (BACKWARD, DOWN))
    found.finish()
    return tuple(found.operations)


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
        """Repeats a turn of kinds and chunks; a gradient of weights that none waits for is left out."""
        for _ in range(times):
            for what, chunk in turn:
                self._one(what, chunk)

    def finish(self) -> None:
        """All gradients of weights that are left."""
        for chunk in (DOWN, UP):
            while self.waiting[chunk]:
                self._one(WEIGHT, chunk)

    def _one(self, what: int, chunk: int) -> None:
        if what == WEIGHT:
            if self.waiting[chunk]:
                self.operations.append((what, chunk, self.waiting[chunk].pop(0)))
            return
        of = FORWARD if what == FORWARD else BACKWARD
        micro = self.next[of, chunk]
        self.next[of, chunk] += 1
        if what == BACKWARD and self.late is not None and micro >= self.late[chunk]:
            what = INPUT
        if what == INPUT:
            self.waiting[chunk].append(micro)
        self.operations.append((what, chunk, micro))
