"""Proofs as JUnit XML, which every CI shows: a test suite for each run, a test case for each question."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

from mindllm.files import atomic_open
from mindllm.prove.answers import Answer, Standing
from mindllm.prove.proof import Proof
from mindllm.prove.questions import MEMORY, QUESTIONS, STEP_TIME

FAILURE, ERROR, SKIPPED = "failure", "error", "skipped"
NO_CHARACTER = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 has no place for (section 2.2), escaped or not."""
REPLACED = "\ufffd"


def write_junit(proofs: Sequence[Proof], path: Path) -> None:
    """Write proofs for CI: refuted is a failure, an open question an error; what may stay open, or is expected, is skipped."""
    root = ElementTree.Element("testsuites", name="mindllm prove")
    suites = [_suite(proof) for proof in proofs]
    for kind in ("tests", f"{FAILURE}s", f"{ERROR}s", SKIPPED):
        root.set(kind, str(sum(int(suite.get(kind, "0")) for suite in suites)))
    root.set("time", f"{sum(proof.seconds for proof in proofs):.3f}")
    root.extend(suites)
    ElementTree.indent(root)
    with atomic_open(path) as file:
        file.write('<?xml version="1.0" encoding="UTF-8"?>\n')
        file.write(ElementTree.tostring(root, encoding="unicode") + "\n")


def outcome(answer: Answer, proof: Proof) -> str:
    """Return what CI calls the standing of an answer; empty where it is proved."""
    if answer.standing is Standing.REFUTED:
        return FAILURE
    if answer.standing is Standing.NOT_PROVED and answer.question not in proof.allowed:
        return ERROR
    return "" if answer.standing is Standing.PROVED else SKIPPED


def _suite(proof: Proof) -> ElementTree.Element:
    outcomes = [outcome(answer, proof) for answer in proof.answers]
    suite = ElementTree.Element(
        "testsuite",
        {
            "name": clean(proof.run.name),
            "tests": str(len(outcomes)),
            **{f"{kind}s": str(outcomes.count(kind)) for kind in (FAILURE, ERROR)},
            SKIPPED: str(outcomes.count(SKIPPED)),
            "time": f"{proof.seconds:.3f}",
            "timestamp": proof.run.date,
        },
    )
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in _properties(proof):
        ElementTree.SubElement(properties, "property", name=name, value=clean(value))
    suite.extend(_case(answer, proof) for answer in proof.answers)
    return suite


def _properties(proof: Proof) -> Iterator[tuple[str, str]]:
    """What programs look for without opening ``proof.json``; bytes and seconds."""
    memory, step = proof.answer(MEMORY).figures, proof.answer(STEP_TIME).figures
    yield "verdict", proof.verdict.value
    yield "hash", proof.run.hash
    yield "seconds", f"{proof.seconds:.3f}"
    if "peak" in memory:
        yield "peak", f"{memory['peak']:.0f}"
    if "seconds" in step:
        yield "step_seconds", f"{step['seconds']:.6g}"


def _case(answer: Answer, proof: Proof) -> ElementTree.Element:
    case = ElementTree.Element(
        "testcase",
        {
            "classname": clean(proof.run.name),
            "name": QUESTIONS[answer.question].text,
            "time": f"{answer.seconds:.3f}",
        },
    )
    if kind := outcome(answer, proof):
        told = ElementTree.SubElement(case, kind, message=clean(answer.says))
        if kind != SKIPPED:  # which has a message and nothing else
            told.set("type", answer.question)
            told.text = clean("\n".join(map(str, answer.findings)) or answer.says)
    else:
        said = [answer.says, *answer.evidence]
        ElementTree.SubElement(case, "system-out").text = clean("\n".join(said))
    return case


def clean(text: str) -> str:
    """Return a text without the characters that XML does not know."""
    return NO_CHARACTER.sub(REPLACED, text)
