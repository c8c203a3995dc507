"""Units of memory and time, once. What MindSpore and this project print as MB and GB of memory are MIB and GIB.

People read memory of devices in GB (:func:`gigabytes`); programs and files have it in MB or bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from mindllm.errors import UserError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
DEVICE_GB = "GB of 2^30 bytes"
"""The unit in which memory of devices is shown, as outputs name it: that of ``max_device_memory``, which MindSpore counts so."""
MB, GB = 10**6, 10**9
"""Of files and disks, and of published figures."""

MILLISECONDS, MICROSECONDS = 1e3, 1e6
"""In a second."""

DEVICE_SIZE = re.compile(r"\d+(\.\d+)?(GB|MB|KB)")


def counted(number: int, what: str) -> str:
    """A number of things: ``1 device``, ``2,048 devices``."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def parameters_in_words(number: int) -> str:
    """How many parameters a model has: ``6.74 billion parameters``, of a small one ``9.19 million parameters``."""
    size, word = (number / 1e9, "billion") if number >= 1e8 else (number / 1e6, "million")
    return f"{size:,.2f} {word} parameters"


def short_count(count: int) -> str:
    """Return a count with three digits and a letter: ``494M``, ``6.74B``; never with an exponent."""
    for size, letter in ((1, ""), (10**3, "K"), (10**6, "M"), (10**9, "B"), (10**12, "T")):  # noqa: B007 (used after the loop)
        value = count / size
        decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
        text = f"{value:.{decimals}f}"
        if float(text) < 1000:  # 999.7M rounds to 1B
            break
    return (text.rstrip("0").rstrip(".") if decimals else text) + letter


def file_size(size: float) -> str:
    """Bytes of files in words: ``42.1 GB``, ``35.9 MB``."""
    return f"{size / GB:,.1f} GB" if size >= GB / 10 else f"{size / MB:,.1f} MB"


def device_mebibytes(size: str) -> float:
    """Return ``58GB`` or ``58000MB`` of a device in MB of 2**20 bytes, as ``max_device_memory`` has them.

    Raises:
        UserError: it is no such size.
    """
    if not isinstance(size, str) or not DEVICE_SIZE.fullmatch(size):
        raise UserError(f"{size} is no size of a memory; write it as '58GB' or '58000MB'")
    return float(size[:-2]) * {"GB": GIB, "MB": MIB, "KB": KIB}[size[-2:]] / MIB


@dataclass(frozen=True)
class Gigabytes:
    """How the figures of one table or message read: memory of devices in GB of 2**30 bytes, without the unit's name.

    Attributes:
        unit: bytes in one of the sizes that are given.
        decimals: of every figure.
    """

    unit: int
    decimals: int

    def __call__(self, size: float) -> str:
        """Return the nearest figure: ``41.37``; of what is there and rounds to nothing ``<0.01``."""
        rounded = round(size * self.unit / GIB, self.decimals) + 0.0  # no -0.00
        return f"{rounded:,.{self.decimals}f}" if rounded or size <= 0 else f"<{10**-self.decimals:.{self.decimals}f}"

    def at_least(self, size: float) -> str:
        """Return ``size`` rounded up: what is missing is never told as less."""
        steps = size * self.unit / GIB * 10**self.decimals
        return f"{math.ceil(round(steps, 9)) / 10**self.decimals:,.{self.decimals}f}"

    def signed(self, size: float) -> str:
        """Return a difference with its sign: ``+0.003``."""
        return f"{round(size * self.unit / GIB, self.decimals) + 0.0:+,.{self.decimals}f}"


TENTHS_OF_GB = Gigabytes(1, 1)
"""Memory of devices in a sentence, where a hundredth of a GB is more than is known: ``41.4``, ``<0.1``."""


def gigabytes(sizes: Iterable[float], unit: int = 1) -> Gigabytes:
    """Return how these sizes, of ``unit`` bytes, read beside each other: two decimals, or three where none reaches 1 GB."""
    return Gigabytes(unit, 2 if max(map(abs, sizes), default=0.0) * unit >= GIB else 3)


def device_memory(size: float, unit: int = 1) -> str:
    """Return memory of a device in words, by the rule of :func:`gigabytes`: ``41.37 GB``, ``0.412 GB``."""
    return f"{gigabytes([size], unit)(size)} GB"


def missing_memory(size: float, unit: int = 1) -> str:
    """Return memory that a device lacks in words, rounded up."""
    return f"{gigabytes([size], unit).at_least(size)} GB"
