"""Protocol buffers as they are written, without their schemas: numbered fields, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Each field's number and value in order of appearance: an int where it is written as a
    varint, otherwise its bytes."""
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        wire_type = tag & 7
        if wire_type == 0:
            value, position = _varint(message, position)
            yield tag >> 3, value
            continue
        if wire_type == 2:
            length, position = _varint(message, position)
        else:
            length = 8 if wire_type == 1 else 4
        yield tag >> 3, message[position : position + length]
        position += length


def numbers(value: int | bytes) -> list[int]:
    """The values of a repeated field of integers; a single one may be written unpacked."""
    if isinstance(value, int):
        return [value]
    found, position = [], 0
    while position < len(value):
        number, position = _varint(value, position)
        found.append(number)
    return found


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, position
