"""Ctrl-C before there is anything to save, and while MindSpore has a handler of its own.

Little is imported here: this is what a command line does first. Python's own answer to Ctrl-C, an exception
wherever the program is, becomes a page of tracebacks in the middle of an import and a fatal error in a callback of native code.
"""

from __future__ import annotations

import _thread
import os
import signal
import threading
from types import FrameType

from mindllm.leaving import tidy_up

INTERRUPTED = 130


_owned = False  # whether this process is one of our command lines, and not a program that imports us


def own_interrupts() -> None:
    """Called where a command line begins: from here on Ctrl-C ends it at once, until there is something to save."""
    global _owned
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        _owned = True
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        leave_on_interrupt()


def leave_on_interrupt() -> None:
    """From now on Ctrl-C ends the process at once, with one word and exit code 130; for the time in which nothing is lost."""
    if _owned:
        signal.signal(signal.SIGINT, _leave)


def raise_on_interrupt() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt, as Python does by itself, if :func:`leave_on_interrupt` was called before."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    tidy_up()
    os._exit(INTERRUPTED)


def receive_interrupts() -> None:
    """Has Ctrl-C call Python's handler whatever native code installs: MindSpore's own sends SIGTERM instead.

    To be called by the main thread before others are started: all of them block the signal, and one waits for it.
    """
    if not _owned or signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    threading.Thread(target=_pass_on, name="interrupts", daemon=True).start()


def _pass_on() -> None:
    while True:
        _thread.interrupt_main(signal.Signals(signal.sigwait({signal.SIGINT})))
