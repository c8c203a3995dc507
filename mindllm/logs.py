"""Log lines in MindFormers' format, on the terminal and in ``{output_dir}/log/rank_{r}/info.log``."""

from __future__ import annotations

import logging
import os
import sys
from functools import lru_cache
from pathlib import Path

from mindllm.terminal.text import visible

FORMAT = "%(asctime)s - [%(filepath)s:%(lineno)d] - %(levelname)s - %(message)s"
ROOT = Path(__file__).resolve().parent.parent


class VisibleFormatter(logging.Formatter):
    """Writes control characters of a message as escapes: a log is read on terminals, too."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


class RelativePath(logging.Filter):
    """Gives a record ``filepath``, the source file relative to the repository."""

    def filter(self, record: logging.LogRecord) -> bool:
        path = Path(record.pathname)
        record.filepath = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        return True


class LogFile(logging.FileHandler):
    """A log that a full disk does not take is told of once, and does not disturb what is logged."""

    told = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (the name is logging's)
        if not self.told:
            self.told = True
            sys.stderr.write(f"{self.baseFilename}: the log cannot be written: {sys.exc_info()[1]}\n")


@lru_cache(maxsize=256)
def warn_once(name: str, message: str) -> None:
    """Log a warning, once in a process however often a file is read."""
    logging.getLogger(name).warning("%s", message)


def set_up_logging(output_dir: Path | str) -> Path:
    """Sends the log of the package to standard output and to a file, which has debug messages, too; returns the file's path."""
    path = Path(output_dir) / "log" / f"rank_{os.environ.get('RANK_ID', '0')}" / "info.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    package = logging.getLogger("mindllm")
    package.setLevel(logging.DEBUG)
    package.propagate = False
    shown, kept = logging.StreamHandler(sys.stdout), LogFile(path, encoding="utf-8")
    shown.setLevel(logging.INFO)
    for handler in (shown, kept):
        handler.addFilter(RelativePath())
        handler.setFormatter(VisibleFormatter(FORMAT))
        package.addHandler(handler)
    return path
