"""A directory of named entries that many processes share.

An entry is found by its key, all that it depends on; its name is a word and the checksum of the
key, "program-<40 digits>". It is a file, {magic, checksum, key, bytes}, whose key is compared in
full. The file is written under another name first and renamed when it is whole: no reader ever sees
half of one. One that is damaged, or that is another entry under this name, is removed. One that
others can write to (files.py) is not read. An entry's modification time is when it was used last;
when all of them together are larger than the bound, the least recently used ones are removed. Files
of other names do not belong to the cache.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
import struct
import time
import uuid
from collections.abc import Iterator
from typing import NamedTuple

from lazyxla.cache import files

MAGIC = b"lazyxla cache 4\n"
_BEGIN = len(MAGIC) + 40  # of what the checksum is of
_ENTRY = re.compile(r"[^-]+-[0-9a-f]{40}")
_UNFINISHED = re.compile(_ENTRY.pattern + r"\..*\.unfinished")
_LONGEST_WRITE = 3600.0
"""Seconds that a writer may take. An unfinished file that is older was left by one that was
killed."""


class Key(NamedTuple):
    """The key of an entry: its file's name, and its text."""

    name: str
    text: bytes


def key(kind: str, text: bytes) -> Key:
    """Of a kind of entries, a word without hyphen."""
    return Key(f"{kind}-{_checksum(text)}", text)


def _checksum(*parts: bytes | memoryview) -> str:
    checksum = hashlib.sha1(usedforsecurity=False)
    for part in parts:
        checksum.update(part)
    return checksum.hexdigest()


class Entries:
    """Those of a directory.

    Args:
        directory: one that :func:`files.prepare_directory` takes.
        max_bytes: of all entries together.
    """

    def __init__(self, directory: str, max_bytes: int) -> None:
        self.directory = directory
        self._max_bytes = max_bytes
        # Written since the directory's size was looked at; the first time for what others left.
        self._unchecked_bytes = max_bytes

    def read(self, key: Key) -> bytes | None:
        """The bytes of an entry, None if it is not there."""
        found = self._load(key.name)
        return found[1] if found and found[0] == key.text else None

    def read_named(self, name: str) -> bytes | None:
        """The same of one whose key is not at hand, but its name, which another entry gave."""
        found = self._load(name)
        return found[1] if found else None

    def contains(self, name: str) -> bool:
        """Whether there is a file for it, even a damaged one. Does not count as using it."""
        return os.path.exists(self._path(name))

    def texts(self, kind: str) -> Iterator[bytes]:
        """The keys' texts of all entries of a kind."""
        try:
            names = os.listdir(self.directory)
        except OSError:
            return
        for name in names:
            if not name.startswith(f"{kind}-") or not _ENTRY.fullmatch(name):
                continue
            if found := self._load(name):
                yield found[0]

    def write(self, key: Key, content: bytes) -> None:
        """Makes an entry, or makes it anew.

        Raises:
            OSError: it cannot be written.
        """
        path = self._path(key.name)
        if _is_no_file(path):
            raise FileExistsError(errno.EEXIST, f"{key.name} is no file", path)
        size = struct.pack("<Q", len(key.text))
        checksum = _checksum(size, key.text, content).encode()
        # In containers that share a directory, processes have the same numbers.
        unfinished = f"{path}.{uuid.uuid4().hex}.unfinished"
        try:
            with open(unfinished, "xb", opener=files.opener) as file:
                file.writelines((MAGIC, checksum, size, key.text, content))
            os.rename(unfinished, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
            raise
        self._unchecked_bytes += len(key.text) + len(content)
        if self._unchecked_bytes > self._max_bytes // 10:
            self._unchecked_bytes = 0
            self._make_room()

    def _path(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def _load(self, name: str) -> tuple[bytes, bytes] | None:
        """Key and bytes of the entry of a name. One that is damaged, or has another name, is
        removed."""
        path = self._path(name)
        content = files.read(path)
        if content is None:
            return None
        found = _unpack(content)
        if found and key(name.partition("-")[0], found[0]).name != name:
            found = None
        with contextlib.suppress(OSError):  # where nothing can be written, it can be read
            if found:
                os.utime(path)
            else:
                os.unlink(path)
        return found

    def _make_room(self) -> None:
        """Other processes do the same at any time: files may vanish."""
        entries, total = [], 0
        with contextlib.suppress(OSError):
            for file in os.scandir(self.directory):
                status = _status(file)
                if status is None:
                    continue
                if _ENTRY.fullmatch(file.name):
                    entries.append((status.st_mtime_ns, status.st_size, file.path))
                    total += status.st_size
                elif (
                    _UNFINISHED.fullmatch(file.name)
                    and time.time() - status.st_mtime > _LONGEST_WRITE
                ):
                    with contextlib.suppress(OSError):
                        os.unlink(file.path)
        if total <= self._max_bytes:
            return
        for _, size, path in sorted(entries):
            if total <= self._max_bytes // 4 * 3:
                break
            with contextlib.suppress(OSError):
                os.unlink(path)
                total -= size


def _status(file: os.DirEntry[str]) -> os.stat_result | None:
    """The status of a file; None if it is not a regular file, or is gone."""
    try:
        status = file.stat(follow_symlinks=False)
    except OSError:
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def _is_no_file(path: str) -> bool:
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISLNK(mode))


def _unpack(content: bytes) -> tuple[bytes, bytes] | None:
    """Key and bytes; None if the file is damaged."""
    if not content.startswith(MAGIC) or len(content) < _BEGIN + 8:
        return None
    rest = memoryview(content)[_BEGIN:]
    if content[len(MAGIC) : _BEGIN] != _checksum(rest).encode():
        return None
    (size,) = struct.unpack_from("<Q", rest)
    if size > len(rest) - 8:
        return None
    return bytes(rest[8 : 8 + size]), bytes(rest[8 + size :])
