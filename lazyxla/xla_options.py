"""Options of XLA's compiler: what ``torch.compile``, :func:`lazyxla.compile` and
``lazyxla.settings.xla_options`` take.

They are named as XLA's flags are, without the dashes: ``xla_cpu_enable_fast_math``.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping

from lazyxla import _C

Options = dict[str, bool | int | float | str]

_of_captures: list[Callable[[Options], None]] = []


@contextlib.contextmanager
def asking(check: Callable[[Options], None]) -> Iterator[None]:
    """In the block options are for another compiler: `check` raises a ValueError for what it does
    not take."""
    _of_captures.append(check)
    try:
        yield
    finally:
        _of_captures.pop()


def check_options(options: Options | None, whose: str) -> Options:
    """Checks options by asking the compiler, and returns them as a dict. Within a capture it is
    the compiler that the capture is for.

    Args:
        options: values by name; None is none.
        whose: what messages call them, for example "torch.compile's options".

    Raises:
        TypeError: they are no dict from names to bool, int, float or str.
        ValueError: the compiler does not take them; the message is the compiler's.
    """
    checked = check_types(options, whose)
    if not checked:
        return {}
    if _of_captures:
        _of_captures[-1](checked)
    else:
        # The types belong to the key: True == 1.
        _ask_compiler(tuple(sorted((name, type(v), v) for name, v in checked.items())))
    return checked


def check_types(options: Mapping[str, bool | int | float | str] | None, whose: str) -> Options:
    """:func:`check_options` without asking the compiler."""
    if options is None or options == {}:
        return {}
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise TypeError(
            f"lazyxla: {whose} must be a dict from names of XLA's options to values, "
            f"not {options!r}"
        )
    for name, value in options.items():
        if not isinstance(value, (bool, int, float, str)):
            raise TypeError(
                f"lazyxla: the compile option {name} must be a bool, int, float or str, "
                f"not {value!r}"
            )
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"lazyxla: the compile option {name} does not fit in 64 bits: {value}")
    return dict(options)


@functools.lru_cache(maxsize=256)
def _ask_compiler(options: tuple[tuple[str, type, bool | int | float | str], ...]) -> None:
    try:
        _C.check_compile_options({name: value for name, _, value in options})
    except ValueError as error:
        raise refused({name: value for name, _, value in options}, error) from None


def refused(options: Options, error: Exception) -> ValueError:
    """What is raised for options that the compiler refuses with this error."""
    return ValueError(f"lazyxla: XLA does not take the compile options {options}: {error}")


def parse(text: str) -> Options:
    """Options written as ``name=value,name=value``; true and false are bools, numbers are numbers.

    Raises:
        ValueError: a part is not of that form, or an integer does not fit in 64 bits.
    """
    options: Options = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name and equals:
            options[name.removeprefix("--")] = found = _value(value)
            if isinstance(found, int) and not -(2**63) <= found < 2**63:
                raise ValueError(f"expected integers of 64 bits, found {part.strip()!r}")
        elif part.strip():
            raise ValueError(f"expected name=value,name=value, found {part.strip()!r}")
    return options


def _value(text: str) -> bool | int | float | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) else text
