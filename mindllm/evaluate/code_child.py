"""Runs a program of unknown origin, or its test, in this process, after it has given up what such a program should not have.

Started by :mod:`mindllm.evaluate.code` as a script, with the sources on standard input; it imports nothing of the project but
:mod:`mindllm.evaluate.code_calls`, which lies beside it. The
kernel enforces the bounds: resource limits; another user and no capabilities, where this one is root; Landlock (``landlock(7)``,
Linux 5.13), which leaves one directory to write to and Python's own files to read; a filter of system calls
(:mod:`mindllm.evaluate.code_filter`). One that the kernel does not offer is told to the parent, and the program does not run.
"""

import ctypes
import json
import os
import resource
import runpy
import struct
import sys
import sysconfig
from pathlib import Path

NO_NEW_PRIVILEGES, SET_SECCOMP, FILTER, SET_DUMPABLE, DROP_FROM_BOUNDING, AMBIENT, CLEAR_ALL = 38, 22, 2, 4, 24, 47, 4
"""Operations of prctl(2)."""
CAPABILITIES, CAPABILITY_VERSION = range(64), 0x20080522  # capset(2): two words of bits
CREATE_RULES, ADD_RULE, RESTRICT, VERSION = 444, 445, 446, 1  # landlock's calls, alike on all machines
FILES = {1: (1 << 13) - 1, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}  # rights by the version that has brought them
NETWORK, SCOPES = {4: 0b11}, {6: 0b11}  # to bind and connect TCP; to reach abstract sockets and send signals
WRITE_FILE, READ_FILE, READ_DIRECTORY = 1 << 1, 1 << 2, 1 << 3
READ = READ_FILE | READ_DIRECTORY
OWN = READ | WRITE_FILE | sum(1 << bit for bit in (4, 5, 7, 8, 12, 13, 14))
"""Rights in the program's own directory: also to remove, move and truncate, and to make directories, files and links."""
READABLE = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/dev/zero", "/dev/urandom", "/dev/random")
PYTHON = ("stdlib", "platstdlib", "purelib", "platlib")
libc = ctypes.CDLL(None, use_errno=True)


def limit(seconds: int, memory: int, file_size: int) -> None:
    """Bounds on processor time, memory, the size of a file, and files that are open."""
    for what, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, file_size),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))


def become(user: int, group: int) -> None:
    """Becomes another user, without groups; its processes can be looked at by this user's alone, as any other's.

    Python's own files are opened before, and found by that descriptor after: they may lie where that user may not look.
    """
    library = os.open(sysconfig.get_path("stdlib"), os.O_PATH)
    os.setgroups([])
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)
    if not os.access(os.__file__, os.R_OK):
        libc.prctl(SET_DUMPABLE, 1, 0, 0, 0)  # or /proc/self is root's
        find_library_by(library)


def find_library_by(descriptor: int) -> None:
    """Has imports look in the directory that ``descriptor`` is, instead of where it lies."""
    old, new = sysconfig.get_path("stdlib"), f"/proc/self/fd/{descriptor}"
    sys.path[:] = [path.replace(old, new, 1) for path in sys.path]
    for module in list(sys.modules.values()):
        if path := getattr(module, "__path__", None):
            module.__path__ = [entry.replace(old, new, 1) for entry in path]
    sys.path_importer_cache.clear()
    if not os.access(f"{new}/os.py", os.R_OK):
        raise OSError(f"user {os.getuid()} cannot read Python's library in {old}; start this as a user who is not root")


def drop_privileges(user: int, group: int) -> None:
    """Gives up all capabilities, and becomes ``user`` where that is not 0; OSError where some privilege stays."""
    for capability in CAPABILITIES:
        libc.prctl(
            DROP_FROM_BOUNDING, capability, 0, 0, 0
        )  # fails for who has no right to: no_new_privs stands for it then
    libc.prctl(AMBIENT, CLEAR_ALL, 0, 0, 0)
    if user:
        become(user, group)
    if libc.capset(struct.pack("=Ii", CAPABILITY_VERSION, 0), bytes(24)):
        raise OSError("capabilities cannot be given up")
    if libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) or 0 in os.getresuid():
        raise OSError("privileges cannot be given up")


def bound_files(directory: str) -> None:
    """Leaves ``directory`` to write to and Python's own files to read; OSError where the kernel has no Landlock."""
    version = libc.syscall(CREATE_RULES, None, ctypes.c_size_t(0), VERSION)
    if version < 1:
        raise OSError(
            "the kernel has no Landlock (Linux 5.13, and landlock among its lsm=), which bounds what is written"
        )
    files, network, scopes = (_rights(rights, version) for rights in (FILES, NETWORK, SCOPES))
    handled = struct.pack("=QQQ", files, network, scopes)[: 8 if version < 4 else 16 if version < 6 else 24]
    libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    rules = libc.syscall(CREATE_RULES, handled, ctypes.c_size_t(len(handled)), 0)
    _allow(rules, directory, OWN & files)
    _allow(rules, os.devnull, READ_FILE | WRITE_FILE)
    for path in filter(os.path.exists, {*READABLE, sys.prefix, sys.base_prefix, *map(sysconfig.get_path, PYTHON)}):
        _allow(rules, path, READ if Path(path).is_dir() else READ_FILE)
    if rules < 0 or libc.syscall(RESTRICT, rules, 0):
        raise OSError(ctypes.get_errno(), "no bounds on what is written")
    os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    place = os.open(path, os.O_PATH)
    if libc.syscall(ADD_RULE, rules, 1, struct.pack("=Qi", rights, place), 0):
        raise OSError(ctypes.get_errno(), f"no bounds on what is done in {path}")
    os.close(place)


def _rights(by_version: dict[int, int], version: int) -> int:
    return sum(rights for first, rights in by_version.items() if first <= version)


def filter_calls(program: bytes) -> None:
    """From here on the kernel refuses what the filter denies; OSError where it takes no filter."""
    lines = ctypes.create_string_buffer(program)
    head = struct.pack("=H6xQ", len(program) // 8, ctypes.addressof(lines))
    if libc.prctl(SET_SECCOMP, FILTER, head, 0, 0):
        raise OSError(ctypes.get_errno(), "the kernel takes no filter of system calls")


def give_up(status: int) -> None:
    """Does all of it, and tells ``status`` (a descriptor, closed before the program begins) that it is done, or why not."""
    seconds, memory, file_size, user, group = map(int, sys.argv[1:6])
    try:
        bound_files(".")
        limit(seconds, memory, file_size)
        drop_privileges(user, group)
        filter_calls(bytes.fromhex(sys.argv[6]))
    except OSError as error:
        os.write(status, str(error).encode())
        os._exit(1)
    os.write(status, b"bounded")
    os.close(status)


def main() -> None:
    """``code_child.py SECONDS BYTES FILE_BYTES USER GROUP FILTER STATUS ROLE READER WRITER``: run standard input, as JSON."""
    sources = json.loads(sys.stdin.buffer.read())
    calls = runpy.run_path(str(Path(__file__).with_name("code_calls.py")))
    give_up(int(sys.argv[7]))
    calls["run"](sys.argv[8], sources, *map(int, sys.argv[9:]))


if __name__ == "__main__":
    main()
