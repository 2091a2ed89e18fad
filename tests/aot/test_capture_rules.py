"""What a capture refuses and puts back: values, data, errors, modes, arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lazyxla
from lazyxla import aot
from tests.aot.training import adamw_step
from tests.conftest import RunPython
from tests.support import needs_libtpu

pytestmark = [needs_libtpu, pytest.mark.usefixtures("nothing_happens")]

V5E = "v5e:2x2"


def _print(x: torch.Tensor) -> torch.Tensor:
    print(x)
    return x


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda x: x * x.sum().item(), r"asked for, by \.item\(\) or a condition"),
        (lambda x: x if x.sum() > 0 else -x, r"asked for, by \.item\(\) or a condition"),
        (lambda x: x.cpu(), r"\(Float\[3, 3\]\) was asked for, by a copy to the CPU"),
        (_print, r"asked for, by a copy to the CPU"),
        (lambda x: x.nonzero(), r"aten::nonzero\(Float\[3, 3\]\) has a result whose shape depends"),
        (lambda x: x[x > 0], r"aten::nonzero\(Bool\[3, 3\]\) has a result whose shape depends"),
    ],
)
def test_values_cannot_be_read(fn: Callable[..., Any], message: str) -> None:
    with pytest.raises(
        RuntimeError, match=r"lazyxla\.aot: .*test_capture_rules\.py:\d+: .*" + message
    ):
        aot.compile(fn, (torch.ones(3, 3),), topology=V5E)


def test_nor_afterwards() -> None:
    with aot.capture(V5E):
        x = torch.ones(3, device="lazyxla") + 1
    with pytest.raises(RuntimeError, match="it has no value"):
        x.tolist()


def test_data_from_before_comes_back(run_python: RunPython) -> None:
    code = """
import copy, lazyxla, torch
from torch import nn

model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to("lazyxla")
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
x = torch.randn(8, 4).to("lazyxla")
plain = torch.tensor([1., 2., 3.]).to("lazyxla")
in_part, through_a_view = plain.clone(), torch.eye(2).to("lazyxla")

def step():
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()

step()
before = copy.deepcopy({k: v.cpu() for k, v in model.state_dict().items()})
with lazyxla.aot.capture("v5e:2x2") as programs:
    for _ in range(3):
        step()
        lazyxla.sync()
    plain.zero_()
    plain[1] = 7
    in_part[1] = 7
    through_a_view.view(-1).neg_()
assert [p.times for p in programs] == [3, 1], programs
# Parameters, momenta and statistics give their memory away, as in a run.
assert len(programs[0].program.donations) == 4 + 4 + 3, programs[0].program.donations
assert plain.tolist() == in_part.tolist() == [1, 2, 3]
assert through_a_view.tolist() == [[1, 0], [0, 1]]
for name, value in model.state_dict().items():
    torch.testing.assert_close(value.cpu(), before[name], rtol=0, atol=0)
step()
lazyxla.sync(wait=True)
assert not torch.equal(model[0].weight.cpu(), before["0.weight"])
"""
    run_python(code)


def test_an_error_leaves_nothing_behind(run_python: RunPython) -> None:
    code = """
import lazyxla, torch
x = torch.ones(3, device="lazyxla")
try:
    with lazyxla.aot.capture("v5e:2x2"):
        y = x * 2
        x.add_(1)
        raise KeyError
except KeyError:
    pass
assert x.tolist() == [1, 1, 1]
assert (x + 1).tolist() == [2, 2, 2]
"""
    run_python(code)


def test_one_capture_at_a_time_and_the_random_state() -> None:
    before = lazyxla.get_rng_state()
    with aot.capture(V5E) as programs:
        torch.rand(3, device="lazyxla").add_(1)
        kept = torch.rand(3, device="lazyxla")
        with pytest.raises(RuntimeError, match="a capture is active already"), aot.capture(V5E):
            pass
    assert len(programs) == 1
    assert torch.equal(lazyxla.get_rng_state(), before)
    del kept


def test_modes_do_not_cut_the_program() -> None:
    with lazyxla.eager_mode(True):
        compiled = aot.compile(lambda x: (x + 1) * 2, (torch.ones(8),), topology=V5E)
        assert lazyxla.eager_mode() is True
    assert compiled.num_outputs == 1


@pytest.mark.parametrize(
    ("args", "keywords", "error", "message"),
    [
        ((3,), {}, TypeError, "expected a function or a module, not 3"),
        ((nn.Linear,), {}, TypeError, "expected a function or a module"),
        ((torch.exp, torch.ones(1)), {}, TypeError, r"not Tensor; for a single one write \(x,\)"),
        ((torch.exp, (), [1]), {}, TypeError, "kwargs is a dict of keyword arguments, not list"),
        ((torch.exp,), {"topology": 5}, TypeError, "a topology is given by its name or by"),
        ((torch.exp,), {"topology": "v9"}, ValueError, "names no TPUs"),
        ((torch.exp,), {"train_step": adamw_step}, TypeError, "needs the module that it trains"),
        ((nn.ReLU(),), {"train_step": True}, TypeError, "returns the step, not True"),
        ((nn.ReLU(),), {"train_step": lambda m: 3}, TypeError, "the step, a function, not 3"),
        ((lambda: 3,), {}, ValueError, "the call computes nothing on the device"),
        ((torch.exp, (torch.ones(3).to_sparse(),)), {}, ValueError, "has dense tensors only"),
        ((torch.add, (torch.ones(2), torch.ones(3))), {}, RuntimeError, "must match the size of"),
    ],
)
def test_wrong_arguments(
    args: tuple[Any, ...], keywords: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        aot.compile(*args, **{"topology": V5E, **keywords})
