"""What a shared library of Linux says about its names: the dynamic symbol table of an ELF file (64 bit, little endian).

Format: System V Application Binary Interface, chapters 4 and 5; versions: Linux Standard Base, "Symbol Versioning".
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path

SECTION, SYMBOL = struct.Struct("<IIQQQQIIQQ"), struct.Struct("<IBBHQQ")
DYNAMIC_SYMBOLS = 11
WEAK = 2
UNDEFINED = 0


class NotElf(ValueError):
    """The file is not a library this reader understands."""


@dataclass(frozen=True)
class SharedLibrary:
    """Names a library offers and names it wants from others; ``machine`` is the processor's number in ELF.

    ``wanted`` leaves out weak names, without which a library loads.
    """

    machine: int
    offered: frozenset[str]
    wanted: frozenset[str]
    content: bytes

    def texts(self, pattern: str) -> set[str]:
        """The constant texts in the library that match ``pattern`` as a whole: what it may look up while running."""
        found = re.findall(rb"\0(" + pattern.encode() + rb")(?=\0)", self.content)
        return {text.decode() for text in found}


def read_shared_library(path: Path) -> SharedLibrary:
    """Reads the names of a library.

    Raises:
        NotElf: the file is something else, or cut off.
    """
    content = path.read_bytes()
    if content[:6] != b"\x7fELF\x02\x01":
        raise NotElf(f"{path} is not a 64-bit library")
    try:
        offered, wanted = _names(content)
        return SharedLibrary(struct.unpack_from("<H", content, 0x12)[0], offered, wanted, content)
    except (struct.error, ValueError, OverflowError) as error:
        raise NotElf(f"{path} is damaged: {error}") from None


def _names(content: bytes) -> tuple[frozenset[str], frozenset[str]]:
    (table,), (count,) = struct.unpack_from("<Q", content, 0x28), struct.unpack_from("<H", content, 0x3C)
    sections = [SECTION.unpack_from(content, table + SECTION.size * index) for index in range(count)]
    offered, wanted = set(), set()
    for _, kind, _, _, offset, size, link, *_ in sections:
        if kind != DYNAMIC_SYMBOLS:
            continue
        start, length = sections[link][4:6]
        texts = content[start : start + length]
        for name, info, _, section, _, _ in SYMBOL.iter_unpack(content[offset : offset + size]):
            if section != UNDEFINED:
                offered.add(_text(texts, name))
            elif info >> 4 != WEAK:
                wanted.add(_text(texts, name))
    return frozenset(offered), frozenset(wanted)


def _text(texts: bytes, start: int) -> str:
    return texts[start : texts.index(b"\0", start)].decode()
