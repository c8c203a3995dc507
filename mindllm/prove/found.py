"""The proof of a resolved configuration, found again: beside its YAML, where the command is called, or in the user's cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from mindllm.cache import user_cache
from mindllm.config import RunConfig
from mindllm.errors import UserError
from mindllm.files import atomic_open
from mindllm.outside import read_text
from mindllm.prove.pieces import without
from mindllm.prove.proof import Proof

FILE, DIRECTORY = "proof.json", "proof"
LARGEST = 64 << 20
OF_NO_PROOF = ("output_dir", "overwrite", "resume_training", "require_proof")
"""Keys that say where a run writes and whether it goes on: what was proved holds whatever they are."""


def hash_of(config: RunConfig) -> str:
    """Return the hash of a resolved configuration by which its proof is known."""
    text = json.dumps(without(config, OF_NO_PROOF), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read_proof(path: Path) -> Proof:
    """Return the proof in a file, or in the directory that was written.

    Raises:
        UserError: there is none, or it is not one.
    """
    file = path / FILE if path.is_dir() else path
    text = read_text(file, LARGEST)
    try:
        tree = json.loads(text)
        if tree["schema"] != Proof.schema:
            raise UserError(f"{file}: has schema {tree['schema']}, this mindllm reads {Proof.schema}; prove it again")
        return Proof.of_tree(tree)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{file}: is no proof of mindllm ({type(error).__name__}: {error})") from None


def remember(proof: Proof) -> None:
    """Keep a proof in the user's cache, for the runs of this machine."""
    with atomic_open(_kept(proof.run.hash)) as file:
        json.dump(proof.to_dict(), file)


def find_proof(config: RunConfig) -> Proof | None:
    """Return the proof of a configuration; None where there is none of exactly this one."""
    wanted = hash_of(config)
    for path in _places(config, wanted):
        if not path.is_file():
            continue
        try:
            proof = read_proof(path)
        except UserError:
            continue
        if proof.run.hash == wanted:
            return proof
    return None


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
    if proof is None:
        return f"not proved; mindllm prove {config.source or 'run.yaml'}"
    return f"{proof.headline().partition(': ')[2]} (proved {proof.run.date[:10]})"
