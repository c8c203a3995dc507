"""Builds ``decode.cc`` for the processor it runs on, once, into the user's cache; what fails is told and not fatal.

The command is a list of constants and paths: no shell, and nothing that a configuration or a checkpoint says.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import platform
import shutil
import subprocess
from pathlib import Path

from mindllm.cache import user_cache
from mindllm.files import atomic_path

SOURCE = Path(__file__).with_name("decode.cc")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-std=c++17", "-shared", "-fPIC")
BUILD_SECONDS = 120
logger = logging.getLogger(__name__)


@functools.cache
def library() -> Path | None:
    """The kernels as a shared library, built unless this version of them is there; ``None`` where that is not possible."""
    compiler = shutil.which("g++")
    if compiler is None:
        logger.info("decoding without C++ kernels: there is no g++")
        return None
    try:
        path = _path()
        if not _loads(path):
            _build(compiler, path)
            ctypes.CDLL(str(path))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None)
        reason = said.decode(errors="replace") if said else str(error)
        logger.warning("decoding without C++ kernels, which is slower: %s", reason.strip())
        return None
    return path


def _path() -> Path:
    """Where this version of the kernels is kept. Raises RuntimeError where it cannot be named."""
    key = hashlib.sha256(SOURCE.read_bytes() + " ".join(FLAGS).encode() + _processor().encode()).hexdigest()[:16]
    directory = user_cache()
    if ":" in str(directory):
        raise RuntimeError(f"MindSpore finds no library below a path with a colon ({directory})")
    return directory / f"decode-{key}.so"


def _processor() -> str:
    """What ``-march=native`` depends on: a home directory may be shared by machines."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    features = [line for line in lines if line.startswith(("flags", "Features"))]
    return features[0] if features else f"{platform.machine()} {platform.processor()}"


def _loads(path: Path) -> bool:
    """Whether a library is there and whole."""
    try:
        return bool(path.exists() and ctypes.CDLL(str(path)))
    except OSError:
        return False


def _build(compiler: str, path: Path) -> None:
    with atomic_path(path) as temporary:
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(temporary)]
        subprocess.run(command, check=True, capture_output=True, timeout=BUILD_SECONDS)
