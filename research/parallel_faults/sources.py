"""Mistakes in what builds the model on its devices: a copy of ``mindllm/`` is edited in one place, and ``mindllm check`` is run.

Most change only what the YAML asks for, so no number tells them. ``names``: what the answer has to name.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from research.parallel_faults.bench import Row

ROOT = Path(__file__).parents[2]
REFUSED = 2  # the exit code of what is no run
SECONDS = 600


@dataclass(frozen=True)
class Edit:
    """A place of ``file``, below ``mindllm/``, in which ``old`` becomes ``new``; asked with a form of the check."""

    what: str
    file: str
    old: str
    new: str
    form: str
    names: str


def edits() -> list[Edit]:
    """Those of ``sources.yaml``, each of which is one place of the sources: a test asks for it."""
    text = (Path(__file__).parent / "sources.yaml").read_text(encoding="utf-8")
    return [Edit(**fields) for fields in yaml.safe_load(text)]


def edit_rows(only: str, told: Callable[[str], None]) -> Iterator[Row]:
    """Every edit whose description ``only`` is found in."""
    for edit in edits():
        name = f"{edit.form}: {edit.what}"
        if re.search(only, name):
            told(f"{name}: checking")
            yield _row(name, edit)


def _row(name: str, edit: Edit) -> Row:
    begun = _seconds()
    with tempfile.TemporaryDirectory() as directory:
        shutil.copytree(ROOT / "mindllm", Path(directory) / "mindllm", ignore=shutil.ignore_patterns("__pycache__"))
        planted(Path(directory), edit)
        code, said = _asked(Path(directory), edit.form)
    found_by = "" if code == 0 else "refusal" if code == REFUSED else "check"
    named = [text for text in said if edit.names in text]
    where = named[0] if named else "\n".join(said)
    return Row(name, edit.what, "own", found_by, bool(named), _seconds() - begun, (edit.names,), where)


def _seconds() -> float:
    """Processor seconds of the commands that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def planted(root: Path, edit: Edit) -> None:
    """Makes the edit in the copy of ``mindllm/`` below ``root``.

    Raises:
        ValueError: the sources do not have the place once.
    """
    path = root / "mindllm" / edit.file
    text = path.read_text(encoding="utf-8")
    if text.count(edit.old) != 1:
        raise ValueError(f"{edit.file} has {text.count(edit.old)} times: {edit.old}")
    path.write_text(text.replace(edit.old, edit.new), encoding="utf-8")


def _asked(root: Path, form: str) -> tuple[int, list[str]]:
    """Exit code and what the check of a form says, with the sources below ``root``."""
    file = root / "mindllm" / "verify" / "forms" / f"{form}.yaml"
    command = [sys.executable, "-m", "mindllm", "check", str(file), "--no_cache", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(root), "XDG_CACHE_HOME": str(root / "cache")}
    ended = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=SECONDS)
    try:
        return ended.returncode, list(_words(json.loads(ended.stdout)))
    except ValueError:
        return ended.returncode, ended.stderr.splitlines()


def _words(tree: object) -> Iterator[str]:
    """Every text in an answer."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from (f"{key} {text}" for text in _words(value))
    elif isinstance(tree, list):
        for value in tree:
            yield from _words(value)
    elif isinstance(tree, str):
        yield tree
