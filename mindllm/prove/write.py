"""What a proof leaves: ``report.html`` for people and ``proof.json`` for programs, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

from mindllm.files import atomic_open
from mindllm.prove.found import FILE, remember
from mindllm.prove.page import render_page
from mindllm.prove.proof import Proof

PAGE = "report.html"


def write_proof(proof: Proof, directory: Path) -> Path:
    """Write both files into ``directory``, keep a complete proof for the runs of this machine, and return the page."""
    directory.mkdir(parents=True, exist_ok=True)
    with atomic_open(directory / FILE) as file:
        json.dump(proof.to_dict(), file, indent=1, allow_nan=False)
        file.write("\n")
    with atomic_open(directory / PAGE) as page:
        page.write(render_page(proof))
    if proof.complete:
        remember(proof)
    return directory / PAGE
