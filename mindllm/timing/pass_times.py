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
        forward, backward: seconds of a micro-batch on every place.
        delay: of a tensor that goes to another stage.
        schedule: order of micro-batches.
        weight: seconds of the gradients of weights, which are in ``backward``, where the schedule has some of them apart.
        again: seconds of it that the other half of such a backward pass takes as well: MindSpore recomputes in both.
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

    def simulated(self) -> Timeline:
        """Return the schedule; where there are far more micro-batches than stages, a steady state stands for most of them."""
        forward, backward = np.array(self.forward), np.array(self.backward)
        if self.chunks == 1 and self.schedule == SCHEDULE and is_long(self.stages, self.micro_batches):
            return simulate_long(self.micro_batches, forward, backward, self.delay)
        table = timetable(stage_orders(self.schedule, self.stages, self.chunks, self.micro_batches), self.chunks)
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
