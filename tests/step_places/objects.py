"""Objects and classes."""

from __future__ import annotations

import abc
import collections
import dataclasses
import enum
import functools
import types
from typing import Any

import torch

from tests.step_places import common
from tests.step_places.common import Place, fresh, place, set_scale, unwatched


@place
def attribute() -> Place:
    config = fresh()()
    config.scale = 1.0
    return Place(
        lambda x: x * config.scale,
        [lambda v: setattr(config, "scale", v), lambda v: config.__dict__.update(scale=v)],
    )


@place
def attribute_that_is_missing() -> Place:
    config = fresh()()
    kind = type(config)

    def replace_dict(value: float) -> None:
        config.__dict__ = {"scale": value}

    return Place(
        lambda x: config(x),
        [
            lambda v: setattr(config, "scale", v),
            lambda v: config.__dict__.pop("scale", None),
            lambda v: setattr(kind, "scale", v),
            replace_dict,
        ],
    )


@place
def attribute_whose_name_is_made_up() -> Place:
    config = fresh()()
    return Place(
        lambda x: x * getattr(config, "sc" + "ale"), [lambda v: setattr(config, "scale", v)]
    )


@place
def another_class() -> Place:
    config, other = fresh()(), fresh(scale=0.25)

    def change(value: float) -> None:
        other.scale = value
        config.__class__ = other

    return Place(lambda x: x * config.scale, [change])


@place
def class_attribute_of_a_base() -> Place:
    base = fresh()
    kind = fresh(base=base)
    config = kind()
    return Place(
        lambda x: x * config.scale,
        [
            lambda v: setattr(base, "scale", v),
            lambda v: setattr(kind, "scale", v),
            lambda v: setattr(kind, "__bases__", (fresh(scale=v),)),
        ],
    )


@place
def method_that_is_replaced() -> Place:
    kind = fresh()
    config = kind()
    return Place(
        lambda x: config.scaled(x),
        [
            lambda v: setattr(kind, "scaled", lambda self, x: x * v),
            lambda v: setattr(config, "scaled", lambda x: x * common.SCALE),
            set_scale,
        ],
    )


@place
def bound_method() -> Place:
    config = fresh()()
    scaled = config.scaled
    return Place(lambda x: scaled(x), [lambda v: setattr(config, "scale", v)])


@place
def property_of_a_class() -> Place:
    def change(value: float) -> None:
        kind.scale = property(lambda self: value)

    kind = fresh(scale=property(lambda self: common.SCALE * self.inner), inner=1.0)
    config = kind()
    return Place(
        lambda x: x * config.scale,
        [set_scale, lambda v: setattr(config, "inner", v), change],
    )


@place
def descriptor() -> Place:
    class Scale:
        value = 1.0

        def __get__(self, owner: Any, kind: type) -> float:
            return self.value * common.SCALE

    scale = Scale()
    config = fresh(scale=scale)()
    return Place(lambda x: x * config.scale, [set_scale, lambda v: setattr(scale, "value", v)])


@unwatched
def cached_property() -> Place:
    cached = functools.cached_property(lambda self: common.SCALE)
    kind = fresh(cached=cached)
    cached.__set_name__(kind, "cached")
    config = kind()
    return Place(
        lambda x: x * config.cached,
        [set_scale, lambda v: (set_scale(v), config.__dict__.pop("cached", None))],
    )


@place
def getattr_of_a_class() -> Place:
    kind = fresh(__getattr__=lambda self, name: common.SCALE if name == "size" else 1.0)
    config = kind()
    return Place(lambda x: x * config.size, [set_scale, lambda v: setattr(config, "size", v)])


@unwatched
def dataclass() -> Place:
    @dataclasses.dataclass
    class Options:
        scale: float = 1.0
        more: list[float] = dataclasses.field(default_factory=lambda: [1.0])

    options = Options()
    return Place(
        lambda x: x * dataclasses.asdict(options)["scale"] * options.more[0],
        [lambda v: setattr(options, "scale", v), lambda v: options.more.__setitem__(0, v)],
    )


@place
def matched_by_position() -> Place:
    @dataclasses.dataclass
    class Options:
        amount: float = 1.0

    options = Options()

    def read(x: torch.Tensor) -> torch.Tensor:
        match options:
            case Options(found):
                return x * found
        return x

    return Place(read, [lambda v: setattr(options, "amount", v)])


@place
def matched_by_names_of_the_class() -> Place:
    class Options:
        __match_args__ = ("amount",)

    options: Any = Options()
    options.amount = 1.0

    def read(x: torch.Tensor) -> torch.Tensor:
        match options:
            case Options(found):
                return x * found
        return x

    return Place(read, [lambda v: setattr(options, "amount", v)])


@place
def call_that_is_an_object() -> Place:
    inner = fresh()()
    config = fresh(__call__=inner)()
    return Place(lambda x: config(x), [lambda v: setattr(inner, "scale", v)])


@place
def registered_classes() -> Place:
    class Scaled(abc.ABC):  # noqa: B024
        pass

    def read(x: torch.Tensor) -> torch.Tensor:
        return x * (0.5 if isinstance(common.SCALE, Scaled) else 1.0)

    def change(value: float) -> None:
        Scaled.register(float)

    return Place(read, [change])


@unwatched
def slots() -> Place:
    class Slotted:
        __slots__ = ("scale",)

    config = Slotted()
    config.scale = 1.0
    return Place(lambda x: x * config.scale, [lambda v: setattr(config, "scale", v)])


@unwatched
def slots_beside_a_dict() -> Place:
    class Plain:
        pass

    class Slotted(Plain):
        __slots__ = ("scale",)

    config = Slotted()
    config.scale = 1.0
    return Place(lambda x: x * config.scale, [lambda v: setattr(config, "scale", v)])


@place
def simple_namespace() -> Place:
    config = types.SimpleNamespace(scale=1.0)
    return Place(lambda x: x * config.scale, [lambda v: setattr(config, "scale", v)])


@place
def enumeration() -> Place:
    class Kind(enum.Enum):
        PLAIN = 1.0
        HALF = 0.5

    holder = [Kind.PLAIN]

    def change(value: float) -> None:
        holder[0] = Kind.HALF if holder[0] is Kind.PLAIN else Kind.PLAIN

    return Place(
        lambda x: x * holder[0].value, [change, lambda v: setattr(Kind.PLAIN, "_value_", v)]
    )


@unwatched
def names_in_a_tuple() -> Place:
    Pair = collections.namedtuple("Pair", "scales other")
    pair = Pair([1.0], 1)
    return Place(lambda x: x * pair.scales[0], [lambda v: pair.scales.__setitem__(0, v)])


def _tuple(kind: type, *elements: Any) -> Place:
    pair: Any = kind(*elements)
    pair.scale = 1.0
    return Place(
        lambda x: x * pair[0][0] * pair.scale,
        [lambda v: pair[0].__setitem__(0, v), lambda v: setattr(pair, "scale", v)],
    )


@unwatched
def subclass_of_a_named_tuple() -> Place:
    return _tuple(fresh(base=collections.namedtuple("Pair", "a b")), [1.0], 2)


@place
def subclass_of_tuple() -> Place:
    return _tuple(fresh(base=tuple), ([1.0], 2))
