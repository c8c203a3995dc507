"""The plan book of a run: its layout and those for fewer nodes, each with the same global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindllm.config.checks.mesh import COMPILED, compiles_for
from mindllm.errors import CheckFailed, Problem, UserError
from mindllm.launch.layouts import LayoutBook
from mindllm.recipes.configure import Configured, Prover, Request, configure_run
from mindllm.recipes.recipe import book_path, removal_note, remove_spares, spare_path
from mindllm.results import Result
from mindllm.terminal.progress import Progress, unwatched
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
        devices: number of devices.
        run: the run; None: no strategy fits on this number of devices.
        reason: why there is no run.
    """

    devices: int
    run: Configured | None
    reason: str = ""

    def tree(self) -> dict[str, Any]:
        """Return the JSON object of the layout, without its file."""
        if self.run is None:
            return {"devices": self.devices, "reason": self.reason}
        verdict = self.run.proof.verdict.value if self.run.proof else None
        step = self.run.strategies.recommended.step.seconds
        strategy = self.run.strategies.recommended_name
        return {"devices": self.devices, "strategy": strategy, "step_s": step, "verdict": verdict}

    def row(self, name: str) -> tuple[str, ...]:
        """Return the row of :meth:`Book.table_of`, with the name of the file."""
        if self.run is None:
            return (str(self.devices), "none", "", "", "")
        best = self.run.strategies.recommended
        verdict = self.run.proof.verdict.value if self.run.proof else "estimated only"
        memory = f"{max(best.memory) / GIB:.1f}"
        return (str(self.devices), f"{name}: {best.candidate.name}", f"{best.step.seconds:.2f}", memory, verdict)


@dataclass(frozen=True, repr=False)
class Book(Result):
    """A run and its layouts for fewer nodes, sorted by devices, the run first.

    Attributes:
        run: the run.
        node_devices: devices of a node, by which layouts differ.
        spares: the layouts for one node fewer, two nodes fewer, and so on.
    """

    run: Configured
    node_devices: int
    spares: tuple[Layout, ...]

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """All layouts, starting with the run."""
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
        """Sequences per step, equal in all layouts."""
        return self.config.global_batch_size

    def paths(self, path: Path) -> list[Path]:
        """Return the file of each layout of the run at ``path``."""
        return [path, *(spare_path(path, number) for number in range(1, len(self.spares) + 1))]

    def write(self, path: Path | str) -> None:
        """Write the run, its layouts and the plan book next to it; remove those of an earlier run.

        Raises:
            UserError: a file is not writable.
        """
        path = Path(path)
        remove_spares(path)
        for layout, file in zip(self.layouts, self.paths(path), strict=True):
            if layout.run:
                layout.run.write(file)
        self.write_book(path)

    def write_book(self, path: Path) -> Path:
        """Write the plan book, which names the existing layouts by their devices, and return its path."""
        layouts = zip(self.layouts, self.paths(path), strict=True)
        files = {layout.devices: file for layout, file in layouts if layout.run}
        LayoutBook(book_path(path), self.node_devices, self.global_batch, files).write()
        return book_path(path)

    def table_of(self, path: Path) -> Table:
        """Return a row for each layout: devices, file and strategy, step time, memory and verdict."""
        columns = [*figures("devices"), *texts("layout"), *figures("step s", "GB"), *texts("verdict")]
        title = f"plan book: {self.global_batch} sequences per step in every layout"
        rows = [layout.row(file.name) for layout, file in zip(self.layouts, self.paths(path), strict=True)]
        return Table(title, columns, rows)

    def lines(self) -> Iterator[str]:
        """Yield the reason for each missing layout."""
        for layout in self.layouts:
            if layout.run is None:
                yield f"no layout for {layout.devices} devices: {layout.reason}"

    def files(self, path: Path) -> dict[str, Any]:
        """Return the JSON object of the book of the run at ``path``."""
        layouts = zip(self.layouts, self.paths(path), strict=True)
        written = [layout.tree() | {"written": str(file) if layout.run else None} for layout, file in layouts]
        return {"book": str(book_path(path)), "layouts": written}

    def summary(self) -> str:
        """Return the number of layouts and the strategy of the run."""
        return f"{sum(layout.run is not None for layout in self.layouts)} layouts, {self.run.summary()}"

    def tree(self) -> dict[str, Any]:
        """Return the run, and its layouts without files."""
        return self.run.tree() | {"layouts": [layout.tree() for layout in self.layouts]}

    def parts(self) -> Iterator[Part]:
        """Yield the run, and the layouts with the files that :meth:`write` writes next to ``run.yaml``."""
        yield from self.run.parts()
        yield self.table_of(Path("run.yaml"))
        yield from self.lines()


def configure_with_spares(
    request: Request,
    command: str,
    spares: int = 0,
    node_devices: int | None = None,
    output: Path | None = None,
    prove: Prover | None = None,
    progress: Progress = unwatched,
) -> Configured | Book:
    """Find the run of a request and, with ``spares``, its layouts for fewer nodes; write each as soon as it is found.

    Args:
        request: the network, the devices and limits of the search.
        command: the command that is recorded in each YAML.
        spares: number of layouts for one, two, ... nodes fewer.
        node_devices: devices of a node; None: those that the innermost link of the device connects.
        output: the YAML to write, or a directory for it; None: write nothing.
        prove: proves a run, with the name and the directory of the proof; None: prove nothing.
        progress: called with the state of search and proof.

    Raises:
        CheckFailed: no strategy fits, or none is fast enough.
        UserError: the devices cannot lose nodes, or the network has a feature that is not modelled.
    """
    if node_devices and not spares:
        message = f"requires spares (value {node_devices}); pass spares=1, or remove it"
        raise UserError.of(Problem(None, ("node_devices",), message, node_devices))
    node = devices_of_node(request.device, node_devices) if spares else 0
    if spares and not request.fewer:
        spare_counts(request.devices, node, spares)  # refuse invalid numbers before the search
    run = configure_run(request, command, output, prove, progress)
    if not spares:
        return run
    if run.path is not None and (note := removal_note(run.path, remove_spares(run.path))):
        progress(note)
    counts = spare_counts(run.device_count, node, spares)

    def find(smaller: Request, number: int) -> Configured:
        path = spare_path(run.path, number) if run.path is not None else None
        return configure_run(smaller, command, path, prove, progress)

    book = Book(run, node, tuple(find_spares(request, run, counts, find)))
    if run.path is not None:
        book.write_book(run.path)
    return book


def devices_of_node(device: Device, node_devices: int | None) -> int:
    """Return the devices of a node: ``node_devices``, or those that the innermost link of the device connects.

    Raises:
        UserError: the link has no size.
    """
    count = node_devices or device.links[0].devices
    if count is None:
        raise UserError(
            f"--spares: the link {device.links[0].name} of {device.name} has no size; pass --node-devices N"
        )
    return count


def spare_counts(devices: int, node: int, spares: int) -> tuple[int, ...]:
    """Return the device counts of a run without one node, without two, up to ``spares`` nodes.

    Raises:
        UserError: the devices do not fill whole nodes, no node remains, or MindSpore does not compile for a count.
    """
    if devices % node:
        raise UserError(
            f"--spares: {devices} devices do not fill whole nodes of {node}; use a multiple of {node}, or set --node-devices"
        )
    if spares >= devices // node:
        raise UserError(
            f"--spares {spares}: {devices // node} nodes of {node} devices leave none; use at least {(spares + 1) * node} "
            "devices, or fewer spares"
        )
    counts = tuple(devices - node * number for number in range(1, spares + 1))
    if invalid := [count for count in counts if not compiles_for(count, 1)]:
        raise UserError(
            f"--spares {spares}: {invalid[0]} devices would remain, and {COMPILED}; use other --devices, or fewer spares"
        )
    return counts


def find_spares(
    request: Request, first: Configured, counts: tuple[int, ...], find: Callable[[Request, int], Configured]
) -> Iterator[Layout]:
    """Yield the layout for each device count, from ``find``, which takes the request and the number of missing nodes.

    A spare layout has the global batch of ``first``; the minimum speed of ``request`` applies to the whole cluster only.
    """
    batch, slower = first.config.global_batch_size, replace(request.constraints, tokens_per_second=None)
    for number, devices in enumerate(counts, 1):
        smaller = replace(request, devices=devices, global_batch=batch, fewer=False, constraints=slower)
        try:
            yield Layout(devices, find(smaller, number))
        except CheckFailed as error:
            yield Layout(devices, None, f"{error}{_batch_advice(batch, first.device_count, devices)}")


def _batch_advice(batch: int, first: int, devices: int) -> str:
    """Return the next batch that both device counts divide; empty if ``devices`` divides ``batch``."""
    if batch % devices == 0:
        return ""
    both = lcm(first, devices)
    return f". {devices} replicas do not divide {batch} sequences; --global-batch {-(-batch // both) * both} fits both"
