"""Units of memory and time, once. What MindSpore and this project print as MB and GB of memory are MIB and GIB."""

from __future__ import annotations

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
MB, GB = 10**6, 10**9
"""Of files and disks, and of published figures."""

MILLISECONDS, MICROSECONDS = 1e3, 1e6
"""In a second."""
