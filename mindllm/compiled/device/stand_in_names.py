"""Which libraries and names the stand-in device software must offer: read from the symbol tables of a wheel of MindSpore."""

from __future__ import annotations

import ctypes
import platform
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from mindllm.compiled.device.elf import NotElf, SharedLibrary, read_shared_library

MACHINES = {"x86_64": 62, "aarch64": 183}
ASCEND = ("plugin/libmindspore_ascend.so*", "plugin/libmindspore_ops_ascend.so")
COMPANIONS = (
    "libmindspore_ascend_res_manager.so",
    "libd_collective.so",
    "libmindspore_graph_ir.so",
    "libhccl_plugin.so",
)
KERNELS = ("ms_kernels_internal/*/lib/*.so", "ms_kernels_symmetric_memory/**/lib/*.so")
OPENED = ("libmindspore_atb_kernels.so", "libmindspore_pyboost_atb_kernels.so", "libdvpp_utils.so")  # if a program asks
LOOKED_UP = r"(?:acl(?:nn|rt|mdl|op|tdt|prof|sys|[A-Z])|Hccl|Hcom)[A-Za-z0-9]{2,80}"
OPERATOR, WORKSPACE = "aclnn", "GetWorkspaceSize"  # the second is put behind the name of an operator while running
SYSTEM = ("libstdc++.so.6", "libgcc_s.so.1", "libm.so.6", "libgomp.so.1", "libpthread.so.0", "libdl.so.2", "librt.so.1")

ZERO = "stand_in_zero"
# What answers a name, the first pattern that matches; all others answer zero. The bodies are in stand_in.c.
ANSWERS = (
    (r"aclrt\w*Create(Stream|Event|Context)\w*|aclrtGetCurrentContext|aclrtMallocPhysical", "stand_in_make"),
    (r"acl(op|mdl|tdt|prof)?Create\w+", "stand_in_pointer"),
    (r"aclrtMalloc(Align32)?|aclrtReserveMemAddress", "stand_in_device_malloc"),
    (r"aclrtMallocHost", "stand_in_host_malloc"),
    (r"aclrtFreeHost", "stand_in_host_free"),
    (r"aclrtGetMemInfo", "stand_in_memory"),
    (r"aclrtGetSocName", "stand_in_soc_name"),
    (r"aclsysGetCANNVersion", "stand_in_cann_version"),
    (r"aclrtGetDeviceCount", "stand_in_device_count"),
    (r"aclrtGetDevice", "stand_in_device"),
    (r"acltdtReceiveTensor", "stand_in_not_available"),
    (r"aclGetRecentErrMsg|acltdtGetDatasetName|HcclGetErrorString|_ZNK2ge11AscendString9GetStringEv", "stand_in_text"),
    (r"_ZN2ge15OperatorFactory9IsExistOp\w+", "stand_in_one"),
    (r"_ZN2ge15OperatorFactory14CreateOperator\w+", "stand_in_operator"),
    (r"_ZN2ge13StatusFactory8InstanceEv", "stand_in_status_factory"),
)


def names_to_offer(wheel: Path) -> tuple[Mapping[str, str], list[str]]:
    """Return the names that the wheel's Ascend back end needs and no library has, and the files it is linked with.

    Each name comes with the body of ``stand_in.c`` that answers it.

    Args:
        wheel: directory of the package ``mindspore``.
    """
    ascend = _libraries(_ascend_paths(wheel / "lib"))
    # libraries that a process may load with the back end: a stand-in would replace a name that they define
    others = _libraries([*(wheel / "lib").glob("*.so*"), *wheel.glob("_c_*.so")])
    defined = {name for library in (*ascend, *others) for name in library.defined}
    undefined = {name for library in ascend for name in library.undefined | library.texts(LOOKED_UP)}
    system = [ctypes.CDLL(None), *_loaded(SYSTEM)]
    undefined |= {name + WORKSPACE for name in undefined if name.startswith(OPERATOR) and not name.endswith(WORKSPACE)}
    names = sorted(
        name for name in undefined - defined if name and not any(hasattr(library, name) for library in system)
    )
    return {name: _answer(name) for name in names}, _files_to_offer(wheel, ascend)


def _files_to_offer(wheel: Path, ascend: Iterable[SharedLibrary]) -> list[str]:
    opened = _libraries([wheel / "lib" / "plugin" / "ascend" / name for name in OPENED])
    needed = {name for library in (*ascend, *opened) for name in library.needed}
    own = {path.name for path in (wheel / "lib").rglob("*.so*")} | {path.name for path in wheel.glob("*.so")}
    return sorted(name for name in needed - own if not _loaded([name]))


def _ascend_paths(lib: Path) -> list[Path]:
    ascend = lib / "plugin" / "ascend"
    found = [path for pattern in ASCEND for path in lib.glob(pattern)]
    companions = [ascend / name for name in COMPANIONS if (ascend / name).is_file()]
    return found + companions + [path for pattern in KERNELS for path in sorted(ascend.glob(pattern))]


def _libraries(paths: Iterable[Path]) -> list[SharedLibrary]:
    """Return the existing libraries for this processor. Wheels also contain a few for others."""
    read = []
    for path in filter(Path.is_file, paths):
        try:
            library = read_shared_library(path)
        except NotElf:
            continue
        if library.machine == MACHINES.get(platform.machine()):
            read.append(library)
    return read


def _loaded(names: Iterable[str]) -> list[ctypes.CDLL]:
    loaded = []
    for name in names:
        try:
            loaded.append(ctypes.CDLL(name))
        except OSError:
            continue
    return loaded


def _answer(name: str) -> str:
    return next((body for pattern, body in ANSWERS if re.fullmatch(pattern, name)), ZERO)
