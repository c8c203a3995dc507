"""Answers that are kept in the user's cache under what they depend on, so that nothing is proved twice."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from mindllm.cache import user_cache
from mindllm.files import atomic_open
from mindllm.outside import read_compressed_json
from mindllm.prove.answers import Answer

SUFFIX = ".json.gz"  # answers bring their pages
KEPT = 400  # files; those not used for longest go first


def directory() -> Path:
    """Return the directory of kept answers."""
    return user_cache("proofs")


def keep(key: str, answers: Sequence[Answer]) -> None:
    """Keep the answers of a piece, with today's date."""
    tree = {"proved_on": date.today().isoformat(), "answers": [answer.tree() for answer in answers]}
    with atomic_open(_file(key), "wb") as file, gzip.open(file, "wt", encoding="utf-8", compresslevel=5) as text:
        json.dump(tree, text)
    _forget_old_ones()


def kept(key: str) -> tuple[Answer, ...]:
    """Return what is kept, with the day it was found out; nothing where nothing is, or it cannot be read."""
    path = _file(key)
    try:
        tree = read_compressed_json(path)
        answers = tuple(Answer.of_tree({**answer, "proved_on": tree["proved_on"]}) for answer in tree["answers"])
    except (OSError, ValueError, KeyError, TypeError):
        return ()
    os.utime(path)
    return answers


def _file(key: str) -> Path:
    return directory() / f"{key}{SUFFIX}"


def _forget_old_ones() -> None:
    files = sorted(directory().glob(f"*{SUFFIX}"), key=lambda path: -path.stat().st_mtime)
    for path in files[KEPT:]:
        path.unlink(missing_ok=True)
