"""A process that has failed ends within seconds, whatever holds it: threads that are waited for, exit functions, native code.

After its error is told a process of MindSpore may stay for minutes: its connections to other processes are taken down in exit
functions and destructors, which wait for the other side. Whoever started it sees no end and no error then.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from mindllm.errors import RunFailed
from mindllm.process.interrupts import interrupt_code

SECONDS = 20.0  # to tell the error, tidy up and end
NATIVE_SECONDS = 5.0  # after them, where native code keeps Python from running


@contextmanager
def ending_in_time(seconds: float = SECONDS, told: Callable[[float], None] | None = None) -> Iterator[None]:
    """Where the block ends with an error, the process does so, too, ``seconds`` later at the most, with the error's code.

    ``told`` is called with the seconds that this takes at the very most.
    """
    try:
        yield
    except BaseException as error:
        if told is not None:
            told(seconds + 2 * NATIVE_SECONDS)
        end_within(seconds, code_of(error))
        raise


def end_within(seconds: float, code: int) -> None:
    """Has this process end with ``code`` in ``seconds``, if it has not by then; it writes where its threads are.

    Python's own timer needs its lock. Where native code holds that, one of C ends the process a few seconds later, with 1.
    """
    threading.Thread(target=_end, args=(seconds, code), name="end in time", daemon=True).start()
    faulthandler.dump_traceback_later(seconds + NATIVE_SECONDS, exit=True, file=sys.__stderr__ or 2)


def code_of(error: BaseException) -> int:
    """The exit code of a process that ends with ``error``."""
    if isinstance(error, KeyboardInterrupt):
        return interrupt_code()
    code = error.code if isinstance(error, SystemExit) else getattr(error, "exit_code", RunFailed.exit_code)
    return code if isinstance(code, int) else int(code is not None)


def _end(seconds: float, code: int) -> None:
    time.sleep(seconds)
    with suppress(OSError):
        os.write(2, f"\nended: this process had failed and was still there {seconds:.0f} s later, in:\n".encode())
    with suppress(OSError, ValueError):
        faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
    flushing = threading.Thread(target=_flush, daemon=True)  # who hangs may hold the lock of a stream
    flushing.start()
    flushing.join(1)
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
