"""Data sets from local directories in the layout of the hub: nothing is downloaded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mindllm.errors import UserError, shortened

OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")  # read when the libraries are imported


@contextmanager
def local_data(directory: Path) -> Iterator[None]:
    """Lets ``datasets.load_dataset``, which the tasks of the harness call, read below ``directory`` alone."""
    import datasets

    original = datasets.load_dataset

    def load_dataset(path: str, name: str | None = None, **options: Any) -> Any:
        if "data_files" in options or path in ("json", "csv", "parquet", "text"):
            return original(path, name, **options)  # the task names files itself
        place = place_of(directory, path)
        options.setdefault("cache_dir", str(prepared_in(place)))
        try:
            return original(str(place), name, **options)
        except UserError:
            raise
        except Exception as error:  # the library raises whatever its readers do
            if name is not None and (place / name).is_dir():
                return _read(original, place, path, data_dir=name, **options)
            raise UserError(_unreadable(place, path, name, error)) from error

    datasets.load_dataset = load_dataset
    try:
        yield
    finally:
        datasets.load_dataset = original


def place_of(directory: Path, path: str) -> Path:
    """Where the data set ``path`` of the hub lies, ``owner/name`` or ``name`` alone; raises UserError where it does not."""
    if Path(path).is_dir():
        return Path(path)
    for place in (directory / path, directory / Path(path).name):
        if place.is_dir():
            return place
    raise UserError(
        f"the data set {path} is not in {directory / path}: put its repository of the hub there, on a machine with a network: "
        f"hf download --repo-type dataset {path} --local-dir {directory / path}"
    )


def prepared_in(place: Path) -> Path:
    """Where the library keeps what it prepares of the data set in ``place``: nobody else's, and not of files that have changed.

    By itself it tells data sets from a directory apart by their names alone.
    """
    import datasets

    files = sorted(
        path for path in place.rglob("*") if path.is_file() and ".cache" not in path.parts[len(place.parts) :]
    )
    stats = [(str(path.relative_to(place)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    name = hashlib.sha256(repr((str(place.resolve()), stats)).encode()).hexdigest()[:16]
    return Path(datasets.config.HF_DATASETS_CACHE) / f"mindllm-{name}"


def _read(original: Any, place: Path, path: str, **options: Any) -> Any:
    try:
        return original(str(place), **options)
    except Exception as error:
        raise UserError(_unreadable(place, path, options.get("data_dir"), error)) from error


def _unreadable(place: Path, path: str, name: str | None, error: Exception) -> str:
    part = f" ({name})" if name else ""
    return f"{place}: cannot be read as the data set {path}{part}: {shortened(str(error), 200)}"
