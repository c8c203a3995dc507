"""Where mindllm's own files are: for hashes of what is compiled, and for processes of ours that import it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def python_path(variables: Mapping[str, str] = os.environ) -> str:
    """Return the ``PYTHONPATH`` of a process that imports this mindllm first, and what it was told besides."""
    return os.pathsep.join(filter(None, [str(PACKAGE.parent), variables.get("PYTHONPATH", "")]))
