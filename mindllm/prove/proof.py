"""The proof of a run: the verdict, an answer to each question, and what they are of."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from mindllm.prove.answers import Answer, Standing
from mindllm.prove.questions import CHECKPOINTS, COMMUNICATION, MEMORY, QUESTIONS, STEP_TIME
from mindllm.results import Result
from mindllm.terminal.tables import Table, texts
from mindllm.terminal.text import styled
from mindllm.timing.verdict import Room
from mindllm.units import TENTHS_OF_GB

if TYPE_CHECKING:
    from mindllm.results import Part

COLOURS = {
    Standing.PROVED: "green",
    Standing.REFUTED: "bold red",
    Standing.NOT_PROVED: "yellow",
    Standing.EXPECTED: "dim",
}


class Verdict(str, Enum):
    """What a proof comes to."""

    READY = "ready"
    REFUTED = "refuted"
    NOT_PROVED = "not proved"


Figure = Annotated[float, Field(allow_inf_nan=False, ge=-1e30, le=1e30)]


class ReadFigures(BaseModel):
    """Figures of an answer that a later command computes with; others are kept as they are."""

    model_config = ConfigDict(strict=True)


class StagePeak(ReadFigures):
    """A stage and the bytes it needs."""

    stage: int
    peak: Figure


class MemoryFigures(ReadFigures):
    """Bytes of the fullest stage, of a device, and of every stage."""

    peak: Figure
    limit: Figure
    stages: list[StagePeak] = []


class StepFigures(ReadFigures):
    """Seconds of a step, and the share of the peak it reaches."""

    seconds: Figure = 0
    model_flops_utilisation: Figure = 0


class CommunicationFigures(ReadFigures):
    """Bytes that are exchanged without need."""

    bytes: Figure = 0


class CheckpointFigures(ReadFigures):
    """Bytes of a checkpoint."""

    checkpoint: Figure = 0


READ_FIGURES: Mapping[str, type[ReadFigures]] = {
    MEMORY: MemoryFigures,
    STEP_TIME: StepFigures,
    COMMUNICATION: CommunicationFigures,
    CHECKPOINTS: CheckpointFigures,
}


@dataclass(frozen=True)
class Run:
    """What was proved.

    Attributes:
        name: what it is called: a file, or its model.
        hash: of the resolved configuration (:func:`mindllm.prove.found.hash_of`).
        words: model, strategy, batch and devices for people, in order.
        versions: of mindllm, MindSpore and Python.
        seed: of the run.
        date: when, as ``2026-11-20T14:03:05+00:00``.
    """

    name: str
    hash: str
    words: Mapping[str, str]
    versions: Mapping[str, str]
    seed: int
    date: str


@dataclass(frozen=True, repr=False)
class Proof(Result):
    """All answers, and the verdict they come to.

    Attributes:
        run: what was proved.
        answers: to every question, in their order.
        allowed: names of questions that may stay without a proof.
        seconds: what it took.
        complete: whether all pieces were done; an interrupted proof, or a quick one, has questions that are expected only.
    """

    schema: ClassVar[int] = 1

    run: Run
    answers: tuple[Answer, ...]
    allowed: tuple[str, ...] = ()
    seconds: float = 0.0
    complete: bool = True
    device: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """Refuted if one answer is; ready if all are proved, but for those that are allowed to stay open."""
        standings = {answer.standing for answer in self.answers}
        if Standing.REFUTED in standings:
            return Verdict.REFUTED
        return Verdict.NOT_PROVED if self.open else Verdict.READY

    @property
    def open(self) -> tuple[Answer, ...]:
        """Answers without a proof that nobody has allowed."""
        without = (Standing.NOT_PROVED, Standing.EXPECTED)
        return tuple(item for item in self.answers if item.standing in without and item.question not in self.allowed)

    def answer(self, question: str) -> Answer:
        """Return the answer to a question by its name.

        Raises:
            KeyError: there is no such question.
        """
        return {answer.question: answer for answer in self.answers}[question]

    def headline(self) -> str:
        """Return the verdict in a line."""
        if self.verdict is Verdict.READY:
            return f"{self.run.name}: ready: {', '.join(self.best_words())}"
        return f"{self.run.name}: {self.verdict.value}: {', '.join(item.question for item in self.troubles)}"

    def shortage(self) -> str:
        """Return why the run does not fit, and the keys that change that; empty if memory is not short.

        ``does not fit by formula: stage 0 needs 82.1 GB of 55.1 GB; set recompute_config.recompute: true …``
        """
        answer = self.answer(MEMORY)
        how = {Standing.EXPECTED: "by formula", Standing.REFUTED: "in the dry run"}.get(answer.standing)
        if how is None or "peak" not in answer.figures or not answer.findings:
            return ""
        first = answer.findings[0]
        return "; ".join(filter(None, [f"does not fit {how}: {first.message}", first.advice]))

    @property
    def troubles(self) -> tuple[Answer, ...]:
        """Answers that keep a run from being ready: those that are refuted, otherwise those that are open."""
        return tuple(item for item in self.answers if item.standing is Standing.REFUTED) or self.open

    def best_words(self) -> Iterator[str]:
        """Yield what a run that is ready may expect."""
        answer, step = self.answer("memory"), self.answer("step_time").figures
        if "peak" in (memory := answer.figures):
            room = room_of(memory)
            how = " by formula" if answer.standing is Standing.EXPECTED else ""
            yield f"{'fits' if room.fits else 'does not fit,'} {TENTHS_OF_GB(memory['peak'])} of {room.bound}{how}"
        if "seconds" in step:
            yield f"{step['seconds']:.3g} s a step expected"
        if self.allowed:
            yield f"without a proof of {', '.join(self.allowed)}"

    def summary(self) -> str:
        """Return the verdict and what it is of."""
        return self.headline()

    def tree(self) -> dict[str, Any]:
        """Return everything, as ``proof.json`` has it."""
        return {
            "verdict": self.verdict.value,
            "complete": self.complete,
            "run": {**vars(self.run), "words": dict(self.run.words), "versions": dict(self.run.versions)},
            "device": self.device,
            "allowed": list(self.allowed),
            "seconds": round(self.seconds, 3),
            "answers": [_without_texts(answer).tree() for answer in self.answers],
            **self.extra,
        }

    @classmethod
    def of_tree(cls, tree: Mapping[str, Any]) -> Proof:
        """Return the inverse of :meth:`to_dict`, without ``extra``; raise ValueError for any other value."""
        proof = TypeAdapter(cls).validate_python({name: value for name, value in tree.items() if name != "extra"})
        for answer in proof.answers:
            if answer.figures and (figures := READ_FIGURES.get(answer.question)):
                figures.model_validate(dict(answer.figures))
        return proof

    def parts(self) -> Iterator[Part]:
        """Yield the table of questions, the findings below it, and the verdict."""
        yield questions_table(self.answers, self.run.name)
        for answer in self.answers:
            yield from finding_lines(answer)
        colour = {Verdict.READY: "bold green", Verdict.REFUTED: "bold red"}.get(self.verdict, "bold yellow")
        yield styled((self.headline(), colour))
        if shortage := self.shortage():
            yield styled((shortage, colour))


def room_of(figures: Mapping[str, Any]) -> Room:
    """Return the fullest stage next to the limit, from the figures of an answer about memory."""
    return Room((figures["peak"],), figures["limit"], figures.get("reserved", 0.0))


def _without_texts(answer: Answer) -> Answer:
    """The answer with the names of its pages alone."""
    return replace(answer, pages=tuple(replace(page, text="") for page in answer.pages))


def questions_table(answers: Sequence[Answer], name: str) -> Table:
    """Return how every question stands."""
    table = Table(f"{name}: what is proved", texts("question", "stands", "because"))
    for answer in answers:
        since = f" (since {answer.proved_on})" if answer.proved_on else ""
        standing = styled((answer.standing.value, COLOURS[answer.standing]))
        table.add_row(QUESTIONS[answer.question].text, standing, answer.says + since)
    return table


def finding_lines(answer: Answer, most: int = 8) -> Iterator[Part]:
    """Yield why a question is not proved, with what would change it."""
    for finding in answer.findings[:most]:
        yield styled((f"  {answer.question}: ", "bold"), str(finding))
    if len(answer.findings) > most:
        yield f"  {answer.question}: and {len(answer.findings) - most} more"


def in_order(answers: Mapping[str, Answer]) -> tuple[Answer, ...]:
    """Return answers in the order of the questions."""
    return tuple(answers[name] for name in QUESTIONS if name in answers)


def check_allowed(names: Collection[str]) -> tuple[str, ...]:
    """Return the names of questions that may stay open; raise UserError for one that is none."""
    from mindllm.errors import UserError, nearest

    for name in names:
        if name not in QUESTIONS:
            raise UserError(f"--allow {name}: there is no such question{nearest(name, QUESTIONS)}")
    return tuple(dict.fromkeys(names))
