"""The plan book of a run: beside its layout those for fewer nodes, each with the same global batch."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from math import lcm
from pathlib import Path
from typing import Any

from mindllm.config.checks.mesh import COMPILED, compiles_for
from mindllm.errors import CheckFailed, UserError
from mindllm.launch.layouts import LayoutBook
from mindllm.outside import open_file
from mindllm.recipes.configure import Configured, Request
from mindllm.recipes.recipe import WRITTEN_BY
from mindllm.terminal.tables import Table, figures, texts
from mindllm.timing.device import Device
from mindllm.units import GIB

SPARE = ".spare_"


@dataclass(frozen=True)
class Layout:
    """A layout of the book.

    Attributes:
        devices: how many it takes.
        path: its YAML.
        found: the run; None: there is none for so many devices.
        reason: why there is none.
    """

    devices: int
    path: Path
    found: Configured | None
    reason: str = ""

    def tree(self) -> dict[str, Any]:
        """Return what ``--json`` prints of it."""
        found = self.found
        if found is None:
            return {"devices": self.devices, "written": None, "reason": self.reason}
        verdict = found.proof.verdict.value if found.proof else None
        best = found.strategies.recommended
        return {
            "devices": self.devices,
            "written": str(self.path),
            "strategy": found.strategies.recommended_name,
            "step_s": best.step.seconds,
            "verdict": verdict,
        }

    def row(self) -> tuple[str, ...]:
        """Return its row of :meth:`Book.table`."""
        if self.found is None:
            return (str(self.devices), "none", "", "", "")
        found = self.found
        best = found.strategies.recommended
        verdict = found.proof.verdict.value if found.proof else "by formula alone"
        memory = f"{max(best.memory) / GIB:.1f}"
        return (
            str(self.devices),
            f"{self.path.name}: {best.candidate.name}",
            f"{best.step.seconds:.2f}",
            memory,
            verdict,
        )


@dataclass(frozen=True)
class Book:
    """The layouts of a run, that with most devices first.

    Attributes:
        node_devices: devices of a node, by which layouts differ.
        global_batch: sequences of a step, in all layouts.
    """

    node_devices: int
    global_batch: int
    layouts: tuple[Layout, ...]

    def write(self, path: Path) -> None:
        """Write the book: the file of each layout by its devices; layouts that were not found are left out.

        Raises:
            UserError: it cannot be written.
        """
        files = {layout.devices: layout.path for layout in self.layouts if layout.found}
        LayoutBook(path, self.node_devices, self.global_batch, files).write()

    def table(self) -> Table:
        """Return a row for each layout: its devices, file and strategy, step and memory, and its verdict."""
        columns = [*figures("devices"), *texts("layout"), *figures("step s", "GB"), *texts("verdict")]
        title = f"plan book: {self.global_batch} sequences a step in every layout"
        return Table(title, columns, [layout.row() for layout in self.layouts])

    def lines(self) -> Iterator[str]:
        """Yield why a layout is missing."""
        for layout in self.layouts:
            if layout.found is None:
                yield f"no layout for {layout.devices} devices: {layout.reason}"


def devices_of_node(device: Device, asked: int | None) -> int:
    """Return how many devices a node has: as asked for, or those that the innermost link of the device joins.

    Raises:
        UserError: the description does not say.
    """
    joined = asked or device.links[0].devices
    if joined is None:
        raise UserError(
            f"--spares: the link {device.links[0].name} of {device.name} has no end; give --node-devices N too"
        )
    return joined


def spare_counts(devices: int, node: int, spares: int) -> tuple[int, ...]:
    """Return the devices of a run that is one node smaller, then two, up to ``spares`` nodes.

    Raises:
        UserError: the devices are no whole nodes, no node is left, or MindSpore compiles for no such number.
    """
    if devices % node:
        raise UserError(
            f"--spares: {devices} devices are no whole nodes of {node}; take a multiple of {node}, or say with "
            "--node-devices how many a node has"
        )
    if spares >= devices // node:
        raise UserError(
            f"--spares {spares}: of {devices // node} x {node} devices no node is left without {spares}; "
            f"take at least {(spares + 1) * node} devices, or fewer spares"
        )
    counts = tuple(devices - node * number for number in range(1, spares + 1))
    if refused := [count for count in counts if not compiles_for(count, 1)]:
        raise UserError(
            f"--spares {spares}: {refused[0]} devices would be left, and {COMPILED}; "
            "take other --devices, or fewer spares"
        )
    return counts


def find_spares(
    request: Request,
    first: Configured,
    place: Path,
    counts: tuple[int, ...],
    find: Callable[[Request, Path], Configured],
) -> Iterator[Layout]:
    """Yield the layout for each of ``counts`` devices as ``find`` finds and writes it, beside that of ``first`` at ``place``.

    A spare has the global batch of ``first``; it may be slower than ``request`` wants, which is said of the whole cluster.
    """
    _forget_older(place)
    batch, slower = first.config.global_batch_size, replace(request.constraints, tokens_per_second=None)
    for number, devices in enumerate(counts, 1):
        path = place.with_name(f"{place.stem}{SPARE}{number}{place.suffix}")
        smaller = replace(request, devices=devices, global_batch=batch, fewer=False, constraints=slower)
        try:
            yield Layout(devices, path, find(smaller, path))
        except CheckFailed as error:
            yield Layout(devices, path, None, f"{error}{_divided(batch, first.device_count, devices)}")


def _forget_older(place: Path) -> None:
    """Remove the spares that an earlier command wrote beside ``place``: of fewer ones, some would stay and be of another run."""
    for path in place.parent.glob(f"{glob.escape(place.stem)}{SPARE}[0-9]*{place.suffix}"):
        with suppress(OSError), open_file(path) as file:  # what cannot be read is not ours
            if file.read(len(WRITTEN_BY)) == WRITTEN_BY.encode():
                path.unlink()


def _divided(batch: int, first: int, devices: int) -> str:
    """Return the nearest larger batch that any replicas of both numbers of devices divide; empty where ``batch`` is one."""
    if batch % devices == 0:
        return ""
    both = lcm(first, devices)
    return (
        f". {devices} replicas do not divide {batch} sequences; --global-batch {-(-batch // both) * both} serves both"
    )
