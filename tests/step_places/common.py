"""What the places share: the register of them, and a number that is global."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

Read = Callable[[torch.Tensor], torch.Tensor]
Change = Callable[[float], object]


class Place(NamedTuple):
    read: Read
    changes: list[Change]
    undo: Callable[[], object] = lambda: None


SCALE = 1.0

PLACES: dict[str, Callable[[], Place]] = {}
UNWATCHED: set[str] = set()
"""Places that no guard watches: a step that reads them is not captured."""


def place(make: Callable[[], Place]) -> Callable[[], Place]:
    PLACES[make.__name__] = make
    return make


def unwatched(make: Callable[[], Place]) -> Callable[[], Place]:
    UNWATCHED.add(make.__name__)
    return place(make)


def set_scale(value: float) -> None:
    global SCALE
    SCALE = value


class Config:
    scale = 1.0
    options = {"scale": 1.0}  # noqa: RUF012

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def fresh(name: str = "Fresh", base: type = Config, **members: Any) -> Any:
    """A class of its own."""
    return type(name, (base,), {"__module__": __name__, **members})
