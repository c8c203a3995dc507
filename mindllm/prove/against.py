"""Two proofs of a run held against each other: what became better or worse since, and what of the run changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindllm.prove.answers import Standing
from mindllm.prove.proof import COLOURS, Proof
from mindllm.prove.questions import CHECKPOINTS, COMMUNICATION, MEMORY, QUESTIONS, STEP_TIME
from mindllm.results import Result
from mindllm.terminal.tables import Column, Table, texts
from mindllm.terminal.text import styled
from mindllm.units import GB, GIB, MIB

if TYPE_CHECKING:
    from mindllm.results import Part

SHOWN = 0.05  # of a unit that is shown with one digit behind the point: less is no change


@dataclass(frozen=True)
class Change:
    """A figure that changed.

    Attributes:
        what: which, as ``stage 2`` or ``step``.
        before, after: bytes, seconds or a share.
        text: the change in a few words, as ``stage 2 +3.1 GB``.
        better: whether less of it, or of a utilisation more, is there now.
    """

    what: str
    before: float
    after: float
    text: str
    better: bool


@dataclass(frozen=True)
class Turned:
    """A question that stands otherwise than before."""

    question: str
    before: Standing
    after: Standing
    because: str

    @property
    def lost(self) -> bool:
        """Whether it was proved, and is no longer."""
        return self.before is Standing.PROVED


@dataclass(frozen=True, repr=False)
class Comparison(Result):
    """What became better or worse from an earlier proof to a later one.

    Attributes:
        earlier, later: the proofs.
        changes: of memory, time, exchanges and checkpoints.
        turned: questions that stand otherwise.
        words: what of the run is said otherwise, by name: before and after.
    """

    earlier: Proof
    later: Proof
    changes: tuple[Change, ...]
    turned: tuple[Turned, ...]
    words: dict[str, tuple[str, str]]

    def worse_by(self, share: float) -> bool:
        """Return whether peak memory or step time grew by more than ``share``, or what was proved is no longer.

        A quick proof has not looked for most proofs: of its questions those that are refuted count as lost.
        """
        lost = any(
            item.lost and (self.later.complete or item.after is Standing.REFUTED) and not self._may_stay_open(item)
            for item in self.turned
        )
        return lost or any(
            after > before * (1 + share)
            for question, key in ((MEMORY, "peak"), (STEP_TIME, "seconds"))
            for before, after in _pair(self.earlier, self.later, question, key)
        )

    def _may_stay_open(self, item: Turned) -> bool:
        return item.after is not Standing.REFUTED and item.question in self.later.allowed

    def summary(self) -> str:
        """Return all changes of figures in a line."""
        return ", ".join(change.text for change in self.changes) or "no figure changed"

    def tree(self) -> dict[str, Any]:
        """Return everything that changed."""
        return {
            "earlier": {"hash": self.earlier.run.hash, "date": self.earlier.run.date},
            "changes": [vars(change) for change in self.changes],
            "questions": [
                {"question": item.question, "before": item.before.value, "after": item.after.value}
                for item in self.turned
            ],
            "words": {name: list(pair) for name, pair in self.words.items()},
        }

    def parts(self) -> Iterator[Part]:
        """Yield the questions that stand otherwise, what of the run changed, and the figures in a line."""
        since = self.earlier.run.date[:10]
        if self.turned:
            table = Table(f"since {since}", [Column("question", True), *texts("stood", "stands", "because")])
            for item in self.turned:
                standings = [styled((one.value, COLOURS[one])) for one in (item.before, item.after)]
                table.add_row(QUESTIONS[item.question].text, *standings, item.because)
            yield table
        for name, (before, after) in self.words.items():
            yield f"{name}: {after} (was: {before})"
        pieces = [(change.text, "green" if change.better else "red") for change in self.changes]
        joined = [piece for pair in pieces for piece in (pair, ", ")][:-1]
        yield styled((f"since {since}: ", "bold"), *(joined or ["no figure changed"]))


def compare(earlier: Proof, later: Proof) -> Comparison:
    """Hold a proof against an earlier one.

    What a formula expects is held against what a formula expected alone: a dry run says something else of the same run.
    """
    changes = (
        *_memory(earlier, later),
        *_time(earlier, later),
        *_exchanges(earlier, later),
        *_checkpoints(earlier, later),
    )
    return Comparison(earlier, later, changes, tuple(_turned(earlier, later)), dict(_words(earlier, later)))


def _pair(earlier: Proof, later: Proof, question: str, key: str) -> Iterator[tuple[Any, Any]]:
    """A figure before and after; nothing where one of them does not have it, or one is a formula's and the other is not."""
    before, after = earlier.answer(question), later.answer(question)
    alike = (before.standing is Standing.EXPECTED) == (after.standing is Standing.EXPECTED)
    if alike and key in before.figures and key in after.figures:
        yield before.figures[key], after.figures[key]


def _memory(earlier: Proof, later: Proof) -> Iterator[Change]:
    """Stage by stage; of other numbers of stages the fullest alone."""
    for before, after in _pair(earlier, later, MEMORY, "stages"):
        if len(before) == len(after):
            for old, new in zip(before, after, strict=True):
                yield from _size(f"stage {new['stage']}", old["peak"], new["peak"])
            return
    for before, after in _pair(earlier, later, MEMORY, "peak"):
        yield from _size("fullest stage", before, after)


def _size(what: str, before: float, after: float, unit: int = GIB, name: str = "GB") -> Iterator[Change]:
    if abs(after - before) >= SHOWN * unit:
        yield Change(what, before, after, f"{what} {(after - before) / unit:+,.1f} {name}", after < before)


def _time(earlier: Proof, later: Proof) -> Iterator[Change]:
    for before, after in _pair(earlier, later, STEP_TIME, "seconds"):
        yield from _relative("step", before, after)
    for before, after in _pair(earlier, later, STEP_TIME, "model_flops_utilisation"):
        points = 100 * (after - before)
        if abs(points) >= SHOWN:
            yield Change("MFU", before, after, f"MFU {points:+.1f} points", after > before)


def _relative(what: str, before: float, after: float) -> Iterator[Change]:
    change = 100 * (after / before - 1) if before else float(after > 0)
    if abs(change) >= SHOWN:
        yield Change(what, before, after, f"{what} {change:+.1f}%", after < before)


def _exchanges(earlier: Proof, later: Proof) -> Iterator[Change]:
    for before, after in _pair(earlier, later, COMMUNICATION, "bytes"):
        yield from _size("exchanges nobody asked for", before, after, MIB, "MB")


def _checkpoints(earlier: Proof, later: Proof) -> Iterator[Change]:
    before, after = (proof.answer(CHECKPOINTS).figures.get("checkpoint") for proof in (earlier, later))
    if before is not None and after is not None:  # a formula's in every proof
        yield from _size("a checkpoint", before, after, GB)


def _turned(earlier: Proof, later: Proof) -> Iterator[Turned]:
    for question in QUESTIONS:
        before, after = earlier.answer(question), later.answer(question)
        if before.standing is not after.standing:
            yield Turned(question, before.standing, after.standing, after.says)


def _words(earlier: Proof, later: Proof) -> Iterator[tuple[str, tuple[str, str]]]:
    pairs: tuple[tuple[str, Callable[[Proof], Any]], ...] = (
        ("", lambda proof: proof.run.words),
        ("version of ", lambda proof: proof.run.versions),
        ("", lambda proof: {"timed on": proof.device, "seed": str(proof.run.seed)}),
    )
    for prefix, of in pairs:
        before, after = of(earlier), of(later)
        for name in {**before, **after}:
            if before.get(name) != after.get(name):
                yield f"{prefix}{name}", (before.get(name, "not said"), after.get(name, "not said"))
