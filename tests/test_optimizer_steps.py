"""Compiled and plain optimizer steps in turns: nothing is read back."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lazyxla
from lazyxla import optimizer_steps
from tests.support import DEVICE, assert_same, counted

NAMES = [
    *("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "RMSprop", "ASGD", "Rprop", "SGD"),
]

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "uncut")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def step(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    module(x).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "single"])
@pytest.mark.parametrize("name", NAMES)
def test_in_turns(name: str, foreach: bool) -> None:
    if name == "NAdam" and not foreach:
        pytest.skip("PyTorch cannot compile it: it multiplies a CPU tensor by one of the device")
    theirs, inputs = model(), torch.randn(8, 4, 8)
    ours = copy.deepcopy(theirs).to(DEVICE)
    options = {"lr": 0.01, "foreach": foreach}
    of_ours = getattr(torch.optim, name)(ours.parameters(), **options)
    of_theirs = getattr(torch.optim, name)(theirs.parameters(), **options)
    compiled = torch.compile(step, backend="lazyxla")
    for number, (x, kind) in enumerate(zip(inputs, "pcppcppp", strict=True)):
        on_device = x.to(DEVICE)
        lazyxla.sync(wait=True)
        before = lazyxla.counters()
        (compiled if kind == "c" else step)(ours, of_ours, on_device)
        recorded = lazyxla.counters()
        lazyxla.sync(wait=True)
        after = lazyxla.counters()
        if number > 2:  # the first ones make the optimizer's state, and move it
            assert after["downloads"] == before["downloads"]
            assert recorded["executions"] == before["executions"]
            assert after["executions"] == before["executions"] + 1
        if number > 5:
            assert after["compiles"] == before["compiles"]
        step(theirs, of_theirs, x)
        assert not any(group.get("capturable") for group in of_ours.param_groups)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        # Eight steps with powers of beta in float32, where PyTorch on the CPU has float64.
        torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-5)
    on_host = getattr(torch.optim, name)(theirs.parameters(), **options)
    file = io.BytesIO()
    torch.save(of_ours.state_dict(), file)
    file.seek(0)
    on_host.load_state_dict(torch.load(file, map_location="cpu"))
    step(theirs, on_host, inputs[0])


@pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "single"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["captured", "loaded"])
def test_counts_on_the_device_lose_no_digits(how: str, name: str, foreach: bool) -> None:
    """PyTorch computes with Python numbers, in float64. One program serves all captured steps."""
    theirs, inputs = model().double(), torch.randn(9, 4, 8, dtype=torch.float64)
    ours = copy.deepcopy(theirs).to(DEVICE)
    options = {"lr": 0.01, "foreach": foreach}
    of_ours = getattr(torch.optim, name)(ours.parameters(), **options)
    of_theirs = getattr(torch.optim, name)(theirs.parameters(), **options)
    captured = lazyxla.compile(step, capture=True)
    for number, x in enumerate(inputs):
        step(theirs, of_theirs, x)
        with counted() as n:
            (captured if how == "captured" else step)(ours, of_ours, x.to(DEVICE))
            lazyxla.sync()
        if number == 0 and how == "loaded":
            for state in of_ours.state.values():
                state.update({k: v.to(DEVICE) for k, v in state.items() if torch.is_tensor(v)})
        if number > 0 and how == "captured":
            assert n.compiles == 0
            assert n.captured_steps == (number > 1)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert_same(a, b)
    for a, b in zip(of_ours.state.values(), of_theirs.state.values(), strict=True):
        if "step" in b:
            assert_same(a["step"], b["step"])


def test_counts_of_a_step_with_a_closure_lose_no_digits() -> None:
    theirs = model().double()
    ours = copy.deepcopy(theirs).to(DEVICE)
    x = torch.randn(4, 8, dtype=torch.float64)

    def make(module: nn.Module) -> Any:
        optimizer = torch.optim.RAdam(module.parameters(), lr=0.01)

        def step(x: Tensor) -> Any:
            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = module(x).square().mean()
                loss.backward()
                return loss

            return optimizer.step(closure)

        return step

    ours_step, theirs_step = lazyxla.compile(make(ours), capture=True), make(theirs)
    for number in range(9):
        theirs_step(x)
        with counted() as n:
            ours_step(x.to(DEVICE))
        assert n.compiles == 0 or number == 0
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_counts_are_float64_where_there_is_float64(platform: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(optimizer_steps.lookup, "recorded_platform", lambda: platform)
    module = model().to(DEVICE)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.randn(4, 8, device=DEVICE)).sum().backward()
    changes = list(optimizer_steps.count_on_device(optimizer, optimizer.param_groups[0]))
    counts = [value.dtype for _, key, value in changes if key == "step"]
    assert counts == ([] if platform == "tpu" else [torch.float64] * 4)


def test_a_step_that_fails_leaves_the_group_as_it_was() -> None:
    module = model().to(DEVICE)
    optimizer = torch.optim.Adam(module.parameters())
    step(module, optimizer, torch.randn(2, 8, device=DEVICE))
    for state in optimizer.state.values():
        state["step"] = state["step"].to(DEVICE)

    def fail() -> Any:
        assert optimizer.param_groups[0]["capturable"]
        raise RuntimeError("the closure's")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="closure's"):
            optimizer.step(fail)
    assert not optimizer.state_dict()["param_groups"][0]["capturable"]  # what is saved then
    step(module, optimizer, torch.randn(2, 8, device=DEVICE))
    assert not optimizer.param_groups[0]["capturable"]


def test_what_the_user_set_stays() -> None:
    module = model().to(DEVICE)
    optimizer = torch.optim.Adam(module.parameters(), capturable=True)
    for _ in range(2):
        step(module, optimizer, torch.randn(2, 8, device=DEVICE))
        assert optimizer.param_groups[0]["capturable"]


class Odd(torch.optim.Optimizer):
    """It keeps something else for its parameters than PyTorch's optimizers do."""

    def __init__(self, parameters: Any, kept: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "capturable": False})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = kept

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.sub_(parameter.grad, alpha=group["lr"])


@pytest.mark.parametrize("kept", [None, 3, (), {}, {"step": 1}, {"step": None}], ids=repr)
def test_of_other_optimizers(kept: Any) -> None:
    theirs = model()
    ours = copy.deepcopy(theirs).to(DEVICE)
    x = torch.randn(4, 8)
    for module, given in ((ours, x.to(DEVICE)), (theirs, x)):
        optimizer = Odd(module.parameters(), kept)
        step(module, optimizer, given)
        step(module, optimizer, given)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.cpu(), b)


def test_replacements_of_threads_that_overlap() -> None:
    """Each has its own as long as its block lasts, whichever ends first."""
    seen: list[float] = []

    class Optimizer(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            seen.append(self.param_groups[0]["lr"])

    optimizer = Optimizer([torch.zeros(2, requires_grad=True)], {"lr": 1.0})

    def giving(rate: float) -> Any:
        replace = lambda of: [(of.param_groups[0], "lr", rate)]  # noqa: E731
        return optimizer_steps.replacing([optimizer], replace)

    first, second = giving(2.0), giving(3.0)
    for block, enter in ((first, True), (second, True), (first, False), (second, False)):
        _ = block.__enter__() if enter else block.__exit__(None, None, None)
        optimizer.step()
        assert optimizer.param_groups[0]["lr"] == 1.0
    assert seen == [2.0, 3.0, 3.0, 1.0]
