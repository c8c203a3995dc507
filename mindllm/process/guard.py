"""A process that ends a command whose Python cannot run: native code, such as a compiler, may hold Python's lock for a minute.

Python calls no handler then, and no thread of it runs, so the answer to a signal has to come from elsewhere. The guard is forked
when the command begins. It sees the bytes that Python's handler in C writes for each signal, and acts if they are not taken in
time. It ends with the command.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import shutil
import signal
import socket
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from mindllm.process.temporary import LONGEST_END, end_descendants

SIZE = 1 << 16  # of the memory that both share
POLL_SECONDS = 0.1
SET_DEATH_SIGNAL, SIGEV_THREAD, CONTROL_BLOCK = 1, 2, 512
OFFSETS = {"fd": 0, "buffer": 16, "size": 24, "value": 32, "notify": 44, "function": 48}  # of a struct aiocb of 64 bits


class Guard:
    """The guard of this process, and what the process tells it: whether to act, and paths to remove.

    Args:
        signals: a socket with a byte for each signal, which who answers takes away.
        words: what is printed, by number of the signals that end the command.
        seconds: that an answer may take.
    """

    def __init__(self, signals: socket.socket, words: dict[int, bytes], seconds: float) -> None:
        self._memory: mmap.mmap | None = mmap.mmap(-1, SIZE)
        self._exits = {number: os.pipe() for number in words}
        life, self._alive = os.pipe()
        command = os.getpid()
        if os.fork() == 0:
            try:
                self._watch(command, signals, life, words, seconds, self._memory)
            finally:
                os._exit(0)
        os.close(life)
        self._blocks = [_exit_when_readable(reader, 128 + number) for number, (reader, _) in self._exits.items()]
        os.register_at_fork(after_in_child=self._forget)

    def set_active(self, active: bool) -> None:
        """Set whether the guard ends this process where a signal is not answered."""
        if self._memory is not None:
            self._memory[0] = active

    def set_paths(self, paths: Collection[str]) -> None:
        """Set the files and directories that are removed when the guard ends this process."""
        text = b"\0".join(os.fsencode(Path(path).absolute()) for path in paths)
        if self._memory is not None and len(text) < SIZE - 5:
            self._memory[1 : 5 + len(text)] = len(text).to_bytes(4, "little") + text

    def _forget(self) -> None:
        """In a fork of the command, and in forks of that: the guard is not its own."""
        if self._memory is not None:
            self._memory = None
            os.close(self._alive)

    def _watch(
        self,
        command: int,
        signals: socket.socket,
        life: int,
        words: dict[int, bytes],
        seconds: float,
        memory: mmap.mmap,
    ) -> NoReturn:
        """Wait for signals that nobody answers, until the command ends."""
        self._close_others(signals.fileno(), life)
        for number in words:
            signal.signal(number, signal.SIG_IGN)
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        poll = select.poll()
        poll.register(signals, select.POLLIN)
        poll.register(life, select.POLLIN)
        since: float | None = None
        while os.getppid() == command and not any(number == life for number, _ in poll.poll()):
            number = next((one for one in _waiting(signals) if one in words), 0)
            since = (since or time.monotonic()) if number else None
            if since is not None and memory[0] and time.monotonic() > since + seconds:
                self._end(command, number, words[number], memory)
            time.sleep(POLL_SECONDS)
        os._exit(0)

    def _close_others(self, *needed: int) -> None:
        """Close what the command has opened, and may wait for the end of."""
        nowhere = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1):
            os.dup2(nowhere, standard)
        kept = {0, 1, 2, *needed, *(writer for _, writer in self._exits.values())}
        for descriptor in {int(path.name) for path in Path("/proc/self/fd").iterdir()} - kept:
            with suppress(OSError):
                os.close(descriptor)

    def _end(self, command: int, number: int, word: bytes, memory: mmap.mmap) -> NoReturn:
        """End the command with the exit code of a signal, all processes below it, and its temporary files."""
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, 0, 0, 0, 0)
        with suppress(OSError):
            os.write(2, word)
        end_descendants(command, {os.getpid()})
        size = int.from_bytes(memory[1:5], "little")
        paths = [os.fsdecode(path) for path in memory[5 : 5 + size].split(b"\0") if path]
        _remove(paths)
        os.write(self._exits[number][1], b"!")
        deadline = time.monotonic() + LONGEST_END
        while os.getppid() == command and time.monotonic() < deadline:
            time.sleep(0.01)
        if os.getppid() == command:  # a system without asynchronous reads: another exit code, but an end
            os.kill(command, signal.SIGKILL)
        _remove(paths)
        os._exit(0)


def _waiting(signals: socket.socket) -> bytes:
    with suppress(BlockingIOError):
        return signals.recv(64, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    return b""


def _remove(paths: Collection[str]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):
            Path(path).unlink()


def _exit_when_readable(reader: int, code: int) -> ctypes.Array[ctypes.c_char] | None:
    """Have the C library end this process with ``code`` once ``reader`` has a byte, whoever holds Python's lock.

    An asynchronous read calls a function when it is done, in a thread of the C library: ``_exit``. Return what has to live as
    long, or None where there is no such library.
    """
    library = ctypes.CDLL(None)
    if ctypes.sizeof(ctypes.c_void_p) != 8 or not hasattr(library, "aio_read"):
        return None
    block = ctypes.create_string_buffer(CONTROL_BLOCK)
    at = ctypes.addressof(block)
    function = ctypes.cast(library._exit, ctypes.c_void_p).value
    ctypes.c_int.from_address(at + OFFSETS["fd"]).value = reader
    ctypes.c_void_p.from_address(at + OFFSETS["buffer"]).value = at + CONTROL_BLOCK - 8
    ctypes.c_size_t.from_address(at + OFFSETS["size"]).value = 1
    ctypes.c_int.from_address(at + OFFSETS["value"]).value = code
    ctypes.c_int.from_address(at + OFFSETS["notify"]).value = SIGEV_THREAD
    ctypes.c_void_p.from_address(at + OFFSETS["function"]).value = function
    library.aio_read(block)
    return block
