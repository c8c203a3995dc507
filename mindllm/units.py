"""Units of memory and time, once. What MindSpore and this project print as MB and GB of memory are MIB and GIB."""

from __future__ import annotations

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
MB, GB = 10**6, 10**9
"""Of files and disks, and of published figures."""

MILLISECONDS, MICROSECONDS = 1e3, 1e6
"""In a second."""


def counted(number: int, what: str) -> str:
    """A number of things: ``1 device``, ``2,048 devices``."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def file_size(size: float) -> str:
    """Bytes of files in words: ``42.1 GB``, ``35.9 MB``."""
    return f"{size / GB:,.1f} GB" if size >= GB / 10 else f"{size / MB:,.1f} MB"
