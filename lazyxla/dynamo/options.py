"""What users may give to ``torch.compile`` besides the backend's name."""

from __future__ import annotations

import functools

from lazyxla import _C

Options = dict[str, bool | int | float | str]

_MODES = (None, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def check_mode(mode: str | None) -> None:
    """Checks that PyTorch knows the mode.

    Raises:
        ValueError: it does not.
    """
    if mode not in _MODES:
        known = ", ".join(repr(m) for m in _MODES if m)
        raise ValueError(f"lazyxla: torch.compile has no mode {mode!r}; it has {known}")


def check_options(options: Options | None) -> Options:
    """Checks compile options by asking the compiler, and returns them as a dict.

    Raises:
        TypeError: they are no dict from names to bool, int, float or str.
        ValueError: the compiler does not take them; the message is the compiler's.
    """
    if not options:
        return {}
    if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
        raise TypeError(
            "lazyxla: torch.compile's options must be a dict from names of XLA's options to "
            f"values, not {options!r}"
        )
    for name, value in options.items():
        if not isinstance(value, (bool, int, float, str)):
            raise TypeError(
                f"lazyxla: the compile option {name} must be a bool, int, float or str, "
                f"not {value!r}"
            )
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"lazyxla: the compile option {name} does not fit in 64 bits: {value}")
    if _C.captured_platform():  # they are for another compiler, which is asked later
        return dict(options)
    # The types belong to the key: True == 1.
    _ask_compiler(tuple(sorted((name, type(v), v) for name, v in options.items())))
    return dict(options)


@functools.lru_cache(maxsize=256)
def _ask_compiler(options: tuple[tuple[str, type, bool | int | float | str], ...]) -> None:
    try:
        _C.check_compile_options({name: value for name, _, value in options})
    except ValueError as error:
        given = {name: value for name, _, value in options}
        raise ValueError(
            f"lazyxla: XLA does not take the compile options {given}: {error}"
        ) from None
