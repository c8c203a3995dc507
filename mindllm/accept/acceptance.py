"""What an acceptance comes to: claims with their lines, as a table and JSON. Nothing in it names a machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindllm.accept.claims import BY_NAME
from mindllm.accept.judge import Line, Verdict, worst
from mindllm.results import Result
from mindllm.terminal.tables import Table, figures, texts
from mindllm.terminal.text import styled
from mindllm.units import GB, device_memory

if TYPE_CHECKING:
    from mindllm.results import Part

COLOURS = {
    Verdict.CONFIRMED: "green",
    Verdict.REFUTED: "bold red",
    Verdict.FAILED: "bold red",
    Verdict.OPEN: "yellow",
    Verdict.NOT_RUN: "dim",
}
ON_A_CPU = (
    "No Ascend device is here: the runs were processes of this CPU. Losses are measured; memory, seconds and links are predicted "
    "for devices, and not run."
)
ON_DEVICES = "The runs were on Ascend devices; losses are compared with those of one CPU device."
ON_NODES = " Each run had the same devices of every node; runs of one device were on node 0."
ON_CPU_NODES = (
    " Replicas were processes of all {nodes} nodes. Where devices share the model, node 0 executed all ranks in one process, and "
    "the other nodes waited."
)


@dataclass(frozen=True, repr=False)
class Acceptance(Result):
    """Claims beside what a few small runs have shown.

    Attributes:
        target: ``Ascend`` or ``CPU``.
        devices: that were asked for, of all nodes.
        device: the described device that steps and links are predicted for: its name, if it comes with mindllm.
        claims: names of the claims that were asked for.
        lines: predicted and measured figures, those of a claim together.
        preflight: of each node, state by subject: ``good``, ``no`` or ``unknown``.
        versions: of software, by name.
        records: of each run, by its name, what was measured of every step.
        took: seconds of each claim.
        interrupted: whether it was stopped before its end.
        nodes: that shared the devices.
    """

    target: str
    devices: int
    device: str
    claims: tuple[str, ...]
    lines: tuple[Line, ...]
    preflight: Sequence[Sequence[tuple[str, str]]]
    versions: Mapping[str, str]
    records: Mapping[str, Sequence[Mapping[str, Any]]]
    took: Mapping[str, float]
    interrupted: bool = False
    nodes: int = 1

    def of(self, claim: str) -> tuple[Line, ...]:
        """Return the lines of a claim."""
        return tuple(line for line in self.lines if line.claim == claim)

    def verdict(self, claim: str) -> Verdict:
        """Return how a claim stands: the worst of its lines."""
        return worst([line.verdict for line in self.of(claim)])

    def standing(self, verdict: Verdict) -> list[str]:
        """Return the claims that stand so."""
        return [claim for claim in self.claims if self.verdict(claim) is verdict]

    def summary(self) -> str:
        """Return how many claims stand how."""
        counts = [(one, len(self.standing(one))) for one in Verdict]
        return ", ".join(f"{count} {one.value}" for one, count in counts if count)

    def headline(self) -> str:
        """Return what ran where, and how many claims stand how."""
        where = f"{self.devices} Ascend devices" if self.target == "Ascend" else "no device, losses alone"
        where += f" on {self.nodes} nodes" if self.nodes > 1 else ""
        stopped = "; stopped before its end" if self.interrupted else ""
        return f"{where}, predictions for {self.device}: {self.summary()}{stopped}"

    def where(self) -> str:
        """Return what the runs were, in a sentence."""
        if self.target == "Ascend":
            return ON_DEVICES + (ON_NODES if self.nodes > 1 else "")
        return ON_A_CPU + (ON_CPU_NODES.format(nodes=self.nodes) if self.nodes > 1 else "")

    def states(self) -> Iterator[tuple[str, list[str]]]:
        """Yield each subject of preflight with its state on every node; a dash where a node says nothing of it."""
        known = [dict(states) for states in self.preflight]
        for subject in dict.fromkeys(subject for states in known for subject in states):
            yield subject, [states.get(subject, "–") for states in known]

    def tree(self) -> dict[str, Any]:
        """Return claims, lines, states of the preflight and versions."""
        return {
            "target": self.target,
            "devices": self.devices,
            "nodes": self.nodes,
            "device": self.device,
            "interrupted": self.interrupted,
            "claims": [
                {"claim": name, "says": BY_NAME[name].says, "verdict": self.verdict(name).value, "seconds": self.took.get(name)}
                for name in self.claims
            ],
            "lines": [{**vars(line), "verdict": line.verdict.value, "detail": dict(line.detail)} for line in self.lines],
            "preflight": [
                {"node": node, "subject": subject, "state": state}
                for node, states in enumerate(self.preflight) for subject, state in states
            ],
            "versions": dict(self.versions),
        }  # fmt: skip

    def parts(self) -> Iterator[Part]:
        """Yield the headline, where it ran, and a line for each figure."""
        yield styled((self.headline(), "bold"))
        yield self.where()
        rows = [
            (name, figure, predicted, found, styled((line.verdict.value, COLOURS[line.verdict])), line.why)
            for line, (name, figure, predicted, found) in ((line, cells(line)) for line in self.lines)
        ]
        kinds = [*texts("claim", "figure"), *figures("predicted", "measured"), *texts("verdict", "why")]
        yield Table("claims", kinds, rows, keys=2)
        for node, states in enumerate(self.preflight):
            if bad := [subject for subject, state in states if state == "no"]:
                yield f"preflight{f' of node {node}' if self.nodes > 1 else ''} says no to: {', '.join(bad)}"


def cells(line: Line) -> tuple[str, str, str, str]:
    """Return claim, figure, predicted and measured of a line, as they are shown."""
    return line.claim, line.figure, amount(line.predicted, line.unit), amount(line.measured, line.unit)


def amount(value: float | None, unit: str) -> str:
    """Return a figure with its unit as people read it; a dash where there is none."""
    if value is None:
        return "–"
    if unit == "B":
        return device_memory(value)
    if unit == "B/s":
        return f"{value / GB:.2f} GB/s"
    return f"{value:.6f}" if unit == "nats" else f"{value:.4f} {unit}"
