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
    if path.is_absolute() or path.parts[:1] != (NAME,) or path.exists():
        return path
    shipped = shipped_configs().joinpath(*path.parts[1:])
    return shipped if shipped.exists() else path
