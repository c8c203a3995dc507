"""What the passes of a micro-batch take on every place of a pipeline: few figures, from which the schedule follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mindllm.schedules.orders import stage_orders, timetable
from mindllm.schedules.simulate import Timeline, simulate
from mindllm.schedules.steady import SCHEDULE, is_long, simulate_long


@dataclass(frozen=True)
class PassTimes:
    """Seconds of passes by place (chunk x stages + stage).

    Attributes:
        stages, chunks, micro_batches: of the pipeline.
        forward, backward: seconds of a micro-batch, or of a piece of it, on every place.
        delay: of a tensor that goes to another stage.
        schedule: order of micro-batches.
        weight: seconds of the gradients of weights, which are in ``backward``, where the schedule has some of them apart.
        again: seconds of it that the other half of such a backward pass takes as well: MindSpore recomputes in both.
        pieces: in which the sequences of a micro-batch go through the pipeline; all take the same time here.
    """

    stages: int
    chunks: int
    micro_batches: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    delay: float = 0.0
    schedule: str = SCHEDULE
    weight: tuple[float, ...] = ()
    again: tuple[float, ...] = ()
    pieces: int = 1

    def simulated(self) -> Timeline:
        """Return the schedule; where there are far more micro-batches than stages, a steady state stands for most of them."""
        forward, backward = np.array(self.forward), np.array(self.backward)
        if self.chunks == 1 and self.schedule == SCHEDULE and is_long(self.stages, self.micro_batches):
            return simulate_long(self.micro_batches, forward, backward, self.delay)
        orders = stage_orders(self.schedule, self.stages, self.chunks, self.micro_batches, self.pieces)
        table = timetable(orders, self.chunks)
        weight = np.array(self.weight) if self.weight else None
        return simulate(table, forward, backward, weight, self.delay, np.array(self.again) if self.again else 0.0)

    def tree(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def of_tree(cls, tree: Mapping[str, Any]) -> PassTimes:
        """Return what :meth:`tree` gave, from JSON, too."""
        passes = {key: tuple(tree.get(key, ())) for key in ("forward", "backward", "weight", "again")}
        return cls(**{**tree, **passes})
