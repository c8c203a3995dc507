"""Where things are kept between runs: one directory of the user, or a temporary one where that cannot be written."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

from mindllm.process.exit_hooks import when_leaving
from mindllm.process.temporary import make_temporary, remove_temporary
from mindllm.terminal.text import visible

VARIABLE = "XDG_CACHE_HOME"


def user_cache(*names: str) -> Path:
    """``$XDG_CACHE_HOME/mindllm/names…`` (``~/.cache`` where it is not set), which exists and can be written.

    A home that is read-only, full or missing is said once; then this process and its children keep things in a temporary
    directory that goes with them.
    """
    try:
        wanted = Path(os.environ.get(VARIABLE) or Path.home() / ".cache") / "mindllm"
        directory = wanted.joinpath(*names)
        _try(directory)
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: there is no home
        reason = getattr(error, "strerror", None) or str(error)
        temporary = str(make_temporary("mindllm-cache-"))
        when_leaving(remove_temporary, temporary)
        place = os.environ.get(VARIABLE) or "~/.cache"
        said = f"nothing is kept for later: {place} cannot be written ({reason}); set {VARIABLE}"
        logging.getLogger(__name__).warning("%s", visible(said))
        os.environ[VARIABLE] = temporary
        directory = Path(temporary, "mindllm", *names)
        directory.mkdir(parents=True)
    return directory


def _try(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory):
        pass
