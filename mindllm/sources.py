"""The sources of this package: their place, for processes that import it, and their digest, for results that depend on them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def python_path(variables: Mapping[str, str] = os.environ) -> str:
    """Return a ``PYTHONPATH`` that begins with this package, followed by the one in ``variables``."""
    return os.pathsep.join(filter(None, [str(PACKAGE.parent), variables.get("PYTHONPATH", "")]))


@cache
def source_digest() -> str:
    """Return a hash of all sources of this package."""
    digest = hashlib.sha256()
    for path in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.c")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def software_key() -> str:
    """Return the version of MindSpore and the digest of the sources, on which compiled and simulated results depend."""
    return f"{_mindspore_version()} {source_digest()}"


@cache
def _mindspore_version() -> str:
    """Return the installed version, without importing MindSpore if its package has the usual name."""
    try:
        return version("mindspore")
    except PackageNotFoundError:
        import mindspore

        return mindspore.__version__
