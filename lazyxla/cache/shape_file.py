"""The file of PyTorch's answers about shapes: csrc/dispatch/inference_store.h reads and writes it.

Its first line is the file's own name, which contains the versions; then follow records, one after
the other, each appended by one write, so that many processes can share the file. A file that cannot
be read or written (files.py) is no error: the answers are then computed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

from lazyxla.cache import files

_MOST_BYTES = 64 << 20


def checksum() -> str:
    """Of the Python code that makes the answers: one that is kept is not checked again."""
    package = Path(__file__).parent.parent
    code = sorted([*package.glob("meta_*.py"), *package.glob("argument_checks/*.py")])
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in code)).hexdigest()[:16]


class ShapeFile:
    """The file at a path, which may not be there yet."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._title = f"lazyxla shapes 3 {os.path.basename(path)}\n".encode()

    def read(self) -> bytes:
        """All records. Makes the directory if need be."""
        if not self._path:
            return b""
        try:
            files.prepare_directory(os.path.dirname(self._path))
        except OSError as error:
            if isinstance(error, files.WritableByOthers):
                files.warn_of_others(error)
            self._path = ""  # no directory to keep them in
            return b""
        content = files.read(self._path)
        if content is None:
            return b""
        if content.startswith(self._title) and len(content) <= _MOST_BYTES:
            return content[len(self._title) :]
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        return b""

    def keep_first(self, size: int) -> None:
        """Truncates it after this many bytes of records: what follows is damaged, and nothing
        appended after that would be read."""
        with contextlib.suppress(OSError), open(self._path, "r+b", opener=files.opener) as file:
            file.truncate(len(self._title) + size)

    def append(self, records: bytes) -> None:
        """Adds records."""
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
