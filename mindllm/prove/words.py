"""What the page of a proof says in sentences: why the verdict is what it is, figures at a glance, what no proof covers."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from mindllm.prove.answers import Answer, Standing
from mindllm.prove.proof import Proof, Verdict, room_of
from mindllm.prove.questions import MEMORY, PARITY, QUESTIONS, STEP_TIME
from mindllm.units import GB, TENTHS_OF_GB

EXTRAPOLATED, NOT_COUNTED = "extrapolated", "not counted: "
STOPPED = "The proof was stopped before its end"
LONGEST = 240  # letters of a reason; all of it stands below


def why(proof: Proof) -> str:
    """Return why the verdict is what it is, in a sentence or two."""
    if not proof.run.hash:
        return f"The configuration does not load: {proof.answers[0].says}. Nothing else was looked at."
    if proof.verdict is Verdict.READY:
        return _ready(proof)
    if proof.verdict is Verdict.REFUTED:
        refuted = _of([answer for answer in proof.answers if answer.standing is Standing.REFUTED], "refuted")
        return refuted if proof.complete else f"{refuted} {STOPPED}."
    if not proof.complete:
        proved = [answer for answer in proof.answers if answer.standing is Standing.PROVED]
        reason = STOPPED if len(proved) > 1 else "Nothing but the configuration was looked at"
        count = f"no proof of {len(proof.open)} of {len(proof.answers)} questions"
        return f"{reason}: {count}. What formulas expect is marked so."
    return _of(proof.open, "not proved")


def _ready(proof: Proof) -> str:
    allowed = allowed_open(proof)
    proved = len(proof.answers) - len(allowed)
    counted = "All questions are proved" if not allowed else f"{proved} of {len(proof.answers)} questions are proved"
    without = f" Allowed to stay open: {', '.join(map(_name, allowed))}." if allowed else ""
    return f"{': '.join(filter(None, [counted, ', '.join(_best(proof))]))}.{without}"


def _best(proof: Proof) -> Iterator[str]:
    memory, step = proof.answer(MEMORY).figures, proof.answer(STEP_TIME).figures
    if "peak" in memory:
        yield f"the fullest stage takes {TENTHS_OF_GB(memory['peak'])} of {room_of(memory).bound}"
    if "seconds" in step:
        yield f"a step is expected to take {_seconds(step, 3)}"


def _seconds(figures: Mapping[str, Any], digits: int) -> str:
    """Return a predicted step with the range in which about nine of ten measured ones were."""
    error = figures.get("step_error")
    return f"{figures['seconds']:.{digits}g} s{f' ± {error:.0%}' if error else ''}"


def _of(answers: Sequence[Answer], what: str) -> str:
    first, *others = answers
    more = f" Also {what}: {', '.join(map(_name, others))}." if others else ""
    reason = first.findings[0].message if first.standing is Standing.REFUTED and first.findings else first.says
    return f"{QUESTIONS[first.question].text} {_sentence(_first_line(reason))}{more}"


def _first_line(text: str) -> str:
    return textwrap.shorten(text.strip().partition("\n")[0], LONGEST, placeholder=" …")


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def allowed_open(proof: Proof) -> list[Answer]:
    """Return the answers that have no proof and may stay so."""
    bad = (Standing.PROVED, Standing.REFUTED)
    return [answer for answer in proof.answers if answer.standing not in bad and answer.question in proof.allowed]


def date_words(date: str) -> str:
    """Return ``2026-11-20T14:03:05+00:00`` as people write it."""
    moment = datetime.fromisoformat(date)
    return f"{moment.day} {moment:%B %Y, %H:%M} {moment.tzname() or ''}".rstrip()


@dataclass(frozen=True)
class Glance:
    """A figure that a reader looks for first. ``wrong``: whether it is what refutes the run."""

    name: str
    value: str
    about: str
    wrong: bool = False


def glances(proof: Proof) -> Iterator[Glance]:
    """Yield the figures at a glance, as far as they are known."""
    yield from _of_memory(proof.answer(MEMORY))
    yield from _of_step(proof.answer(STEP_TIME))
    size = proof.answer("checkpoints").figures
    if "checkpoint" in size:
        needed = f"{size['needed'] / GB:,.1f} GB while one is written"
        yield Glance("Checkpoint", f"{size['checkpoint'] / GB:,.1f} GB", f"{size['kept']} kept: {needed}")


def _of_memory(answer: Answer) -> Iterator[Glance]:
    figures = answer.figures
    if "peak" not in figures:
        return
    fullest = max(figures.get("stages", ()), key=lambda stage: stage["peak"], default={"stage": 0})["stage"]
    room = room_of(figures)
    about = f"of {room.bound}, on stage {fullest}{_expected(answer)}"
    yield Glance("Memory", f"{TENTHS_OF_GB(figures['peak'])} GB", about, not room.fits)


def _of_step(answer: Answer) -> Iterator[Glance]:
    figures = answer.figures
    if "seconds" not in figures:
        return
    yield Glance("Step", _seconds(figures, 4), f"on {figures.get('device', 'the device')}{_expected(answer)}")
    if "model_flops_utilisation" in figures:
        speed = f"{figures['tokens_per_second_per_device']:,.0f} tokens/s/device"
        yield Glance("MFU", f"{figures['model_flops_utilisation']:.1%}", speed, bool(figures.get("implausible")))
    if best := figures.get("best_plan"):
        about = f"over {best:.4g} s, the best plan of this strategy"
        yield Glance("From the best", f"{figures['seconds'] / best - 1:+.1%}", about)


def _expected(answer: Answer) -> str:
    return ", by formula" if answer.standing is Standing.EXPECTED else ""


def uncovered(proof: Proof) -> Iterator[tuple[str, str]]:
    """Yield what no proof covers, in plain words: the subject, and what is open about it."""
    allowed = allowed_open(proof)
    for answer in proof.answers:
        parts = [f"not proved, and allowed to stay so: {answer.says}"] * (answer in allowed)
        parts += [*_specific(answer), *filter(None, [QUESTIONS[answer.question].open])]
        if parts:
            yield _name(answer), "; ".join(parts)
    earlier: dict[str, list[str]] = {}
    for answer in proof.answers:
        if answer.proved_on:
            earlier.setdefault(answer.proved_on, []).append(_name(answer))
    for day, names in earlier.items():
        yield ", ".join(names), f"proved on {day}, and not again: nothing that they depend on has changed since"


def _name(answer: Answer) -> str:
    return answer.question.replace("_", " ")


def _specific(answer: Answer) -> Iterator[str]:
    """Yield what this answer in particular leaves open."""
    checked = answer.figures.get("checked")
    if answer.question == PARITY and isinstance(checked, dict):
        yield f"what was executed is smaller than the run: {checked['text']}"
    if answer.question == MEMORY and any(EXTRAPOLATED in line for line in answer.evidence):
        yield "stages are extrapolated from smaller ones of the same widths, which one more simulation confirmed"
    yield from (line for line in answer.evidence if line.startswith(NOT_COUNTED))
