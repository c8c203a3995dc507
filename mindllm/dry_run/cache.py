"""What was simulated, kept under a name made of everything they depend on, in the user's cache directory."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from mindllm.cache import user_cache
from mindllm.config import RunConfig
from mindllm.config.compiled_keys import compiled_keys
from mindllm.errors import UserError
from mindllm.sources import PACKAGE

LIMIT = "context.max_device_memory"  # what is found is held against it afterwards
KEPT = 400  # files; those not used for longest go first
Kept = TypeVar("Kept")


def kept_file(config: RunConfig, rank: int, suffix: str) -> Path:
    """Where the file with what is known of a rank is, or will be; other data, rates or checkpoints do not change it."""
    keys = {name: value for name, value in compiled_keys(config).items() if name != LIMIT}
    text = "\0".join([json.dumps(keys, sort_keys=True, default=str), str(rank), versions()])
    return directory() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}{suffix}"


def directory() -> Path:
    """The directory of kept profiles."""
    return user_cache("dry_run")


def read_kept(path: Path, read: Callable[[Path], Kept]) -> Kept | None:
    """What is kept at ``path``, if it is; a damaged file is removed."""
    if not path.is_file():
        return None
    try:
        kept = read(path)
    except UserError:
        path.unlink(missing_ok=True)
        return None
    os.utime(path)
    return kept


def forget_old_ones() -> None:
    """Leaves the files used last."""
    files = sorted(directory().glob("*"), key=lambda path: -path.stat().st_mtime)
    for path in files[KEPT:]:
        path.unlink(missing_ok=True)


@cache
def versions() -> str:
    """MindSpore's version and a hash of the sources a simulation runs through."""
    sources = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.c")]
    digest = hashlib.sha256()
    for path in sorted(sources):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"{metadata.version('mindspore')} {digest.hexdigest()}"
