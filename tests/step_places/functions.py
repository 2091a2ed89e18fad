"""Variables, functions and their defaults."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from tests.step_places.common import Place, Read, place, unwatched

SCALE = 1.0
NAMES = {"scale": 1.0}


def set_global(value: float) -> None:
    globals()["SCALE"] = value


@place
def variable_of_a_closure() -> Place:
    scale = 1.0

    def change(value: float) -> None:
        nonlocal scale
        scale = value

    return Place(lambda x: x * scale, [change])


@place
def global_variable() -> Place:
    return Place(lambda x: x * SCALE, [set_global])


@place
def element_of_a_global_dict() -> Place:
    return Place(lambda x: x * NAMES["scale"], [lambda v: NAMES.update(scale=v)])


@place
def default_argument() -> Place:
    def read(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x * scale

    return Place(lambda x: read(x), [lambda v: setattr(read, "__defaults__", (v,))])


@place
def mutable_default_argument() -> Place:
    def read(x: torch.Tensor, scales: list[float] = [1.0]) -> torch.Tensor:  # noqa: B006
        return x * scales[-1]

    scales = read.__defaults__[0]  # type: ignore[index]
    return Place(lambda x: read(x), [scales.append, lambda v: scales.__setitem__(-1, v)])


@place
def default_by_keyword() -> Place:
    def read(x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return x * scale

    return Place(
        lambda x: read(x),
        [
            lambda v: setattr(read, "__kwdefaults__", {"scale": v}),
            lambda v: read.__kwdefaults__.update(scale=v),
        ],
    )


@place
def code_of_a_function() -> Place:
    def read(x: torch.Tensor) -> torch.Tensor:
        return x * 1.0

    def change(value: float) -> None:
        constants = (value if type(c) is float else c for c in read.__code__.co_consts)
        read.__code__ = read.__code__.replace(co_consts=tuple(constants))

    return Place(lambda x: read(x), [change])


@place
def attribute_of_a_function() -> Place:
    def read(x: torch.Tensor) -> torch.Tensor:
        return x * getattr(read, "scale", 1.0)

    return Place(read, [lambda v: setattr(read, "scale", v)])


@place
def partial_arguments() -> Place:
    def scaled(x: torch.Tensor, scales: list[float], *, more: float) -> torch.Tensor:
        return x * scales[0] * more

    scales = [1.0]
    partial = functools.partial(scaled, scales=scales, more=1.0)
    return Place(
        lambda x: partial(x),
        [lambda v: scales.__setitem__(0, v), lambda v: partial.keywords.update(more=v)],
    )


@place
def partial_as_the_function() -> Place:
    holder = {"scale": 1.0}
    return Place(
        functools.partial(lambda holder, x: x * holder["scale"], holder),
        [lambda v: holder.update(scale=v)],
    )


@place
def decorated_function() -> Place:
    scale = [1.0]

    def decorate(f: Read) -> Read:
        @functools.wraps(f)
        def wrapper(x: torch.Tensor) -> torch.Tensor:
            return f(x) * scale[0]

        return wrapper

    @decorate
    @torch.enable_grad()
    def read(x: torch.Tensor) -> torch.Tensor:
        return x * SCALE

    return Place(read, [lambda v: scale.__setitem__(0, v), set_global])


@unwatched
def singledispatch() -> Place:
    @functools.singledispatch
    def read(x: Any) -> Any:
        raise TypeError

    @read.register
    def _(x: torch.Tensor) -> torch.Tensor:
        return x * SCALE

    def register(value: float) -> None:
        read.register(torch.Tensor, lambda x: x * value)

    return Place(lambda x: read(x), [set_global, register])


@place
def function_that_torch_wraps() -> Place:
    scale = {"scale": 1.0}

    def scaled(x: torch.Tensor, by: dict[str, float]) -> torch.Tensor:
        return x * by["scale"] * SCALE

    read = torch.func.vmap(functools.partial(scaled, by=scale))
    return Place(lambda x: read(x), [lambda v: scale.update(scale=v), set_global])


@place
def context_of_one_s_own() -> Place:
    @contextlib.contextmanager
    def scaling() -> Iterator[float]:
        yield SCALE

    def read(x: torch.Tensor) -> torch.Tensor:
        with scaling() as scale:
            return x * scale

    return Place(read, [set_global])


@unwatched
def cached_function() -> Place:
    cached = functools.lru_cache(lambda: SCALE)

    def change(value: float) -> None:
        set_global(value)
        cached.cache_clear()

    return Place(lambda x: x * cached(), [change, set_global])


@place
def recursion() -> Place:
    depth = [1]

    def read(x: torch.Tensor, level: int = 0) -> torch.Tensor:
        return read(x * SCALE, level + 1) if level < depth[0] else x

    return Place(lambda x: read(x), [set_global, lambda v: depth.__setitem__(0, int(v * 4))])


@place
def imported_in_the_step() -> Place:
    def read(x: torch.Tensor) -> torch.Tensor:
        import math

        return x * math.scale  # type: ignore[attr-defined]

    import math

    math.scale = 1.0  # type: ignore[attr-defined]
    return Place(read, [lambda v: setattr(math, "scale", v)], lambda: delattr(math, "scale"))


@place
def module_that_is_imported_is_replaced() -> Place:
    def read(x: torch.Tensor) -> torch.Tensor:
        import math

        return x * math.sqrt(1.0)

    def change(value: float) -> None:
        other = types.ModuleType("math")
        other.sqrt = lambda _: value  # type: ignore[attr-defined]
        sys.modules["math"] = other

    import math

    return Place(read, [change], lambda: sys.modules.update(math=math))
