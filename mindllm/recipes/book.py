"""The plan book of a run: beside its layout those for fewer nodes, each with the same global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindllm.config.checks.mesh import COMPILED, compiles_for
from mindllm.errors import CheckFailed, UserError
from mindllm.launch.layouts import LayoutBook
from mindllm.recipes.configure import Configured, Request
from mindllm.recipes.spare_files import book_path, forget_spares, spare_path
from mindllm.results import Result
from mindllm.terminal.tables import Table, figures, texts
from mindllm.timing.device import Device
from mindllm.units import GIB

if TYPE_CHECKING:
    from mindllm.config import RunConfig
    from mindllm.prove.proof import Proof
    from mindllm.results import Part


@dataclass(frozen=True)
class Layout:
    """A layout of the book.

    Attributes:
        devices: how many it takes.
        found: the run; None: there is none for so many devices.
        reason: why there is none.
    """

    devices: int
    found: Configured | None
    reason: str = ""

    def tree(self) -> dict[str, Any]:
        """Return what ``--json`` prints of it but for the file."""
        found = self.found
        if found is None:
            return {"devices": self.devices, "reason": self.reason}
        verdict = found.proof.verdict.value if found.proof else None
        step = found.strategies.recommended.step.seconds
        strategy = found.strategies.recommended_name
        return {"devices": self.devices, "strategy": strategy, "step_s": step, "verdict": verdict}

    def row(self, name: str) -> tuple[str, ...]:
        """Return its row of :meth:`Book.table`, with the name of its file."""
        if self.found is None:
            return (str(self.devices), "none", "", "", "")
        found = self.found
        best = found.strategies.recommended
        verdict = found.proof.verdict.value if found.proof else "by formula alone"
        memory = f"{max(best.memory) / GIB:.1f}"
        return (str(self.devices), f"{name}: {best.candidate.name}", f"{best.step.seconds:.2f}", memory, verdict)


@dataclass(frozen=True, repr=False)
class Book(Result):
    """A run and its layouts for fewer nodes, that with most devices first, which is the run itself.

    Attributes:
        run: the run.
        node_devices: devices of a node, by which layouts differ.
        spares: the layouts for one node fewer, for two.
    """

    run: Configured
    node_devices: int
    spares: tuple[Layout, ...]

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """All layouts, the run's first."""
        return (Layout(self.run.device_count, self.run), *self.spares)

    @property
    def config(self) -> RunConfig:
        """The run."""
        return self.run.config

    @property
    def proof(self) -> Proof | None:
        """The proof of the run."""
        return self.run.proof

    @property
    def global_batch(self) -> int:
        """Sequences of a step, in all layouts."""
        return self.config.global_batch_size

    def paths(self, place: Path) -> list[Path]:
        """Return the file of each layout, where the run itself is at ``place``."""
        return [place, *(spare_path(place, number) for number in range(1, len(self.spares) + 1))]

    def write(self, path: Path | str) -> None:
        """Write the run, its layouts beside it, and the book that names them; earlier ones there are removed.

        Raises:
            UserError: they cannot be written.
        """
        place = Path(path)
        forget_spares(place)
        for layout, file in zip(self.layouts, self.paths(place), strict=True):
            if layout.found:
                layout.found.write(file)
        self.write_book(place)

    def write_book(self, place: Path) -> Path:
        """Write the file that names the layouts, which are there, by their devices, and return it; as :meth:`write`."""
        known = zip(self.layouts, self.paths(place), strict=True)
        files = {layout.devices: file for layout, file in known if layout.found}
        LayoutBook(book_path(place), self.node_devices, self.global_batch, files).write()
        return book_path(place)

    def table_of(self, place: Path) -> Table:
        """Return a row for each layout: its devices, file and strategy, step and memory, and its verdict."""
        columns = [*figures("devices"), *texts("layout"), *figures("step s", "GB"), *texts("verdict")]
        title = f"plan book: {self.global_batch} sequences a step in every layout"
        rows = [layout.row(file.name) for layout, file in zip(self.layouts, self.paths(place), strict=True)]
        return Table(title, columns, rows)

    def lines(self) -> Iterator[str]:
        """Yield why a layout is missing."""
        for layout in self.layouts:
            if layout.found is None:
                yield f"no layout for {layout.devices} devices: {layout.reason}"

    def files(self, place: Path) -> dict[str, Any]:
        """Return what ``--json`` prints of the book of the run at ``place``."""
        known = zip(self.layouts, self.paths(place), strict=True)
        written = [layout.tree() | {"written": str(file) if layout.found else None} for layout, file in known]
        return {"book": str(book_path(place)), "layouts": written}

    def summary(self) -> str:
        """Return how many layouts there are, and the strategy of the run."""
        return f"{sum(layout.found is not None for layout in self.layouts)} layouts, {self.run.summary()}"

    def tree(self) -> dict[str, Any]:
        """Return the run, and its layouts without files."""
        return self.run.tree() | {"layouts": [layout.tree() for layout in self.layouts]}

    def parts(self) -> Iterator[Part]:
        """Yield the run, and the layouts as :meth:`write` would name their files beside ``run.yaml``."""
        yield from self.run.parts()
        yield self.table_of(Path("run.yaml"))
        yield from self.lines()


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
    request: Request, first: Configured, counts: tuple[int, ...], find: Callable[[Request, int], Configured]
) -> Iterator[Layout]:
    """Yield the layout for each of ``counts`` devices as ``find`` finds it, which is told how many nodes fewer it has.

    A spare has the global batch of ``first``; it may be slower than ``request`` wants, which is said of the whole cluster.
    """
    batch, slower = first.config.global_batch_size, replace(request.constraints, tokens_per_second=None)
    for number, devices in enumerate(counts, 1):
        smaller = replace(request, devices=devices, global_batch=batch, fewer=False, constraints=slower)
        try:
            yield Layout(devices, find(smaller, number))
        except CheckFailed as error:
            yield Layout(devices, None, f"{error}{_divided(batch, first.device_count, devices)}")


def _divided(batch: int, first: int, devices: int) -> str:
    """Return the nearest larger batch that any replicas of both numbers of devices divide; empty where ``batch`` is one."""
    if batch % devices == 0:
        return ""
    both = lcm(first, devices)
    return (
        f". {devices} replicas do not divide {batch} sequences; --global-batch {-(-batch // both) * both} serves both"
    )
