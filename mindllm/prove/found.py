"""The proof of a resolved configuration, found again: beside its YAML, where the command is called, or in the user's cache."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from pydantic import ValidationError

from mindllm.cache import user_cache
from mindllm.config import RunConfig
from mindllm.config.reading.problems import plain_message
from mindllm.errors import LONGEST_PART, UserError, bounded, dotted
from mindllm.files import atomic_open
from mindllm.outside import FileRefusedError, read_json
from mindllm.prove.pieces import without
from mindllm.prove.proof import Proof, Verdict
from mindllm.prove.questions import QUESTIONS
from mindllm.versions import __version__

logger = logging.getLogger(__name__)
FILE, DIRECTORY = "proof.json", "proof"
LARGEST = 64 << 20
SAVES = "CheckpointMonitor"
OF_NO_PROOF = ("output_dir", "overwrite", "resume_training", "require_proof", "runner_config.stop_step")
"""Keys that say where a run writes, whether it goes on and how far this time: what was proved holds whatever they are."""
DECISIVE = ("mindllm", "mindspore")
"""Software whose versions a proof is of; that of Python decides nothing."""


def hash_of(config: RunConfig) -> str:
    """Return the hash of a resolved configuration by which its proof is known.

    What watches a run changes no answer, but for what saves it; and training is proved as fine-tuning is.
    """
    tree = without(config, OF_NO_PROOF)
    tree["callbacks"] = [item for item in tree["callbacks"] if item["type"] == SAVES]
    tree["run_mode"] = "train" if tree["run_mode"] == "finetune" else tree["run_mode"]
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def read_proof(path: Path) -> Proof:
    """Return the proof in a file, or in a directory that ``mindllm prove`` wrote.

    Raises:
        OSError: the file cannot be opened.
        UserError: the file is not a proof of this version of mindllm.
    """
    file = path / FILE if path.is_dir() else path
    try:
        tree = read_json(file, LARGEST)
    except FileRefusedError as error:
        raise UserError(f"{file}: not a proof of mindllm: {error.reason}") from None
    if not isinstance(tree, dict) or not isinstance(schema := tree.get("schema"), int):
        raise UserError(f"{file}: not a proof of mindllm; give the proof.json that mindllm prove wrote")
    if schema != Proof.schema:
        raise UserError(f"{file}: has schema {schema}, this mindllm reads {Proof.schema}; prove it again")
    try:
        proof = Proof.of_tree(tree)
    except ValidationError as error:
        first = error.errors()[0]
        key = bounded(dotted(first["loc"]), LONGEST_PART)
        raise UserError(f"{file}: not a proof of mindllm: {key}: {plain_message(first)}") from None
    questions = [answer.question for answer in proof.answers]
    if sorted(questions) != sorted(QUESTIONS):
        raise UserError(f"{file}: not a proof of mindllm: its questions are not those of this version")
    return proof


def remember(proof: Proof) -> None:
    """Keep a proof in the user's cache, for the runs of this machine."""
    with atomic_open(_kept(proof.run.hash)) as file:
        json.dump(proof.to_dict(), file)


def find_proof(config: RunConfig) -> Proof | None:
    """Return the proof of exactly this configuration: a complete one if there is any, None where there is none at all."""
    wanted, incomplete = hash_of(config), None
    for path in _places(config, wanted):
        if not path.is_file():
            continue
        try:
            proof = read_proof(path)
        except (OSError, UserError) as error:
            logger.debug("%s: %s", path, error)
            continue
        if proof.run.hash == wanted and proof.complete:
            return proof
        if proof.run.hash == wanted:
            incomplete = incomplete or proof
    return incomplete


def _places(config: RunConfig, wanted: str) -> Iterator[Path]:
    directories = [Path(DIRECTORY)]
    if config.source:
        directories = [config.source.parent / DIRECTORY, config.source.parent, *directories]
    for directory in directories:
        yield directory / FILE
        if directory.name == DIRECTORY and directory.is_dir():
            yield from sorted(directory.glob(f"*/{FILE}"))
    yield _kept(wanted)


def _kept(name: str) -> Path:
    return user_cache("proofs", "whole") / f"{name}.json"


def line_about(config: RunConfig, proof: Proof | None) -> str:
    """Return the line that a run begins with."""
    if proof is None or not proof.complete:
        return f"not proved; {command_for(config)}"
    since, other = proof.run.date[:10], other_versions(proof)
    if other:
        return f"proved {since} by other software ({other}); {command_for(config)}"
    if proof.verdict is Verdict.READY:
        return f"proved {since}: {', '.join(proof.best_words())}"
    return (
        f"{proof.verdict.value} {since}: {', '.join(item.question for item in proof.troubles)}; {command_for(config)}"
    )


def versions_here() -> dict[str, str]:
    """Return the versions that a proof is made with."""
    return {
        "mindllm": __version__,
        "mindspore": metadata.version("mindspore"),
        "python": platform.python_version(),
    }


def other_versions(proof: Proof) -> str:
    """Return what a proof was made with and is not used here: its answers are of other programs; empty where it is the same."""
    here = versions_here()
    pairs = ((name, proof.run.versions.get(name, "unknown"), here[name]) for name in DECISIVE)
    return ", ".join(f"{name} {then}, here {now}" for name, then, now in pairs if then != now)


def command_for(config: RunConfig) -> str:
    """Return the command that proves a run as it was called, with the keys that options have changed."""
    origins = config._provenance.origins.items()
    keys = {dotted(path): origin.option for path, origin in origins if origin.option.startswith("--")}
    given = dict.fromkeys(option for key, option in keys.items() if key not in (*OF_NO_PROOF, "run_mode"))
    return " ".join(["mindllm prove", str(config.source or "run.yaml"), *given])
