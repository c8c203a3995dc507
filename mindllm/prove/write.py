"""What a proof leaves: ``report.html`` for people, pages beside it, and ``proof.json`` for programs, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

from mindllm.errors import UserError
from mindllm.files import atomic_open
from mindllm.prove.found import FILE, read_proof, remember
from mindllm.prove.page import render_page
from mindllm.prove.proof import Proof

PAGE = "report.html"


def write_proof(proof: Proof, directory: Path) -> Path:
    """Write all files into ``directory``, keep a complete proof for the runs of this machine, and return the page."""
    directory.mkdir(parents=True, exist_ok=True)
    _write_pages(proof, directory)
    with atomic_open(directory / FILE) as file:
        json.dump(proof.to_dict(), file, indent=1, allow_nan=False)
        file.write("\n")
    with atomic_open(directory / PAGE) as page:
        page.write(render_page(proof))
    if proof.complete and proof.run.hash:  # one that does not load is no run's
        remember(proof)
    return directory / PAGE


def _write_pages(proof: Proof, directory: Path) -> None:
    """Write the pages of all answers; those that an earlier proof has left here, and this one does not have, go."""
    pages = {page.file: page.text for answer in proof.answers for page in answer.pages}
    for name in _left(directory) - set(pages):
        (directory / name).unlink(missing_ok=True)
    for name, text in pages.items():
        with atomic_open(directory / name) as file:
            file.write(text)


def _left(directory: Path) -> set[str]:
    """Return the names of pages that an earlier proof wrote into this directory; a ``proof.json`` of others may name any file."""
    try:
        earlier = read_proof(directory)
    except (OSError, UserError):
        return set()
    files = {page.file for answer in earlier.answers for page in answer.pages}
    return {name for name in files if Path(name).name == name and name.endswith(".html")}
