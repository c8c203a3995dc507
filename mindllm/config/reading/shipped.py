"""The configurations that come with mindllm: ``configs/`` of its sources; an installed package carries a copy inside of it."""

from __future__ import annotations

from pathlib import Path

from mindllm.sources import PACKAGE

NAME = "configs"


def shipped_configs() -> Path:
    """The directory they are in."""
    installed = PACKAGE / NAME
    return installed if installed.is_dir() else PACKAGE.parent / NAME


def shipped_or_own(path: Path) -> Path:
    """``path``; or, where there is no such file and it begins with ``configs/``, the one that came with mindllm."""
    return path if path.exists() else shipped_as(path) or path


def shipped_as(path: Path) -> Path | None:
    """Return what came with mindllm under a relative path that begins with ``configs/``, whatever is in the working directory."""
    shipped = shipped_configs().joinpath(*path.parts[1:])
    return shipped if path.parts[:1] == (NAME,) and shipped.exists() else None
