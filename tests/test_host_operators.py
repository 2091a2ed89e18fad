"""Operators without a rule whose decomposition has parts without one: host calls and fallbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import lazyxla
from lazyxla import _C
from lazyxla.dynamo import backend
from lazyxla.lowering import (
    LoweringError,
    Node,
    Program,
    Ref,
    TensorSpec,
    check_lowering,
    how,
    lower,
)
from tests.support import DEVICE, assert_same, check, counted, on_device, on_host, warned

library = torch.library.Library("lazyxla_parts", "DEF")
library.define("doubled(Tensor x, Tensor[] more) -> Tensor")


@torch.library.impl(library, "doubled", "CPU")
def _(x: torch.Tensor, more: list[torch.Tensor]) -> torch.Tensor:
    return sum(more, x) * 2


@torch.library.register_fake("lazyxla_parts::doubled")
def _(x: torch.Tensor, more: list[torch.Tensor]) -> torch.Tensor:
    return torch.empty_like(x)


doubled = torch.ops.lazyxla_parts.doubled
Decompose = Callable[[Any, Callable[..., Any]], None]


@pytest.fixture
def decompose(monkeypatch: pytest.MonkeyPatch) -> Iterator[Decompose]:
    """Gives an operator a decomposition until the test ends."""
    changed: list[str] = []

    def give(op: Any, function: Callable[..., Any]) -> None:
        monkeypatch.setitem(torch._decomp.decomposition_table, op, function)
        changed.append(op._schema.name)
        _C.rule_changed(changed[-1], False)

    yield give
    monkeypatch.undo()
    for name in changed:
        _C.rule_changed(name, False)


def test_a_decomposition_whose_parts_have_rules(decompose: Decompose) -> None:
    decompose(doubled.default, lambda x, more: torch.stack([x, *more]).sum(0) * 2)
    assert how("lazyxla_parts::doubled") == "decomposition"
    with counted() as n:
        check(lambda x, y: doubled(x + 1, [y]) - 1, torch.arange(3.0), torch.ones(3))
    assert (n.fallbacks, n.host_calls, n.executions) == (0, 0, 1)


def test_a_part_that_only_the_host_can_run(
    decompose: Decompose, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    """The operator runs there as a whole, and is what is counted."""
    decompose(doubled.default, lambda x, more: on_host(x) * 2)
    lazyxla.reset_counters()
    for _ in range(2):
        check(lambda x: doubled(x + 1, [x]), torch.arange(3.0))
    assert lazyxla.fallbacks() == {"lazyxla_parts::doubled": 2}
    text = "lazyxla_parts::doubled has no lowering for such arguments and runs on the host"
    assert warned(capfd, recwarn).count(text) == 1


def test_parts_are_tried_out_for_each_kind_of_call(decompose: Decompose) -> None:
    def function(x: torch.Tensor, more: list[torch.Tensor]) -> torch.Tensor:
        return on_host(x) if x.dtype == torch.float64 else sum(more, x) * 2

    decompose(doubled.default, function)
    for dtype, fallbacks in ((torch.float32, 0), (torch.float64, 1), (torch.float32, 0)):
        x = torch.arange(3, dtype=dtype)
        for _ in range(2):
            with counted() as n:
                check(lambda x: doubled(x, []), x)
            assert n.fallbacks == fallbacks


def test_a_decomposition_that_cannot_be_traced(decompose: Decompose) -> None:
    def function(x: torch.Tensor, more: list[torch.Tensor]) -> torch.Tensor:
        raise RuntimeError("not for these")

    decompose(doubled.default, function)
    with counted() as n:
        check(lambda x: doubled(x, []), torch.arange(3.0))
    assert n.fallbacks == 1


def test_a_compiled_kernel_is_called_within_the_program(decompose: Decompose) -> None:
    decompose(torch.ops.aten.geqrf.default, lambda a: (on_host(a), on_host(a)))
    assert how("aten::geqrf") == "decomposition"
    a = torch.eye(3) + 1
    ours = on_device(a)
    with counted() as n:
        kept = torch.geqrf(ours + 1)
        lazyxla.sync(wait=True)
    assert (n.fallbacks, n.host_calls, n.executions) == (0, 1, 1)
    assert_same(kept, torch.geqrf(a + 1))


def test_a_host_call_within_a_decomposition(decompose: Decompose) -> None:
    decompose(doubled.default, lambda x, more: torch.linalg.matrix_exp(x) * 2)
    x = on_device(torch.zeros(2, 2))
    with counted() as n:
        y = doubled(x, [])
        lazyxla.sync(wait=True)
    assert (n.fallbacks, n.host_calls) == (0, 1)
    assert_same(y, 2 * torch.eye(2))


def program_of(name: str) -> Program:
    spec = TensorSpec(torch.float32, (3,))
    return Program([spec], [Node(name, (Ref(0), []), (spec,))], [Ref(1)], [], {})


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_accelerators_have_no_host_calls(platform: str, decompose: Decompose) -> None:
    program = program_of("lazyxla_parts::doubled")
    decompose(doubled.default, lambda x, more: torch.linalg.ldl_factor_ex(x.diag())[0].diagonal())
    assert check_lowering(program, platform) == "host"
    assert check_lowering(program, "cpu") == "call"
    with pytest.raises(LoweringError, match=r"lazyxla_parts::doubled is lowered through its deco"):
        lower(program, platform)
    decompose(doubled.default, lambda x, more: x * 2)
    assert check_lowering(program, platform) == check_lowering(program, "cpu") == "device"


def test_within_traced_graphs(decompose: Decompose, fresh_dynamo: None) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return doubled(x + 1, [x]) - 1

    for decomposition, fallbacks in ((lambda x, more: on_host(x), 1), (lambda x, m: x + x + 2, 0)):
        torch._dynamo.reset()
        decompose(doubled.default, decomposition)
        x = on_device(torch.ones(3))
        with counted() as n:
            y = torch.compile(function, backend=backend)(x)
            lazyxla.sync(wait=True)
        assert n.fallbacks == fallbacks
        assert_same(y, function(torch.ones(3)))


def test_a_full_graph_region_says_what_breaks_it(decompose: Decompose) -> None:
    decompose(doubled.default, lambda x, more: on_host(x))

    @lazyxla.compile(full_graph=True)
    def region(x: torch.Tensor) -> torch.Tensor:
        return doubled(x, [])

    with pytest.raises(RuntimeError, match="lazyxla_parts::doubled runs on the host"):
        region(torch.ones(3, device=DEVICE))
