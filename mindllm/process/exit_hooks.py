"""The end of a process of ours: what is Python's is finished, nothing of native libraries is begun.

Threads of native libraries may still work when the interpreter ends: a solver of HiGHS that was left to itself, connections of
MindSpore. One of them that then asks for Python's lock, or finds the objects of its library destroyed, aborts the process
(``terminate called without an active exception``, exit code 134) after all is done. Only the standard library is imported here.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import NoReturn

BUFFERED = {io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom}
_tidying = ExitStack()
atexit.register(_tidying.close)
_own_alone = False


def when_leaving(function: Callable[..., object], *arguments: object, **options: object) -> None:
    """Has ``function`` called once when this process ends, however it does; the last one first."""
    _tidying.callback(function, *arguments, **options)


def tidy_up() -> None:
    """Does now what was left for the end."""
    _tidying.close()


def skip_exit_functions() -> None:
    """From now on :func:`leave` does what is ours alone, and calls no exit function that a library has registered."""
    global _own_alone
    _own_alone = True


def leave(code: int) -> NoReturn:
    """Ends this process with ``code``: finishes its threads, exit functions and files as Python does, then leaves at once.

    An error on the way is printed; it changes neither the code nor the rest, and Ctrl-C only ends a wait.
    """
    ours, all_of_them = (tidy_up,), (threading._shutdown, atexit._run_exitfuncs)  # type: ignore[attr-defined]
    for finish in (*(ours if _own_alone else all_of_them), _write_files):
        try:
            finish()
        except KeyboardInterrupt:
            pass
        except BaseException:
            sys.excepthook(*sys.exc_info())
    os._exit(code)


def _write_files() -> None:
    """Writes what open files hold, of Python and of C."""
    import ctypes

    for found in gc.get_objects():
        if type(found) in BUFFERED:
            with suppress(OSError, ValueError):  # ValueError: it is closed
                found.flush()
    ctypes.CDLL(None).fflush(None)
