"""The runs of an acceptance, one claim after the other: predicted, executed, judged. Ctrl-C keeps what is done."""

from __future__ import annotations

import builtins
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mindllm.accept.acceptance import Acceptance
from mindllm.accept.claims import Claim, Shape
from mindllm.accept.expected import Timed, of_part_nodes, peak_of, timed
from mindllm.accept.judge import Line, Verdict, link_line, loss_line, peak_line, time_line, without
from mindllm.accept.measured import Measured, alone, computing_of, execute, reached, recorded
from mindllm.accept.node_states import node_states
from mindllm.accept.nodes import NodeLost, Nodes, States
from mindllm.accept.runs import RUNS, SIZES, Size, Target, base_run, laid_out, run_of, write_text
from mindllm.config import RunConfig, override_config
from mindllm.config.checks.mesh import COMPILED
from mindllm.dry_run.simulations import Simulations, simulations_here
from mindllm.errors import CheckFailed, RunFailed, UserError
from mindllm.launch.start import Launch
from mindllm.preflight.node import visible_devices
from mindllm.preflight.versions import CANN_FILES, CANN_HOMES, DRIVER_FILES, find_version
from mindllm.profiles.compare import Comparison
from mindllm.prove.found import versions_here
from mindllm.terminal.progress import Progress, unwatched
from mindllm.timing.device import Device, read_device
from mindllm.timing.shipped import shipped_devices
from mindllm.train.checkpoint import CheckpointStore
from mindllm.train.job.output_directory import CHECKPOINTS

MISTAKES = (UserError, RunFailed, CheckFailed, OSError)
CODES = re.compile(r"\bE[A-Z]\d{4}\b")  # of CANN and MindSpore, as EI0006
ERRORS = frozenset(
    name for name, item in vars(builtins).items() if isinstance(item, type) and issubclass(item, Exception)
)
REFERENCE = "the losses of this run are those that the others are compared with"
ON_CPU_DEVICES = 2


@dataclass(frozen=True)
class Wanted:
    """What is asked for.

    Attributes:
        claims: which ones.
        devices: how many, of all nodes; on a CPU ranks.
        device: the described device that steps and links are predicted for.
        output: a directory for runs, page and archive.
        keep: whether runs stay; those that failed do anyway.
        here: Ascend devices that each node has at least; 0: the runs are processes of CPUs.
        nodes: that share the devices evenly.
    """

    claims: tuple[Claim, ...]
    devices: int
    device: Device
    output: Path
    keep: bool = False
    here: int = field(default_factory=visible_devices)
    nodes: int = 1

    @property
    def target(self) -> Target:
        """What executes the runs."""
        return "Ascend" if self.here else "CPU"

    @property
    def size(self) -> Size:
        """The model and length of the runs."""
        return SIZES[self.target]

    @property
    def node_devices(self) -> int:
        """Devices of each of several nodes that runs use; 0: there is one node."""
        return max(claim.shape(self.devices, self.nodes).local for claim in self.claims) if self.nodes > 1 else 0

    @property
    def described(self) -> Device:
        """The described device, with the links that runs on several nodes have."""
        return of_part_nodes(self.device, self.node_devices, self.here) if self.nodes > 1 else self.device

    def shape(self, claim: Claim) -> Shape:
        """Return the devices that a claim's run takes."""
        return claim.shape(self.devices, self.nodes)

    def obstacle(self, claim: Claim) -> str:
        """Return why a claim cannot be run; empty where it can."""
        needs = 2 if claim.several else 1
        if needs > self.devices:
            return f"needs {needs} devices, and {self.devices} was asked for (--devices)"
        shape = self.shape(claim)
        if not claim.fits(shape):
            stages = " and of a stage" if claim.name == "pp" else ""
            return f"{COMPILED}, of all{stages}, and {shape.nodes} nodes have {shape.local} each"
        each = " on each node" if shape.nodes > 1 else ""
        return f"needs {shape.local} devices{each}, and {self.here} are here" if 0 < self.here < shape.local else ""


Told = Callable[[Line], None]


def accept(
    wanted: Wanted,
    told: Told = lambda line: None,
    trouble: Callable[[str, str], None] = lambda claim, text: None,
    kept: Callable[[Acceptance], None] = lambda found: None,
    progress: Progress = unwatched,
    nodes: Nodes | None = None,
) -> Acceptance:
    """Hold claims against small runs.

    Args:
        wanted: which claims, on what.
        told: is given every line as soon as it is known.
        trouble: is given the name of a claim and all that is said of its failure, which stays on this machine.
        kept: is given what is known after each claim, for who writes it down.
        progress: told of claims that are looked at.
        nodes: all of them, which have come; None: there is this one.

    Raises:
        OSError: the output directory cannot be written to.
    """
    (wanted.output / RUNS).mkdir(parents=True, exist_ok=True)
    work = _Acceptance(wanted, told, trouble, nodes or Nodes(_alone(wanted)))
    for number, claim in enumerate(wanted.claims):
        progress(claim.name, number, len(wanted.claims))
        work.look_at(claim)
        kept(work.result())
    progress("done", len(wanted.claims), len(wanted.claims))
    work.tidy()
    return work.result()


class _Acceptance:
    """What is known so far."""

    def __init__(self, wanted: Wanted, told: Told, trouble: Callable[[str, str], None], nodes: Nodes) -> None:
        self.wanted, self.told, self.trouble, self.nodes = wanted, told, trouble, nodes
        self.lines: list[Line] = []
        self.records: dict[str, Any] = {}
        self.references: dict[bool, Measured | None] = {}
        self.took: dict[str, float] = {}
        self.failed: set[str] = set()
        self.interrupted = False
        self.states = _states(wanted, nodes)
        self.simulations: Simulations | None = None
        self.runs = wanted.output.absolute() / RUNS
        self.corpus = write_text(self.runs / wanted.target, wanted.size)
        self.made = {wanted.target, "predicted"}  # names below runs, a directory that may have been there before

    def look_at(self, claim: Claim) -> None:
        """Add the lines of a claim."""
        begun = time.monotonic()
        self.interrupted |= self.nodes.is_stopped()
        if self.interrupted:
            return self._add(without(claim.name, Verdict.NOT_RUN, "stopped before"))
        if why := self.wanted.obstacle(claim):
            return self._add(without(claim.name, Verdict.NOT_RUN, why))
        try:
            self._run(claim)
        except MISTAKES as error:
            self._fail(claim, "run", error)
        except KeyboardInterrupt:
            self.interrupted = True
            self._add(without(claim.name, Verdict.NOT_RUN, "stopped while it ran"))
        self.took[claim.name] = round(time.monotonic() - begun, 1)
        return None

    def _run(self, claim: Claim) -> None:
        wanted, shape = self.wanted, self.wanted.shape(claim)
        is_reference = wanted.target == "CPU" and claim.name == "single"
        reference = self._reference(claim.experts, shape.batch)
        found, config = (reference, None) if is_reference else self._execute(claim, shape)
        loss = loss_line(claim.name, _losses(reference), found.losses, wanted.size.loss_tolerance)
        if is_reference:
            loss = Line(claim.name, "loss", "nats", None, loss.measured, Verdict.OPEN, REFERENCE)
        self._add(loss)
        if claim.begins is None:  # of a resumed run memory and time are those of its layout, which is another claim's
            self._figures(claim, shape, found, config)

    def _figures(self, claim: Claim, shape: Shape, found: Measured, config: RunConfig | None) -> None:
        """Add memory, seconds, kernels and links: predicted for devices, measured where there are some."""
        wanted = self.wanted
        ideal = run_of(claim, shape, SIZES["Ascend"], "Ascend", self.corpus, self.runs / "predicted")
        try:
            self.simulations = self.simulations or simulations_here()
            peak = peak_of(ideal, self.simulations)
            self._add(peak_line(claim.name, peak.used, peak.with_workspace, found.peak))
        except MISTAKES as error:
            self._fail(claim, "used peak", error)
        predicted, comparison = timed(ideal, wanted.described, wanted.node_devices), None
        on_device = wanted.target == "Ascend"
        seconds = found.seconds if on_device else None
        self._add(time_line(claim.name, "step", predicted.step.seconds, predicted.error, seconds))
        if on_device and config is not None:
            try:
                comparison = recorded(config, wanted.described)
            except MISTAKES as error:
                return self._fail(claim, "profile", error)
        for line in recorded_lines(claim.name, predicted, comparison, on_device):
            self._add(line)
        return None

    def _reference(self, experts: bool, batch: int) -> Measured:
        """Return the run of one CPU device with the same model."""
        if experts not in self.references:
            name = "reference_experts" if experts else "reference"
            self.references[experts] = None  # it is not tried again for every claim
            config = base_run(self.wanted.size, "CPU", experts, self.corpus, self._directory(name), batch)
            self.references[experts] = self._keep(name, execute(config))
        if (found := self.references[experts]) is None:
            raise RunFailed("the run of one CPU device, which losses are compared with, has failed before")
        return found

    def _execute(self, claim: Claim, shape: Shape) -> tuple[Measured, RunConfig]:
        wanted, size = self.wanted, self.wanted.size
        config = run_of(claim, shape, size, wanted.target, self.corpus, self._directory(claim.name))
        if claim.begins is not None:
            name = f"{claim.name}_begins"
            base = base_run(size, wanted.target, claim.experts, self.corpus, self._directory(name), shape.batch)
            saving = {"type": "CheckpointMonitor", "save_checkpoint_steps": size.half}
            keys = {
                "runner_config.stop_step": size.half,
                "callbacks": [{"type": "MetricsMonitor"}, saving],
                "profile": False,
            }
            first = override_config(laid_out(base, claim.begins(shape)), keys)
            self._keep(name, execute(first, self.nodes))
            checkpoint = CheckpointStore(Path(first.output_dir) / CHECKPOINTS).newest()
            if checkpoint is None:
                raise RunFailed("the first half of the run has left no checkpoint")
            config = override_config(config, {"resume_training": str(checkpoint), "overwrite": False})
        return self._keep(claim.name, execute(config, self.nodes)), config

    def _directory(self, name: str) -> Path:
        shutil.rmtree(self.runs / name, ignore_errors=True)
        self.made.add(name)
        return self.runs / name

    def _keep(self, name: str, found: Measured) -> Measured:
        self.records[name] = found.records
        return found

    def _add(self, line: Line) -> None:
        self.lines.append(line)
        self.told(line)

    def _fail(self, claim: Claim, figure: str, error: BaseException) -> None:
        self.failed.add(claim.name)
        self._add(without(claim.name, Verdict.FAILED, reason_of(error), figure))
        self.trouble(claim.name, str(error))

    def tidy(self) -> None:
        """Remove the runs that nobody needs: all of them, but for those of claims that failed, or where they are to be kept."""
        made = [path for path in sorted(self.runs.iterdir()) if path.name.partition(".")[0] in self.made]
        for path in [] if self.wanted.keep else made:
            if not any(path.name.startswith(name) for name in self.failed):
                shutil.rmtree(path, ignore_errors=True)
                path.unlink(missing_ok=True) if path.is_file() else None
        if not any(self.runs.iterdir()):
            self.runs.rmdir()

    def result(self) -> Acceptance:
        """Return what is known."""
        wanted = self.wanted
        return Acceptance(
            wanted.target,
            wanted.devices,
            _known_name(wanted.device),
            tuple(claim.name for claim in wanted.claims),
            tuple(self.lines),
            self.states,
            versions(wanted.target),
            self.records,
            self.took,
            self.interrupted,
            wanted.nodes,
        )


def recorded_lines(claim: str, predicted: Timed, comparison: Comparison | None, on_device: bool) -> list[Line]:
    """Return the lines of kernels and of every exchange; on a device without a recording they failed."""
    computing, computed = predicted.parts.parts(0)["computing"], computing_of(comparison) if comparison else None
    found = [time_line(claim, "kernels", computing, predicted.error, computed)]
    for (op, axis), rate in predicted.bandwidths().items():
        name = f"{op} over {axis}{predicted.where(axis)}"
        measured = reached(comparison, (op, axis), rate) if comparison else None
        found.append(link_line(claim, name, rate, measured))
    if not on_device:
        return found
    why = "the profiler has left no record of it"
    return [
        line if line.measured is not None else Line(claim, line.figure, line.unit, line.predicted, None, Verdict.FAILED, why)
        for line in found
    ]  # fmt: skip


def reason_of(error: BaseException) -> str:
    """Return what may be said of a failure to anybody: its class, exit code, and the error codes in its text.

    The text itself has paths, addresses and names of hosts.
    """
    if isinstance(error, NodeLost):
        return error.said
    words = re.findall(r"\w+", str(error))
    said = [*dict.fromkeys(word for word in words if word in ERRORS), *dict.fromkeys(CODES.findall(str(error)))]
    code = getattr(error, "exit_code", None)
    parts = [
        type(error).__name__,
        f"exit code {code}" if code else "",
        f"it said {', '.join(said[:8])}" if said else "",
    ]
    return ", ".join(filter(None, parts))


def _known_name(device: Device) -> str:
    """Return the name of a device that comes with mindllm; that of another may be anything, and stays here."""
    known = {read_device(name).name for name in shipped_devices()}
    return device.name if device.name in known else "a device of one's own"


def _losses(reference: Measured) -> dict[int, float]:
    return {step: loss for step, loss in reference.losses.items() if loss is not None}


def _alone(wanted: Wanted) -> Launch:
    """Return the place of the one node that has all devices."""
    place = alone(wanted.output, wanted.target == "Ascend")
    return replace(place, workers=wanted.devices, local_workers=wanted.devices)


def _states(wanted: Wanted, nodes: Nodes) -> list[States]:
    """Return what preflight says of each node."""
    nodes.ask_to_check()
    return [node_states(nodes.place, wanted.here), *nodes.checked()]


def versions(target: str) -> dict[str, str]:
    """Return the versions of what has run; of CANN and the driver on devices alone."""
    found = versions_here()
    if target == "Ascend":
        homes = list(CANN_HOMES)
        found |= {"CANN": find_version(homes, CANN_FILES), "driver": find_version([""], DRIVER_FILES)}
    return found
