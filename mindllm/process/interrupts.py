"""Ctrl-C, SIGTERM and SIGHUP while there is nothing to save, and while MindSpore has handlers of its own.

Little is imported here: this is what a command line does first. Python's own answer to Ctrl-C, an exception
wherever the program is, becomes a page of tracebacks in the middle of an import and a fatal error in a callback of native code;
to the others it ends without a word and leaves temporary directories behind. And Python answers nothing while native code
compiles: a thread of ours is told of signals by their file descriptor, and ends a process that does not answer for a while. The
guard (:mod:`mindllm.process.guard`) ends one in which no thread of Python can run.
"""

from __future__ import annotations

import _thread
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from mindllm.process.exit_hooks import tidy_up
from mindllm.process.guard import Guard
from mindllm.process.temporary import leave_nothing, observe_paths

INTERRUPTED = 128 + signal.SIGINT
GRACE = 3.0  # seconds in which a signal has to be answered while there is nothing to save
MARGIN = 0.3  # after them the guard answers, if Python cannot
ENDING = {signal.SIGINT: b"interrupted\n", signal.SIGTERM: b"terminated\n", signal.SIGHUP: b"hung up\n"}
"""What is said when a process leaves because of it; the exit code is 128 and its number, as shells have it."""
RECEIVER = "interrupts"
IMPORT = "<frozen importlib._bootstrap>"
COMPILERS = ("/mindspore/graph/api.py", "/mindspore/common/api.py")  # from MindSpore 2.10 on, and before

Handler = Callable[[int, "FrameType | None"], None]
_owned: frozenset[int] = (
    frozenset()
)  # signals that are ours: of one of our command lines, not of a program that imports us
_answered = threading.Event()
_nothing_to_save = False
_guard: Guard | None = None
_received = signal.SIGINT  # the signal that raised KeyboardInterrupt last
_handler_of_python = 0  # the function that the system calls for SIGINT while Python handles it


def own_interrupts() -> None:
    """Called where a command line begins: from here on a signal ends it at once, until there is something to save."""
    global _owned, _handler_of_python, _guard
    if _owned or threading.current_thread() is not threading.main_thread():
        return
    _owned = frozenset(number for number in ENDING if signal.getsignal(number) != signal.SIG_IGN)  # under nohup, with &
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _owned)
    leave_on_interrupt()
    _handler_of_python = _system_handler(signal.SIGINT)
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    with suppress(OSError):  # no more processes are allowed: Python answers alone
        _guard = Guard(receiver, {number: ENDING[signal.Signals(number)] for number in _owned}, GRACE + MARGIN)
        observe_paths(_guard.set_paths)
        report_handlers()
    threading.Thread(target=_watch, args=(receiver, sender), name="signals", daemon=True).start()


def leave_on_interrupt() -> None:
    """From now on a signal ends the process at once, with one word; for the time in which nothing is lost."""
    for number in _owned:
        signal.signal(number, _leave)
    report_handlers()


def raise_on_interrupt() -> None:
    """From now on a signal raises KeyboardInterrupt, if :func:`leave_on_interrupt` was called before."""
    global _received
    _received = signal.SIGINT
    for number in _owned:
        if signal.getsignal(number) is _leave:
            signal.signal(number, _raise)
    report_handlers()


def interrupt_code() -> int:
    """Return the exit code of a process that ends because of the KeyboardInterrupt raised last: 130, 143 or 129."""
    return 128 + _received


def interrupt_word() -> str:
    """Return the word that is printed for it: interrupted, terminated or hung up."""
    return ENDING[_received].decode().rstrip()


@contextmanager
def interruptible() -> Iterator[None]:
    """Lets signals raise KeyboardInterrupt; SIGTERM, too, which MindSpore makes Ctrl-C send from the first graph on."""
    previous = {number: signal.signal(number, _raise) for number in _owned or {signal.SIGTERM}}
    report_handlers()
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler or signal.SIG_DFL)
        report_handlers()


def nothing_to_save(holds: bool) -> None:
    """Whether a handler that is not of this module may be left without an answer, as while the first step compiles."""
    global _nothing_to_save
    _nothing_to_save = holds
    report_handlers()


def report_handlers() -> None:
    """Tell the guard whether a signal that nobody answers ends this process; to be called after handlers have changed."""
    if _guard is not None:
        _guard.set_active(any(map(_must_answer, _owned)))


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


def _watch(receiver: socket.socket, sender: socket.socket) -> None:
    """End the process where a signal that ends it is not answered: native code has the main thread.

    A signal is taken away when it is answered. Where native code has Python's lock as well, the guard finds it still there.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    while waiting := receiver.recv(1, socket.MSG_PEEK):
        number = waiting[0]
        if number in _owned and _must_answer(number):
            if not _answered.wait(GRACE) and _must_answer(number):
                _leave(number, None)
            _answered.clear()
        receiver.recv(1)


def _must_answer(number: int) -> bool:
    return _nothing_to_save or signal.getsignal(number) in (_leave, _raise)


def _raise(number: int, frame: FrameType | None) -> None:
    global _received
    _received = _sent(number)
    if _owned and _is_within_native(frame):
        _leave(number, frame)
    _answered.set()
    raise KeyboardInterrupt


def _sent(number: int) -> signal.Signals:
    """Return the signal that this process was sent: MindSpore's handler of Ctrl-C, once it is installed, sends SIGTERM."""
    is_replaced = _handler_of_python and _system_handler(signal.SIGINT) != _handler_of_python
    is_received = any(thread.name == RECEIVER for thread in threading.enumerate())
    return signal.SIGINT if number == signal.SIGTERM and is_replaced and not is_received else signal.Signals(number)


def _system_handler(number: int) -> int:
    """Return the address of the function that the system calls for a signal."""
    import ctypes

    action = ctypes.create_string_buffer(256)  # a struct sigaction, which begins with the address
    ctypes.CDLL(None).sigaction(number, None, action)
    return int.from_bytes(action.raw[: ctypes.sizeof(ctypes.c_void_p)], "little")


def _is_within_native(frame: FrameType | None) -> bool:
    """Whether a module is imported or a graph compiled: what is raised there passes through native code, which may abort."""
    while frame is not None:
        code = frame.f_code
        if code.co_filename == IMPORT or (code.co_name == "compile" and code.co_filename.endswith(COMPILERS)):
            return True
        frame = frame.f_back
    return False


def _leave(number: int, frame: FrameType | None) -> None:
    number = _sent(number)
    os.write(2, ENDING[signal.Signals(number)])
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # other threads go on until the end: what they print of it is no answer
    os.dup2(nowhere, 2)
    tidy_up()
    leave_nothing()
    os._exit(128 + number)
