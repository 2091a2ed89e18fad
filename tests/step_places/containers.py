"""Containers, modules and the process."""

from __future__ import annotations

import collections
import os
import sys
import types
from typing import Any

import torch

from tests.step_places import common
from tests.step_places.common import Place, Read, place, set_scale, unwatched


@place
def elements_of_a_list() -> Place:
    scales = [1.0, 1.0]

    def read(x: torch.Tensor) -> torch.Tensor:
        for scale in scales:
            x = x * scale
        return x

    return Place(
        read,
        [
            lambda v: scales.__setitem__(0, v),
            scales.append,
            lambda v: scales.pop() if len(scales) > 1 else None,
            lambda v: scales.reverse(),
        ],
    )


def _chained(items: Any) -> Read:
    """The order matters."""

    def read(x: torch.Tensor) -> torch.Tensor:
        for scale in items:
            x = x * float(scale) + 0.125
        return x

    return read


@place
def order_of_a_set() -> Place:
    scales: set[Any] = {1, 9}  # in the same place of its table

    def change(value: float) -> None:
        order = list(scales)
        scales.clear()
        scales.update(reversed(order))

    return Place(_chained(scales), [change, lambda v: scales.add(v)])


@place
def equal_numbers_in_a_set() -> Place:
    scales: set[Any] = {1}

    def read(x: torch.Tensor) -> torch.Tensor:
        for scale in scales:
            x = x * (0.5 if isinstance(scale, float) else 1.0)
        return x

    return Place(read, [lambda v: (scales.clear(), scales.add(1.0 if v < 0.7 else 1))])


@place
def order_of_a_dict() -> Place:
    scales = {"a": 1.0, "b": 0.5}

    def change(value: float) -> None:
        scales["a"] = scales.pop("a")

    return Place(lambda x: _chained(scales.values())(x), [change])


@place
def order_of_an_ordered_dict() -> Place:
    scales = collections.OrderedDict(a=1.0, b=0.5, c=2.0)
    return Place(
        lambda x: _chained(scales.values())(x),
        [
            lambda v: scales.move_to_end("a"),
            lambda v: scales.move_to_end("c", last=False),
            lambda v: scales.update(b=v),
        ],
    )


@place
def factory_of_a_defaultdict() -> Place:
    scales: Any = collections.defaultdict(lambda: common.SCALE)

    def read(x: torch.Tensor) -> torch.Tensor:
        x = x * scales["scale"]
        del scales["scale"]
        return x

    def change(value: float) -> None:
        scales.default_factory = lambda: value

    return Place(read, [set_scale, change])


@unwatched
def deque() -> Place:
    scales = collections.deque([1.0], maxlen=1)
    return Place(lambda x: x * scales[0], [scales.append])


@place
def user_list() -> Place:
    scales = collections.UserList([1.0])
    return Place(lambda x: x * scales[0], [lambda v: scales.__setitem__(0, v)])


@place
def nested_containers() -> Place:
    tree = {"layers": [{"scale": (1.0, [1.0])}]}

    def change(value: float) -> None:
        tree["layers"][0]["scale"] = (value, [1.0])

    return Place(
        lambda x: x * tree["layers"][0]["scale"][0] * tree["layers"][0]["scale"][1][0],  # type: ignore[index]
        [change, lambda v: tree["layers"][0]["scale"][1].__setitem__(0, v)],  # type: ignore[attr-defined]
    )


@place
def attribute_of_a_module() -> Place:
    module = types.ModuleType("options")
    module.scale = 1.0  # type: ignore[attr-defined]
    return Place(
        lambda x: x * module.scale,
        [lambda v: setattr(module, "scale", v), lambda v: module.__dict__.update(scale=v)],
    )


@place
def getattr_of_a_module() -> Place:
    module = types.ModuleType("options")
    module.__getattr__ = lambda name: common.SCALE  # type: ignore[method-assign]
    return Place(lambda x: x * module.scale, [set_scale, lambda v: setattr(module, "scale", v)])


@unwatched
def environment_variable() -> Place:
    os.environ["STEP_SCALE"] = "1.0"
    return Place(
        lambda x: x * float(os.environ["STEP_SCALE"]),
        [lambda v: os.environ.__setitem__("STEP_SCALE", str(v))],
        lambda: os.environ.pop("STEP_SCALE"),
    )


@place
def builtin_that_is_hidden() -> Place:
    def change(value: float) -> None:
        globals()["float"] = lambda _: value

    return Place(lambda x: x * float("1.0"), [change], lambda: globals().pop("float", None))


@unwatched
def module_found_by_name() -> Place:
    sys.modules["step_options"] = module = types.ModuleType("step_options")
    module.scale = 1.0  # type: ignore[attr-defined]

    def read(x: torch.Tensor) -> torch.Tensor:
        return x * sys.modules["step_options"].scale

    return Place(
        read, [lambda v: setattr(module, "scale", v)], lambda: sys.modules.pop("step_options")
    )


@place
def host_tensor() -> Place:
    scale = torch.ones(())
    array = scale.numpy()

    def change(value: float) -> None:
        array[...] = value

    return Place(lambda x: x * scale.item(), [change, lambda v: scale.fill_(v)])


@unwatched
def gradient_of_a_host_tensor() -> Place:
    weight = torch.ones((), requires_grad=True)
    weight.grad = torch.ones(())

    def change(value: float) -> None:
        weight.grad = torch.tensor(value)

    return Place(lambda x: x * weight.grad.item(), [change])  # type: ignore[union-attr]


@place
def gradient_that_a_host_tensor_gets() -> Place:
    weight = torch.ones((), requires_grad=True)

    def change(value: float) -> None:
        weight.grad = torch.tensor(value) if value == 0.5 else None

    return Place(lambda x: x * (1.0 if weight.grad is None else 0.5), [change])


@unwatched
def numpy_array() -> Place:
    import numpy as np

    scale = np.ones(2)
    return Place(lambda x: x * float(scale[0]), [lambda v: scale.fill(v)])
