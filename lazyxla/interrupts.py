"""Ctrl-C where Python code must not be cut in two."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class Deferred:
    """A block in which Ctrl-C waits until its end; for blocks of less than a second.

    Python raises KeyboardInterrupt between any two instructions of the main thread, also in the
    middle of an import, which leaves modules half registered that nothing completes. In other
    threads, and where the program has its own idea of SIGINT outside of Python, it does nothing.
    """

    def __init__(self) -> None:
        self._handler: object = None
        self._came = False

    def __enter__(self) -> Deferred:
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler) and threading.current_thread() is threading.main_thread():
            self._handler = handler
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._handler is None:
            return
        signal.signal(signal.SIGINT, self._handler)  # type: ignore[arg-type]
        if self._came:
            signal.raise_signal(signal.SIGINT)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True
