"""What was predicted beside what was measured: one line for each figure of a claim, and its verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

PEAK_TOLERANCE = 0.1  # assumed: of the dry run, to either side; an estimate of kernels' workspace comes on top
LINK_TOLERANCE = 0.25  # assumed: of the described bandwidth, to either side
NO_DEVICE = "no device: processes of this CPU"


class Verdict(str, Enum):
    """How a line, or a claim, stands."""

    CONFIRMED = "confirmed"
    REFUTED = "refuted"
    FAILED = "failed"
    OPEN = "not judged"
    NOT_RUN = "not run"


WORST_FIRST = (Verdict.REFUTED, Verdict.FAILED, Verdict.CONFIRMED, Verdict.OPEN, Verdict.NOT_RUN)


@dataclass(frozen=True)
class Line:
    """One figure of a claim.

    Attributes:
        claim: name of the claim.
        figure: what is compared: ``loss``, ``used peak``, ``step``, ``kernels``, or an exchange.
        unit: of both figures: ``nats``, ``B``, ``s``, ``B/s``.
        predicted: by one CPU device, the dry run, or the model of time; None: nobody predicts it.
        measured: by the run; None: it was not.
        verdict: of the line.
        why: the verdict in words. They are ours alone: nothing that a program or a system has said is in them.
        detail: further figures.
    """

    claim: str
    figure: str
    unit: str
    predicted: float | None
    measured: float | None
    verdict: Verdict
    why: str
    detail: Mapping[str, float] = field(default_factory=dict)


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """Return how a claim stands whose lines stand so; without lines it was not run."""
    return next((one for one in WORST_FIRST if one in verdicts), Verdict.NOT_RUN)


def loss_line(claim: str, wanted: Mapping[int, float], found: Mapping[int, float | None], tolerance: float) -> Line:
    """Compare the losses of steps, in nats per token, with those of one CPU device; ``found`` may have the later steps alone."""
    steps = sorted(step for step in found if step in wanted)
    if not steps:
        return Line(claim, "loss", "nats", None, None, Verdict.FAILED, "no step has a loss")
    pairs = [(wanted[step], math.nan if found[step] is None else float(found[step] or 0.0)) for step in steps]
    off = max((abs(one - other) for one, other in pairs), key=lambda size: math.inf if math.isnan(size) else size)
    within = off <= tolerance
    said = "a loss is not finite" if math.isnan(off) else f"{_named(steps)} differ by at most {off:.1e}"
    verdict = Verdict.CONFIRMED if within else Verdict.REFUTED
    why = f"{said}; allowed: {tolerance:g}"
    return Line(claim, "loss", "nats", pairs[-1][0], pairs[-1][1], verdict, why, {"largest_difference": off})


def peak_line(claim: str, used: int, with_workspace: int, found: int | None) -> Line:
    """Compare the peak of device memory, without fragments, with the dry run's; all in bytes.

    Level 1 of the dry run has no workspace of kernels, so the peak may lie between both figures, with a tolerance at either end.
    """
    if found is None:
        return Line(claim, "used peak", "B", used, None, Verdict.NOT_RUN, NO_DEVICE)
    least, most = (1 - PEAK_TOLERANCE) * used, (1 + PEAK_TOLERANCE) * max(used, with_workspace)
    verdict = Verdict.CONFIRMED if least <= found <= most else Verdict.REFUTED
    beside = f"; workspace of kernels may add {with_workspace / used - 1:.1%}" if with_workspace > used else ""
    why = f"{_off(found, used)} the dry run{beside}; allowed: {PEAK_TOLERANCE:.0%} to either side"
    return Line(claim, "used peak", "B", used, found, verdict, why, {"least": least, "most": most})


def time_line(claim: str, figure: str, predicted: float, error: float | None, found: float | None) -> Line:
    """Compare seconds of a step with the model of time and its stated range, a share of the prediction."""
    if found is None:
        return Line(claim, figure, "s", predicted, None, Verdict.NOT_RUN, NO_DEVICE)
    if error is None:
        why = f"{_off(found, predicted)} the prediction; the described device states no range (step_error)"
        return Line(claim, figure, "s", predicted, found, Verdict.OPEN, why)
    within = abs(found - predicted) <= error * predicted
    verdict = Verdict.CONFIRMED if within else Verdict.REFUTED
    why = f"{_off(found, predicted)} the prediction; its range: {error:.0%} to either side"
    return Line(claim, figure, "s", predicted, found, verdict, why, {"range": error})


def link_line(claim: str, exchange: str, described: float, found: float | None) -> Line:
    """Compare the bandwidth of an exchange, in bytes a second, with what its described links give messages of this size."""
    figure = f"bandwidth of {exchange}"
    if found is None:
        return Line(claim, figure, "B/s", described, None, Verdict.NOT_RUN, NO_DEVICE)
    least, most = 1 - LINK_TOLERANCE, 1 / (1 - LINK_TOLERANCE)
    verdict = Verdict.CONFIRMED if least <= found / described <= most else Verdict.REFUTED
    why = f"{found / described:.0%} of what the described links give; allowed: {least:.0%} to {most:.0%}"
    return Line(claim, figure, "B/s", described, found, verdict, why)


def without(claim: str, verdict: Verdict, why: str, figure: str = "run") -> Line:
    """Return the line of what has no figures: it was not run, or it failed."""
    return Line(claim, figure, "", None, None, verdict, why)


def _named(steps: Sequence[int]) -> str:
    return f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"losses of step {steps[0]}"


def _off(found: float, predicted: float) -> str:
    return f"{100 * (found / predicted - 1):+.1f}% off"
