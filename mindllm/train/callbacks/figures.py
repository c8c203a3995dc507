"""What a step counted beside its loss, for the callbacks that write and show it: experts, MTP layers, pairs of answers."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np

from mindllm.finetune.preference import FIGURES
from mindllm.finetune.unpaired import UNPAIRED_FIGURES
from mindllm.models.experts.expert_load import LOSS_PROBE, PAIRS_PROBE
from mindllm.train.callbacks.callback import Callback
from mindllm.train.expert_loads import LOAD, LayerLoad, layer_loads
from mindllm.train.state import RunState, StepRecord

# What a step counted of pairs of answers, as the means that users of TRL know.

MARGINS = "rewards/margins"


def pair_figures(counted: Mapping[str, np.ndarray]) -> dict[str, float]:
    """What ``Engine.counts`` gave, as means over the pairs of the step; nothing where it counted none.

    A reward is ``beta`` times how much likelier than the reference the model makes an answer, in nats; ``logps`` are the
    model's own log-probabilities of an answer; ``rewards/accuracies`` is the part of the pairs whose chosen answer has the
    higher reward.
    """
    sums = counted.get(LOAD + PAIRS_PROBE)
    if sums is None or not sums[-1]:
        return {}
    figures = {name: float(value / sums[-1]) for name, value in zip(FIGURES, sums, strict=False)}
    return {**figures, MARGINS: figures["rewards/chosen"] - figures["rewards/rejected"]}


def unpaired_figures(counted: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The same of unpaired answers: means over the desirable ones (``chosen``) and over the others (``rejected``), where there
    are any; ``kl`` is the estimated distance from the reference, in nats.
    """
    sums = counted.get(LOAD + PAIRS_PROBE)
    if sums is None or not sums[-1]:
        return {}
    found = dict(zip(UNPAIRED_FIGURES, map(float, sums), strict=False))
    answers, desirable = float(sums[-1]), found.pop("desirable")
    counts = {"chosen": desirable, "rejected": answers - desirable, "kl": answers}
    named = {name: (value, counts[name.rpartition("/")[2]]) for name, value in found.items()}
    figures = {name: value / count for name, (value, count) in named.items() if count}
    if desirable and answers > desirable:
        figures[MARGINS] = figures["rewards/chosen"] - figures["rewards/rejected"]
    return figures


# Rewards of chosen and rejected answers after every step, for the callbacks that write and show them.

logger = logging.getLogger(__name__)


class PreferenceMonitor(Callback):
    """Asks the engine what it counted of pairs; logs a line every ``per_print_times`` steps, and for the last step."""

    first_rank_only = True

    def __init__(self, per_print_times: int) -> None:
        self.per_print_times = per_print_times

    def step_end(self, state: RunState, record: StepRecord) -> None:
        figures_of = unpaired_figures if state.config.preference.is_unpaired else pair_figures
        state.preference = figures_of(state.engine.counts()) if record.applied else {}
        if state.preference and (record.step % self.per_print_times == 0 or record.step == state.last_step):
            logger.info(preference_line(state.preference))


def preference_line(figures: dict[str, float]) -> str:
    """``{ rewards/chosen: 0.0112, rewards/rejected: -0.0203, …, rewards/accuracies: 75.0% }``, of what there is of it."""
    names = ("rewards/chosen", "rewards/rejected", MARGINS, "kl")
    shown = [f"{name}: {figures[name]:.4f}" for name in names if name in figures]
    if (accuracies := figures.get("rewards/accuracies")) is not None:
        shown.append(f"rewards/accuracies: {accuracies:.1%}")
    return f"{{ {', '.join(shown)} }}"


# The loss of what layers predict ahead, by itself, for the callbacks that write and show it.

logger = logging.getLogger(__name__)


class PredictionLossMonitor(Callback):
    """Asks the engine what it counted; logs a line every ``per_print_times`` steps, and for the last step.

    In a pipeline the ranks of the last stage know it.
    """

    def __init__(self, per_print_times: int) -> None:
        self.per_print_times = per_print_times

    def step_end(self, state: RunState, record: StepRecord) -> None:
        state.mtp_loss = prediction_loss(state.engine.counts()) if record.applied else None
        last = record.step == state.last_step
        if state.mtp_loss is not None and (record.step % self.per_print_times == 0 or last):
            logger.info("{ mtp_loss: %.3f }", state.mtp_loss)


def prediction_loss(counted: Mapping[str, np.ndarray]) -> float | None:
    """The mean over layers of the mean loss of a token each predicts, nats, without its factor, from ``Engine.counts``.

    None where nothing was counted: there are no such layers, or they are on another stage.
    """
    sums = [values for name, values in counted.items() if LOSS_PROBE in name and values.any()]
    return float(np.mean([loss / tokens for loss, tokens in sums])) if sums else None


logger = logging.getLogger(__name__)


class ExpertLoadMonitor(Callback):
    """Asks the engine what it counted; logs a line every ``per_print_times`` steps, and for the last step."""

    first_rank_only = True

    def __init__(self, per_print_times: int) -> None:
        self.per_print_times = per_print_times

    def step_end(self, state: RunState, record: StepRecord) -> None:
        if not record.applied:  # nothing was counted
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
