"""The few free constants of a device from measured steps: the most likely ones, given how well each was known before.

Constants are fitted as logarithms. Each is held to the described value by a width that says how sure that is (a Gaussian prior),
so that few rows change only what they speak about; a row counts by the logarithm of predicted over measured time. Errors are
taken to have Student's t distribution (Lange, Little and Taylor, 1989): a step that a slow node or a busy network held up says
next to nothing about the device. Levenberg-Marquardt on both together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mindllm.timing.device import Device
from mindllm.timing.step import step_seconds
from mindllm.timing.workload import Workload

ROW = 0.02  # spread of undisturbed steps around a good model, as a logarithm
FREEDOM = 4.0  # degrees of freedom of the errors' distribution; 2 to 4 predict published steps alike
STEP = 1e-3  # of a logarithm, for differences
ROUNDS = 30
WIDER = (16.0, 4.0, 1.0)
"""Times the spread, one after the other (graduated non-convexity, Blake and Zisserman, 1987): from a description that is far off,
every row looks like one that says nothing. Of this way and the straight one the likelier end is taken."""
SETTLED = 1e-5  # of the sum of squares


@dataclass(frozen=True)
class Constant:
    """A free constant: its path in the description, how unsure it is (as a logarithm), and the most that it may be."""

    path: tuple[str | int, ...]
    width: float
    most: float = math.inf

    def of(self, device: Device) -> float:
        found: Any = device
        for part in self.path:
            found = found[part] if isinstance(part, int) else getattr(found, part)
        return found.value if found is not None else 0.0


def constants(device: Device) -> dict[str, Constant]:
    """What is fitted of a device, by name; what is described as nothing stays nothing."""
    found = {
        "matrix": Constant(("efficiency", "matrix"), 0.15, 1.0),
        "half_size": Constant(("efficiency", "half_size"), 0.6),
        "attention": Constant(("efficiency", "attention"), 0.3, 1.0),
        "memory": Constant(("efficiency", "memory"), 0.2, 1.0),
        "float16 casts": Constant(("efficiency", "float16_casts"), 1.0, 1.0),
        "bfloat16 casts": Constant(("efficiency", "bfloat16_casts"), 1.0, 1.0),
        "launch": Constant(("efficiency", "launch"), 0.7),
        "host": Constant(("efficiency", "host"), 0.5),
        "overlap": Constant(("overlap",), 0.7, 1.0),
        "step_overhead": Constant(("step_overhead",), 1.0),
    }
    for number, link in enumerate(device.links):
        found[link.name] = Constant(("links", number, "efficiency"), 0.3, 1.0)
        found[f"{link.name} latency"] = Constant(("links", number, "latency"), 0.7)
        found[f"{link.name} part groups"] = Constant(("links", number, "part_groups"), 1.0, 1.0)
    return {name: constant for name, constant in found.items() if constant.of(device) > 0}


@dataclass(frozen=True)
class Measured:
    """A step that was measured: ``seconds`` of ``workload``."""

    name: str
    workload: Workload
    seconds: float


@dataclass(frozen=True)
class Calibration:
    """A calibrated device, and its constants before and after."""

    device: Device
    before: Mapping[str, float]
    after: Mapping[str, float]


def calibrate(device: Device, rows: Sequence[Measured], source: str, known: Collection[str] = ()) -> Calibration:
    """Fits the constants of ``device`` that are not ``known`` to steps.

    ``source`` says in the new description where the figures are from. What kernels of attention were measured to reach, at a
    size of heads, stays as it is: it is a small part of most steps, which say little about it.
    """
    known = {*known, *(("attention",) if device.efficiency.attention_head else ())}

    def predicted(devices: Sequence[Device]) -> np.ndarray:
        return np.array([step_seconds(row.workload, devices) for row in rows])

    names = [name for name in constants(device) if name not in known]
    measured = np.array([row.seconds for row in rows])
    return fitted(device, names, predicted, measured, source, np.full(len(rows), ROW))


def fitted(
    device: Device,
    names: Sequence[str],
    predicted: Callable[[Sequence[Device]], np.ndarray],
    measured: np.ndarray,
    source: str,
    spread: np.ndarray,
) -> Calibration:
    """Fits some constants to anything that a device predicts.

    Args:
        device: where to start.
        names: constants to fit; those the device does not have are passed over.
        predicted: seconds of every row on each of some devices, ``[rows, devices]``.
        measured: seconds of every row.
        source: where the new figures are from.
        spread: of every row around a good model, as a logarithm.
    """
    free = {name: constant for name, constant in constants(device).items() if name in names}
    before = np.array([constant.of(device) for constant in free.values()])
    widths = np.array([constant.width for constant in free.values()])
    most = np.log(np.array([constant.most for constant in free.values()]) / before)

    def described(moves: np.ndarray) -> Device:
        return with_constants(device, dict(zip(free, before * np.exp(moves), strict=True)), source)

    def residuals(points: Sequence[np.ndarray], wider: float) -> np.ndarray:
        """[points, rows + constants]."""
        devices = [described(point) for point in points]
        errors = np.log(predicted(devices) / measured[:, None]).T / (spread * wider)
        return np.concatenate([_tempered(errors), np.array(points) / widths], axis=1)

    exact = partial(residuals, wider=1.0)
    ways = [_least(exact, np.zeros(len(free)), most), np.zeros(len(free))]
    for wider in WIDER:
        ways[1] = _least(partial(residuals, wider=wider), ways[1], most)
    moves = ways[int((exact(ways) ** 2).sum(axis=1).argmin())]
    after = described(moves)
    return Calibration(
        after,
        dict(zip(free, before.tolist(), strict=True)),
        {name: constant.of(after) for name, constant in free.items()},
    )


def _tempered(errors: np.ndarray) -> np.ndarray:
    """What an error in spreads counts: squared, twice the negative logarithm of its likelihood relative to none."""
    return np.sign(errors) * np.sqrt((FREEDOM + 1) * np.log1p(errors**2 / FREEDOM))


def _least(residuals: Callable[[Sequence[np.ndarray]], np.ndarray], moves: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Levenberg-Marquardt from ``moves``, within ``most``."""
    damping = 1e-2
    for _ in range(ROUNDS):
        shifts = [moves, *(moves - STEP * row for row in np.eye(len(moves)))]  # downwards: never beyond ``most``
        found = residuals(shifts)
        here, slopes = found[0], (found[0] - found[1:]).T / STEP
        normal, gradient, cost = slopes.T @ slopes, slopes.T @ here, float(here @ here)
        tries = [damping * factor for factor in (0.1, 1.0, 10.0, 100.0)]
        ahead = [
            np.minimum(moves - np.linalg.solve(normal + one * np.diag(np.diag(normal)), gradient), most)
            for one in tries
        ]
        costs = (residuals(ahead) ** 2).sum(axis=1)
        best = int(costs.argmin())
        if costs[best] >= cost * (1 - SETTLED):
            return ahead[best] if costs[best] < cost else moves
        moves, damping = ahead[best], tries[best]
    return moves


def uncalibrated(device: Device) -> Device:
    """The device as it was described before it was calibrated: what zero-shot predictions and calibrations start from."""
    tree = device.model_dump()
    for constant in constants(device).values():
        place: Any = tree
        for part in constant.path:
            place = place[part]
        if place["assumed"] is not None:
            place.update(value=place["assumed"], assumed=None, source="assumed")
            tree["step_error"] = None  # it is of the calibrated one
    return Device.model_validate(tree)


def with_constants(device: Device, values: Mapping[str, float], source: str) -> Device:
    """``device`` with other constants, by their names in :func:`constants`; how far its steps are off is not known then."""
    tree = {**device.model_dump(), "step_error": None}
    for name, constant in constants(device).items():
        if name in values:
            place: Any = tree
            for part in constant.path:
                place = place[part]
            assumed = place["value"] if place["assumed"] is None else place["assumed"]
            place.update(value=float(min(values[name], constant.most)), source=source, assumed=assumed)
    return Device.model_validate(tree)
