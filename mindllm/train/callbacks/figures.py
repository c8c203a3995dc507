"""Callbacks that compute figures of a step for metrics and log: experts, MTP layers, preference pairs, health."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np

from mindllm.finetune.preference import FIGURES
from mindllm.finetune.unpaired import UNPAIRED_FIGURES
from mindllm.models.experts.expert_load import LOSS_PROBE, PAIRS_PROBE
from mindllm.train.callbacks.callback import Callback
from mindllm.train.expert_loads import LOAD, LayerLoad, layer_loads
from mindllm.train.health import health_figures
from mindllm.train.state import RunState, StepRecord

logger = logging.getLogger(__name__)
MARGINS = "rewards/margins"


def pair_figures(counted: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return means over the preference pairs of a step, under TRL's names; empty without pairs.

    A reward is ``beta`` times the log-probability ratio of model and reference, in nats; ``logps`` are log-probabilities of the
    model; ``rewards/accuracies`` is the share of pairs whose chosen answer has the higher reward.
    """
    sums = counted.get(LOAD + PAIRS_PROBE)
    if sums is None or not sums[-1]:
        return {}
    figures = {name: float(value / sums[-1]) for name, value in zip(FIGURES, sums, strict=False)}
    return {**figures, MARGINS: figures["rewards/chosen"] - figures["rewards/rejected"]}


def unpaired_figures(counted: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return means over the unpaired answers of a step: desirable ones (``chosen``), others (``rejected``).

    ``kl`` is the estimated divergence from the reference, in nats. Empty without answers.
    """
    sums = counted.get(LOAD + PAIRS_PROBE)
    if sums is None or not sums[-1]:
        return {}
    totals = dict(zip(UNPAIRED_FIGURES, map(float, sums), strict=False))
    answers, desirable = float(sums[-1]), totals.pop("desirable")
    counts = {"chosen": desirable, "rejected": answers - desirable, "kl": answers}
    named = {name: (value, counts[name.rpartition("/")[2]]) for name, value in totals.items()}
    figures = {name: value / count for name, (value, count) in named.items() if count}
    if desirable and answers > desirable:
        figures[MARGINS] = figures["rewards/chosen"] - figures["rewards/rejected"]
    return figures


class PreferenceMonitor(Callback):
    """Computes the figures of preference pairs; logs them every ``per_print_times`` steps and after the last step."""

    first_rank_only = True

    def __init__(self, per_print_times: int) -> None:
        self.per_print_times = per_print_times

    def step_end(self, state: RunState, record: StepRecord) -> None:
        figures_of = unpaired_figures if state.config.preference.is_unpaired else pair_figures
        state.preference = figures_of(state.engine.counts()) if record.applied else {}
        if state.preference and (record.step % self.per_print_times == 0 or record.step == state.last_step):
            logger.info(preference_line(state.preference))


def preference_line(figures: dict[str, float]) -> str:
    """Return ``{ rewards/chosen: 0.0112, rewards/rejected: -0.0203, …, rewards/accuracies: 75.0% }``."""
    names = ("rewards/chosen", "rewards/rejected", MARGINS, "kl")
    items = [f"{name}: {figures[name]:.4f}" for name in names if name in figures]
    if (accuracies := figures.get("rewards/accuracies")) is not None:
        items.append(f"rewards/accuracies: {accuracies:.1%}")
    return f"{{ {', '.join(items)} }}"


class MtpLossMonitor(Callback):
    """Computes the loss of MTP layers; logs it every ``per_print_times`` steps and after the last step.

    In a pipeline only ranks of the last stage have it.
    """

    def __init__(self, per_print_times: int) -> None:
        self.per_print_times = per_print_times

    def step_end(self, state: RunState, record: StepRecord) -> None:
        state.mtp_loss = mean_mtp_loss(state.engine.counts()) if record.applied else None
        last = record.step == state.last_step
        if state.mtp_loss is not None and (record.step % self.per_print_times == 0 or last):
            logger.info("{ mtp_loss: %.3f }", state.mtp_loss)


def mean_mtp_loss(counted: Mapping[str, np.ndarray]) -> float | None:
    """Return the loss of MTP layers in nats per token, unweighted, averaged over layers, from ``Engine.counts``.

    None if the model has no such layers, or they are on another stage.
    """
    sums = [values for name, values in counted.items() if LOSS_PROBE in name and values.any()]
    return float(np.mean([loss / tokens for loss, tokens in sums])) if sums else None


class ExpertLoadMonitor(Callback):
    """Computes the loads of experts; logs them every ``per_print_times`` steps and after the last step."""

    first_rank_only = True

    def __init__(self, per_print_times: int) -> None:
        self.per_print_times = per_print_times

    def step_end(self, state: RunState, record: StepRecord) -> None:
        if not record.applied:  # a skipped step has no counts
            state.expert_loads = ()
            return
        chosen = state.config.model.config.num_experts_chosen
        state.expert_loads = tuple(layer_loads(state.engine.counts(), chosen))
        last = record.step == state.last_step
        if state.expert_loads and (record.step % self.per_print_times == 0 or last):
            logger.info(load_line(state.expert_loads))


def load_line(loads: tuple[LayerLoad, ...]) -> str:
    """Return ``{ experts: largest load 1.83 of the mean (layer 3), smallest 0.41 (layer 0), dropped choices: 2.13% }``."""
    busiest = max(loads, key=lambda load: load.largest)
    idlest = min(loads, key=lambda load: load.smallest)
    dropped = sum(load.dropped for load in loads) / len(loads)
    return (
        f"{{ experts: largest load {busiest.largest:.2f} of the mean (layer {busiest.layer}), "
        f"smallest {idlest.smallest:.2f} (layer {idlest.layer}), dropped choices: {dropped:.2%} }}"
    )


class HealthMonitor(Callback):
    """Computes health figures at an interval (section ``monitor_config``). All ranks have it, each for its parts of the weights.

    ``logs``: write the log lines.
    """

    def __init__(self, logs: bool = True) -> None:
        self.logs = logs

    def step_end(self, state: RunState, record: StepRecord) -> None:
        settings = state.config.monitor_config
        if record.step % settings.step_interval and record.step != state.last_step:
            state.health = {}
            return
        state.health = health_figures(state.engine.watched(), record.global_norm, record.applied, state.config)
        for figure in settings.logged() if self.logs else ():
            logger.info(health_line(figure, state.health))


def health_line(figure: str, figures: Mapping[str, float]) -> str:
    """Return ``{ grad_norm: embedding 0.943, layers_0.attention 0.161, …, head 0.753 }``."""
    prefix = f"{figure}/"
    items = (f"{name.removeprefix(prefix)} {value:.4g}" for name, value in figures.items() if name.startswith(prefix))
    return f"{{ {figure}: {', '.join(items) or 'none: the step was not applied'} }}"
