"""Where the seconds of one recorded rank differ from the prediction of its stage: terms that add up to the difference.

step = computing + exposed exchanges + free                                     (of a profiler, and of the prediction)
computing  = kernels slower than the roofline of their shapes + work that is not predicted + kernels of unknown work
exchanges  = slower ones + waiting for ranks that come late + what is hidden less than predicted + waiting between stages
free       = the beginning of the step + gaps that the host leaves, beyond what a step is said to cost beside
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mindllm.profiles.exchange_axes import axes_of_groups
from mindllm.profiles.predicted import PredictedStep, signature
from mindllm.profiles.recorded import RECEIVED, SENT, Collective, Kernel, RankRecord
from mindllm.timing.costs.operators import operator_seconds
from mindllm.timing.costs.work import VECTOR, Operator

Cause = Literal[
    "kernel", "work", "unknown", "not in kernels", "exchange", "exposed", "waits for ranks", "bubble", "send", "data", "begin",
    "host", "other exchange",
]  # fmt: skip
BATCHES = ("GetNext", "InitDataSetQueue")
"""Types of kernels that wait for the next batch."""
LAYER = re.compile(r"layers?[._/-]?(\d{1,5})\b")
Key = tuple[Cause, Hashable]


@dataclass
class Term:
    """Seconds of one cause on one rank.

    Attributes:
        group: of operators or exchanges that it is about.
        detail: what JSON says of it besides.
        runs: how often it ran in a step, where that is known.
    """

    cause: Cause
    what: str
    seconds: float = 0.0
    group: Hashable = None
    detail: dict[str, object] = field(default_factory=dict)
    runs: float = math.inf


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
        _kernels(found, record, stage, predicted)
        counted = sum(one.seconds for one in record.kernels.each) / record.kernels.steps
        if record.kernels.each:
            found["not in kernels", ""] = Term(
                "not in kernels", "computing beside the kernels recorded", computing - counted
            )
    _free(found, record.parts.begins, free, expected["free"])
    _exchanges(found, record, stage, predicted, expected)
    return found


def _kernels(found: dict[Key, Term], record: RankRecord, stage: int, predicted: PredictedStep) -> None:
    """Slower than their shapes allow, more or other work than predicted, work that is not known."""
    assert record.kernels is not None
    alike: dict[tuple[str, Hashable], list[Kernel]] = defaultdict(list)
    for one in record.kernels.each:
        alike[one.type, one.ran].append(one)
    share, device = 1.0 / record.kernels.steps, predicted.step.device
    done: dict[Hashable, float] = defaultdict(float)
    counts: Counter[Hashable] = Counter()
    for (kind, ran), kernels in alike.items():
        spent = share * sum(one.seconds for one in kernels)
        if kind in BATCHES:
            found["data", kind] = Term("data", f"{kind}: waiting for the next batch", spent)
        elif isinstance(ran, Operator):
            each = operator_seconds(ran, device)
            group = signature(ran)
            done[group] += share * len(kernels) * each
            counts[group] += len(kernels)
            found["kernel", (kind, kernels[0].shapes, ran.dtype)] = _slower(kernels, kind, ran, each, share, predicted)
        else:
            found["unknown", ran] = Term("unknown", str(ran), spent, runs=share * len(kernels))
    for group in {*done, *predicted.operators}:
        own = predicted.operators.get(group)
        less = own.of_stage(stage, predicted.runs) if own else 0.0
        if not less and not done[group]:
            continue
        runs, expects = share * counts[group], float(own.counts[stage]) if own else 0.0
        found["work", group] = Term(
            "work", _named(group, predicted), done[group] - less, group, {"runs": runs, "predicted_runs": expects}
        )


def _slower(
    kernels: Sequence[Kernel], kind: str, ran: Operator, each: float, share: float, predicted: PredictedStep
) -> Term:
    """Kernels that are alike beside the roofline of their shape, and the layers in which they are slow."""
    times = [one.seconds for one in kernels]
    detail: dict[str, object] = {
        "runs": share * len(kernels), "median": statistics.median(times), "roofline": each, "dtype": ran.dtype,
        "operators": operators_of(signature(ran), predicted), "layers": slow_layers(kernels, each),
    }  # fmt: skip
    what = f"{kind} {kernels[0].shapes} {ran.dtype}"
    return Term("kernel", what, share * sum(times) - share * len(kernels) * each, signature(ran), detail)


def slow_layers(kernels: Sequence[Kernel], each: float) -> list[int]:
    """Return the layers in which kernels are slow, where they are not in others; empty: alike in all, or not recorded."""
    by_layer: dict[int, list[float]] = defaultdict(list)
    for one in kernels:
        if number := LAYER.search(one.name):
            by_layer[int(number[1])].append(one.seconds)
    beyond = {layer: statistics.median(times) - each for layer, times in by_layer.items()}
    most = max(beyond.values(), default=0.0)
    slow = sorted(layer for layer, seconds in beyond.items() if seconds > most / 2)
    return slow if len(slow) < len(by_layer) else []


def operators_of(group: Hashable, predicted: PredictedStep) -> list[str]:
    """Return names of predicted operators that do the work of a group; of vector operators none, they are too many."""
    own = predicted.operators.get(group)
    return sorted(own.names) if own and group != (VECTOR,) else []


def _named(group: Hashable, predicted: PredictedStep) -> str:
    assert isinstance(group, tuple)
    if group == (VECTOR,):
        return "vector operators"
    names = operators_of(group, predicted)
    sizes = " x ".join(map(str, group[1])) if isinstance(group[1], tuple) else f"{group[1]:,} million operations"
    return f"{group[0]} {sizes}" + (f" ({', '.join(names[:2])})" if names else "")


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
    waited = 0.0
    for name, key in axes_of_groups(groups, share, stage, predicted).items():
        transit[key] += share * sum(one.seconds - one.waited for one in groups[name])
        waited += share * sum(one.waited for one in groups[name])
    for key in {*transit, *predicted.exchanges}:
        own = predicted.exchanges.get(key)  # type: ignore[call-overload]
        before = own.of_stage(stage, predicted.runs) if own else 0.0
        if before or transit[key]:
            assert isinstance(key, tuple)
            what = f"{key[0]} over {key[1]}" if own else f"{key[0]} that is not predicted"
            detail = {"measured": transit[key], "predicted": before}
            found["exchange", key] = Term("exchange", what, transit[key] - before, key, detail)
    if waited:
        found["waits for ranks", ""] = Term("waits for ranks", "waiting in exchanges for ranks that come late", waited)
    found["bubble", ""] = Term("bubble", "waiting between stages", received - expected["bubble"])
    measured = sum(transit.values()) + waited
    hidden = measured + received - parts.exposed
    found["exposed", ""] = Term("exposed", "exchanges that nothing hides", expected["hidden"] - hidden)
