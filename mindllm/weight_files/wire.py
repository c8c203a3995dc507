"""Protobuf's encoding of messages, in files of any size (https://protobuf.dev/programming-guides/encoding/)."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import IO, NoReturn

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types
Place = tuple[int, int]  # where bytes begin and end


def fields_of(file: IO[bytes], start: int, end: int) -> Iterator[tuple[int, int | Place]]:
    """The fields of a message: their numbers, with a number or the place of their bytes, which are skipped."""
    position = start
    while position < end:
        key, position = _varint(file, position, end)
        number, wire = key >> 3, key & 7
        if wire == VARINT:
            value, position = _varint(file, position, end)
            yield number, value
            continue
        size = {FIXED64: 8, FIXED32: 4}.get(wire)
        if wire == BYTES:
            size, position = _varint(file, position, end)
        if size is None or position + size > end:
            raise ValueError(f"it ends or breaks off at byte {position}")
        yield number, (position, position + size)
        position += size


def _varint(file: IO[bytes], position: int, end: int) -> tuple[int, int]:
    """A number of one to ten bytes, seven bits each, and where it ends."""
    file.seek(position)
    content = file.read(min(10, end - position))
    value = 0
    for index, byte in enumerate(content):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, position + index + 1
    raise ValueError(f"it ends or breaks off at byte {position}")


def numbers_of(file: IO[bytes], found: int | Place) -> list[int]:
    """The numbers of a field, with their sign: one, or a packed list."""
    if isinstance(found, int):
        return [_signed(found)]
    numbers, position = [], found[0]
    while position < found[1]:
        value, position = _varint(file, position, found[1])
        numbers.append(_signed(value))
    return numbers


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


class Message:
    """A small message in memory and its fields by their numbers. Raises ValueError where a field is missing or no such thing."""

    def __init__(self, content: bytes) -> None:
        self._file = io.BytesIO(content)
        self._fields = list(fields_of(self._file, 0, len(content)))

    def messages(self, number: int) -> list[Message]:
        """The messages of a field; none where it is absent."""
        return [Message(self._bytes(place)) for place in self._places(number)]

    def message(self, number: int) -> Message:
        """The first message of a field."""
        return next(iter(self.messages(number)), None) or self._missing(number)

    def text(self, number: int) -> str:
        """The text of a field."""
        places = self._places(number) or self._missing(number)
        return self._bytes(places[0]).decode("utf-8")

    def numbers(self, number: int) -> list[int]:
        """The numbers of a field, packed or one by one."""
        return [value for key, found in self._fields if key == number for value in numbers_of(self._file, found)]

    def number(self, number: int) -> int:
        """The last number of a field, 0 where it is absent."""
        return next(iter(self.numbers(number)[::-1]), 0)

    def _missing(self, number: int) -> NoReturn:
        raise ValueError(f"it has no field {number}")

    def _places(self, number: int) -> list[Place]:
        return [found for key, found in self._fields if key == number and isinstance(found, tuple)]

    def _bytes(self, place: Place) -> bytes:
        self._file.seek(place[0])
        return self._file.read(place[1] - place[0])
