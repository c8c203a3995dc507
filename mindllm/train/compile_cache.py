"""The compiled training step on disk, so that the next start of the same run loads it instead of compiling.

MindSpore numbers the graphs it keeps and checks little more than the script that was started. So one directory holds the
graphs of one step only, and is named by all that the step depends on: configuration, sources, versions.

With graph-kernel fusion the fused kernels are kept beside it (``MS_COMPILER_CACHE_PATH``, see ``device``). A loaded graph names
the same kernels differently, so the first start from it compiles them once more. There are some 60, however many layers a model
has, and they take longer than the graph of a few layers: of such a model the kernels alone are kept.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from mindllm.config import RunConfig
from mindllm.config.compiled_keys import compiled_keys
from mindllm.process.temporary import goes_with_this_process, remove_temporary
from mindllm.sources import PACKAGE
from mindllm.train.device import cache_directory, uses_graph_kernels

PREFIX, FUSED = "step-", "f"
MANY_LAYERS = (
    12  # whose graph takes longer than the kernels: with adapters 6 take 20 processor seconds, 30 some 200, kernels 40
)
ABANDONED = 86400.0  # seconds after which an unfinished directory belongs to no process any more


@contextlib.contextmanager
def cached_compilation(config: RunConfig) -> Iterator[None]:
    """Graphs that are compiled for the first time inside are loaded from the cache or put there, whole or not at all."""
    fuses = uses_graph_kernels(config)
    few = fuses and config.model.config.num_layers < MANY_LAYERS
    if not config.context.compile_cache or config.context.save_graphs or few:
        yield
        return
    name = f"{PREFIX}{step_key(config)}{FUSED if fuses else ''}"
    with kept_compilation(cache_directory(config).absolute() / name):
        yield


@contextlib.contextmanager
def kept_compilation(kept: Path, most: int = 1) -> Iterator[None]:
    """What is compiled inside is loaded from the directory ``kept`` or put there, whole or not at all.

    The ``most`` directories that were used last are left beside it, of those whose names begin alike up to the last hyphen.
    """
    import mindspore as ms

    root = kept.parent
    directory = kept if kept.is_dir() else kept.with_name(f".{kept.name}.{os.getpid()}")
    directory.mkdir(parents=True, exist_ok=True)
    if directory != kept:
        goes_with_this_process(directory)  # a signal may end it while the compiler works
    ms.set_context(enable_compile_cache=True, compile_cache_path=str(directory))
    try:
        yield
        if directory != kept:
            _keep(directory, kept, most)
        else:
            _touch(kept)
    finally:
        ms.set_context(enable_compile_cache=False, compile_cache_path=str(root))
        if directory != kept:
            remove_temporary(directory)


def _keep(directory: Path, kept: Path, most: int) -> None:
    """Gives a finished directory its name; of its kind the oldest go until there are ``most``, and what a killed process left."""
    prefix = kept.name.rpartition("-")[0] + "-"
    others = sorted(kept.parent.glob(f"{prefix}*"), key=_last_use, reverse=True)
    left = [path for path in kept.parent.glob(f".{prefix}*") if time.time() - _last_use(path) > ABANDONED]
    for other in (*others[most - 1 :], *left):
        shutil.rmtree(other, ignore_errors=True)
    with contextlib.suppress(OSError):  # another process was faster
        directory.rename(kept)


def _touch(path: Path) -> None:
    with contextlib.suppress(OSError):  # it may be read-only, or gone
        os.utime(path)


def _last_use(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # another process has removed it
        return 0.0


def step_key(config: RunConfig) -> str:
    """Returns a hash of what a compiled step depends on: the configuration (:func:`compiled_keys`), sources, versions."""
    text = json.dumps([compiled_keys(config), _mindspore_version()], sort_keys=True, default=str)
    return hashlib.sha256(text.encode() + sources_digest()).hexdigest()[:16]


def _mindspore_version() -> str:
    """The installed version, without the second that importing takes where it is known by its usual name."""
    try:
        return version("mindspore")
    except PackageNotFoundError:
        import mindspore as ms

        return ms.__version__


@functools.cache
def sources_digest() -> bytes:
    """Returns a hash of all sources of the package."""
    digest = hashlib.sha256()
    for source in sorted(PACKAGE.rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.digest()
