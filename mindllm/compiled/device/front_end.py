"""MindSpore's parallel compiler without a device: only its front end runs, for one rank of a declared cluster.

The wheel contains the whole front end, but accepts parallel modes for Ascend only, and asks the communication library
for the world. Four of its own switches and one function lift that, see :func:`pretend_device`. One process serves one rank.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindllm.errors import UserError
from mindllm.versions import MINDSPORE_RELEASE

VERIFIED_VERSIONS = (MINDSPORE_RELEASE,)
TARGET = "Ascend"
WORLD_GROUP = "hccl_world_group"
GET_COMMUNICATION = "_ZN9mindspore11CommManager11GetInstanceEv"  # CommManager::GetInstance
RANK_ID, RANK_SIZE, FUNCTIONS = (
    4,
    5,
    7,
)  # of its virtual functions: GetRankID(group, &rank), GetRankSize(group, &size), all
HEADER = 2  # words before them in their table
SIZE_OF_NOBODY = 2048  # what MindSpore takes for the size of every group where it has no communication library
REGISTER_TARGET = "_ZN9mindspore9MsContext16RegisterInitFuncERKSsPFvPS0_E"  # MsContext::RegisterInitFunc

_kept_alive: list[Any] = []


class FrontEndUnavailable(UserError):
    """This installation of MindSpore cannot be used for compiling without a device."""


def environment(rank: int, devices: int) -> dict[str, str]:
    """Return the variables to set before MindSpore is imported: the rank, and compiling with the front end only."""
    return {"RANK_ID": str(rank), "RANK_SIZE": str(devices), "MS_DEV_PRECOMPILE_ONLY": "1"}


def pretend_device(rank: int, devices: int, asked: Callable[[], int] | None = None) -> None:
    """Make this process rank ``rank`` of ``devices`` Ascend devices. Call it before anything else uses MindSpore.

    With ``asked`` it becomes the rank that this returns, and only when the compiler wants to know: it has by then done what is
    the same for all ranks. The parallel context must be set without ``global_rank`` for that. Nothing before may need the rank.

    Raises:
        FrontEndUnavailable: the version of MindSpore is not one this was verified with, or lacks what is needed.
    """
    for name, value in environment(rank, devices).items():
        if os.environ.get(name) != value:
            raise RuntimeError(f"{name} must be {value} in the environment before MindSpore is imported")
    _require_version()
    _register_target()
    world = _World(None if asked else rank, devices, asked)
    _declare_world(world)
    _answer_compiler(world)


def _require_version() -> None:
    import mindspore

    if mindspore.__version__ not in VERIFIED_VERSIONS:
        verified = ", ".join(VERIFIED_VERSIONS)
        raise FrontEndUnavailable(
            f"compiling without a device was verified with MindSpore {verified}, not {mindspore.__version__}; "
            f"pip install mindspore=={VERIFIED_VERSIONS[-1]}"
        )


def _register_target() -> None:
    """Add the target "Ascend" to the context, with an initialiser that does nothing (a libc function of one argument)."""
    import mindspore
    from mindspore._c_expression import MSContext

    library = Path(mindspore.__file__).parent / "lib" / "libmindspore_core.so"
    try:
        register = getattr(ctypes.CDLL(str(library)), REGISTER_TARGET)
    except (OSError, AttributeError) as error:
        raise FrontEndUnavailable(f"this build of MindSpore has no symbol to register a target with: {error}") from None
    name = _old_abi_string(TARGET.encode())
    initialiser = ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p)
    register.restype = None
    register(ctypes.byref(name), initialiser)
    _kept_alive.extend([name, initialiser])
    MSContext.get_instance().set_device_target_inner(TARGET)


def _old_abi_string(text: bytes) -> ctypes.c_void_p:
    """Create a ``std::string`` of libstdc++'s old ABI: a pointer to characters after length, capacity and reference count."""
    never_shared = -1
    header = struct.pack("<QQi4x", len(text), len(text), never_shared)
    buffer = ctypes.create_string_buffer(header + text + b"\0")
    _kept_alive.append(buffer)
    return ctypes.c_void_p(ctypes.addressof(buffer) + len(header))


@dataclass
class _World:
    """Answers for the communication library. Names of groups made by the compiler begin with the number of ranks.

    The rank inside a group is asked for only to check that it is smaller than the group; its value goes nowhere.
    """

    rank: int | None
    devices: int
    asked: Callable[[], int] | None = None

    def known_rank(self) -> int:
        """Return the global rank.

        Raises:
            RuntimeError: whoever asks does so before the compiler: what it makes of the answer would be that of every rank.
        """
        if self.rank is None:
            raise RuntimeError("the rank is needed before the compiler asks for it: compile every rank by itself")
        return self.rank

    def become(self) -> int:
        """Return the global rank when the compiler asks for it."""
        if self.rank is None:
            assert self.asked is not None
            self.rank = self.asked()
            _tell_context(self.rank)
        return self.rank

    def get_rank_size(self, group: str = WORLD_GROUP) -> int:
        return self.devices if group == WORLD_GROUP else int(group.split("-")[0])

    def get_rank_id(self, group: str = WORLD_GROUP) -> int:
        return self.known_rank() % self.get_rank_size(group)

    def get_local_rank_id(self, group: str = WORLD_GROUP) -> int:
        return self.get_rank_id(group)

    def create_group(self, group: str, size: int, ranks: list[int]) -> None:
        """Nothing to do: nobody communicates. But the ranks of a group that a model makes are those of the own one."""
        self.known_rank()


def _tell_context(rank: int) -> None:
    from mindspore.parallel._auto_parallel_context import auto_parallel_context

    auto_parallel_context().set_global_rank(rank)


def _declare_world(world: _World) -> None:
    from mindspore.communication import _comm_helper as helper

    if not hasattr(helper, "_HCCL_TEST_AVAILABLE"):
        raise FrontEndUnavailable("this build of MindSpore has no hook to declare a communication world with")
    helper._HCCL_TEST_AVAILABLE = True
    helper.hccl = world
    helper.GlobalComm.INITED = True


def _answer_compiler(world: _World) -> None:
    """Let the compiler itself ask for the size of a group, by which it divides where replicas share optimizer state, and for
    the rank, where the parallel context does not say it.

    The object that answers has its functions in a table; it is given a copy of that table with these replaced.
    """
    import mindspore

    library = Path(mindspore.__file__).parent / "lib" / "libmindspore_common.so"
    try:
        get = getattr(ctypes.CDLL(str(library)), GET_COMMUNICATION)
    except (OSError, AttributeError) as error:
        raise FrontEndUnavailable(f"this build of MindSpore has no symbol for communication: {error}") from None
    get.restype = ctypes.c_void_p
    manager = ctypes.c_size_t.from_address(get())
    functions = (ctypes.c_size_t * (HEADER + FUNCTIONS)).from_address(manager.value - HEADER * ctypes.sizeof(manager))
    kind = ctypes.CFUNCTYPE(
        ctypes.c_bool, ctypes.c_void_p, ctypes.POINTER(ctypes.c_char_p), ctypes.POINTER(ctypes.c_uint)
    )

    def size_of(_: Any, group: Any, size: Any) -> bool:
        size[0] = world.get_rank_size(group[0].decode())
        return True

    def rank_in(_: Any, group: Any, rank: Any) -> bool:
        rank[0] = world.become() if group[0].decode() == WORLD_GROUP else 0  # in others it was 0 before
        return True

    known = ctypes.c_uint()
    name = ctypes.cast(ctypes.byref(_old_abi_string(WORLD_GROUP.encode())), ctypes.POINTER(ctypes.c_char_p))
    kind(functions[HEADER + RANK_SIZE])(ctypes.addressof(manager), name, ctypes.byref(known))
    if known.value != SIZE_OF_NOBODY:
        return  # a communication library answers
    table = type(functions)(*functions)
    answers = {RANK_SIZE: size_of} | ({RANK_ID: rank_in} if world.asked else {})
    for number, answer in answers.items():
        replacement = kind(answer)
        table[HEADER + number] = ctypes.cast(replacement, ctypes.c_void_p).value or 0
        _kept_alive.append(replacement)
    _kept_alive.append(table)
    manager.value = ctypes.addressof(table) + HEADER * ctypes.sizeof(manager)


@dataclass(frozen=True)
class FrontEndGraph:
    """What the front end made of a cell: MindIR (protobuf bytes), and the layout of every parameter on this rank."""

    mind_ir: bytes
    parameter_layouts: Mapping[str, Any]


def compile_cell(cell: Any, *inputs: Any) -> FrontEndGraph:
    """Compile a training cell for the inputs' shapes. The compiler's own errors pass through."""
    from mindspore.graph.api import _cell_graph_executor as executor

    phase, _ = executor.compile(cell, *inputs, phase="train")
    internal = executor._graph_executor
    return FrontEndGraph(internal.get_func_graph_proto(phase, "mind_ir"), internal.get_parameter_layout(phase))
