"""Recorded kernels beside the roofline of their shapes, and beside the operators that are predicted.

computing - predicted = slower than the roofline + work beyond the predicted + kernels whose work is not known
"""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from mindllm.errors import shortened
from mindllm.profiles.predicted import VECTORS, PredictedStep, signature
from mindllm.profiles.recorded import Kernel, Ran
from mindllm.profiles.terms import Term
from mindllm.timing.costs.operators import operator_seconds
from mindllm.timing.costs.work import Operator

BATCHES = ("GetNext", "InitDataSetQueue")
"""Types of kernels that wait for the next batch."""
TEXT = 200  # characters of a name or a row of shapes that are shown
LAYER = re.compile(r"layers?(?:-\w+)?[./](\d{1,5})(?:-\w+)?[./](.*)")
OPERATOR = re.compile(r"-op\d+")


@dataclass(frozen=True)
class Alike:
    """Kernels of one type that ran the same operator, and the seconds of its roofline."""

    ran: Operator
    kernels: Sequence[Kernel]
    roofline: float

    @property
    def beyond(self) -> float:
        """Seconds beyond the roofline, all together."""
        return sum(one.seconds for one in self.kernels) - self.roofline * len(self.kernels)


def kernel_terms(recorded: Ran[Kernel], stage: int, predicted: PredictedStep) -> Iterator[Term]:
    """Yield what kernels of a rank take beyond the prediction of its stage."""
    share, device = 1.0 / recorded.steps, predicted.step.device
    by_work: dict[tuple[str, Operator | str], list[Kernel]] = defaultdict(list)
    for one in recorded.each:
        by_work[one.type, one.ran].append(one)
    groups: dict[tuple[str, Hashable], list[Alike]] = defaultdict(list)
    for (kind, ran), kernels in by_work.items():
        if isinstance(ran, Operator) and kind not in BATCHES:
            group = signature(ran)
            key = (kernels[0].shapes, ran.dtype) if group == VECTORS else group
            groups[kind, key].append(Alike(ran, kernels, operator_seconds(ran, device)))
            continue
        spent, runs = share * sum(one.seconds for one in kernels), share * len(kernels)
        cause, what = (
            ("data", f"{kind}: waiting for the next batch")
            if kind in BATCHES
            else ("unknown", shortened(str(ran), TEXT))
        )
        yield Term(cause, what, spent, runs=runs, about=what)  # type: ignore[arg-type]
    for (kind, key), alike in groups.items():
        yield _slower(kind, key, alike, share, predicted)
    yield from _work([one for alike in groups.values() for one in alike], share, stage, predicted)


def _work(every: Sequence[Alike], share: float, stage: int, predicted: PredictedStep) -> Iterator[Term]:
    """Yield what kernels at their roofline take beside the predicted operators of the same sizes."""
    done: dict[Hashable, float] = defaultdict(float)
    counts: Counter[Hashable] = Counter()
    for one in every:
        done[signature(one.ran)] += share * len(one.kernels) * one.roofline
        counts[signature(one.ran)] += len(one.kernels)
    for group in dict.fromkeys((*done, *predicted.operators)):
        own = predicted.operators.get(group)
        less = own.of_stage(stage, predicted.runs) if own else 0.0
        if less or done[group]:
            runs, expects = share * counts[group], float(own.counts[stage]) if own else 0.0
            detail = {"runs": runs, "predicted_runs": expects}
            yield Term("work", group_name(group, predicted), done[group] - less, group, detail, about=group)


def _slower(kind: str, key: Hashable, alike: Sequence[Alike], share: float, predicted: PredictedStep) -> Term:
    """Return what kernels of the same work take beyond their roofline, by shape, and where they are slow."""
    group = signature(alike[0].ran)
    ordered = sorted(alike, key=lambda one: -one.beyond)
    detail: dict[str, object] = {
        "shapes": [
            {
                "shapes": one.kernels[0].shapes.strip('"'), "runs": share * len(one.kernels), "roofline": one.roofline,
                "median": statistics.median(kernel.seconds for kernel in one.kernels), "seconds": share * one.beyond,
            }
            for one in ordered
        ],
        "dtype": alike[0].ran.dtype, "operators": cell_operators(group, predicted), **slow_in(alike),
    }  # fmt: skip
    what = shortened(f"{kind} {ordered[0].kernels[0].shapes.strip(chr(34))} {alike[0].ran.dtype}", TEXT)
    return Term("kernel", what, share * sum(one.beyond for one in alike), group, detail, about=(kind, key))


def slow_in(alike: Sequence[Alike]) -> dict[str, list[Any]]:
    """Return the layers and the cells in which kernels are slow, where they are not in others; empty: alike in all."""
    layers: dict[int, list[float]] = defaultdict(list)
    cells: dict[str, list[float]] = defaultdict(list)
    for each in alike:
        for one in each.kernels:
            layer, cell = scope_of(one.name)
            if layer is not None:
                layers[layer].append(one.seconds - each.roofline)
                cells[cell].append(one.seconds - each.roofline)
    return {"layers": _slow(layers), "cells": _slow(cells)}


def _slow(times: Mapping[Any, Sequence[float]]) -> list[Any]:
    beyond = {name: statistics.fmean(spent) for name, spent in times.items()}
    most = max(beyond.values(), default=0.0)
    slow = sorted(name for name, seconds in beyond.items() if seconds > most / 2)
    return slow if len(slow) < len(times) else []


def scope_of(name: str) -> tuple[int | None, str]:
    """Return the layer of a full name and its cell there; None where the name has no layer.

    ``.../layers-CellList/3-DecoderLayer/feed_forward-FeedForward/w2-Linear/MatMul-op5`` is layer 3, ``feed_forward.w2``.
    """
    found = LAYER.search(name)
    if not found:
        return None, ""
    cells = takewhile(lambda part: not OPERATOR.search(part), found[2].split("/"))
    return int(found[1]), ".".join(part.partition("-")[0] for part in cells if part)


def cell_operators(group: Hashable, predicted: PredictedStep) -> list[str]:
    """Return names of predicted operators that do the work of a group; of vector operators none, they are too many."""
    own = predicted.operators.get(group)
    return sorted(own.names) if own and group != VECTORS else []


def group_name(group: Hashable, predicted: PredictedStep) -> str:
    """Return a group of operators in words."""
    assert isinstance(group, tuple)
    if group == VECTORS:
        return "vector operators"
    names = cell_operators(group, predicted)
    sizes = " x ".join(map(str, group[1])) if isinstance(group[1], tuple) else f"{group[1]:,} million operations"
    return f"{group[0]} {sizes}" + (f" ({', '.join(names[:2])})" if names else "")
