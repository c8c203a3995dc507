"""The filter of system calls, read as the kernel reads it: what is not on the list is denied, on both machines."""

import struct

import pytest

from mindllm.evaluate.code_filter import (
    ALLOW,
    ARCHITECTURE,
    ARGUMENTS,
    CLONE,
    DENY,
    MACHINES,
    NO_ATTRIBUTES,
    NOTHING,
    NUMBER,
    UNKNOWN,
    X32,
    allowed_calls,
    filter_program,
)

PTHREAD, FORK, NEW_USER = 0x3D0F00, 0x01200011, 0x10000000
MACHINE = pytest.mark.parametrize("machine", MACHINES)


def answer(machine, number, *arguments, truncate=True, architecture=None):
    """What the kernel answers a call: the filter is executed on a ``struct seccomp_data`` of it."""
    data = bytearray(64)
    struct.pack_into("=I", data, NUMBER, number)
    struct.pack_into("=I", data, ARCHITECTURE, architecture or MACHINES[machine])
    struct.pack_into(f"={len(arguments)}Q", data, ARGUMENTS, *arguments)
    lines = list(struct.iter_unpack("=HBBI", filter_program(machine, truncate)))
    conditions = {0x15: lambda a, k: a == k, 0x35: lambda a, k: a >= k, 0x45: lambda a, k: bool(a & k)}
    place = accumulator = 0
    while True:
        code, if_true, if_false, constant = lines[place]
        place += 1
        if code == 0x06:
            return constant
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, constant)
        else:
            place += if_true if conditions[code](accumulator, constant) else if_false


@MACHINE
def test_nothing_but_the_list_is_allowed(machine):
    allowed = {number for number in range(1000) if answer(machine, number, PTHREAD) == ALLOW}
    by_argument = {"ioctl", "prctl", "prlimit64"}  # not with these arguments
    assert allowed == {number for name, number in allowed_calls(machine).items() if name not in by_argument}
    assert answer(machine, X32 + allowed_calls(machine)["read"]) == DENY
    other = next(value for name, value in MACHINES.items() if name != machine)
    assert answer(machine, allowed_calls(machine)["read"], architecture=other) == DENY


@pytest.mark.parametrize(
    ("name", "numbers"),
    {
        "socket": (41, 198), "kill": (62, 129), "tgkill": (234, 131), "execve": (59, 221), "ptrace": (101, 117),
        "mount": (165, 40), "chroot": (161, 51), "mknodat": (259, 33), "settimeofday": (164, 170), "setuid": (105, 146),
        "fchownat": (260, 54), "io_uring_setup": (425, 425), "bpf": (321, 280), "unshare": (272, 97), "init_module": (175, 105),
        "memfd_create": (319, 279), "shmget": (29, 194), "pidfd_open": (434, 434), "openat2": (437, 437),
    }.items(),
)  # fmt: skip
def test_calls_that_reach_further_are_denied(name, numbers):
    assert [answer(machine, number) for machine, number in zip(MACHINES, numbers, strict=True)] == [DENY, DENY], name


@MACHINE
def test_arguments_decide_where_a_call_does_more_than_one_thing(machine):
    calls = allowed_calls(machine)

    def all_of(name, *arguments):
        return {answer(machine, calls[name], *given) for given in arguments}

    assert all_of("fcntl", (3, 4, 0x800), (3, 1030, 5), (3, 6, 0)) == {ALLOW}
    assert all_of("fcntl", (3, 4, 0x2000), (3, 8, 1), (3, 10, 9), (3, 15, 1), (3, 1024, 0), (3, 1026, 1)) == {DENY}
    assert all_of("ioctl", (1, 0x5401, 0), (1, 0x5413, 0)) == {ALLOW}
    assert all_of("ioctl", (0, 0x5412, 0), (0, 0x8901, 0), (0, 0x5452, 1)) == {DENY}
    assert all_of("prlimit64", (0, 7, 0, 1 << 40)) == {ALLOW}
    assert all_of("prlimit64", (0, 7, 1 << 40, 0), (0, 7, 8, 0), (1, 7, 0, 8)) == {DENY}
    assert all_of("prctl", (15, 0)) == {ALLOW}
    assert all_of("prctl", (4, 1), (1, 9), (38, 1)) == {DENY}
    assert answer(machine, CLONE[machine], PTHREAD) == ALLOW
    assert answer(machine, CLONE[machine], FORK) == answer(machine, CLONE[machine], PTHREAD | NEW_USER) == DENY
    assert answer(machine, 435) == answer(machine, 500) == UNKNOWN


@MACHINE
def test_what_the_kernel_is_not_asked_for_ends_as_if_it_were_done(machine):
    assert answer(machine, {"x86_64": 268, "aarch64": 53}[machine]) == NOTHING  # fchmodat
    assert answer(machine, {"x86_64": 280, "aarch64": 88}[machine]) == NOTHING  # utimensat
    assert answer(machine, {"x86_64": 188, "aarch64": 5}[machine]) == NO_ATTRIBUTES  # setxattr


@MACHINE
def test_without_landlock_s_right_to_truncate_only_what_is_written_is_truncated(machine):
    opened = allowed_calls(machine)["openat"]
    read, write, both = (answer(machine, opened, 0, 0, 0x200 | mode, truncate=False) for mode in (0, 1, 2))
    assert (read, write, both) == (DENY, ALLOW, ALLOW)
    assert answer(machine, opened, 0, 0, 0, truncate=False) == answer(machine, opened, 0, 0, 0x200) == ALLOW
    assert answer(machine, allowed_calls(machine)["truncate"], truncate=False) == DENY
