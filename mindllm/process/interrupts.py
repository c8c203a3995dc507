"""Ctrl-C, SIGTERM and SIGHUP while there is nothing to save, and while MindSpore has handlers of its own.

Little is imported here: this is what a command line does first. Python's own answer to Ctrl-C, an exception
wherever the program is, becomes a page of tracebacks in the middle of an import and a fatal error in a callback of native code;
to the others it ends without a word and leaves temporary directories behind. And Python answers nothing while native code
compiles: a thread of ours is told of signals by their file descriptor, and ends a process that does not answer for a while.
"""

from __future__ import annotations

import _thread
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from mindllm.process.exit_hooks import tidy_up
from mindllm.process.temporary import leave_nothing

INTERRUPTED = 128 + signal.SIGINT
GRACE = 3.0  # seconds in which a signal has to be answered while there is nothing to save
ENDING = {signal.SIGINT: b"interrupted\n", signal.SIGTERM: b"terminated\n", signal.SIGHUP: b"hung up\n"}
"""What is said when a process leaves because of it; the exit code is 128 and its number, as shells have it."""
RECEIVER = "interrupts"
IMPORT, COMPILER = "<frozen importlib._bootstrap>", "/mindspore/common/api.py"

Handler = Callable[[int, "FrameType | None"], None]
_owned: frozenset[int] = (
    frozenset()
)  # signals that are ours: of one of our command lines, not of a program that imports us
_answered = threading.Event()
_nothing_to_save = False


def own_interrupts() -> None:
    """Called where a command line begins: from here on a signal ends it at once, until there is something to save."""
    global _owned
    if _owned or threading.current_thread() is not threading.main_thread():
        return
    _owned = frozenset(number for number in ENDING if signal.getsignal(number) != signal.SIG_IGN)  # under nohup, with &
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _owned)
    leave_on_interrupt()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    threading.Thread(target=_watch, args=(reader,), name="signals", daemon=True).start()


def leave_on_interrupt() -> None:
    """From now on a signal ends the process at once, with one word; for the time in which nothing is lost."""
    for number in _owned:
        signal.signal(number, _leave)


def raise_on_interrupt() -> None:
    """From now on a signal raises KeyboardInterrupt, if :func:`leave_on_interrupt` was called before."""
    for number in _owned:
        if signal.getsignal(number) is _leave:
            signal.signal(number, _raise)


@contextmanager
def interruptible() -> Iterator[None]:
    """Lets signals raise KeyboardInterrupt; SIGTERM, too, which MindSpore makes Ctrl-C send from the first graph on."""
    previous = {number: signal.signal(number, _raise) for number in _owned or {signal.SIGTERM}}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler or signal.SIG_DFL)


def nothing_to_save(holds: bool) -> None:
    """Whether a handler that is not of this module may be left without an answer, as while the first step compiles."""
    global _nothing_to_save
    _nothing_to_save = holds


def leave_nothing_behind() -> None:
    """Ends the children of an interrupted command line and removes its temporary directories, where blocks did not."""
    if _owned:
        leave_nothing()


def receive_interrupts() -> None:
    """Has Ctrl-C call Python's handler whatever native code installs: MindSpore's own sends SIGTERM instead, at every step.

    To be called by the main thread before native libraries start threads (numpy does): all of them block the signal, and one
    waits for it. A thread that does not would now and then be given the signal, with MindSpore's handler. To be called again
    before MindSpore is used: multiprocessing lifts the block where it starts its first process.
    """
    if signal.SIGINT not in _owned:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    if any(thread.name == RECEIVER for thread in threading.enumerate()):
        return
    signal.signal(signal.SIGURG, lambda number, frame: None)
    threading.Thread(target=_pass_on, args=(threading.get_ident(),), name=RECEIVER, daemon=True).start()


def _pass_on(main: int) -> None:
    """Calls the handler of each SIGINT in the main thread; SIGURG, which means nothing, ends the call it may be waiting in."""
    while True:
        _thread.interrupt_main(signal.Signals(signal.sigwait({signal.SIGINT})))
        signal.pthread_kill(main, signal.SIGURG)


def _watch(reader: int) -> None:
    """Ends the process where a signal that ends it is not answered: native code has the main thread."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    while told := os.read(reader, 1):
        number = told[0]
        if number not in _owned or not _must_answer(number):
            continue
        if not _answered.wait(GRACE) and _must_answer(number):
            _leave(number, None)
        _answered.clear()


def _must_answer(number: int) -> bool:
    return _nothing_to_save or signal.getsignal(number) in (_leave, _raise)


def _raise(number: int, frame: FrameType | None) -> None:
    if _owned and _is_within_native(frame):
        _leave(number, frame)
    _answered.set()
    raise KeyboardInterrupt


def _is_within_native(frame: FrameType | None) -> bool:
    """Whether a module is imported or a graph compiled: what is raised there passes through native code, which may abort."""
    while frame is not None:
        code = frame.f_code
        if code.co_filename == IMPORT or (code.co_name == "compile" and code.co_filename.endswith(COMPILER)):
            return True
        frame = frame.f_back
    return False


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, ENDING[signal.Signals(number)])
    tidy_up()
    leave_nothing()
    os._exit(128 + number)
