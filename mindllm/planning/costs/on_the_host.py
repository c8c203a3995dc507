"""What fused attention yields, waiting on the host (``swap_config``) beside recomputation: a layer's costs, by formula.

Copies run on a stream of their own. What they take longer than the layer's own pass, and what of a result is not back when
the backward pass needs it, is waited for (``timing/costs/swapped.py``). A place may hide copies behind its other layers, too,
so these costs are no less than those of the model of time. A result is called back as many operators ahead as its copy takes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mindllm.architecture.layer_counts import ONE_F_ONE_B
from mindllm.architecture.layer_kind import LayerKind
from mindllm.config import RunConfig
from mindllm.config.recompute import ATTENTION
from mindllm.parallel.layer_plan import LayerAssignment
from mindllm.timing.costs.swapped import late_seconds, moved_bytes
from mindllm.timing.step import TimedWork
from mindllm.timing.step_work import Part, spec_part
from mindllm.timing.workload import Swap, Workload

PRICE = 1e-5  # of a backward pass, so that nothing is moved that buys nothing


@dataclass(frozen=True)
class Way:
    """What becomes of a layer's activations: what is computed again, and the ``backward_prefetch`` of attention's results on the
    host; 0: they stay.
    """

    kind: LayerKind
    swap: int = 0

    @property
    def moves(self) -> Swap:
        """What waits on the host."""
        return ((ATTENTION, self.swap),) if self.swap else ()


def hosted(workload: Workload, timed: TimedWork, kinds: Mapping[str, LayerKind]) -> dict[str, Way]:
    """The kinds that keep attention's results, with these on the host, by name.

    Raises:
        UserError: the device has no figure of its host's link, or no layer has such results.
    """
    ahead = max(_prefetch(workload, timed, number) for number in range(len(workload.architecture.layers)))
    return {
        "host" if kind == LayerKind() else f"{name}, host": Way(kind, ahead)
        for name, kind in kinds.items()
        if not kind.recompute
    }


def _prefetch(workload: Workload, timed: TimedWork, number: int) -> int:
    """Operators that a copy of attention's results takes."""
    part = spec_part(workload, workload.architecture.layers[number], LayerAssignment(0), ((ATTENTION, 1),))
    longest = max(one.bytes for one in part.moved) / timed.device.host_rate
    return max(1, math.ceil(longest / _each(timed, part)))


def _each(timed: TimedWork, part: Part) -> float:
    """The mean time of an operator of the backward pass."""
    return timed.passes(part)[1].seconds / len(part.backward)


def copies_waited_for(timed: TimedWork, part: Part) -> float:
    """Seconds that both passes of a layer on its own wait for copies."""
    if not part.moved:
        return 0.0
    forward, backward = (one.seconds for one in timed.passes(part))
    rate = timed.device.host_rate
    copied = moved_bytes(part.moved) / rate
    late = late_seconds(part.moved, rate, _each(timed, part))
    return PRICE * backward + max(0.0, copied - forward) + max(0.0, copied - backward, late)


def check_swapped(config: RunConfig, numbers: Sequence[int] | None) -> None:
    """Refuses runs of which it is not known what moving results does to their order.

    Raises:
        UserError: names the key.
    """
    scheduler = config.parallel.pipeline_config.pipeline_scheduler
    if scheduler != ONE_F_ONE_B:
        message = (
            f"what waits on the host is planned in {ONE_F_ONE_B} (value {scheduler}); write that, or leave out --swap"
        )
        raise config.error("parallel.pipeline_config.pipeline_scheduler", message)
    chunks = max(numbers or [config.model.config.pp_interleave_num])
    if chunks > 1:
        message = f"what waits on the host is planned with one chunk (value {chunks}); write 1, or leave out --swap"
        raise config.error("model.model_config.pp_interleave_num", message)
