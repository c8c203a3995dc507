"""The filter of system calls under which a program of unknown origin runs: what is not on its list is denied.

A classic BPF program over ``struct seccomp_data`` (Linux: ``seccomp(2)``). The list is what CPython's standard library calls in a
program of one process: memory, threads, clocks, and files that are open or opened by name. Which files those may be is Landlock's
matter. Mode, times and extended attributes of files are not, so they stay as they are: to set mode or times does nothing, and
there seem to be no extended attributes, which is what ``shutil`` takes for a success.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

ALLOW, ERROR = 0x7FFF0000, 0x00050000  # answers: run it; fail with the error that is added to it, 0 for none
DENY, UNKNOWN, NOTHING, NO_ATTRIBUTES = ERROR | 1, ERROR | 38, ERROR, ERROR | 95  # EPERM, ENOSYS, success, ENOTSUP
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # instructions
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # places in struct seccomp_data
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32 = 0x40000000  # numbers of x86_64's second set of calls begin here
NEWEST = 463  # calls with higher numbers are younger than this list; a library that tries one falls back on ENOSYS

CALLS = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69, pwritev 296 70, sendfile 40 71
copy_file_range 326 285, lseek 8 62, close 3 57, close_range 436 436, dup 32 23, dup2 33 -, dup3 292 24, pipe 22 -, pipe2 293 59
flock 73 32, fsync 74 82, fdatasync 75 83, ftruncate 77 46, fallocate 285 47, fadvise64 221 223, readahead 187 213
open 2 -, openat 257 56, creat 85 -, stat 4 -, fstat 5 80, lstat 6 -, newfstatat 262 79, statx 332 291, statfs 137 43
fstatfs 138 44, access 21 -, faccessat 269 48, faccessat2 439 439, readlink 89 -, readlinkat 267 78, getdents 78 -
getdents64 217 61, getcwd 79 17, chdir 80 49, fchdir 81 50, umask 95 166, mkdir 83 -, mkdirat 258 34, rmdir 84 -, unlink 87 -
unlinkat 263 35, rename 82 -, renameat 264 38, renameat2 316 276, link 86 -, linkat 265 37, symlink 88 -, symlinkat 266 36
mmap 9 222, munmap 11 215, mremap 25 216, mprotect 10 226, madvise 28 233, msync 26 227, mincore 27 232, brk 12 214
poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, epoll_create 213 -, epoll_create1 291 20, epoll_ctl 233 21
epoll_wait 232 -, epoll_pwait 281 22, eventfd2 290 19
futex 202 98, set_tid_address 218 96, set_robust_list 273 99, rseq 334 293, membarrier 324 283, sched_yield 24 124
sched_getaffinity 204 123, getcpu 309 168, arch_prctl 158 -, restart_syscall 219 128, exit 60 93, exit_group 231 94
rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigtimedwait 128 137
rt_sigsuspend 130 133, sigaltstack 131 132, pause 34 -, alarm 37 -, getitimer 36 102, setitimer 38 103
nanosleep 35 101, clock_nanosleep 230 115, clock_gettime 228 113, clock_getres 229 114, gettimeofday 96 169, time 201 -
getpid 39 172, getppid 110 173, gettid 186 178, getpgrp 111 -, getpgid 121 155, getsid 124 156, getuid 102 174, geteuid 107 175
getgid 104 176, getegid 108 177, getgroups 115 158, getresuid 118 148, getresgid 120 150, getrlimit 97 163, getrusage 98 165
getpriority 140 141, times 100 153, uname 63 160, sysinfo 99 179, wait4 61 260, waitid 247 95, getrandom 318 278
"""
"""Name, number on x86_64, number on aarch64 (- where it has no such call)."""
UNDONE = {
    NOTHING: "chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, "
    "utime 132 -, utimes 235 -, futimesat 261 -, utimensat 280 88",
    NO_ATTRIBUTES: "setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, getxattr 191 8, lgetxattr 192 9, fgetxattr 193 10, "
    "listxattr 194 11, llistxattr 195 12, flistxattr 196 13, removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16",
}
"""Calls that the kernel does not see, by how they seem to end."""
TRUNCATE = {"x86_64": 76, "aarch64": 45}  # of a file by name; on the list where Landlock bounds it
CLONE, CLONE3 = {"x86_64": 56, "aarch64": 220}, 435
OPENS = {"x86_64": {2: 1, 257: 2}, "aarch64": {56: 2}}  # calls that open: which argument is the flags
THREAD = 0x00010000  # CLONE_THREAD: threads are no processes
NEW_NAMESPACE = 0x7E020080  # CLONE_NEW*, all of them
O_TRUNC, ASYNC = 0x200, 0x2000
ACCESS_MODES = (0x1, 0x2)  # O_WRONLY, O_RDWR

BY_ARGUMENT = {
    "fcntl": {"x86_64": 72, "aarch64": 25},
    "ioctl": {"x86_64": 16, "aarch64": 29},
    "prctl": {"x86_64": 157, "aarch64": 167},
    "prlimit64": {"x86_64": 302, "aarch64": 261},
}
COMMANDS = {
    "fcntl": (
        0,
        1,
        2,
        3,
        5,
        6,
        7,
        1030,
        1032,
    ),  # DUPFD, GETFD, SETFD, GETFL, GETLK, SETLK(W), DUPFD_CLOEXEC, GETPIPE_SZ
    "ioctl": (0x5401, 0x5413, 0x541B, 0x5450, 0x5451),  # TCGETS, TIOCGWINSZ, FIONREAD, FIONCLEX, FIOCLEX
    "prctl": (15, 16),  # the name of a thread
}
F_SETFL = 4

Line = tuple[int, int, int, int]
"""An instruction: code, lines to skip where its condition holds, where it does not, constant."""


def filter_program(machine: str, truncate: bool) -> bytes:
    """Returns the filter for ``machine`` as instructions of eight bytes.

    ``truncate``: Landlock knows truncation (from its third version on). Without, truncation by name is denied, and opening
    with ``O_TRUNC`` needs a mode that writes, which Landlock does bound.
    """
    lines: list[Line] = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, MACHINES[machine]), (RETURN, 0, 0, DENY)]
    lines.append((LOAD, 0, 0, NUMBER))
    rules = _ruled(machine, truncate)
    for number in sorted(allowed_calls(machine, truncate).values()):
        rule = rules.get(number, [(RETURN, 0, 0, ALLOW)])
        lines += [(EQUAL, 0, len(rule), number), *rule]
    for answer, calls in UNDONE.items():
        for number in _numbers(calls, machine).values():
            lines += [(EQUAL, 0, 1, number), (RETURN, 0, 0, answer)]
    lines += [(AT_LEAST, 0, 1, X32), (RETURN, 0, 0, DENY)]
    lines += [(EQUAL, 1, 0, CLONE3), (AT_LEAST, 0, 1, NEWEST), (RETURN, 0, 0, UNKNOWN), (RETURN, 0, 0, DENY)]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def allowed_calls(machine: str, truncate: bool = True) -> dict[str, int]:
    """The numbers of the calls on the list, by name; some of them with certain arguments alone."""
    found = _numbers(CALLS, machine) | {name: numbers[machine] for name, numbers in BY_ARGUMENT.items()}
    return found | {"clone": CLONE[machine]} | ({"truncate": TRUNCATE[machine]} if truncate else {})


def _numbers(calls: str, machine: str) -> dict[str, int]:
    place = 1 + list(MACHINES).index(machine)
    entries = [entry.split() for line in calls.strip().splitlines() for entry in line.split(",") if entry.strip()]
    return {entry[0]: int(entry[place]) for entry in entries if entry[place] != "-"}


def _ruled(machine: str, truncate: bool) -> dict[int, list[Line]]:
    """What is looked at besides the number, by number; each rule ends with its own answer."""
    number = {name: numbers[machine] for name, numbers in BY_ARGUMENT.items()}
    clone = [_argument(0), (ANY_BIT, 0, 2, THREAD), (ANY_BIT, 1, 0, NEW_NAMESPACE)]
    rules = {
        CLONE[machine]: [*clone, (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, DENY)],
        number["fcntl"]: [*_one_of("fcntl", 1), *_status_flags()],
        number["ioctl"]: [*_one_of("ioctl", 1), (RETURN, 0, 0, DENY)],
        number["prctl"]: [*_one_of("prctl", 0), (RETURN, 0, 0, DENY)],
        number["prlimit64"]: list(_reads_own_limits()),
    }
    if not truncate:
        rules |= {call: list(_truncates_what_it_writes(place)) for call, place in OPENS[machine].items()}
    return rules


def _argument(place: int, high: bool = False) -> Line:
    """Loads the low half of an argument (both machines are little endian), or the high one."""
    return (LOAD, 0, 0, ARGUMENTS + 8 * place + 4 * high)


def _one_of(name: str, place: int) -> Iterator[Line]:
    """Allows the commands of ``name``, and goes on with the next line for any other."""
    yield _argument(place)
    for command in COMMANDS[name]:
        yield (EQUAL, 0, 1, command)
        yield (RETURN, 0, 0, ALLOW)


def _status_flags() -> Iterator[Line]:
    """After the command: F_SETFL without O_ASYNC, which with an owner set sends signals; nothing else."""
    yield (EQUAL, 0, 2, F_SETFL)
    yield _argument(2)
    yield (ANY_BIT, 0, 1, ASYNC)
    yield (RETURN, 0, 0, DENY)
    yield (RETURN, 0, 0, ALLOW)


def _reads_own_limits() -> Iterator[Line]:
    """``prlimit64(0, …, NULL, …)``: limits of this process, read."""
    for line, skipped in ((_argument(0), 5), (_argument(2), 3), (_argument(2, high=True), 1)):
        yield line
        yield (EQUAL, 0, skipped, 0)
    yield (RETURN, 0, 0, ALLOW)
    yield (RETURN, 0, 0, DENY)


def _truncates_what_it_writes(place: int) -> Iterator[Line]:
    yield _argument(place)
    yield (ANY_BIT, 0, 2, O_TRUNC)
    yield (ANY_BIT, 1, 0, sum(ACCESS_MODES))
    yield (RETURN, 0, 0, DENY)
    yield (RETURN, 0, 0, ALLOW)
