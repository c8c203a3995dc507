"""The load of experts after every step, for the callbacks that write and show it."""

from __future__ import annotations

import logging

from mindllm.train.callbacks.callback import Callback
from mindllm.train.expert_loads import LayerLoad, layer_loads
from mindllm.train.state import RunState, StepRecord

logger = logging.getLogger(__name__)


class ExpertLoadMonitor(Callback):
    """Asks the engine what it counted; logs a line every ``per_print_times`` steps, and for the last step."""

    of_first_rank = True

    def __init__(self, per_print_times: int) -> None:
        self.per_print_times = per_print_times

    def step_end(self, state: RunState, record: StepRecord) -> None:
        if record.overflow:  # nothing was counted
            state.expert_loads = ()
            return
        chosen = state.config.model.config.num_experts_chosen
        state.expert_loads = tuple(layer_loads(state.engine.counts(), chosen))
        last = record.step == state.last_step
        if state.expert_loads and (record.step % self.per_print_times == 0 or last):
            logger.info(load_line(state.expert_loads))


def load_line(loads: tuple[LayerLoad, ...]) -> str:
    """``{ experts: largest load 1.83 of the mean (layer 3), smallest 0.41 (layer 0), dropped choices: 2.13% }``."""
    busiest = max(loads, key=lambda load: load.largest)
    idlest = min(loads, key=lambda load: load.smallest)
    dropped = sum(load.dropped for load in loads) / len(loads)
    return (
        f"{{ experts: largest load {busiest.largest:.2f} of the mean (layer {busiest.layer}), "
        f"smallest {idlest.smallest:.2f} (layer {idlest.layer}), dropped choices: {dropped:.2%} }}"
    )
