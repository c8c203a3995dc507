"""The recorded step beside the predicted one: what differs, by cause, and what the step would gain if it did not.

Of ranks of one stage the lower median stands for all; how much longer the slowest takes is a cause of its own. A cause is worth
the step with all causes less the step with all but this one, both from the pipeline's simulator: a slow kernel on a stage that
waits anyway is worth nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mindllm.errors import UserError
from mindllm.profiles.predicted import Change, PredictedStep, Spent
from mindllm.profiles.ranks import terms_of
from mindllm.profiles.recorded import SENT, RankRecord
from mindllm.profiles.terms import Key, Term
from mindllm.timing.step import StepTime

LEAST = 0.005  # of the predicted step, from which on a difference is told
MOST = 100  # differences that are told one by one
LOCAL = ("kernel", "work", "unknown", "not in kernels", "data", "begin", "host")
"""Causes that a rank has by itself; of others it may be that another rank is late."""


@dataclass(frozen=True)
class Finding:
    """One difference; seconds are of a step, above 0 where the recorded one takes longer.

    Attributes:
        cause: as in :data:`mindllm.profiles.report.NAMES`.
        where: stages, and for an imbalance the rank.
        what: kernel with its shapes, kind of exchange, ...
        seconds: on the stage where it is largest.
        worth: seconds by which the step is shorter without it.
        consequence: whether it follows from others, and does not count beside them.
    """

    cause: str
    where: str
    what: str
    seconds: float
    worth: float
    consequence: bool = False
    detail: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class StageRecord:
    """The ranks of one stage that were recorded, and their terms."""

    stage: int
    records: Sequence[RankRecord]
    terms: Sequence[dict[Key, Term]]

    @property
    def keys(self) -> list[Key]:
        """Causes of any of its ranks."""
        return list(dict.fromkeys(key for one in self.terms for key in one))

    def seconds(self, key: Key) -> list[float]:
        """Return the seconds of a cause on every rank."""
        return [one[key].seconds if key in one else 0.0 for one in self.terms]

    def base(self, key: Key) -> float:
        """Return what stands for the stage: the lower median; of waiting for others the least."""
        found = sorted(self.seconds(key))
        return found[0] if key[0] == "waits for ranks" else found[(len(found) - 1) // 2]

    def term(self, key: Key) -> Term:
        """Return the term of the rank whose seconds stand for the stage."""
        base = self.base(key)
        having = [one[key] for one in self.terms if key in one]
        return min(having, key=lambda term: abs(term.seconds - base))


@dataclass(frozen=True)
class Part:
    """A cause on one stage: what is changed by it."""

    term: Term
    stage: int
    seconds: float
    change: Change


@dataclass(frozen=True)
class Comparison:
    """The recorded step, the predicted one, the causes, and what they leave.

    Attributes:
        findings: differences of at least 0.5% of the predicted step, the most valuable first.
        unexplained: seconds of the recorded step beyond the predicted one with all causes.
        small: what the smaller differences are worth together.
    """

    measured: float
    step: StepTime
    findings: tuple[Finding, ...]
    unexplained: float
    small: float
    stages: tuple[StageRecord, ...]
    predicted: PredictedStep

    @property
    def difference(self) -> float:
        """Seconds by which the recorded step is longer."""
        return self.measured - self.step.seconds


def compare(step: StepTime, records: Sequence[RankRecord]) -> Comparison:
    """Compare the records of ranks with a predicted step.

    Raises:
        UserError: a rank is none of the run's.
    """
    predicted = PredictedStep(step)
    stages = _stages(predicted, records)
    parts: dict[Key, list[Part]] = defaultdict(list)
    for stage in stages:
        base = {key: stage.base(key) for key in stage.keys}
        hide_slower(base)
        for key, seconds in base.items():
            if key[0] != "bubble" and seconds:
                term = stage.term(key)
                parts[key].append(Part(term, stage.stage, seconds, _change(predicted, key, term, stage.stage, seconds)))
        late = imbalance(stage)
        if late is not None:
            change = predicted.spread(predicted.everything, stage.stage, late.seconds)
            parts["imbalance", late.about].append(Part(late, stage.stage, late.seconds, change))
    delay = _delay(stages, predicted)
    every = [one.change for found in parts.values() for one in found]
    whole, waits = predicted.seconds(every, delay)
    findings = _findings(predicted, parts, every, delay, whole)
    findings += _bubbles(predicted, stages, every, delay, whole, waits)
    measured = max(one.parts.seconds for one in records)
    told = sorted(findings, key=lambda one: (one.consequence, -abs(one.worth), -abs(one.seconds)))
    return Comparison(
        measured,
        step,
        tuple(told),
        measured - whole,
        _small(predicted, parts, every, delay, whole),
        tuple(stages),
        predicted,
    )


def _stages(predicted: PredictedStep, records: Sequence[RankRecord]) -> list[StageRecord]:
    strategy = predicted.step.workload.strategy
    found: dict[int, list[RankRecord]] = defaultdict(list)
    for one in sorted(records, key=lambda record: record.rank):
        if one.rank >= strategy.device_num:
            raise UserError(
                f"{one.directory}: is of rank {one.rank}, and the run has {strategy.device_num} devices; give the run's YAML"
            )
        found[one.rank // strategy.stage_device_num].append(one)
    return [
        StageRecord(stage, own, [terms_of(one, stage, predicted) for one in own])
        for stage, own in sorted(found.items())
    ]


def hide_slower(base: dict[Key, float]) -> None:
    """Take from slower exchanges what is hidden beyond the prediction: longer ones have more that can be hidden."""
    key: Key = ("exposed", "")
    more = -base.get(key, 0.0)
    slower = {name: seconds for name, seconds in base.items() if name[0] == "exchange" and seconds > 0}
    taken = min(more, sum(slower.values()))
    if taken <= 0:
        return
    for name, seconds in slower.items():
        base[name] -= taken * seconds / sum(slower.values())
    base[key] += taken


def imbalance(stage: StageRecord) -> Term | None:
    """Return how much longer the slowest rank of a stage takes by itself than the lower median; None: one was recorded."""
    if len(stage.records) < 2:
        return None
    local = [key for key in stage.keys if key[0] in LOCAL]
    sums = [sum(stage.seconds(key)[place] for key in local) for place in range(len(stage.records))]
    slowest, usual = int(np.argmax(sums)), sorted(sums)[(len(sums) - 1) // 2]
    reasons = sorted(local, key=lambda key: stage.base(key) - stage.seconds(key)[slowest])[:3]
    why = {
        stage.terms[slowest][key].what: stage.seconds(key)[slowest] - stage.base(key)
        for key in reasons
        if key in stage.terms[slowest]
    }
    rank = stage.records[slowest].rank
    usual_rank = next(one.rank for one, spent in zip(stage.records, sums, strict=True) if spent == usual)
    what = f"rank {rank} takes longer than rank {usual_rank}"
    return Term("imbalance", what, sums[slowest] - usual, None, {"rank": rank, "most of it": why}, about=rank)


def _change(predicted: PredictedStep, key: Key, term: Term, stage: int, seconds: float) -> Change:
    """Return where in the step a cause acts."""
    spent: Spent | None = None
    if key[0] in ("kernel", "work") and term.group in predicted.operators:
        spent = predicted.operators[term.group]
    elif key[0] in ("exchange", "work"):
        spent = predicted.exchanges.get(term.group)  # type: ignore[call-overload]
    elif key[0] == "exposed":
        spent = _hidden(predicted, stage)
    elif key[0] in ("begin", "data") or (key[0] == "host" and seconds < 0) or term.runs < predicted.runs:
        spent = Spent.nothing(predicted.stages, predicted.places)
    return predicted.spread(spent if spent is not None else predicted.everything, stage, seconds)


def _hidden(predicted: PredictedStep, stage: int) -> Spent:
    """Exchanges of which some are predicted to be hidden: those once per step, or those of passes where there are no others."""
    found = Spent.nothing(predicted.stages, predicted.places)
    for spent in predicted.exchanges.values():
        found.once += spent.once
        found.passes += spent.passes * (not predicted.step.ends[stage].hidden)
    return found


def _delay(stages: Sequence[StageRecord], predicted: PredictedStep) -> float:
    """Return by how much a Send takes longer than predicted, without waiting for the other side."""
    if predicted.stages == 1:
        return 0.0
    each = [
        one.seconds - one.waited
        for stage in stages
        for record in stage.records
        if record.collectives is not None
        for one in record.collectives.each
        if one.op == SENT
    ]
    return float(np.median(each)) - predicted.timed.send if each else 0.0


def _told(predicted: PredictedStep, parts: Mapping[Key, Sequence[Part]]) -> list[Key]:
    """Return the causes that are told: the largest, none below the least."""
    sizes = {key: max(abs(one.seconds) for one in own) for key, own in parts.items()}
    told = [key for key, seconds in sizes.items() if seconds >= LEAST * predicted.step.seconds]
    return sorted(told, key=lambda key: -sizes[key])[:MOST]


def _small(
    predicted: PredictedStep, parts: Mapping[Key, Sequence[Part]], every: Sequence[Change], delay: float, whole: float
) -> float:
    """Return what the causes are worth together that are too small to be told."""
    large = [one.change for key in _told(predicted, parts) for one in parts[key]]
    return whole - predicted.seconds(large, delay)[0] if len(large) < len(every) else 0.0


def _findings(
    predicted: PredictedStep, parts: Mapping[Key, Sequence[Part]], every: Sequence[Change], delay: float, whole: float
) -> list[Finding]:
    least = LEAST * predicted.step.seconds
    found = []
    for key in _told(predicted, parts):
        own = parts[key]
        largest = max(own, key=lambda one: abs(one.seconds))
        mine = {id(one.change) for one in own}
        without = predicted.seconds([one for one in every if id(one) not in mine], delay)[0]
        where = "" if predicted.stages == 1 else f"stage {', '.join(str(one.stage) for one in own)}"
        term = largest.term
        found.append(Finding(key[0], where, term.what, largest.seconds, whole - without, detail=term.detail))
    if abs(delay) * predicted.runs >= least:
        without = predicted.seconds(list(every), 0.0)[0]
        detail = {"each": delay + predicted.timed.send, "predicted": predicted.timed.send}
        found.append(
            Finding(
                "send",
                "",
                "hidden states and gradients between stages",
                2 * delay * predicted.runs,
                whole - without,
                detail=detail,
            )
        )
    return found


def _bubbles(
    predicted: PredictedStep,
    stages: Sequence[StageRecord],
    every: Sequence[Change],
    delay: float,
    whole: float,
    waits: np.ndarray,
) -> list[Finding]:
    """Waiting between stages: what follows from the other causes, and what none of them explains."""
    if predicted.stages == 1 or not stages:
        return []
    key: Key = ("bubble", "")
    before = np.array([predicted.parts(one.stage)["bubble"] for one in stages])
    recorded = before + np.array([one.base(key) for one in stages])
    explained = waits[[one.stage for one in stages]]
    found, least = [], LEAST * predicted.step.seconds
    if abs(recorded - before).max() >= least:
        even = predicted.seconds([*every, _evened(predicted, every)], delay)[0]
        even_before = predicted.seconds([_evened(predicted, [])])[0]
        worth = (whole - even) - (predicted.step.seconds - even_before)
        rows = {
            str(one.stage): {"measured": float(has), "predicted": float(had), "with the other causes": float(follows)}
            for one, has, had, follows in zip(stages, recorded, before, explained, strict=True)
        }
        most = int(abs(recorded - before).argmax())
        found.append(
            Finding(
                "bubble",
                f"stage {stages[most].stage}",
                "waiting between stages, uneven passes",
                float((recorded - before)[most]),
                worth,
                True,
                {"stages": rows},
            )
        )
    return found


def _evened(predicted: PredictedStep, every: Sequence[Change]) -> Change:
    """Return the change that makes all places take the mean of them."""
    times = predicted.timed.durations + sum((one.passes for one in every), np.zeros((2, predicted.places)))
    return Change(times.mean(axis=1, keepdims=True) - times, np.zeros(predicted.stages))
