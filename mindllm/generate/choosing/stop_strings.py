"""Text that ends at the first stop string, wherever the borders of the pieces it comes in lie."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text on in pieces and holds back what may yet become a stop string.

    The stop string that is complete first ends the text, of those that end together the longest: the result does not depend
    on how the text was cut. ``found`` says that it has ended; what comes after is dropped.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.found = False
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str) -> str:
        """Takes the next piece; returns the text that is certainly before any stop string."""
        if self.found or not self._stops:
            return "" if self.found else piece
        text = self._held + piece
        self.found, end = self._end(text)
        self._held = "" if self.found else text[end:]
        return text[:end]

    def finish(self) -> str:
        """Returns what is held back: with the text at its end it is the beginning of no stop string."""
        held, self._held = self._held, ""
        return held

    def _end(self, text: str) -> tuple[bool, int]:
        """Whether ``text`` has a stop string, and where what is before it, or before the beginning of one, ends."""
        starts = [(text.find(stop), stop) for stop in self._stops]
        matches = [(start + len(stop), start) for start, stop in starts if start >= 0]
        if matches:
            return True, min(matches)[1]
        return False, len(text) - max(_overlap(text, stop) for stop in self._stops)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that ``stop`` begins with, the whole of it left out."""
    return next(size for size in range(min(len(text), len(stop) - 1), -1, -1) if text.endswith(stop[:size]))
