"""Where things are kept between runs: one directory of the user, or a temporary one where that cannot be written."""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from pathlib import Path

from mindllm.process.exit_hooks import when_leaving
from mindllm.process.temporary import make_temporary, may_be_planted, remove_temporary
from mindllm.terminal.text import visible

VARIABLE = "XDG_CACHE_HOME"


def user_cache(*names: str) -> Path:
    """``$XDG_CACHE_HOME/mindllm/names…`` (``~/.cache`` where it is not set), which exists and can be written.

    If the home is read-only, full or missing, or another user created the directory in a shared place, a warning is logged
    once, and this process and its children use a temporary directory that is removed at the end.
    """
    try:
        wanted = Path(os.environ.get(VARIABLE) or Path.home() / ".cache") / "mindllm"
        directory = wanted.joinpath(*names)
        _try(directory)
        if may_be_planted(wanted):  # it holds libraries that are loaded
            raise PermissionError(errno.EPERM, f"{wanted} belongs to another user")
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
