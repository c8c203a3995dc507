"""A signal ends a command line whatever it does, with a word and no traceback, and leaves no child and no directory behind."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mindllm.process.interrupts import COMPILERS

LONGEST_ANSWER = 15.0  # 3.3 s on a machine that does nothing else
PROGRAM = """
import hashlib, os, subprocess, sys, threading, time
from mindllm.process import interrupts
interrupts.own_interrupts()
interrupts.GRACE = 0.2
from mindllm.command import run_command
from mindllm.process.temporary import make_temporary
from mindllm.files import atomic_path

def say_when_native():
    while sys._current_frames()[threading.main_thread().ident].f_code.co_name != "native":
        time.sleep(0.01)
    time.sleep(0.3)
    print(os.environ["READY"], flush=True)

def main(arguments):
    if sys.argv[1] == "leave":
        interrupts.leave_on_interrupt()
    if sys.argv[1] in ("first step", "later step"):
        import signal
        interrupts.nothing_to_save(True)
        signal.signal(signal.SIGTERM, lambda number, frame: sys.argv[1] == "later step" and print("noticed", flush=True))
        signal.signal(signal.SIGINT, lambda number, frame: None)
        signal.signal(signal.SIGHUP, lambda number, frame: None)
        interrupts.nothing_to_save(sys.argv[1] == "first step")
    child = subprocess.Popen(["sleep", "100"], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with atomic_path("unfinished") as path:
        os.environ["READY"] = f"{make_temporary('mindllm_test_')} {path.absolute()} {child.pid}"
        if sys.argv[2] == "native":
            threading.Thread(target=say_when_native, daemon=True).start()
            native()
        if sys.argv[2] == "locked":
            print(os.environ["READY"], flush=True)
            hold_lock(100 if sys.argv[1] != "later step" else 5)
            print("finished", flush=True)
            return 0
        if sys.argv[2] == "import":
            import endless
        print(os.environ["READY"], flush=True)
        while True:
            pass

def native():
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)

def hold_lock(seconds):
    "As a compiler does: native code that gives Python's lock to nobody, and that no signal ends."
    import ctypes
    mutex, library = ctypes.create_string_buffer(128), ctypes.PyDLL(None)
    until = (ctypes.c_long * 2)(int(time.time()) + seconds, 0)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_timedlock(mutex, until)

run_command(main)
"""
ENDLESS = """
import os
print(os.environ["READY"], flush=True)
while True:
    try:
        pass
    except BaseException:
        raise ImportError
"""


def lives(process):
    state = Path(f"/proc/{process}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] not in "ZX"


@pytest.mark.parametrize(
    ("policy", "where", "number", "code", "word"),
    [
        ("leave", "python", signal.SIGINT, 130, "interrupted"),
        ("leave", "native", signal.SIGINT, 130, "interrupted"),
        ("leave", "native", signal.SIGTERM, 143, "terminated"),
        ("raise", "python", signal.SIGTERM, 143, "terminated"),
        ("raise", "python", signal.SIGHUP, 129, "hung up"),
        ("raise", "native", signal.SIGHUP, 129, "hung up"),
        ("raise", "import", signal.SIGINT, 130, "interrupted"),
        ("raise", "import", signal.SIGHUP, 129, "hung up"),
        ("first step", "native", signal.SIGTERM, 143, "terminated"),
        ("first step", "locked", signal.SIGTERM, 143, "terminated"),
        ("leave", "locked", signal.SIGINT, 130, "interrupted"),
        ("raise", "locked", signal.SIGHUP, 129, "hung up"),
        ("later step", "locked", signal.SIGTERM, 0, "noticed\nfinished"),
    ],
)
def test_at_any_moment(policy, where, number, code, word, tmp_path):
    (tmp_path / "endless.py").write_text(ENDLESS)
    (tmp_path / "program.py").write_text(PROGRAM)

    def default_handlers():
        for each in (
            signal.SIGINT,
            signal.SIGTERM,
            signal.SIGHUP,
        ):  # where the tests run in the background some are ignored
            signal.signal(each, signal.SIG_DFL)

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "program.py", policy, where],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=default_handlers,
    )
    directory, unfinished, child = process.stdout.readline().split()
    assert Path(directory).is_dir()
    assert Path(unfinished).is_file()
    process.send_signal(number)
    begun = time.monotonic()
    printed, _ = process.communicate(timeout=60)
    assert time.monotonic() - begun < LONGEST_ANSWER
    assert (process.returncode, printed) == (code, f"{word}\n")
    assert not Path(directory).exists() or code == 0
    assert not Path(unfinished).exists()
    assert code == 0 or not lives(child)
    if code == 0:
        os.kill(int(child), signal.SIGKILL)


def test_the_compiler_of_mindspore_is_where_it_is_looked_for():
    """What is raised inside of it is swallowed, or ends in pages of source lines: a signal there ends the process instead."""
    (place,) = importlib.util.find_spec("mindspore").submodule_search_locations
    files = [Path(place).parent / name.lstrip("/") for name in COMPILERS]
    assert any(file.is_file() and "def compile(" in file.read_text(encoding="utf-8") for file in files)


def test_a_signal_that_is_ignored_stays_so(tmp_path):
    program = (
        "import os\nfrom mindllm.process.interrupts import own_interrupts\nown_interrupts()\nos.kill(os.getpid(), 1)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ignored = lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)  # noqa: E731
    assert (
        subprocess.run([sys.executable, "-c", program], env=environment, preexec_fn=ignored, check=False).returncode
        == 0
    )


FORKS = """
import os
from mindllm.process.interrupts import own_interrupts
own_interrupts()
if os.fork() == 0:
    ends = os.pipe()
    if os.fork() == 0:
        [os.fstat(end) for end in ends]
        print("open", flush=True)
        os._exit(0)
    os.wait()
    [os.fstat(end) for end in ends]
    print("open", flush=True)
    os._exit(0)
os.wait()
print(open(f"/proc/self/task/{os.getpid()}/children").read(), flush=True)
os._exit(0)
"""


def test_forks_keep_their_files_and_the_guard_ends_with_its_command():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", FORKS], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )  # fmt: skip
    *opened, guard = done.stdout.split()
    assert opened == ["open", "open"]
    for _ in range(200):
        if not lives(guard):
            return
        time.sleep(0.02)
    pytest.fail("the guard lives on")
