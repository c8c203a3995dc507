"""Programs of unknown origin: what passes, and what a program cannot do to pass or to harm."""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from mindllm.errors import UserError
from mindllm.evaluate import code
from mindllm.evaluate.code import CHILD, demand_bounds, landlock_version, other_user, passes
from mindllm.evaluate.code_filter import UNDONE, _numbers, allowed_calls

try:
    demand_bounds()
except UserError as refused:
    pytest.skip(f"not shown here: {refused}", allow_module_level=True)
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


CHEATS = {
    "the last line of the source in a frame of the caller": """
import sys
s = sys._getframe(1).f_locals
print(s['source'].splitlines()[-1][7:-2])
""",
    "names of callers": """
import sys
f = sys._getframe()
while f:
    f.f_globals['run_test'] = f.f_globals['check'] = print
    f = f.f_back
def answer(): return 41
""",
    "success by the process": """
import os
def answer(): os._exit(0)
""",
    "success at the exit": """
import atexit, os, sys
atexit.register(os._exit, 0)
def answer(): sys.exit(0)
""",
    "an exit in a thread": """
import os, threading
threading.Timer(0.2, os._exit, (0,)).start()
def answer(): import time; time.sleep(1)
""",
    "an object that equals everything": """
class A:
    __eq__ = lambda s, o: True
    __ne__ = lambda s, o: False
__hash__ = None
def answer(): return A()
""",
    "a number that equals everything": """
class A(int):
    __eq__ = lambda s, o: True
def answer(): return A(41)
""",
    "a builtin of its own": """
import builtins
builtins.abs = builtins.len = lambda x: 0
def abs(x): return 0
def answer(): return 41
""",
    "AssertionError that is none": """
import builtins
builtins.AssertionError = SystemExit
def answer(): return 41
""",
    "a trace function": """
import sys
sys.settrace(lambda *a: None)
def answer(): return 41
""",
    "the test in memory": """
import gc
def answer():
    for o in gc.get_objects():
        if isinstance(o, str) and 'assert' in o: return 42
        if isinstance(o, dict) and o.get('word'): return 42
    return 41
""",
    "the test in the file system": """
import glob
def answer():
    for n in glob.glob('/proc/*/mem') + glob.glob('/proc/self/fd/*'):
        try: open(n).read(); return 42
        except OSError: pass
    return 41
""",
    "answers on all descriptors": """
import os
for n in range(3, 32):
    try: os.write(n, b'{"ready": true}\\nbounded\\n{"value": null}\\n')
    except OSError: pass
os._exit(0)
""",
    "every reply it can write": """
import os
for n in range(3, 32):
    for r in ('{"ready": true}', '{"callable": true}', '{"value": ["object", null], "arguments": []}'):
        try: os.write(n, r.encode() + b'\\n')
        except OSError: pass
os._exit(0)
""",
    "a reply that is code": """
import os
for n in range(3, 32):
    for r in ('{"ready": true}', '{"value": ["__import__", "os"]}'):
        try: os.write(n, r.encode() + b'\\n')
        except OSError: pass
os._exit(0)
""",
    "a reply without end": """
import os
for n in range(3, 32):
    try:
        os.write(n, b'{"ready": true}\\n')
        while True: os.write(n, b'[' * 9999)
    except OSError: pass
""",
    "a reply nested without end": """
def answer():
    x = []
    for _ in range(100000): x = [x]
    return x
""",
    "an exit of the other side": """
import os, signal
def answer():
    for n in range(1, 300):
        try: os.kill(os.getpid() + n, signal.SIGKILL)
        except OSError: pass
    return 41
""",
    "an error that ends the test": """
def answer(): raise SystemExit(0)
""",
    "an iterator": """
def answer(): return iter([42])
""",
}
TESTS = ("assert answer() == 42", "def check(candidate):\n    assert abs(candidate() - 42) < 1e-6\ncheck(answer)")


@pytest.mark.parametrize("test", TESTS, ids=["plain", "as HumanEval"])
@pytest.mark.parametrize("program", CHEATS.values(), ids=CHEATS)
def test_no_program_passes_by_what_it_reads_or_forges(program, test):
    assert not passes(program, test, seconds=3)


GIVEN = 'def poly(x):\n    return x - 42\n\n\ndef root():\n    """Where poly is 0."""\n'
OF_ROOT = "def check(candidate):\n    assert poly(candidate()) == 0\ncheck(root)"


def test_what_the_problem_gives_is_not_the_programs():
    """A helper that the test uses: a program that redefines it does not decide what is right."""
    right, wrong = (GIVEN + f"    return {value}\n" for value in (42, 41))
    assert passes(right, OF_ROOT, given=GIVEN, entry="root")
    assert not passes(wrong, OF_ROOT, given=GIVEN, entry="root")
    assert not passes(wrong + "def poly(x): return 0", OF_ROOT, given=GIVEN, entry="root")
    assert not passes("", OF_ROOT, given=GIVEN, entry="root")


@pytest.mark.parametrize(
    ("function", "test"),
    [
        ("return x", "for v in (None, True, 0, -5, 10**5000, 1.5, float('inf'), 'a\\ud800é', b'x', 1 + 2j, [1, (2, {3})],"
         " {(1,): {}}, frozenset({1}), range(1, 9, 2)):\n    assert f(v) == v and type(f(v)) is type(v), v"),
        ("x.sort(); x.append(9)", "v = [3, 1]\nassert f(v) is None and v == [1, 3, 9]"),
        ("x.update(a=2)", "v = {'a': 1}\nf(v)\nassert v == {'a': 2}"),
        ("return (each for each in [1, 2])", "assert tuple(f(0)) == (1, 2) and f(0) != [1, 2]"),
        ("from collections import Counter; return Counter(x)", "assert f('aab') == {'a': 2, 'b': 1}"),
        ("from decimal import Decimal; return Decimal(x) / 4", "assert f(1) == 0.25"),
        ("from fractions import Fraction; return Fraction(x, 4)", "assert f(1) == 0.25"),
        ("raise ValueError('no')",
         "try:\n    f(1)\nexcept ValueError as error:\n    assert str(error) == 'no'\nelse:\n    assert False"),
        ("return len(x)", "try:\n    f(1)\nexcept TypeError:\n    pass\nelse:\n    assert False"),
        ("return x", "assert f(float('nan')) != f(float('nan'))"),
        ("return x", "try:\n    missing\nexcept NameError:\n    pass\nelse:\n    assert False"),
        ("return x\nlimit = [1, 2]", "assert limit == [1, 2] and f(x=3) == 3"),
    ],
)  # fmt: skip
def test_values_arrive_as_they_are(function, test):
    assert passes(f"def f(x):\n    {function}", test)


def denied(statement, error="PermissionError", before="pass"):
    return f"{before}\ndef answer():\n    try:\n        {statement}\n    except {error}:\n        return 42"


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


UPROBES = {335, 336}  # of x86_64: from elsewhere than their own code they end the process, filter or not


def test_every_call_that_is_not_on_the_list_is_denied_by_this_kernel():
    machine = platform.machine()
    known = {
        *UPROBES,
        *allowed_calls(machine).values(),
        *(n for calls in UNDONE.values() for n in _numbers(calls, machine).values()),
    }
    program = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def answer():
    allowed = []
    for number in sorted({{*range(600), 0x40000000}} - {known}):
        ctypes.set_errno(0)
        if libc.syscall(number, 0, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() not in (1, 38):
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


@pytest.fixture
def victim(tmp_path):
    """A file that nothing but the bounds protects: it is of the user that programs run as, and everyone may find it."""
    user, group = other_user()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "victim")
        path.write_text("mine")
        os.utime(path, (1, 1))
        for place in (directory, path):
            os.chown(place, user or -1, group or -1)
        Path(directory).chmod(0o755)
        before = path.stat()
        yield path
        after = path.stat()
        assert path.read_text() == "mine"
        assert [path.name for path in Path(directory).iterdir()] == ["victim"]
        for what in ("st_mode", "st_uid", "st_gid", "st_mtime", "st_ctime", "st_ino", "st_nlink"):
            assert getattr(after, what) == getattr(before, what), what
        assert os.listxattr(path) == []


@pytest.mark.parametrize(
    "statement",
    [
        "open(V, 'w')",
        "open(V, 'r+')",
        "os.open(V, os.O_RDONLY | os.O_TRUNC)",
        "os.open(V, os.O_WRONLY | os.O_TRUNC)",
        "os.truncate(V, 0)",
        "os.unlink(V)",
        "os.rename(V, 'here')",
        "os.link(V, 'here')",
        "os.symlink(V, 'here') or open('here', 'a')",
        "open(V + '.new', 'w')",
        "os.mkdir(V + '.d')",
        "os.chown(V, os.getuid(), os.getgid())",
        "os.chdir('/') or open(V[1:], 'a')",
        "open(V).read()",
        "os.listdir(os.path.dirname(V))",
    ],
)
def test_no_file_of_others_is_changed_or_read(victim, statement):
    assert passes(denied(statement.replace("V", repr(str(victim))), "OSError", "import os"), TEST)


@pytest.mark.parametrize(
    "statement",
    ["os.chmod(V, 0)", "os.utime(V, (5, 5))", "os.fchmod(os.open(V, os.O_PATH), 0)", "os.setxattr(V, 'user.x', b'1')"],
)
def test_no_mode_time_or_attribute_of_others_is_changed(victim, statement):
    statement = statement.replace("V", repr(str(victim)))
    passes(f"import os\n{statement}", "")  # the victim tells, not the program


@pytest.mark.parametrize(
    "statement",
    [
        "fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())",
        "fcntl.fcntl(0, fcntl.F_SETSIG, 9)",
        "fcntl.fcntl(0, fcntl.F_SETFL, os.O_ASYNC)",
        "fcntl.ioctl(0, 0x8901, b'1234')",
        "os.mkfifo('f')",
        "os.mknod('n')",
        "os.chroot('.')",
        "os.setuid(0)",
        "time.clock_settime(time.CLOCK_REALTIME, time.time())",
        "socket.socketpair()",
    ],
)
def test_signals_devices_roots_and_clocks_are_out_of_reach(statement):
    assert passes(denied(statement, before="import fcntl, os, socket, time"), TEST)


@pytest.mark.parametrize(
    "program",
    [
        "import shutil\nopen('a', 'w').write('x')\nshutil.copy2('a', 'b')\nassert open('b').read() == 'x'",
        "import os, shutil\nos.makedirs('d/e')\nopen('d/e/a', 'w').close()\nos.rename('d/e/a', 'b')\nshutil.rmtree('d')",
        "import tempfile\nwith tempfile.TemporaryDirectory() as d:\n    open(d + '/x', 'w').write('1')",
        "import tarfile\nopen('a', 'w').close()\ntarfile.open('t', 'w:gz').add('a')",
        "from concurrent.futures import ThreadPoolExecutor as T\nassert sum(T(4).map(abs, range(9))) == 36",
        "import sqlite3\nassert sqlite3.connect('db').execute('select 1').fetchall() == [(1,)]",
        "import os, time\nos.cpu_count(), time.localtime(), os.urandom(4), print(file=open(os.devnull, 'w'))",
        "import os\nopen('a', 'w').write('xy')\nos.truncate('a', 1)\nassert open('a').read() == 'x'",
    ],
)
def test_what_the_standard_library_does_with_its_own_files_passes(program):
    if "truncate" in program and landlock_version() < 3:
        pytest.skip("this kernel's Landlock does not bound truncation, so it is denied")
    assert passes(program, "")


def test_files_are_small():
    assert passes("def answer():\n    open('here', 'w').write('x')\n    return 42", TEST)
    assert passes(denied("open('here', 'w').write('x' * (2 << 20))", "OSError"), TEST)


AS_ANOTHER = f"""
import runpy, sys
child = runpy.run_path({str(CHILD)!r})
child["drop_privileges"](*map(int, sys.argv[1:]))
print(open("/proc/self/status").read())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has more than its own rights to give up")
def test_root_becomes_nobody_without_groups_and_capabilities():
    user, group = map(str, other_user())
    result = subprocess.run(
        [sys.executable, "-I", "-c", AS_ANOTHER, user, group], capture_output=True, text=True, check=True
    )
    status = dict(line.split(":", 1) for line in result.stdout.splitlines() if ":" in line)
    assert {name: status[name].split() for name in ("Uid", "Gid", "Groups", "NoNewPrivs")} == {
        "Uid": [user] * 4,
        "Gid": [group] * 4,
        "Groups": [],
        "NoNewPrivs": ["1"],
    }
    assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        ({"other_user": lambda: (0, 0)}, "privileges cannot be given up"),
        ({"filter_program": lambda *_: b""}, "no filter of system calls"),
        ({"platform": lambda: "riscv64"}, "this is linux on riscv64"),
    ],
)
def test_what_cannot_be_bounded_does_not_run(broken, expected, monkeypatch):
    if "other_user" in broken and os.geteuid():
        pytest.skip("only root could run a program as root")
    for name, value in broken.items():
        if name == "platform":
            monkeypatch.setattr(code.platform, "machine", value)
        else:
            monkeypatch.setattr(code, name, value)
    with pytest.raises(UserError, match=expected):
        passes("", "")


def test_a_kernel_without_landlock_is_told(tmp_path, monkeypatch):
    child = tmp_path / "child.py"
    shutil.copy(CHILD.with_name("code_calls.py"), tmp_path)
    child.write_text(CHILD.read_text().replace("VERSION = 444, 445, 446, 1", "VERSION = 1444, 445, 446, 1"))
    monkeypatch.setattr(code, "CHILD", child)
    with pytest.raises(UserError, match=r"no Landlock \(Linux 5.13"):
        passes("", "")


def test_memory_and_time_are_bounded():
    assert passes(denied("bytearray(4 << 30)", "MemoryError"), TEST)
    start = time.monotonic()
    assert not passes("while True: pass", TEST, seconds=1)
    assert time.monotonic() - start < 60


def test_a_program_that_talks_without_end_fills_no_memory():
    assert not passes("while True: print('x' * 10000)", TEST, seconds=3)
