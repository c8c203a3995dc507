"""The signals that stop a job, while a launcher runs it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType

from mindllm.process.interrupts import report_handlers

SIGNALS = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM}
"""What ranks are sent for each."""


class StopRequests:
    """Hands the first of ``SIGNALS`` to ``stop``, as what ranks are sent for it; a second one raises KeyboardInterrupt.

    One that is ignored already, as SIGHUP is under nohup, stays so.
    """

    def __init__(self, stop: Callable[[int], None]) -> None:
        self.stop = stop
        self.asked = False

    def install(self) -> None:
        """Begins to listen."""
        handled = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._receive) for number in handled}
        report_handlers()

    def restore(self) -> None:
        """Ends listening."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        report_handlers()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self.stop(SIGNALS[signal.Signals(number)])
