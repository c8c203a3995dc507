"""How much of this machine's memory a tool may take: a share of what is free when it begins, seen by the user's other tools.

A tool claims memory before it begins: it is told its budget, chooses what it does, and says what that will take. Claims are files
in a directory of the user, locked as long as their process lives, so those of dead processes are known and removed. What
another tool has claimed and not taken yet is not free.
"""

from __future__ import annotations

import _thread
import argparse
import ctypes
import fcntl
import functools
import json
import logging
import os
import re
import secrets
import signal
import stat
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import gettempdir
from types import TracebackType
from typing import Any

from mindllm.errors import RunFailed, UserError
from mindllm.process.exit_hooks import when_leaving
from mindllm.process.temporary import make_temporary, open_private_directory, remove_temporary
from mindllm.terminal.text import visible
from mindllm.units import GIB

SHARE = 0.6
VARIABLE = "MINDLLM_MEMORY_SHARE"
PROCESSES, CONTROL_GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
LOCK = "lock"
CLAIM_BYTES = 256
CLAIM_NAME = re.compile(r"[1-9]\d*\.[a-z0-9_]{8}")  # process and a random part
GUARD_SECONDS = 2.0
ADVICE = f"end other programs, ask for less, or allow a larger share (--memory-share, ${VARIABLE})"
UNLIMITED = 1 << 60  # control groups of version 1 say "no limit" by a number that no machine has
LIMITS = {"": ("memory.max", "memory.current", "inactive_file"),
          "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")}  # fmt: skip
"""By controller (version 2 has no name): files of the limit and of what is used, and the pages that can be dropped."""

_claims: list[MemoryClaim] = []  # of this process, the outermost first


def add_memory_option(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--memory-share``."""
    parser.add_argument(
        "--memory-share",
        type=share,
        action=_UseShare,
        metavar="S",
        help=f"largest share of free memory to use (default: {SHARE}, or ${VARIABLE})",
    )


def share(text: str) -> float:
    """A share above 0, at most 1, as the type of an option."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(
            f"{text} is not a share of memory; write a number above 0 and at most 1, as {SHARE}"
        )
    return value


class _UseShare(argparse.Action):
    """Sets the share of this process and of those it starts."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        os.environ[VARIABLE] = str(values)
        setattr(namespace, self.dest, values)


def memory_share() -> float:
    """The share asked for by the option or the variable; SHARE where there is neither."""
    try:
        return share(os.environ.get(VARIABLE, str(SHARE)))
    except argparse.ArgumentTypeError as error:
        raise UserError(f"{VARIABLE}: {error}") from None


def available_bytes(processes: Path = PROCESSES, control_groups: Path = CONTROL_GROUPS) -> int | None:
    """Memory that programs can still get, of the machine and within every control group around this process; None: unknown."""
    found = [*_of_machine(processes / "meminfo"), *_of_control_groups(processes / "self" / "cgroup", control_groups)]
    return min(found, default=None)


def gibibytes(count: int | None) -> str:
    """Bytes in words."""
    return "an unknown number of bytes" if count is None else f"{count / GIB:.1f} GB"


def free_memory() -> str:
    """Memory that programs can still get, in words."""
    return gibibytes(available_bytes())


def _of_machine(facts: Path) -> Iterator[int]:
    for line in _read(facts).splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) << 10


def _of_control_groups(own: Path, root: Path) -> Iterator[int]:
    """What is left of each limit, from the process's own group to the root; pages of files that can be dropped are free."""
    for line in _read(own).splitlines():
        _, controllers, name = line.split(":", 2)
        for controller in set(controllers.split(",")) & set(LIMITS):
            top = root / controller
            group = top / name.lstrip("/")
            for place in (group, *group.parents):
                yield from _left(place, *LIMITS[controller])
                if place == top:
                    break


def _left(group: Path, limit: str, used: str, droppable: str) -> Iterator[int]:
    bound, taken = _read(group / limit).strip(), _read(group / used).strip()
    if bound.isdigit() and taken.isdigit() and int(bound) < UNLIMITED:
        statistics = dict(line.split() for line in _read(group / "memory.stat").splitlines())
        yield max(0, int(bound) - int(taken) + int(statistics.get(droppable, 0)))


def _read(path: Path) -> str:
    """The text of a file of the system; empty where there is none, or it may not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


class MemoryClaim:
    """What this process and those it starts will take, from ``take`` on until the block ends.

    Args:
        guarded: ends what the process has started, and the block with RunFailed, when more than the budget is taken.

    Attributes:
        budget: bytes that may be taken in all; None where the system does not say what is free.
        free: bytes that were free when the claim began, without those that others have claimed.
        peak: the most that was taken, as far as it was looked at.

    No other process of the user learns its budget before ``take`` has been called, so two tools that begin together do not
    both get what is free. A claim inside another one of this process has the rest of that one's budget.
    """

    def __init__(self, guarded: bool = True) -> None:
        self.free: int | None = None
        self.budget: int | None = None
        self.peak = 0
        self._guarded = guarded
        self._exceeded = False
        self._ended = threading.Event()
        self._before = 0
        self._directory: int | None = None
        self._lock: int | None = None
        self._file: tuple[str, int] | None = None
        self._end = ExitStack()

    def __enter__(self) -> MemoryClaim:
        self._before = memory_of_tree(os.getpid())
        if _claims:
            outer = _claims[-1]
            self.free = self.budget = None if outer.budget is None else max(0, outer.budget - outer.taken())
        else:
            share_of_free = memory_share()  # may raise: before the lock is taken
            self._directory = self._end.enter_context(claim_directory())
            self._lock = _locked(self._directory)
            available = available_bytes()
            self.free = None if available is None else max(0, available - claimed_by_others(self._directory))
            self.budget = None if self.free is None else int(share_of_free * self.free)
        _claims.append(self)
        return self

    def take(self, wanted: int) -> None:
        """Says that so many bytes will be taken; more is known later on, it may be said again."""
        if self._directory is not None:
            self._write(self._directory, {"pid": os.getpid(), "bytes": wanted, "before": self._before})
            if self._lock is not None and self._guarded:
                threading.Thread(target=self._watch, daemon=True).start()
        self._unlock()

    def taken(self) -> int:
        """Bytes that this process and those it started have taken since the claim began."""
        return max(0, memory_of_tree(os.getpid()) - self._before)

    def fits(self, wanted: int) -> bool:
        """Whether so many bytes are within the budget; they are where nothing is known."""
        return self.budget is None or wanted <= self.budget

    def describe(self) -> str:
        """The budget in words: ``13.1 GB, 60% of the 21.9 GB that are free``."""
        if self._directory is None:
            return gibibytes(self.budget)
        return f"{gibibytes(self.budget)}, {memory_share():.0%} of the {gibibytes(self.free)} that are free"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        self._ended.set()
        if self in _claims:
            _claims.remove(self)
        self._unlock()
        if self._file is not None:
            name, handle = self._file
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._directory)
            os.close(handle)
            self._file = None
        budget = self.describe()
        self._directory = None
        self._end.close()
        if self._exceeded:
            raise RunFailed(f"more memory was taken than there is for it ({budget}): {ADVICE}") from None

    def _write(self, directory: int, claim: dict[str, int]) -> None:
        if self._file is None:
            name = f"{os.getpid()}.{secrets.token_hex(4)}"
            handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory)
            fcntl.flock(handle, fcntl.LOCK_EX)
            self._file = name, handle
        os.pwrite(self._file[1], json.dumps(claim).encode().ljust(CLAIM_BYTES), 0)

    def _watch(self) -> None:
        """Looks at what is taken; above the budget ends the processes below this one, and interrupts this one.

        Telling shared pages apart walks through all of them: it is done where more is resident than ever before, or than fits.
        """
        most = 0
        while not self._ended.wait(GUARD_SECONDS):
            if (resident := sum(map(_resident, _tree(os.getpid())))) <= most and self.fits(resident):
                continue
            most = max(most, resident)
            self.peak = max(self.peak, self.taken())
            if not self.fits(self.peak):
                self._exceeded = True
                for process in _tree(os.getpid())[1:]:
                    with suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                _interrupt_main()
                return

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _interrupt_main() -> None:
    """Ctrl-C for the main thread; an exception in it where Ctrl-C is ignored, as in a job that a shell runs in the background."""
    if signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None):
        main = ctypes.c_ulong(threading.main_thread().ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(KeyboardInterrupt))
    else:
        _thread.interrupt_main()


@contextmanager
def claim_directory() -> Iterator[int]:
    """Yield a descriptor of the directory with the claims of this user.

    It is ``$XDG_RUNTIME_DIR/mindllm``, or ``mindllm-<uid>`` below the temporary directory. If another user took the name, or
    it is a link, a warning is logged and this process uses a directory of its own.
    """
    try:
        descriptor = open_private_directory(_claim_path())
    except OSError as error:
        descriptor = open_private_directory(_own_claims(_claim_path(), error.strerror or str(error)))
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _claim_path() -> Path:
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base, "mindllm") if base and os.access(base, os.W_OK) else Path(gettempdir(), f"mindllm-{os.geteuid()}")


@functools.cache
def _own_claims(path: Path, reason: str) -> Path:
    """Return a directory of this process alone, and warn once that it does not see the claims of other processes."""
    logging.getLogger(__name__).warning(
        "%s", visible(f"memory that other mindllm processes claim is not counted: {path}: {reason}; remove it")
    )
    directory = make_temporary("mindllm-")
    when_leaving(remove_temporary, str(directory))
    return directory


def claimed_by_others(directory: int) -> int:
    """Return the bytes that other processes have claimed and not taken yet; parents of this process do not count."""
    own = {os.getpid(), *_ancestors(os.getpid())}
    total = 0
    for name in filter(CLAIM_NAME.fullmatch, os.listdir(directory)):
        if (claim := _read_claim(directory, name)) and claim["pid"] not in own:
            total += max(0, claim["bytes"] - max(0, memory_of_tree(claim["pid"]) - claim["before"]))
    return total


def _read_claim(directory: int, name: str) -> dict[str, int] | None:
    """Return a claim whose process is alive; remove that of a dead one. Any other file is left alone."""
    try:
        handle = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return None
    try:
        state = os.fstat(handle)
        if not stat.S_ISREG(state.st_mode) or state.st_size != CLAIM_BYTES:
            return None
        content = json.loads(os.pread(handle, CLAIM_BYTES, 0))
        claim = {key: int(content[key]) for key in ("pid", "bytes", "before")}
        if str(claim["pid"]) != name.partition(".")[0]:
            return None
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(name, dir_fd=directory)
        return None
    except BlockingIOError:
        return claim
    except (OSError, ValueError, KeyError, TypeError):
        return None
    finally:
        os.close(handle)


def _locked(directory: int) -> int:
    handle = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)
    fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


def memory_of_tree(process: int) -> int:
    """Bytes that a process and those it started hold now; pages that several share count once among them."""
    return sum(map(_held_by, _tree(process)))


def _tree(process: int) -> list[int]:
    """A process and all it has started, itself first."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents().items():
        children.setdefault(parent, []).append(child)
    found = [process]
    for one in found:
        found += children.get(one, ())
    return found


def _held_by(process: int) -> int:
    for line in _read(PROCESSES / str(process) / "smaps_rollup").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    return _resident(process)


def _resident(process: int) -> int:
    """Bytes of a process's pages in memory, those that others have as well among them."""
    fields = _read(PROCESSES / str(process) / "statm").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if fields else 0


def _parents() -> dict[int, int]:
    found = {}
    for process in (path for path in PROCESSES.iterdir() if path.name.isdecimal()):
        fields = _read(process / "stat").rpartition(")")[2].split()  # names may have spaces and brackets
        if fields:
            found[int(process.name)] = int(fields[1])
    return found


def _ancestors(process: int) -> Iterator[int]:
    parents = _parents()
    while process := parents.get(process, 0):
        yield process
