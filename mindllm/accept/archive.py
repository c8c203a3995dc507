"""What an acceptance leaves: one page, and one archive of the page, the figures and the steps of every run.

Only what is made here goes into the archive, never a file of a run: numbers of known keys, sentences of ours, versions. So no
name of a host or user, no path, address or variable of the environment can come into it.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

from mindllm.accept.acceptance import Acceptance
from mindllm.accept.page import render_page
from mindllm.files import atomic_open, atomic_path
from mindllm.terminal.json_text import strict

PAGE, FIGURES, ARCHIVE = "acceptance.html", "acceptance.json", "acceptance.zip"
DATE = (2020, 1, 1, 0, 0, 0)  # of every member: when a machine was used is nobody's business


def write_acceptance(found: Acceptance, directory: Path) -> tuple[Path, Path]:
    """Write page and archive into a directory; return both."""
    page = render_page(found)
    with atomic_open(directory / PAGE) as file:
        file.write(page)
    with atomic_path(directory / ARCHIVE) as path, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members(found, page).items():
            archive.writestr(zipfile.ZipInfo(name, DATE), text)
    return directory / PAGE, directory / ARCHIVE


def members(found: Acceptance, page: str) -> dict[str, str]:
    """Return the files of the archive by name."""
    runs = {
        f"runs/{name}.jsonl": "".join(f"{json.dumps(strict(dict(record)), allow_nan=False)}\n" for record in records)
        for name, records in found.records.items()
    }
    return {PAGE: page, FIGURES: json.dumps(found.to_dict(), indent=1, allow_nan=False) + "\n", **runs}
