"""Files of a plan book beside its run: their names, and their end where another run is written at that place."""

from __future__ import annotations

import glob
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from mindllm.config import RunConfig, load_config, render_config
from mindllm.errors import UserError
from mindllm.launch.layouts import HEAD
from mindllm.outside import open_file
from mindllm.recipes.recipe import WRITTEN_BY

SPARE, BOOK = ".spare_", ".book"


def spare_path(place: Path, number: int) -> Path:
    """Return the YAML of the layout for so many nodes fewer, from 1 on."""
    return place.with_name(f"{place.stem}{SPARE}{number}{place.suffix}")


def book_path(place: Path) -> Path:
    """Return the file of the book of the run at ``place``."""
    return place.with_name(f"{place.stem}{BOOK}.yaml")


def forget_spares(place: Path, written: RunConfig | None = None) -> tuple[Path, ...]:
    """Remove the book and the spares that an earlier command wrote beside ``place``, and return them.

    They are of the run that was there: a restart would go on in another run's layout. Where that is ``written`` again, they
    stay; so does what no command of ours has written.
    """
    if written is not None and _holds(place, written):
        return ()
    return tuple(_remove(place))


def say_forgotten(place: Path, removed: Collection[Path]) -> str:
    """What :func:`forget_spares` removed beside ``place``, in a line for people; empty where it was nothing."""
    names = ", ".join(path.name for path in removed)
    return f"removed beside {place}, as of another run: {names}" if names else ""


def _remove(place: Path) -> Iterator[Path]:
    spares = sorted(place.parent.glob(f"{glob.escape(place.stem)}{SPARE}[0-9]*{place.suffix}"))
    for path, beginning in ((book_path(place), HEAD), *((spare, WRITTEN_BY) for spare in spares)):
        with suppress(OSError), open_file(path) as file:  # what cannot be read is not ours
            if file.read(len(beginning)) == beginning.encode():
                path.unlink()
                yield path


def _holds(place: Path, config: RunConfig) -> bool:
    """Whether a YAML is a run already."""
    try:
        return render_config(load_config(place)) == render_config(config)
    except UserError:
        return False
