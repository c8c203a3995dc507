"""Runs a program of unknown origin in this process, after this process has given up what such a program should not have.

Started by :mod:`mindllm.evaluate.code` as a script, with the program on standard input; it imports nothing of the project. The
kernel enforces the bounds: resource limits; a seccomp filter (Linux: ``seccomp(2)``) under which there are no sockets, no other
programs, no other processes and no signals to them; Landlock (``landlock(7)``, Linux 5.13), which leaves one directory for files.
"""

import ctypes
import os
import platform
import resource
import struct
import sys

NO_NEW_PRIVILEGES, SET_SECCOMP, FILTER = 38, 22, 2  # prctl(2)
ALLOW, DENY, UNKNOWN = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38  # run it; fail with EPERM; with ENOSYS
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # instructions of a classic BPF program
THREAD = 0x00010000  # CLONE_THREAD: threads are no processes
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # places in struct seccomp_data
X32 = 0x40000000
CREATE_RULES, ADD_RULE, RESTRICT = 444, 445, 446  # landlock's calls, alike on all machines
WRITES = sum(1 << bit for bit in (1, 4, 5, 6, 7, 8, 9, 10, 11, 12))  # write, remove and make anything (first version)
MACHINES = {"x86_64": (0xC000003E, 56, 435), "aarch64": (0xC00000B7, 220, 435)}  # architecture, clone, clone3
DENIED = {  # what is denied: its number on each machine, as they stand above; None where it has no such call
    "socket": (41, 198),
    "socketpair": (53, 199),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "execve": (59, 221),
    "execveat": (322, 281),
    "fork": (57, None),
    "vfork": (58, None),
    "prlimit64": (302, 261),  # could change the bounds of another process
    "setpriority": (141, 140),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    "shmget": (29, 194),  # memory that is left when the process ends
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "unshare": (272, 97),
    "setns": (308, 268),
    "io_uring_setup": (425, 425),  # does what the filter denies
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "keyctl": (250, 219),
}


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


def denied_calls(machine: str) -> dict[str, int]:
    """The numbers of the calls that are denied, by name."""
    place = list(MACHINES).index(machine)
    return {name: number for name, numbers in DENIED.items() if (number := numbers[place]) is not None}


def filter_program(machine: str) -> bytes:
    """The filter of system calls as instructions ``(code, jump if true, jump if false, constant)``."""
    architecture, clone, clone3 = MACHINES[machine]
    checks = [(AT_LEAST, X32), *((EQUAL, number) for number in denied_calls(machine).values())]
    lines = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, DENY), (LOAD, 0, 0, NUMBER)]
    for place, (code, constant) in enumerate(checks):
        lines.append((code, len(checks) - place + 4, 0, constant))
    lines += [
        (EQUAL, 5, 0, clone3),
        (EQUAL, 0, 2, clone),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (ANY_BIT, 0, 1, THREAD),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, DENY),
        (RETURN, 0, 0, UNKNOWN),
    ]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def filter_calls(libc: ctypes.CDLL) -> None:
    """From here on the kernel refuses what the filter denies; OSError where it takes no filter."""
    program = ctypes.create_string_buffer(filter_program(platform.machine()))
    head = struct.pack("=H6xQ", (len(program) - 1) // 8, ctypes.addressof(program))
    if libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(SET_SECCOMP, FILTER, head, 0, 0):
        raise OSError(ctypes.get_errno(), "no filter of system calls")


def write_only_to(libc: ctypes.CDLL, directory: str) -> None:
    """Nothing outside of ``directory`` can be written, where the kernel knows Landlock."""
    rules = libc.syscall(CREATE_RULES, struct.pack("=Q", WRITES), 8, 0)
    if rules < 0:
        return
    place = os.open(directory, os.O_PATH)
    libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if libc.syscall(ADD_RULE, rules, 1, struct.pack("=Qi", WRITES, place), 0) or libc.syscall(RESTRICT, rules, 0):
        raise OSError(ctypes.get_errno(), "no bounds on what is written")
    os.close(place)
    os.close(rules)


def main() -> None:
    """``code_child.py SECONDS BYTES FILE_BYTES``: runs standard input; ends with 0 where it ran to its end."""
    source = sys.stdin.read()
    libc = ctypes.CDLL(None, use_errno=True)
    write_only_to(libc, ".")
    limit(*map(int, sys.argv[1:4]))
    filter_calls(libc)
    exec(compile(source, "<answer>", "exec"), {"__name__": "__main__"})
    sys.stdout.flush()
    os._exit(0)  # what the program left for the end of the process does not decide


if __name__ == "__main__":
    main()
