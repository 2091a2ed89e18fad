"""When recorded work runs.

Lazy, the default: at :func:`lazyxla.sync` or when a value is read. Eager: at every operator. A
compiled region: once, at its end, whatever the mode around it.

The mode belongs to the process, not to a thread: autograd's threads record, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar, overload

from lazyxla import _C

F = TypeVar("F", bound=Callable[..., Any])


class _Restore:
    """What setting a mode returns: as a context manager, it brings the earlier mode back."""

    def __init__(self, before: bool) -> None:
        self._before = before

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        _set_eager(self._before)


def _set_eager(value: bool) -> bool:
    if value:
        _C.sync(False)  # what is pending belongs to the lazy program before
    return _C.exchange_eager(value)


@overload
def eager_mode() -> bool: ...
@overload
def eager_mode(enabled: bool) -> _Restore: ...
def eager_mode(enabled: bool | None = None) -> bool | _Restore:
    """Sets or tells whether each operator runs at its call.

    ``eager_mode(True)`` switches for good; ``with eager_mode(True):`` for a block. An operator
    still runs asynchronously: its call returns once it is enqueued. Each distinct operator call is
    compiled once.

    Args:
        enabled: the new mode; None leaves it as it is.

    Returns:
        Without an argument, whether the mode is eager; else a context manager.
    """
    if enabled is None:
        return _C.eager()
    if not isinstance(enabled, bool):
        raise TypeError(f"eager_mode() takes True or False, not {enabled!r}")
    return _Restore(_set_eager(enabled))


class region:
    """A block that becomes one program: ``with lazyxla.region(): ...``.

    What was recorded before runs first, so that nothing of it leaks into the program. The block's
    own work runs when it ends, also when it ends by an exception; a value that is read inside cuts
    it in two. Regions may nest: the outermost counts.
    """

    _depth = 0

    def __enter__(self) -> None:
        if region._depth == 0:
            _C.sync(False)
            region._eager_outside = _C.exchange_eager(False)
        region._depth += 1

    _eager_outside = False

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        region._depth -= 1
        if region._depth == 0:
            try:
                _C.sync(False)
            finally:
                _C.exchange_eager(region._eager_outside)


def compile(function: F) -> F:
    """Makes one program of each call of a function, a whole training step for example.

    Works as a decorator and as a call. The function is recorded at every call (so it may do
    anything), and its program is compiled once for each distinct graph. Pending work runs before
    it, its own when it returns; the mode around it does not matter.

    Args:
        function: any callable. What it returns is returned.
    """

    @functools.wraps(function)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        with region():
            return function(*args, **kwargs)

    return compiled  # type: ignore[return-value]
