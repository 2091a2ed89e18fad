"""What code reads without naming it, or by a function that goes by another name."""

from __future__ import annotations

import builtins
import collections
import contextlib
import functools
import operator
import types
import weakref
from typing import Any

import torch

from tests.step_places import common
from tests.step_places import types as own_types
from tests.step_places.common import Place, fresh, place, set_scale, unwatched


class Options:
    """What a test puts there."""


def _options(**attributes: Any) -> Any:
    options = Options()
    vars(options).update(attributes)
    return options


# --- Text ----------------------------------------------------------------------------------------


@place
def attribute_in_a_format_string() -> Place:
    options = _options(inner=_options(amount=1.0))
    return Place(
        lambda x: x * float(f"{options.inner.amount:.3f}"),
        [lambda v: setattr(options.inner, "amount", v)],
    )


@place
def format_string_from_elsewhere() -> Place:
    options, template, write = _options(amount=1.0), "{0.amount}", "{0.amount}".format
    return Place(
        lambda x: x * float(template.format(options)) * float(write(options)),
        [lambda v: setattr(options, "amount", v)],
    )


@place
def text_by_percent() -> Place:
    number: Any = fresh(__repr__=lambda self: str(common.SCALE))()
    template, modulo = "%r", operator.mod
    return Place(lambda x: x * float(template % number) * float(modulo("%s", number)), [set_scale])


@place
def text_by_a_function_of_another_name() -> Place:
    number: Any = fresh(__repr__=lambda self: str(common.SCALE))()
    write = [repr, str]
    return Place(lambda x: x * float(write[0](number)) * float(write[1](number)), [set_scale])


# --- Attributes ----------------------------------------------------------------------------------


@place
def getattr_of_another_name() -> Place:
    options, get, name = _options(amount=1.0), getattr, "am"
    return Place(
        lambda x: x * get(options, name + "ount"), [lambda v: setattr(options, "amount", v)]
    )


@place
def getattr_of_builtins() -> Place:
    options, name = _options(amount=1.0), "am"
    return Place(
        lambda x: x * builtins.getattr(options, name + "ount"),
        [lambda v: setattr(options, "amount", v)],
    )


@place
def getattr_in_a_partial() -> Place:
    options = _options(amount=1.0)
    get = functools.partial(getattr, options, "am" + "ount")
    return Place(lambda x: x * get(), [lambda v: setattr(options, "amount", v)])


@place
def attrgetter_of_another_name() -> Place:
    options, getter, name = _options(amount=1.0), operator.attrgetter, "am"
    return Place(
        lambda x: x * getter(name + "ount")(options), [lambda v: setattr(options, "amount", v)]
    )


@place
def keys_of_a_mapping() -> Place:
    """`**` and dict() call keys() by its name."""
    mapping: Any = fresh(
        keys=lambda self: ["whole" if common.SCALE == 1.0 else "half"],
        __getitem__=lambda self, key: 1.0,
    )()

    def scaled(x: torch.Tensor, whole: float = 0.5, half: float = 0.5) -> torch.Tensor:
        return x * whole

    return Place(lambda x: scaled(x, **mapping) * len(next(iter(dict(mapping)))), [set_scale])


@place
def closed_by_its_context() -> Place:
    last = [1.0]
    thing: Any = fresh(close=lambda self: last.__setitem__(0, common.SCALE))()

    def read(x: torch.Tensor) -> torch.Tensor:
        with contextlib.closing(thing):
            pass
        return x * last[0]

    return Place(read, [set_scale])


@place
def attribute_of_a_partial() -> Place:
    partial: Any = functools.partial(lambda x, scale: x * scale, scale=1.0)

    def replace(value: float) -> None:
        partial.__setstate__((partial.func, (), {"scale": value}, dict(vars(partial))))

    return Place(
        lambda x: partial(x) * getattr(partial, "amount", 1.0),
        [lambda v: setattr(partial, "amount", v), replace],
    )


@place
def names_of_a_function() -> Place:
    def named() -> None:
        """1.0"""

    named.__name__ = named.__qualname__ = "1.0"
    return Place(
        lambda x: x * float(named.__name__) * float(named.__qualname__) * float(str(named.__doc__)),
        [
            lambda v: setattr(named, "__name__", str(v)),
            lambda v: setattr(named, "__qualname__", str(v)),
            lambda v: setattr(named, "__doc__", str(v)),
        ],
    )


@unwatched
def annotations_of_a_function() -> Place:
    def annotated() -> None: ...

    annotated.__annotations__["scale"] = 1.0
    return Place(
        lambda x: x * annotated.__annotations__["scale"],
        [lambda v: annotated.__annotations__.update(scale=v)],
    )


@unwatched
def what_makes_annotations() -> Place:
    """As functions have it from Python 3.14 on."""

    def annotated() -> None: ...

    def annotate_with(value: float) -> None:
        annotated.__annotate__ = lambda form: {"scale": value}  # type: ignore[attr-defined]

    annotate_with(1.0)
    return Place(lambda x: x * annotated.__annotate__(1)["scale"], [annotate_with])  # type: ignore[attr-defined]


@unwatched
def subclasses() -> Place:
    base = fresh()
    kinds = [fresh(base=base)]
    return Place(
        lambda x: x * base.__subclasses__()[-1].scale,
        [lambda v: kinds.append(fresh(base=base, scale=v))],
    )


@unwatched
def proxy_of_a_class() -> Place:
    kind = fresh()
    proxy, alive = weakref.proxy(kind), [kind]
    return Place(lambda x: x * proxy.scale, [lambda v: setattr(alive[0], "scale", v)])


@place
def class_that_is_denied() -> Place:
    options = fresh(__class__=property(lambda self: type))()
    return Place(lambda x: x * options.scale, [lambda v: setattr(options, "scale", v)])


# --- Variables -----------------------------------------------------------------------------------


@unwatched
def globals_of_a_function() -> Place:
    return Place(lambda x: x * set_scale.__globals__["SCALE"], [set_scale])


@unwatched
def globals_by_another_name() -> Place:
    evaluate = builtins.eval
    return Place(lambda x: x * evaluate("common.SCALE"), [set_scale])


@unwatched
def globals_of_a_frame() -> Place:
    def read(x: torch.Tensor) -> torch.Tensor:
        try:
            raise ValueError
        except ValueError as error:
            trace: Any = error.__traceback__
            return x * trace.tb_frame.f_globals["common"].SCALE

    return Place(read, [set_scale])


@unwatched
def builtins_of_a_function() -> Place:
    space: dict[str, Any] = {"__builtins__": {"float": float}}
    exec("def read(x): return x * float('1.0')", space)
    read = space["read"]
    return Place(lambda x: read(x), [lambda v: space["__builtins__"].update(float=lambda text: v)])


# --- Modules -------------------------------------------------------------------------------------


@place
def class_of_a_module() -> Place:
    module: Any = types.ModuleType("options")
    module.scale = 1.0

    def change(value: float) -> None:
        module.__class__ = fresh(base=types.ModuleType, scale=property(lambda self: value))

    def undo(value: float) -> None:
        module.__class__ = types.ModuleType

    return Place(lambda x: x * module.scale, [change, undo])


@place
def getattr_of_a_module_that_is_replaced() -> Place:
    module: Any = types.ModuleType("options")
    return Place(
        lambda x: x * getattr(module, "scale", 1.0),
        [lambda v: setattr(module, "__getattr__", lambda name: v)],
    )


@unwatched
def module_beside_the_step_s() -> Place:
    """It has the name of one of Python's."""

    def read(x: torch.Tensor) -> torch.Tensor:
        from .types import SCALE

        return x * SCALE

    def undo() -> None:
        own_types.SCALE = 1.0

    return Place(read, [lambda v: setattr(own_types, "SCALE", v)], undo)


@place
def outer_module_of_one_that_is_imported() -> Place:
    module: Any = collections
    module.scale = 1.0

    def read(x: torch.Tensor) -> torch.Tensor:
        import collections.abc

        return x * collections.scale  # type: ignore[attr-defined]

    return Place(read, [lambda v: setattr(module, "scale", v)], lambda: delattr(module, "scale"))


@unwatched
def settings_of_torch_that_is_imported() -> Place:
    def read(x: torch.Tensor) -> torch.Tensor:
        import torch

        return x * (0.5 if torch.backends.cudnn.benchmark else 1.0)

    def change(value: float) -> None:
        with torch.backends.__allow_nonbracketed_mutation():  # PyTorch's own tests forbid it
            torch.backends.cudnn.benchmark = value == 0.5

    return Place(read, [change], lambda: change(1.0))
