"""torch.compile of functions that are not on one device alone: parts, and what is between."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import lazyxla
from lazyxla.dynamo import backend
from lazyxla.lowering import registry
from tests.support import DEVICE, assert_same, check, counted, on_device, on_host

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def _compile(function: Any, **kwargs: Any) -> Any:
    return torch.compile(function, backend=backend, **kwargs)


def test_cpu_argument_moved_inside() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.to(y.device, torch.float64) * 2 + y

    compiled = _compile(function, fullgraph=True)
    x, y = torch.randn(3), torch.randn(3, dtype=torch.float64)
    ours = y.to(DEVICE)
    compiled(x, ours).cpu()
    with counted() as n:
        result = compiled(x, ours)
        lazyxla.sync()
    assert (n.nodes_recorded, n.executions, n.uploads) == (1, 1, 1)
    assert_same(result, function(x, y))


def test_result_moved_to_the_cpu_and_back() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        on_cpu = (x.exp() + 1).cpu() * 3
        return on_cpu, (on_cpu - 1).to(x.device).sqrt()

    x = torch.rand(4)
    on_cpu, result = _compile(function, fullgraph=True)(x.to(DEVICE))
    theirs, expected = function(x)
    assert on_cpu.device.type == "cpu"
    torch.testing.assert_close(on_cpu, theirs)
    assert_same(result, expected)


def test_parts_around_an_operator_of_the_host_are_one_node_each() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = (x + 1) * 2
        return on_host(y).relu().sum() + y.mean()

    x = torch.randn(4, 3)
    ours = x.to(DEVICE)
    compiled = _compile(function, fullgraph=True)
    before = set(registry.graphs)  # some of which may be dropped meanwhile
    lazyxla.reset_counters()
    assert_same(compiled(ours), function(x))
    assert len(registry.graphs.keys() - before) == 2
    assert sum(lazyxla.fallbacks().values()) == 1


def test_cpu_numbers_are_inputs_of_the_program() -> None:
    def function(x: torch.Tensor, step: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        step.add_(1)
        return x * (1 - 0.9**step) / scale.sqrt()

    compiled = _compile(function, fullgraph=True)
    x = torch.randn(3)
    ours = x.to(DEVICE)
    step, scale = torch.tensor(0.0), torch.tensor(2.0, dtype=torch.float64)
    mine = step.clone()
    for turn in range(5):
        expected = function(x, step, scale)
        with counted() as n:
            result = compiled(ours, mine, scale)
            lazyxla.sync()
        assert n.executions == 1
        assert n.compiles == (turn < 2)  # first a constant, then an input
        assert_same(result, expected)
        assert torch.equal(mine, step)


@pytest.mark.parametrize("value", [True, 1 + 2j])
def test_cpu_numbers_that_cannot_be_inputs_are_copied(value: Any) -> None:
    function = _compile(lambda x, y: x * y)
    x, y = torch.randn(3), torch.tensor(value)
    assert_same(function(x.to(DEVICE), y), x * y)


def test_constants_and_factories() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        table = torch.tensor([1.0, 2.0, 3.0], device=x.device)
        small = torch.tensor(0.5)
        return (
            x * table
            + torch.arange(3, device=x.device)
            + torch.tensor([4, 5, 6]).to(x.device)
            + small
        )

    compiled = _compile(function, fullgraph=True)
    for _ in range(2):
        check(compiled, torch.randn(3))


def test_no_arguments() -> None:
    compiled = _compile(lambda: torch.arange(4, device=DEVICE) * 2.5, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled().cpu(), torch.arange(4) * 2.5)


def test_index_on_the_cpu() -> None:
    index = torch.tensor([2, 0, 2])
    compiled = _compile(lambda x, i: x[i] + 1, fullgraph=True)
    x = torch.randn(4, 2)
    assert_same(compiled(x.to(DEVICE), index), x[index] + 1)


def test_arguments_of_the_cpu_alone() -> None:
    x = torch.randn(3)
    with counted() as n:
        torch.testing.assert_close(_compile(lambda t: t.sin() + 1)(x), x.sin() + 1)
    assert n.nodes_recorded == 0


def test_write_to_an_argument_that_the_host_reads_later() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        singular = on_host(y)  # between the parts
        old = x + singular.sum()
        x.copy_(y)
        return old, singular

    x = torch.randn(3, 3)
    ours = x.to(DEVICE)
    results = _compile(function, fullgraph=True)(ours)
    assert_same(results, function(x))
    assert_same(ours, x)


def test_unsupported_operators_in_training() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (on_host(x.tanh()) * 3).sum()

    theirs = torch.randn(4, 3, requires_grad=True)
    ours = on_device(theirs)
    function(theirs).backward()
    _compile(function)(ours).backward()
    torch.testing.assert_close(ours.grad.cpu(), theirs.grad)


def test_graphs_go_with_their_function() -> None:
    torch._dynamo.reset()
    gc.collect()
    before = dict(registry.graphs)

    def function(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x).sum()

    compiled = _compile(function)
    x = torch.randn(7).to(DEVICE).requires_grad_()
    compiled(x).backward()
    assert len(registry.graphs) == len(before) + 2
    del compiled
    torch._dynamo.reset()
    gc.collect()
    # Pending nodes are lowered after their function is gone.
    expected = x.detach().cpu().requires_grad_()
    function(expected).backward()
    torch.testing.assert_close(x.grad.cpu(), expected.grad)
    gc.collect()
    assert registry.graphs.keys() == before.keys()


def test_errors_keep_their_type_and_text() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        if x.shape[0] == 3:
            raise KeyError("no such thing")
        return y

    with pytest.raises(KeyError, match="no such thing"):
        _compile(function)(torch.ones(3, device=DEVICE))
    with pytest.raises(RuntimeError, match="must have same reduction dim"):
        _compile(lambda x: x @ x)(torch.ones(2, 3, device=DEVICE))


def test_lowering_errors_name_the_operator_and_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(b: Any, *_: Any) -> Any:
        raise ValueError("not today")

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        return y.atan() * 2  # this line

    monkeypatch.setitem(registry._rules, "aten::atan", refuse)
    result = _compile(function)(torch.ones(2, device=DEVICE))
    with pytest.raises(NotImplementedError) as caught:
        result.cpu()
    text = str(caught.value)
    assert "aten::atan(float32[2]) cannot be lowered: not today" in text
    assert "test_dynamo_parts.py" in text
    assert "return y.atan() * 2  # this line" in text


@pytest.mark.parametrize("kind", ["number", "row", "values", "accumulated", "mixed"])
def test_writing_by_mask(kind: str) -> None:
    def function(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        if kind == "number":
            x[mask] = 5.0
        elif kind == "row":
            x[:, mask[0] > 0] = torch.arange(2.0, device=x.device).reshape(2, 1)
        elif kind == "values":
            x[mask] = torch.arange(4.0, device=x.device)
        elif kind == "accumulated":
            x.index_put_((mask,), torch.arange(4.0, device=x.device), accumulate=True)
        else:
            x[torch.tensor([1, 0, 1], device=x.device), mask.any(0)] = 7.0
        return x * 2

    mask = torch.tensor([[True, False, True], [True, True, False]])
    compiled = _compile(function, fullgraph=True)
    x = torch.randn(2, 3)
    assert_same(compiled(x.to(DEVICE), mask.to(DEVICE)), function(x, mask))


def test_returning_what_was_written() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x += 1
        return x, x * 2

    x = torch.randn(3)
    ours = x.to(DEVICE)
    results = _compile(function)(ours)
    assert_same(results, function(x))
    assert results[0] is ours


def test_two_devices() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x * 2).to(y.device) + y, (y.sum() * 3).to(x.device) + x

    x, y = torch.randn(3), torch.randn(3)
    results = _compile(function, fullgraph=True)(x.to("lazyxla:0"), y.to("lazyxla:1"))
    assert [r.device.index for r in results] == [1, 0]
    assert_same(results, function(x, y))


def test_argument_on_another_device_than_traced() -> None:
    call = _calls_of(lambda x: x + 1, torch.ones(2, device="lazyxla:0"))
    with pytest.raises(RuntimeError, match="argument 0 of a compiled graph was on lazyxla:0"):
        call([torch.ones(2, device="lazyxla:1")])
    with pytest.raises(TypeError, match="argument 0 of a compiled graph must be a tensor, not int"):
        call([3])
    with pytest.raises(TypeError, match="a compiled graph takes a list, not tuple"):
        call((torch.ones(2, device="lazyxla:0"),))


def _calls_of(function: Any, *args: torch.Tensor) -> Any:
    """The compiled form of a function's one graph, as AOTAutograd calls it."""
    from lazyxla.dynamo import execution

    calls = []
    with pytest.MonkeyPatch.context() as patch:
        compile_graph = execution._one_call

        def spy(*how: Any) -> Any:
            calls.append(compile_graph(*how))
            return calls[-1]

        patch.setattr(execution, "_one_call", spy)
        _compile(function)(*args)
    (call,) = calls
    return call


def test_random_numbers_of_the_cpu_are_drawn_in_the_order_of_the_calls() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = torch.bernoulli((x * 0.5).cpu())  # waits for the device
        return first, torch.rand(3), torch.rand(3) + (x + 1).cpu()

    x = torch.rand(3)
    found = []
    for call, given in ((function, x), (_compile(function, fullgraph=True), x.to(DEVICE))):
        torch.manual_seed(0)
        found.append(call(given))
    torch.testing.assert_close(found[1], found[0])
