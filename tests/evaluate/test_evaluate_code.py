"""Programs of unknown origin: what passes, and what a program cannot do to pass or to harm."""

import platform
import time

import pytest

from mindllm.evaluate import code
from mindllm.evaluate.code import passes
from mindllm.evaluate.code_child import denied_calls

TEST = "assert answer() == 42"


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("def answer():\n    return 42", True),
        ("def answer():\n    return 41", False),
        ("def answer(:", False),
        ("import math, collections, re, itertools, typing\ndef answer(): return 42", True),
        ("import threading\ndef answer():\n x = []\n t = threading.Thread(target=x.append, args=(42,))\n t.start()\n"
         " t.join()\n return x[0]", True),
    ],
)  # fmt: skip
def test_a_program_passes_where_its_test_does(program, expected):
    assert passes(program, TEST) is expected


@pytest.mark.parametrize("program", ["import os\nos._exit(0)", "import sys\nsys.exit(0)", "raise SystemExit"])
def test_a_program_that_leaves_before_its_test_does_not_pass(program):
    assert not passes(program, TEST)


def denied(statement, error="PermissionError"):
    return f"def answer():\n    try:\n        {statement}\n    except {error}:\n        return 42"


@pytest.mark.parametrize(
    "statement",
    [
        "import socket; socket.socket()",
        "import socket; socket.create_connection(('127.0.0.1', 9))",
        "import os; os.fork()",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.execv('/bin/true', ['true'])",
        "import os; os.kill(os.getppid(), 0)",
        "import os; os.system('true') and None; raise PermissionError",
    ],
)
def test_the_kernel_denies_network_processes_and_signals(statement):
    assert passes(denied(statement), TEST)


def test_every_call_that_could_reach_another_process_is_denied():
    numbers = sorted(denied_calls(platform.machine()).values())
    program = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def answer():
    allowed = []
    for number in {numbers}:
        ctypes.set_errno(0)
        if libc.syscall(number, 0, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() != 1:
            allowed.append(number)
    return allowed or 42
"""
    assert passes(program, TEST)


def test_no_thread_of_the_parent_is_signalled():
    assert passes(denied("import ctypes, os; ctypes.CDLL(None).tgkill(os.getppid(), os.getppid(), 0) and 1 / 0",
                         "ZeroDivisionError"), TEST)  # fmt: skip


@pytest.mark.parametrize("size", [0, 1 << 20])
def test_a_program_cannot_fill_the_disk(size, monkeypatch):
    ended = []
    monkeypatch.setattr(
        code, "_is_full", lambda directory, real=code._is_full: ended.append(real(directory)) or ended[-1]
    )
    program = f"n = 0\nwhile True:\n    open(str(n), 'wb').write(bytes({size}))\n    n += 1"
    assert not passes(program, TEST, seconds=60)
    assert ended[-1] is True


def test_files_are_written_in_one_directory_and_are_small(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    assert passes("def answer():\n    open('here', 'w').write('x')\n    return 42", TEST)
    assert passes(denied("open('here', 'w').write('x' * (2 << 20))", "OSError"), TEST)
    passes(f"open({str(victim)!r}, 'w')", "")
    passes(f"import os\nos.unlink({str(victim)!r})", "")
    assert victim.read_text() == "mine"


def test_memory_and_time_are_bounded():
    assert passes(denied("bytearray(4 << 30)", "MemoryError"), TEST)
    start = time.monotonic()
    assert not passes("while True: pass", TEST, seconds=1)
    assert time.monotonic() - start < 60


def test_a_program_that_talks_without_end_fills_no_memory():
    assert not passes("while True: print('x' * 10000)", TEST, seconds=3)
