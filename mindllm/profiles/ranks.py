"""Where the seconds of one recorded rank differ from the prediction of its stage: terms that add up to the difference.

step = computing + exposed exchanges + free                                     (of a profiler, and of the prediction)
computing  = kernels slower than the roofline of their shapes + work that is not predicted + kernels of unknown work
exchanges  = slower ones + waiting for ranks that come late + what is hidden less than predicted + waiting between stages
free       = the beginning of the step + gaps that the host leaves, beyond what a step is said to cost beside
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

from mindllm.errors import shortened
from mindllm.profiles.kernel_terms import kernel_terms
from mindllm.profiles.predicted import PredictedStep
from mindllm.profiles.recorded import RECEIVED, SENT, Collective, Kernel, Ran, RankRecord
from mindllm.profiles.terms import Key, Term

UNKNOWN = "unknown"  # axis of a recorded group of ranks: names of groups do not say it, kinds and sizes do
FAR = 1e3  # of a pair that cannot be told, as a logarithm


def terms_of(record: RankRecord, stage: int, predicted: PredictedStep) -> dict[Key, Term]:
    """Return the terms of a rank by cause and by what they are about."""
    expected = predicted.parts(stage)
    found: dict[Key, Term] = {}
    computing = record.parts.computing
    free = record.parts.free
    if record.kernels is None:
        found["not in kernels", ""] = Term("not in kernels", "computing, kernel by kernel not recorded",
                                           computing - expected["computing"])  # fmt: skip
    else:
        for term in kernel_terms(record.kernels, stage, predicted):
            found[term.cause, term.about] = term
        counted = sum(one.seconds for one in record.kernels.each) / record.kernels.steps
        if record.kernels.each:
            found["not in kernels", ""] = Term(
                "not in kernels", "computing beside the kernels recorded", computing - counted
            )
    _free(found, record.parts.begins, free, expected["free"])
    if record.kernels is not None:
        found["host", ""].detail = gaps_before(record.kernels)
    _exchanges(found, record, stage, predicted, expected)
    return found


def _free(found: dict[Key, Term], begins: float, free: float, expected: float) -> None:
    """Split what the device does nothing in: what a step costs beside is the beginning first."""
    rest = max(0.0, expected - begins)
    found["begin", ""] = Term("begin", "before the first kernel of a step", max(0.0, begins - expected))
    found["host", ""] = Term("host", "gaps between kernels", free - begins - rest)


def _exchanges(
    found: dict[Key, Term], record: RankRecord, stage: int, predicted: PredictedStep, expected: Mapping[str, float]
) -> None:
    parts = record.parts
    if record.collectives is None:
        waits = parts.between_stages if parts.between_stages else 0.0
        found["bubble", ""] = Term("bubble", "waiting between stages", waits - expected["bubble"])
        found["exposed", ""] = Term("exposed", "exchanges, one by one not recorded",
                                    parts.exposed - waits - expected["exposed"])  # fmt: skip
        return
    share = 1.0 / record.collectives.steps
    each = record.collectives.each
    received = share * sum(one.seconds for one in each if one.op == RECEIVED)
    groups: dict[tuple[str, str], list[Collective]] = defaultdict(list)
    for one in each:
        if one.op not in (SENT, RECEIVED):
            groups[one.op, one.group].append(one)
    transit: dict[Hashable, float] = defaultdict(float)
    counts: dict[Hashable, float] = defaultdict(float)
    waited = 0.0
    groups_of: dict[Hashable, set[tuple[str, str]]] = defaultdict(set)
    for name, key in axes_of_groups(groups, share, stage, predicted).items():
        groups_of[key].add(name)
        counts[key] += share * len(groups[name])
        transit[key] += share * sum(one.seconds - one.waited for one in groups[name])
        waited += share * sum(one.waited for one in groups[name])
    for key in {*transit, *predicted.exchanges}:
        own = predicted.exchanges.get(key)  # type: ignore[call-overload]
        before = own.of_stage(stage, predicted.runs) if own else 0.0
        if before or transit[key]:
            assert isinstance(key, tuple)
            what = f"{key[0]} over {key[1]}" if own else f"{shortened(key[0])} that is not predicted"
            detail: dict[str, object] = {"measured": transit[key], "predicted": before}
            detail |= slow_link(record, groups_of[key])
            if own is not None and own.passes.any() and counts[key] != own.counts[stage]:
                runs, expects = counts[key], float(own.counts[stage])
                more = before * (runs / expects - 1) if expects else transit[key]
                found["work", key] = Term("work", what, more, key, {"runs": runs, "predicted_runs": expects})
                before += more
            found["exchange", key] = Term("exchange", what, transit[key] - before, key, detail)
    if waited:
        found["waits for ranks", ""] = Term("waits for ranks", "waiting in exchanges for ranks that come late", waited)
    found["bubble", ""] = Term("bubble", "waiting between stages", received - expected["bubble"])
    measured = sum(transit.values()) + waited
    hidden = measured + received - parts.exposed
    found["exposed", ""] = Term("exposed", "exchanges that nothing hides", expected["hidden"] - hidden)


def slow_link(record: RankRecord, groups: Collection[tuple[str, str]]) -> dict[str, object]:
    """Return the slowest link of some groups beside the median of all of theirs; empty: links are not recorded."""
    links = [one for one in record.links if (one.op, one.group) in groups and one.rate > 0]
    if not links:
        return {}
    slowest = min(links, key=lambda one: one.rate)
    rates = {"rate": slowest.rate, "median": statistics.median(one.rate for one in links)}
    return {"slowest_link": {"link": shortened(slowest.link), "transport": shortened(slowest.transport), **rates}}


def gaps_before(kernels: Ran[Kernel]) -> dict[str, object]:
    """Return seconds of a step in which a stream had nothing, by the types of kernels that came next, the most first.

    Waiting for exchanges is among them, so it tells where to look and is no part of any sum.
    """
    waits: Counter[str] = Counter()
    for one in kernels.each:
        waits[shortened(one.type)] += one.waited / kernels.steps  # type: ignore[assignment]
    return {"gaps_before": {kind: seconds for kind, seconds in waits.most_common(3) if seconds > 0}}


def axes_of_groups(
    groups: Mapping[tuple[str, str], Sequence[Collective]], share: float, stage: int, predicted: PredictedStep
) -> dict[tuple[str, str], Hashable]:
    """Return for every kind and group the predicted exchanges ``(kind, axis)`` that it is nearest to.

    What is compared is the bytes that a rank sends in a step, or its seconds where a recording has no bytes. Groups beyond those
    predicted are of the nearest axis; kinds that are not predicted are ``(kind, "unknown")``.
    """
    found: dict[tuple[str, str], Hashable] = {}
    for kind in dict.fromkeys(op for op, _ in groups):
        mine = [name for name in groups if name[0] == kind]
        axes = [
            key
            for key, spent in predicted.exchanges.items()
            if key[0] == kind and spent.of_stage(stage, predicted.runs) > 0
        ]
        if not axes:
            found |= dict.fromkeys(mine, (kind, UNKNOWN))
            continue
        costs = np.array([[_distance(groups[name], share, stage, predicted, key) for key in axes] for name in mine])
        chosen = dict(zip(*linear_sum_assignment(costs), strict=True))
        for number, name in enumerate(mine):
            found[name] = axes[chosen.get(number, int(costs[number].argmin()))]
    return found


def _distance(
    each: Sequence[Collective], share: float, stage: int, predicted: PredictedStep, key: tuple[str, str]
) -> float:
    own = predicted.exchanges[key]
    sent = share * sum(one.bytes for one in each)
    measured, expected = sent, float(own.bytes[stage])
    if not sent:
        measured = share * sum(one.seconds - one.waited for one in each)
        expected = own.of_stage(stage, predicted.runs)
    return abs(math.log(measured / expected)) if measured > 0 and expected > 0 else FAR
