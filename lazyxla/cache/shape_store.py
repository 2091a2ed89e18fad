"""PyTorch's answers about shapes, kept in a file: csrc/dispatch/inference_store.h asks for them.

Asking a meta function costs up to a millisecond, and the very first one about a second, since
PyTorch then imports its reference modules. The answers never change for one version of torch and of
the code that makes them, so that a later process asks nothing.

The first line of the file is its own name, which contains the versions; then follow records, one
after the other, each {size, checksum, key, answer}. What was answered is appended by one write now
and then and at exit, so that many processes can share the file. It is cut off at the first record
that is damaged. A file that cannot be read or written (files.py) is no error: the answers are then
computed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from lazyxla.cache import files
from lazyxla.config import settings

_MOST_BYTES = 64 << 20
_WRITE_AT_BYTES = 1 << 20

_HEAD = struct.Struct("<III")
"""The size of a key and of an answer, and the checksum of both."""


def checksum() -> str:
    """Of the Python code that makes the answers: one that is kept is not checked again."""
    package = Path(__file__).parent.parent
    code = sorted([*package.glob("meta_*.py"), *package.glob("argument_checks/*.py")])
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in code)).hexdigest()[:16]


class ShapeStore:
    """The answers in the file at a path, which may not be there yet, and those of this process.

    Threads may use it at the same time. What one adds while another writes may be kept for this
    process alone.
    """

    def __init__(self, path: str = "") -> None:
        self._path = path
        self._title = f"lazyxla shapes 4 {os.path.basename(path)}\n".encode()
        self._answers: list[dict[bytes, bytes]] = []  # none before the file is read
        self._unwritten: list[bytes] = []
        self._unwritten_bytes = 0
        self._process = os.getpid()

    def find(self, key: bytes) -> bytes | None:
        """The answer, if it is kept."""
        return self._known().get(key)

    def add(self, key: bytes, answer: bytes) -> None:
        """Keeps an answer that was not found."""
        if self._process != os.getpid():  # what is unwritten is the parent's
            self._process, self._unwritten = os.getpid(), []
        _keep(self._known(), key, answer)
        body = key + answer
        record = _HEAD.pack(len(key), len(answer), zlib.crc32(body)) + body
        self._unwritten.append(record)
        self._unwritten_bytes += len(record)
        if self._unwritten_bytes > _WRITE_AT_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes what was added since the last time."""
        if self._process == os.getpid() and self._unwritten:
            records, self._unwritten, self._unwritten_bytes = self._unwritten, [], 0
            self._append(b"".join(records))

    def _known(self) -> dict[bytes, bytes]:
        """The answers by their keys. The first call reads the file."""
        if not self._answers:
            answers: dict[bytes, bytes] = {}
            for key, answer in self._read():
                _keep(answers, key, answer)
            self._answers.append(answers)
        return self._answers[0]  # if two threads have read it, both go on with the first one's

    def _read(self) -> Iterator[tuple[bytes, bytes]]:
        """All records. Makes the directory if need be."""
        if not self._path:
            return
        try:
            files.prepare_directory(os.path.dirname(self._path))
        except OSError as error:
            if isinstance(error, files.WritableByOthers):
                files.warn_of_others(error)
            self._path = ""  # no directory to keep them in
            return
        content = files.read(self._path)
        if content is None:
            return
        if not content.startswith(self._title) or len(content) > _MOST_BYTES:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            return
        good = len(self._title)
        for key, answer, end in _records(content, good):
            yield key, answer
            good = end
        if good < len(content):  # what is appended after damage would not be read
            with contextlib.suppress(OSError), open(self._path, "r+b", opener=files.opener) as file:
                file.truncate(good)

    def _append(self, records: bytes) -> None:
        if not self._path:
            return
        try:
            if not os.path.exists(self._path):
                self._begin()
            # Unbuffered: one write. A short one leaves a damaged record, which readers recognise.
            with open(self._path, "ab", buffering=0, opener=files.opener) as file:
                if len(self._title) <= os.fstat(file.fileno()).st_size <= _MOST_BYTES:
                    file.write(records)
        except files.WritableByOthers as error:
            files.warn_of_others(error)
        except OSError:
            pass

    def _begin(self) -> None:
        """Makes the file with its title, unless another process is faster."""
        unfinished = f"{self._path}.{os.getpid()}"
        try:
            with open(unfinished, "wb", opener=files.opener) as file:
                file.write(self._title)
            os.link(unfinished, self._path)
        except FileExistsError:
            pass
        finally:
            os.unlink(unfinished)


def _keep(answers: dict[bytes, bytes], key: bytes, answer: bytes) -> None:
    """Adds an answer; the oldest quarter makes room if there are too many."""
    if len(answers) >= settings.max_calls:
        for old in list(itertools.islice(answers, len(answers) // 4 + 1)):
            answers.pop(old, None)  # or another thread has dropped it
    answers[key] = answer


def _records(content: bytes, start: int) -> Iterator[tuple[bytes, bytes, int]]:
    """Key, answer and end of each record, up to the first that is damaged."""
    while start + _HEAD.size <= len(content):
        key_size, answer_size, checksum = _HEAD.unpack_from(content, start)
        start += _HEAD.size
        end = start + key_size + answer_size
        body = content[start:end]
        if len(body) < key_size + answer_size or zlib.crc32(body) != checksum:
            return
        yield body[:key_size], body[key_size:], end
        start = end


_store = ShapeStore()


def find(key: bytes) -> bytes | None:
    """See :class:`ShapeStore`; C++ calls this, ``add`` too."""
    return _store.find(key)


def add(key: bytes, answer: bytes) -> None:
    _store.add(key, answer)


def flush() -> None:
    """Writes what is not written yet; at exit."""
    _store.flush()


def use(path: str) -> None:
    """From now on the answers are those of the file at this path."""
    global _store
    _store.flush()
    _store = ShapeStore(path)
