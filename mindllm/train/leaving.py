"""What is tidied up when a process ends, also where it ends without the exit functions of native libraries."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from contextlib import ExitStack

_tidying = ExitStack()
atexit.register(_tidying.close)


def when_leaving(function: Callable[..., object], *arguments: object, **options: object) -> None:
    """Has ``function`` called once when this process ends; the last one first."""
    _tidying.callback(function, *arguments, **options)


def tidy_up() -> None:
    """Does now what was left for the end."""
    _tidying.close()
