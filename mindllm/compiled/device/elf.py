"""What a shared library of Linux says about its names and its needs: the dynamic section of an ELF file (64 bit, little endian).

Format: System V Application Binary Interface, chapters 4 and 5; versions: Linux Standard Base, "Symbol Versioning".
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path

SECTION, SYMBOL, ENTRY = struct.Struct("<IIQQQQIIQQ"), struct.Struct("<IBBHQQ"), struct.Struct("<QQ")
DYNAMIC, DYNAMIC_SYMBOLS = 6, 11  # kinds of sections
NEEDED = 1  # kind of entry in the former
MACHINE = slice(0x12, 0x14)
WEAK = 2
UNDEFINED = 0


class NotElf(ValueError):
    """The file is not a library this reader understands."""


@dataclass(frozen=True)
class SharedLibrary:
    """Symbols of a shared library.

    Attributes:
        machine: number of the processor in ELF.
        defined: names that it offers.
        undefined: names that it needs from others, without weak ones.
        needed: files it is linked with.
        content: of the file.
    """

    machine: int
    defined: frozenset[str]
    undefined: frozenset[str]
    needed: frozenset[str]
    content: bytes

    def texts(self, pattern: str) -> set[str]:
        """Return the constant texts in the library that match ``pattern`` fully: names that it may look up while it runs."""
        matches = re.findall(rb"\0(" + pattern.encode() + rb")(?=\0)", self.content)
        return {text.decode() for text in matches}


def read_shared_library(path: Path) -> SharedLibrary:
    """Read the names of a library.

    Raises:
        NotElf: the file is not a library, or truncated.
    """
    content = path.read_bytes()
    if content[:6] != b"\x7fELF\x02\x01":
        raise NotElf(f"{path} is not a 64-bit library")
    try:
        defined, undefined, needed = _names(content)
        return SharedLibrary(machine_of(content), defined, undefined, needed, content)
    except (struct.error, ValueError, OverflowError) as error:
        raise NotElf(f"{path} is damaged: {error}") from None


def machine_of(header: bytes) -> int:
    """Return the number of the processor, from the first bytes of a library."""
    return int.from_bytes(header[MACHINE], "little")


def _names(content: bytes) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    (table,), (count,) = struct.unpack_from("<Q", content, 0x28), struct.unpack_from("<H", content, 0x3C)
    sections = [SECTION.unpack_from(content, table + SECTION.size * index) for index in range(count)]
    defined, undefined, needed = set(), set(), set()
    for _, kind, _, _, offset, size, link, *_ in sections:
        if kind not in (DYNAMIC, DYNAMIC_SYMBOLS):
            continue
        start, length = sections[link][4:6]
        texts, entries = content[start : start + length], content[offset : offset + size]
        if kind == DYNAMIC:
            needed |= {_text(texts, value) for tag, value in ENTRY.iter_unpack(entries) if tag == NEEDED}
            continue
        for name, info, _, section, _, _ in SYMBOL.iter_unpack(entries):
            if section != UNDEFINED:
                defined.add(_text(texts, name))
            elif info >> 4 != WEAK:
                undefined.add(_text(texts, name))
    return frozenset(defined), frozenset(undefined), frozenset(needed)


def _text(texts: bytes, start: int) -> str:
    return texts[start : texts.index(b"\0", start)].decode()
