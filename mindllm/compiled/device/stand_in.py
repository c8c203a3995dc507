"""Device software that is not there: libraries made on this machine, with which MindSpore's Ascend back end loads and simulates.

The wheel carries the complete back end, but it is linked against Ascend's own libraries (CANN). Its dry run
(``MS_SIMULATION_LEVEL=1``) launches nothing, so libraries that offer the wanted names and do nothing are enough. They are
compiled once per wheel into the user's cache, and end any process that is not a simulation.

The wheel may be that of another Python (``wheel.py``): what is made depends on its files alone.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mindllm.cache import user_cache
from mindllm.compiled.device import stand_in_names
from mindllm.compiled.device.wheel import StandInUnavailable, Wheel, own_wheel
from mindllm.process.temporary import temporary_directory

SOURCE, CORES_SOURCE = Path(__file__).with_name("stand_in.c"), Path(__file__).with_name("many_cores.c")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O1", "-shared", "-fPIC", "-w")
ZIG_FLAGS = ("-mcpu=baseline",)  # a home directory may be shared by machines with other processors
ZIG_CACHES = ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR")
BUILD_SECONDS = 120
EVERYTHING, CORES = "libascendcl.so", "libmany_cores.so"
# Libraries that wheels open while running: as those they are linked with, further names of the one that has everything.
OPENED = [
    "hccl",
    "runtime",
    "platform",
    "c_sec",
    "nnopbase",
    "ascend_hal",
    "opapi",
    "acl_op_compiler",
    "acl_tdt_channel",
    "ascendalog",
    "mmpa",
    "profapi",
    "register",
]
WHEEL_LIBRARIES = ("shmem/shmem/lib", "shmem/memfabric_hybrid/lib")  # the wheel's own, which its search path misses
HOMES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")


def device_software(wheel: Wheel | None = None) -> Mapping[str, str]:
    """Return the environment of a simulating process: Ascend's software if it is installed, else the stand-ins.

    Args:
        wheel: what it will import (default: the MindSpore of this Python).

    Raises:
        StandInUnavailable: no C compiler, or a MindSpore this does not work with.
    """
    if installed_software():
        return {}
    wheel = wheel or own_wheel()
    return _environment(wheel, stand_ins(wheel))


def installed_software() -> Path | None:
    """Return the directory of Ascend's software that ``set_env.sh`` names; None if it is not installed."""
    homes = (Path(os.environ[name]) for name in HOMES if os.environ.get(name))
    return next((home for home in homes if (home / "lib64" / EVERYTHING).exists()), None)


def stand_ins(wheel: Wheel | None = None) -> Path:
    """Return the directory ``latest`` of the stand-ins for a wheel, and build them unless they are cached."""
    wheel = wheel or own_wheel()
    directory = _cache() / f"stand_in-{_key(wheel)}"
    if not (directory / "latest").is_dir():
        _make(directory, c_compiler(), *stand_in_names.names_to_offer(wheel.package))
    return directory / "latest"


def c_compiler() -> list[str]:
    """Return the command of a C compiler: the system's, else the one of the extra ``compiler`` (ziglang).

    Raises:
        StandInUnavailable: this machine has neither.
    """
    for name in COMPILERS:
        if path := shutil.which(name):
            return [path]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc", *ZIG_FLAGS]
    raise StandInUnavailable(
        f"simulating a device requires a C compiler ({', '.join(COMPILERS)}): "
        "run pip install 'mindllm[compiler]', or install gcc"
    )


def _key(wheel: Wheel) -> str:
    """Return a hash of everything the libraries depend on: the wheel and their sources."""
    own = (Path(__file__), SOURCE, CORES_SOURCE, Path(stand_in_names.__file__))
    parts = [platform.machine(), wheel.version, str(wheel.package), *(path.read_text() for path in own)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cache() -> Path:
    directory = user_cache()
    if ":" in str(directory):
        raise StandInUnavailable(f"libraries are not found below a path with a colon ({directory}); set XDG_CACHE_HOME")
    return directory


def _make(directory: Path, compiler: Sequence[str], names: Mapping[str, str], needed: Sequence[str]) -> None:
    """Build beside ``directory`` and renames: it is whole or absent, also where several processes make it at once."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with temporary_directory(f".{directory.name}.", directory.parent) as around:
        temporary = around / "made"
        libraries = temporary / "latest" / "lib64"
        libraries.mkdir(parents=True)
        (temporary / "latest" / "opp").mkdir()
        generated = around / "names.c"
        generated.write_text(render_names(names), encoding="utf-8")
        _compile(compiler, generated, libraries / EVERYTHING, around)
        _compile(compiler, CORES_SOURCE, libraries / CORES, around)
        for other in {*needed, *(f"lib{name}.so" for name in OPENED)} - {EVERYTHING}:
            (libraries / other).symlink_to(EVERYTHING)
        try:
            temporary.rename(directory)
        except OSError:
            if not directory.is_dir():
                raise


def render_names(names: Mapping[str, str]) -> str:
    """C text that offers every name as an alias of its body in ``stand_in.c``."""
    aliases = (f'extern __typeof__({body}) {name} __attribute__((alias("{body}")));' for name, body in names.items())
    return "\n".join([f'#include "{SOURCE}"', *aliases, ""])


def _compile(compiler: Sequence[str], source: Path, library: Path, temporary: Path) -> None:
    """Compile ``source`` to a shared library; ``temporary`` receives the caches of zig, which are large."""
    command = [*compiler, *FLAGS, str(source), "-o", str(library)]
    variables = {**os.environ, **dict.fromkeys(ZIG_CACHES, str(temporary / "zig"))}
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_SECONDS, env=variables)
    except subprocess.CalledProcessError as error:
        raise StandInUnavailable(f"the C compiler {shlex.join(compiler)} failed:\n{error.stderr.strip()}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StandInUnavailable(f"the C compiler {shlex.join(compiler)} cannot be used: {error}") from None


def _environment(wheel: Wheel, latest: Path) -> dict[str, str]:
    shared_memory = wheel.package / "lib" / "plugin" / "ascend" / "ms_kernels_symmetric_memory"
    directories = [latest / "lib64", *(shared_memory / name for name in WHEEL_LIBRARIES)]
    search = [*map(str, directories), os.environ.get("LD_LIBRARY_PATH", "")]
    return {
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, search)),
        "ASCEND_HOME_PATH": str(latest),
        "ASCEND_OPP_PATH": str(latest / "opp"),
    }


def many_cores(wheel: Wheel) -> Path:
    """Return the library that, preloaded, reports as many cores as launching kernels of branches requires."""
    return stand_ins(wheel) / "lib64" / CORES
