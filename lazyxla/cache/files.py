"""Which directories and files of the caches may be used, and what is said of the others.

A cache holds code that runs here, so it is used only if no other user can write to it: a directory
or file belongs to this user or to root, and neither its group nor others may write to it (in a
sticky directory, such as /tmp, they may: no other user can replace our files there). The caches
share one directory for each user, which is made with mode 700, as are those above it that are
missing.

A path that is not a regular file (a directory, a FIFO, a socket) is left alone, and never waited
for.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from lazyxla import _C


class WritableByOthers(PermissionError):
    """Others can write to it. `strerror` says who; `filename` is its path."""


def prepare_directory(path: str) -> None:
    """Makes a directory of the caches if it is missing.

    Raises:
        OSError: it cannot be made; it is a :class:`WritableByOthers` if others can write to it.
    """
    _make(path)
    status = os.stat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    _check_private(path, status)


def _make(path: str) -> None:
    try:
        os.stat(path)
    except FileNotFoundError:
        parent = os.path.dirname(path)
        if parent not in ("", path):
            _make(parent)
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.mkdir(path, 0o700)


def opener(path: str, flags: int) -> int:
    """For `open`: of files that no other user can write to. A new one gets mode 600.

    Raises:
        OSError: it cannot be opened, or is no file; it is a :class:`WritableByOthers` if others
            can write to it.
    """
    # O_NONBLOCK: opening a FIFO would wait for its other end.
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY, 0o600)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no file", path)
        _check_private(path, status)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read(path: str) -> bytes | None:
    """The content of a file; None if it cannot be read. Warns if others can write to it."""
    try:
        with open(path, "rb", opener=opener) as file:
            return file.read()
    except WritableByOthers as error:
        warn_of_others(error)
    except OSError:
        pass
    return None


def _check_private(path: str, status: os.stat_result) -> None:
    if status.st_uid not in (os.geteuid(), 0):
        reason = f"it belongs to another user, number {status.st_uid}"
        raise WritableByOthers(errno.EPERM, reason, path)
    is_sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_sticky:
        mode = stat.S_IMODE(status.st_mode)
        raise WritableByOthers(
            errno.EPERM, f"other users may write to it, its mode is {mode:o}", path
        )


def warn_of_others(error: WritableByOthers) -> None:
    """Warns, once for a path, that it is not used."""
    _warn_once(
        error.filename,
        f"lazyxla: {error.filename} is not used: {error.strerror}, and what is kept there is code "
        "that runs here. Make it yours alone (chown, chmod go-w), remove it, or set "
        "LAZYXLA_CACHE_DIR to another directory.",
    )


def warn_not_kept(directory: str, error: OSError) -> None:
    """Warns, once for a directory, that programs cannot be kept there."""
    _warn_once(
        directory,
        f"lazyxla: compiled programs cannot be kept in {directory}: {error.strerror}. The next "
        "process compiles them again; set LAZYXLA_CACHE_DIR to a directory that can be written, or "
        "LAZYXLA_CACHE_SIZE=0 to do without.",
    )


_warned: set[str] = set()


def _warn_once(path: str, text: str) -> None:
    if path not in _warned:
        _warned.add(path)
        _C.warn(text)
