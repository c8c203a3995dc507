"""Device software that is not there: libraries made on this machine, with which MindSpore's Ascend back end loads and simulates.

The wheel carries the complete back end, but it is linked against Ascend's own libraries (CANN). Its dry run
(``MS_SIMULATION_LEVEL=1``) launches nothing, so libraries that offer the wanted names and do nothing are enough. They are
compiled once per wheel into the user's cache, and end any process that is not a simulation.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from mindllm.cache import user_cache
from mindllm.compiled.device import stand_in_names
from mindllm.errors import UserError

VERIFIED_VERSIONS = ("2.9.0", "2.10.0")
SOURCE = Path(__file__).with_name("stand_in.c")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O1", "-shared", "-fPIC", "-w")
BUILD_SECONDS = 120
EVERYTHING = "libascendcl.so"
# Libraries the wheel is linked with, or opens while running: further names of the one that has everything.
OTHERS = [
    "ge_runner",
    "graph",
    "msprofiler",
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


class StandInUnavailable(UserError):
    """This machine, or its MindSpore, cannot simulate an Ascend device."""


def device_software() -> Mapping[str, str]:
    """The environment a simulating process needs before it starts: Ascend's software if installed, else the stand-ins.

    Raises:
        StandInUnavailable: no C compiler, or a MindSpore this does not work with.
    """
    return {} if installed_software() else _environment(stand_ins())


def installed_software() -> Path | None:
    """Where Ascend's own software is, as its ``set_env.sh`` says; ``None`` where there is none."""
    homes = (Path(os.environ[name]) for name in HOMES if os.environ.get(name))
    return next((home for home in homes if (home / "lib64" / EVERYTHING).exists()), None)


def stand_ins() -> Path:
    """The directory ``latest`` of the stand-ins for the installed wheel; makes them unless they are in the cache."""
    wheel = _wheel()
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    directory = _cache() / f"stand_in-{_key(wheel)}"
    if not (directory / "latest").is_dir():
        if compiler is None:
            raise StandInUnavailable(
                "simulating a device needs a C compiler, and there is none of " + ", ".join(COMPILERS) + "; "
                "install one (apt install gcc), or do without the simulation: compile_rank needs none"
            )
        _make(directory, compiler, stand_in_names.names_to_offer(wheel))
    return directory / "latest"


def _wheel() -> Path:
    """Directory of the package ``mindspore``, which is not imported: the environment must be set before."""
    specification = importlib.util.find_spec("mindspore")
    if specification is None or specification.origin is None:
        raise StandInUnavailable("MindSpore is not installed")
    if sys.platform != "linux" or platform.machine() not in stand_in_names.MACHINES:
        raise StandInUnavailable(f"MindSpore has no Ascend back end for {platform.system()} on {platform.machine()}")
    version = metadata.version("mindspore")
    if version not in VERIFIED_VERSIONS:
        verified = ", ".join(VERIFIED_VERSIONS)
        raise StandInUnavailable(
            f"simulating a device was verified with MindSpore {verified}, not {version}; "
            f"pip install mindspore=={VERIFIED_VERSIONS[-1]}"
        )
    wheel = Path(specification.origin).parent
    if not list((wheel / "lib" / "plugin").glob("libmindspore_ascend.so*")):
        raise StandInUnavailable(f"this MindSpore was stripped of its Ascend back end ({wheel / 'lib' / 'plugin'})")
    return wheel


def _key(wheel: Path) -> str:
    """What the libraries depend on: the wheel, and everything they are made with."""
    own = (Path(__file__), SOURCE, Path(stand_in_names.__file__))
    parts = [platform.machine(), metadata.version("mindspore"), str(wheel), *(path.read_text() for path in own)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cache() -> Path:
    directory = user_cache()
    if ":" in str(directory):
        raise StandInUnavailable(f"libraries are not found below a path with a colon ({directory}); set XDG_CACHE_HOME")
    return directory


def _make(directory: Path, compiler: str, names: Mapping[str, str]) -> None:
    """Builds beside ``directory`` and renames: it is whole or absent, also where several processes make it at once."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as name:
        temporary = Path(name) / "made"
        libraries = temporary / "latest" / "lib64"
        libraries.mkdir(parents=True)
        (temporary / "latest" / "opp").mkdir()
        generated = Path(name) / "names.c"
        generated.write_text(render_names(names), encoding="utf-8")
        _compile([compiler, *FLAGS, str(generated), "-o", str(libraries / EVERYTHING)])
        for other in OTHERS:
            (libraries / f"lib{other}.so").symlink_to(EVERYTHING)
        try:
            temporary.rename(directory)
        except OSError:
            if not directory.is_dir():
                raise


def render_names(names: Mapping[str, str]) -> str:
    """C text that offers every name as an alias of its body in ``stand_in.c``."""
    aliases = (f'extern __typeof__({body}) {name} __attribute__((alias("{body}")));' for name, body in names.items())
    return "\n".join([f'#include "{SOURCE}"', *aliases, ""])


def _compile(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_SECONDS)
    except subprocess.CalledProcessError as error:
        raise StandInUnavailable(f"the C compiler {command[0]} failed:\n{error.stderr.strip()}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StandInUnavailable(f"the C compiler {command[0]} cannot be used: {error}") from None


def _environment(latest: Path) -> dict[str, str]:
    shared_memory = _wheel() / "lib" / "plugin" / "ascend" / "ms_kernels_symmetric_memory"
    directories = [latest / "lib64", *(shared_memory / name for name in WHEEL_LIBRARIES)]
    search = [*map(str, directories), os.environ.get("LD_LIBRARY_PATH", "")]
    return {
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, search)),
        "ASCEND_HOME_PATH": str(latest),
        "ASCEND_OPP_PATH": str(latest / "opp"),
    }
