"""The device as a recording shows it: what kernels and links reach, and what a step costs beside."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mindllm.config.reading.yaml_tree import write_yaml
from mindllm.errors import UserError
from mindllm.files import atomic_open
from mindllm.profiles.predicted import PredictedStep
from mindllm.profiles.recorded import RankRecord
from mindllm.profiles.report import ProfileReport
from mindllm.timing.costs.exchanges import exchange_seconds, legs
from mindllm.timing.costs.work import Exchange, Operator
from mindllm.timing.device import Device
from mindllm.timing.measured.calibrate import constants, fitted, with_constants
from mindllm.timing.measured.kernels import Kernel, fit_kernels

SPREAD = 0.05  # of exchanges around the model, as a logarithm


def write_device(report: ProfileReport, path: Path) -> None:
    """Write the calibrated device.

    Raises:
        UserError: the recording has nothing that a constant of the device follows from.
    """
    device = calibrated(report)
    with atomic_open(path) as file:
        file.write(write_yaml(device.model_dump(mode="json", exclude_none=False)))


def calibrated(report: ProfileReport) -> Device:
    """Return the device with constants as its kernels, exchanges and gaps tell; how far steps are off is not known then."""
    predicted = report.comparison.predicted
    records = [record for stage in report.comparison.stages for record in stage.records]
    device = predicted.step.device
    kernels = kernels_of(records)
    if kernels:
        device = fit_kernels(device, kernels, f"measured: {len(kernels)} kernels of a profile").device
    device, told = _links(device, report)
    free = statistics.median(record.parts.free for record in records)
    if not kernels and not told:
        raise UserError(
            "--calibrate: the profile has neither kernels with shapes nor exchanges; profile with profiler_level: 1"
        )
    return with_constants(
        device, {"step_overhead": free}, "measured: what no kernel and no exchange of a profile takes"
    )


def kernels_of(records: Sequence[RankRecord]) -> list[Kernel]:
    """Return kernels with shapes that are alike as one, with the median of their times."""
    times: dict[Operator, list[float]] = defaultdict(list)
    for record in records:
        for one in record.kernels.each if record.kernels else ():
            if isinstance(one.ran, Operator) and one.seconds > 0:
                times[one.ran].append(one.seconds)
    return [Kernel(one, statistics.median(spent), len(spent)) for one, spent in times.items()]


def _links(device: Device, report: ProfileReport) -> tuple[Device, bool]:
    """Fit the links to the exchanges of passes and of replicas, each kind and axis as one, by how much longer they take."""
    predicted = report.comparison.predicted
    exchanges, measured, known, weights = _exchanges(predicted), [], [], []
    for stage in report.comparison.stages:
        for terms in stage.terms:
            for (cause, key), term in terms.items():
                took = term.detail.get("measured")
                if cause == "exchange" and key in exchanges and isinstance(took, float) and took > 0:
                    own, before = exchanges[key], term.detail["predicted"]  # type: ignore[index]
                    assert isinstance(before, float)
                    whole = sum(exchange_seconds(one.op, one.bytes, predicted.timed.groups[one.axis], predicted.step.device)
                                for one in own)  # fmt: skip
                    known.append(own)
                    weights.append(took)
                    measured.append(whole * took / before)
    if not known:
        return device, False
    links = {device.links[leg.link].name for own in known for one in own for leg in
             legs(one.op, one.bytes, predicted.timed.groups[one.axis], device)}  # fmt: skip
    names = [name for name in constants(device) if name in links]

    def seconds(devices: Sequence[Device]) -> np.ndarray:
        return np.array([
            [sum(exchange_seconds(one.op, one.bytes, predicted.timed.groups[one.axis], each) for one in own) for each in devices]
            for own in known
        ])  # fmt: skip

    spread = SPREAD / np.sqrt(np.array(weights) / np.mean(weights))  # as kernels do, one counts by its time
    source = f"measured: {len(known)} kinds of exchanges of a profile"
    return fitted(device, names, seconds, np.array(measured), source, spread).device, True


def _exchanges(predicted: PredictedStep) -> dict[tuple[str, str], list[Exchange]]:
    """Return the exchanges of a step by kind and axis, one of each size."""
    found: dict[tuple[str, str], dict[float, Exchange]] = defaultdict(dict)
    work = predicted.timed.work
    passes = (one for part in work.parts.values() for one in (*part.forward, *part.backward, *part.repeated))
    for one in (*passes, *(one for update in work.updates for one in update.exchanges)):
        if isinstance(one, Exchange):
            found[one.op, one.axis].setdefault(one.bytes, one)
    return {key: list(sizes.values()) for key, sizes in found.items()}
