"""Findings of proofs as SARIF 2.1.0 (OASIS, 2020), which code hosts show at the line of the YAML that they are about."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mindllm.files import atomic_open
from mindllm.prove.answers import Answer, Finding, Standing
from mindllm.prove.proof import Proof
from mindllm.prove.questions import QUESTIONS
from mindllm.versions import __version__

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
ROOT = "SRCROOT"
LEVELS = {
    Standing.REFUTED: "error",
    Standing.NOT_PROVED: "warning",
    Standing.EXPECTED: "note",
    Standing.PROVED: "note",  # what it tells all the same
}
RULES = list(QUESTIONS)


def write_sarif(proofs: Sequence[Proof], path: Path) -> None:
    """Write what is wrong with runs into a file that code hosts read: a rule for each question, a result for each finding."""
    tree = {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": {"name": "mindllm", "version": __version__, "rules": list(_rules())}},
                "invocations": [{"executionSuccessful": True}],
                "originalUriBaseIds": {ROOT: {"description": {"text": "where mindllm prove was called"}}},
                "columnKind": "unicodeCodePoints",
                "results": [result for proof in proofs for result in _results(proof)],
                "properties": {
                    "verdicts": [
                        {"run": proof.run.name, "verdict": proof.verdict.value, "hash": proof.run.hash}
                        for proof in proofs
                    ]
                },
            }
        ],
    }
    with atomic_open(path) as file:
        json.dump(tree, file, indent=1, allow_nan=False)
        file.write("\n")


def _rules() -> Iterator[dict[str, Any]]:
    for question in QUESTIONS.values():
        closer = f" Look closer with mindllm {question.verb}." if question.verb else ""
        yield {
            "id": question.name,
            "shortDescription": {"text": question.text},
            "fullDescription": {"text": f"{question.text} Answered by {question.by}."},
            "help": {"text": f"Answered by {question.by}.{closer}"},
            "defaultConfiguration": {"level": LEVELS[Standing.REFUTED]},
        }


def _results(proof: Proof) -> Iterator[dict[str, Any]]:
    for answer in proof.answers:
        findings = answer.findings
        if not findings and answer.standing not in (Standing.EXPECTED, Standing.PROVED):
            findings = (Finding(answer.says),)
        for finding in findings:
            yield _result(proof, answer, finding)


def _result(proof: Proof, answer: Answer, finding: Finding) -> dict[str, Any]:
    said = f"{finding.message}; {finding.advice}" if finding.advice else finding.message
    known = "\0".join([proof.run.name, answer.question, finding.key, finding.message])
    found: dict[str, Any] = {
        "ruleId": answer.question,
        "ruleIndex": RULES.index(answer.question),
        "level": LEVELS[answer.standing],
        "message": {"text": f"{finding.key}: {said}" if finding.key else said},
        "locations": [_location(finding, proof.run.name)],
        "partialFingerprints": {"mindllm/v1": hashlib.sha256(known.encode("utf-8", "replace")).hexdigest()},
        "properties": {"run": proof.run.name, "standing": answer.standing.value},
    }
    if answer.standing is Standing.NOT_PROVED and answer.question in proof.allowed:
        found["suppressions"] = [{"kind": "external", "justification": "may stay open (--allow)"}]
    return found


def _location(finding: Finding, run: str) -> dict[str, Any]:
    """The line and the key; what is about no line stands at the first one, where hosts show what is about the file."""
    physical = {"artifactLocation": artifact(finding.file or run), "region": {"startLine": finding.line or 1}}
    if not finding.key:
        return {"physicalLocation": physical}
    name = finding.key.rpartition(".")[2]
    return {
        "physicalLocation": physical,
        "logicalLocations": [{"name": name, "fullyQualifiedName": finding.key, "kind": "member"}],
    }


def artifact(file: str) -> dict[str, str]:
    """Return where a file is: relative to the working directory if it is below, otherwise from the root of this machine."""
    path = Path(file).absolute()
    here = Path.cwd()
    if path.is_relative_to(here):
        return {"uri": quote(path.relative_to(here).as_posix(), errors="replace"), "uriBaseId": ROOT}
    return {"uri": "file://" + quote(path.as_posix(), errors="replace")}
