"""Profiles of simulations under a name made of everything they depend on, in the user's cache directory."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from importlib import metadata
from pathlib import Path

import mindllm
import toolkit
from mindllm.config import RunConfig, override_config, render_config
from mindllm.errors import UserError
from toolkit.dry_run.profile import Profile, load_profile

NEUTRAL = {"context.max_device_memory": "58GB", "output_dir": "output", "trainer.model_name": "", "seed": 0}
KEPT = 400
"""Keys no simulation depends on, and how many profiles are kept: the least recently used go first."""


def kept_file(config: RunConfig, rank: int) -> Path:
    """Where the profile of a rank is, or will be."""
    text = "\0".join([render_config(override_config(config, NEUTRAL)), str(rank), _versions()])
    return directory() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.profile"


def directory() -> Path:
    """The directory of kept profiles."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mindllm" / "dry_run"


def kept_profile(path: Path) -> Profile | None:
    """The profile at ``path``; a damaged one is removed."""
    if not path.is_file():
        return None
    try:
        profile = load_profile(path)
    except UserError:
        path.unlink(missing_ok=True)
        return None
    os.utime(path)
    return profile


def forget_old_ones() -> None:
    """Leaves the profiles used last."""
    files = sorted(directory().glob("*.profile"), key=lambda path: -path.stat().st_mtime)
    for path in files[KEPT:]:
        path.unlink(missing_ok=True)


@cache
def _versions() -> str:
    """MindSpore's version and a hash of the sources a simulation runs through."""
    sources = [*Path(mindllm.__file__).parent.rglob("*.py"), *Path(mindllm.__file__).parent.rglob("*.c")]
    sources += (Path(toolkit.__file__).parent / "dry_run" / name for name in ("moments.py", "profile.py"))
    digest = hashlib.sha256()
    for path in sorted(sources):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"{metadata.version('mindspore')} {digest.hexdigest()}"
