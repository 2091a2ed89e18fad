"""Memory of tensors: new, resized, that nobody has written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import lazyxla
from tests.support import DEVICE, assert_same, counted

Call = Callable[[str], Any]


def table(d: str) -> torch.Tensor:
    return torch.arange(12.0).reshape(3, 4).to(d)


def row(d: str) -> torch.Tensor:
    return torch.arange(4.0).to(d)


@pytest.mark.parametrize("sizes", [(-1,), (2, -3), (0, -1), (2**40, 2**40)])
def test_a_refused_size_changes_nothing(sizes: tuple[int, ...]) -> None:
    x, y = row(DEVICE), row(DEVICE) + 1
    with pytest.raises(RuntimeError):
        x.resize_(sizes)
    lazyxla.sync()
    assert_same(x, row("cpu"))
    assert_same(y, row("cpu") + 1)


@pytest.mark.parametrize("size", [8, 3])
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_a_resized_result_stays_where_it_is(size: int) -> None:
    """It grows beyond its memory, or is part of a greater one."""

    def written(d: str) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        memory = torch.zeros(size).to(d)
        result = memory[2:2]
        torch.add(torch.ones(3).to(d), 1, out=result)
        return memory, result, result.storage_offset(), result.untyped_storage().nbytes()

    ours, theirs = written(DEVICE), written("cpu")
    assert_same(ours[0], theirs[0])
    assert_same(ours[1], theirs[1])
    assert ours[2:] == theirs[2:]


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


EMPTY: dict[str, Call] = {
    "empty": lambda d: torch.empty(3, device=d),
    "integers": lambda d: torch.empty(3, dtype=torch.int32, device=d),
    "bool": lambda d: torch.empty(3, dtype=torch.bool, device=d),
    "complex": lambda d: torch.empty(3, dtype=torch.complex64, device=d),
    "bfloat16": lambda d: torch.empty(3, dtype=torch.bfloat16, device=d),
    "empty_strided": lambda d: torch.empty_strided((2, 3), (1, 2), device=d),
    "empty_like": lambda d: torch.empty_like(row(d)),
    "new_empty": lambda d: row(d).new_empty(2),
    "empty_permuted": lambda d: torch.empty_permuted((2, 3), (1, 0), device=d),
    "resize_": lambda d: row(d).resize_(6),
    "resize_ of a view": lambda d: row(d)[:2].resize_(6),
    "resize_as_": lambda d: row(d).resize_as_(table(d)),
}


@pytest.mark.parametrize("name", EMPTY)
def test_deterministic_memory(name: str, deterministic: None) -> None:
    assert_same(EMPTY[name](DEVICE), EMPTY[name]("cpu"))


def test_memory_is_not_filled_unless_asked_for(deterministic: None) -> None:
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        with counted() as n:
            torch.empty(3, device=DEVICE)
        assert n.nodes_recorded == 0
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True
