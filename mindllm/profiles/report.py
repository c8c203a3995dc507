"""What a recorded step is said to differ in, as people and programs are shown it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindllm.profiles.compare import LEAST, Comparison, Finding
from mindllm.results import Result
from mindllm.terminal.tables import Table, figures, texts
from mindllm.terminal.text import styled

if TYPE_CHECKING:
    from mindllm.results import Part

LOOK = {
    "kernel": "its shape and format: sizes that are no multiple of 16, transposes around it, another kernel; "
    "layers that are named; `mindllm time --device` with the device of --calibrate",
    "work": "casts, copies and transposes that the prediction does not have; layers of the stage (offset), recomputation, "
    "as the graph has them: `mindllm inspect`",
    "unknown": "what these kernels do: the model of time has no rate for them",
    "not in kernels": "kernel_details.csv of this rank (profiler_level: 1); kernels that run beside each other",
    "exchange": "bandwidth of this group in communication_matrix.json, links of the node, other jobs on the network",
    "exposed": "whether exchanges between replicas run behind the backward pass: their order and fusion",
    "waits for ranks": "the ranks that were not recorded: one of them comes late",
    "bubble": "layers of each stage and recomputation: `mindllm plan` with the calibrated device",
    "send": "links between stages in communication_matrix.json; which ranks are neighbours",
    "data": "readers and the queue of batches (data_wait_s in metrics.jsonl)",
    "begin": "reading the batch before the step (data_wait_s in metrics.jsonl), callbacks between steps",
    "host": "what the host does between kernels: graph sinking (jit_level O2), synchronous reads of results, other processes",
    "imbalance": "this device: clock and temperature (npu-smi info), other processes on its node",
}
NAMES = {
    "kernel": "kernel slower", "work": "other work than predicted", "unknown": "kernels of unknown work",
    "not in kernels": "computing, not in kernels", "exchange": "exchange slower", "exposed": "exchange exposed",
    "waits for ranks": "waits for ranks", "bubble": "bubble", "send": "send slower", "data": "waits for data",
    "begin": "start of the step", "host": "host gaps", "imbalance": "rank slower",
}  # fmt: skip
PARTS = ("computing", "exposed", "bubble", "free")
"""Of a recorded or predicted step, in the order they are shown."""
FASTER = {"kernel": "kernel faster", "exchange": "exchange faster", "exposed": "exchange better hidden",
          "host": "fewer host gaps", "bubble": "smaller bubble", "send": "send faster"}  # fmt: skip
NOT_OF_A_DEVICE = (
    "files of devices are read as MindSpore's writers and CANN's documentation have them; none was at hand"
)


@dataclass(frozen=True, repr=False)
class ProfileReport(Result):
    """A recorded step beside the predicted one; times are seconds of a step.

    Attributes:
        comparison: steps, causes and what they leave.
        notes: files that were not found or not read, and what was assumed.
    """

    comparison: Comparison
    notes: tuple[str, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Differences of at least 0.5% of the predicted step, the most valuable first."""
        return self.comparison.findings

    def summary(self) -> str:
        """Return both steps and the first cause."""
        found = self.comparison
        first = f", most of it: {named(self.findings[0])}" if self.findings else ""
        return f"{found.measured:.3f} s measured, {found.step.seconds:.3f} s predicted{first}"

    def headline(self) -> str:
        """Return both steps in a line."""
        found, known = self.comparison, self.comparison.step.device.step_error
        way = "longer" if found.difference > 0 else "shorter"
        return (
            f"{found.step.device.name}: {found.measured:.3f} s a step measured, {found.step.seconds:.3f} s predicted"
            f"{f' (± {known.value:.0%})' if known else ''}: {abs(found.difference):.3f} s {way}, "
            f"{100 * found.difference / found.step.seconds:+.1f}%"
        )

    def tree(self) -> dict[str, Any]:
        """Return seconds, causes and ranks, as ``--json`` prints them."""
        found = self.comparison
        return {
            "device": found.step.device.name,
            "measured": found.measured,
            "predicted": found.step.seconds,
            "step_error": known.value if (known := found.step.device.step_error) else None,
            "difference": found.difference,
            "findings": [
                {**vars(one), "share": one.worth / found.measured, "look": LOOK[one.cause]} for one in self.findings
            ],
            "small": found.small,
            "unexplained": found.unexplained,
            "ranks": list(self._ranks()),
            "not_counted": list(found.step.uncounted),
            "notes": list(self.notes),
        }

    def parts(self) -> Iterator[Part]:
        """Yield the headline, the causes, where to look, the ranks, and what was not read."""
        yield styled((self.headline(), "bold"))
        if self.findings:
            yield self.causes()
            for cause in dict.fromkeys(one.cause for one in self.findings):
                yield f"{NAMES[cause]}: look at {LOOK[cause]}"
        else:
            yield f"nothing differs by {LEAST:.1%} of the step or more"
        yield self.remainder()
        yield self.ranks()
        yield from self.said()

    def said(self) -> list[str]:
        """Return what was not found, not read, not counted, or taken to be so."""
        left = self.comparison.step.uncounted
        return [*self.notes, *([f"not in the prediction: {'; '.join(left)}"] if left else []), NOT_OF_A_DEVICE]

    def remainder(self) -> str:
        """Return what the causes leave, in a line."""
        found = self.comparison
        return (
            f"differences below {LEAST:.1%} of the step: {found.small:+.4f} s together; not explained: "
            f"{found.unexplained:+.4f} s ({found.unexplained / found.measured:+.1%})"
        )

    def causes(self) -> Table:
        """Return a line for each difference."""
        columns = [*texts("cause", "where", "what"), *figures("s", "worth s", "of the step")]
        rows = [
            (
                named(one), one.where, told(one), f"{one.seconds:+.4f}",
                f"({one.worth:+.4f})" if one.consequence else f"{one.worth:+.4f}",
                f"{100 * one.worth / self.comparison.measured:+.1f}%",
            )
            for one in self.findings
        ]  # fmt: skip
        return Table(
            "where the step differs, and what it is worth (in brackets: follows from the others)", columns, rows
        )

    def ranks(self) -> Table:
        """Return a line for each recorded rank: measured, and by how much that is more than predicted."""
        columns = figures("rank", "stage", "step s", *(f"{name} s" for name in PARTS))
        rows = []
        for one in self._ranks():
            cells = (f"{one[name]:.4f} {one[name] - one['predicted'][name]:+.4f}" for name in PARTS)
            rows.append((str(one["rank"]), str(one["stage"]), f"{one['seconds']:.4f}", *cells))
        return Table("recorded ranks, and how much more than predicted", columns, rows)

    def _ranks(self) -> Iterator[dict[str, Any]]:
        for stage in self.comparison.stages:
            expected = self.comparison.predicted.parts(stage.stage)
            for record, terms in zip(stage.records, stage.terms, strict=True):
                bubble = expected["bubble"] + terms["bubble", ""].seconds
                yield {
                    "rank": record.rank, "stage": stage.stage, "seconds": record.parts.seconds, "steps": record.steps,
                    "computing": record.parts.computing, "exposed": record.parts.exposed - bubble, "bubble": bubble,
                    "free": record.parts.free, "predicted": expected,
                }  # fmt: skip


def named(one: Finding) -> str:
    """Return the name of a cause; of one by which the step is shorter, too."""
    return FASTER.get(one.cause, NAMES[one.cause]) if one.seconds < 0 else NAMES[one.cause]


def told(one: Finding) -> str:
    """Return what a finding is about, with layers and operators where they are known."""
    detail = one.detail
    more = []
    if operators := detail.get("cells") or detail.get("operators"):
        more.append(", ".join(operators[:3]))  # type: ignore[index]
    if layers := detail.get("layers"):
        more.append(f"layers {', '.join(map(str, layers))}")  # type: ignore[call-overload]
    if shapes := detail.get("shapes"):
        first, others = shapes[0], len(shapes) - 1  # type: ignore[index,arg-type]
        also = f", and {others} more shape{'s' * (others > 1)}" if others else ""
        more.append(
            f"{first['runs']:.0f} of {1e6 * first['median']:.0f} us, predicted {1e6 * first['roofline']:.0f}{also}"
        )
    if link := detail.get("slowest_link"):
        more.append(
            f"slowest link {link['link']} {link['transport']} {link['rate'] / 1e9:.1f} GB/s, "  # type: ignore[index]
            f"median {link['median'] / 1e9:.1f}"  # type: ignore[index]
        )
    if "predicted_runs" in detail:
        more.append(f"{detail['runs']:.0f} kernels, predicted {detail['predicted_runs']:.0f}")
    if gaps := detail.get("gaps_before"):
        more.append("before " + ", ".join(f"{kind} {seconds:.4f} s" for kind, seconds in gaps.items()))  # type: ignore[attr-defined]
    if why := detail.get("most of it"):
        more.append("; ".join(f"{what} {seconds:+.4f} s" for what, seconds in why.items()))  # type: ignore[attr-defined]
    return one.what + (f": {'; '.join(more)}" if more else "")
