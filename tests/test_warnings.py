"""PyTorch's warnings come with every call that they are about, as on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import lazyxla
from tests.support import DEVICE, counted, error_of

Call = Callable[[Tensor, Tensor], object]

CALLS: dict[str, Call] = {
    "pointwise": lambda x, out: torch.sin(x, out=out),
    "of two": lambda x, out: torch.add(x, x, out=out),
    "matmul": lambda x, out: torch.mm(x, x, out=out),
    "reduction": lambda x, out: torch.sum(x, 1, out=out),
    "of a list": lambda x, out: torch.cat([x, x], out=out),
    "two results": lambda x, out: torch.sort(x, out=(out, torch.empty(1).long().to(x.device))),
    "indices": lambda x, out: torch.gather(x, 0, torch.zeros_like(x).long(), out=out),
    "silent, linspace": lambda x, out: torch.linspace(0, 1, 3, out=out),
    "silent, linspace of tensors": lambda x, out: torch.linspace(x[0, 0], x[0, 1], 3, out=out),
    "silent, logspace": lambda x, out: torch.logspace(0, 1, 3, out=out),
    "silent, addbmm": lambda x, out: torch.addbmm(x, x[None], x[None], out=out),
    "silent, bernoulli": lambda x, out: torch.bernoulli(x, out=out),
    "silent, multinomial": lambda x, out: torch.multinomial(
        x, 2, out=torch.zeros(5).long().to(x.device)
    ),
    "silent, zeros": lambda x, out: torch.zeros(3, out=out),
    "silent, full": lambda x, out: torch.full((3,), 2.0, out=out),
    "silent, eye": lambda x, out: torch.eye(3, out=out),
    "silent, randperm": lambda x, out: torch.randperm(3, out=out),
    "range": lambda x, out: torch.arange(7, out=out),
    "range with a step": lambda x, out: torch.arange(0, 1, 0.25, out=out),
    "silent, range of as many": lambda x, out: torch.arange(5, out=out[None]),
    "silent, narrow_copy": lambda x, out: torch.narrow_copy(x, 0, 0, 2, out=out),
    "silent, logsigmoid": lambda x, out: torch._C._nn.log_sigmoid(x, out=out),
    "right size": lambda x, out: torch.sin(x[0, :2], out=out[:2]),
}


def heard(call: Call, device: str, size: int) -> list[str]:
    x, out = torch.rand(size, size).to(device), torch.empty(5).to(device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(x, out)
    return sorted(str(w.message).split(" (Triggered")[0] for w in caught)


# Of sizes and numbers.
CALLS |= {
    "variance": lambda x, out: torch.var(x[:1], 0),
    "deviation, out": lambda x, out: torch.std(x[0], 0, correction=3, out=out[0]),
    "silent, variance": lambda x, out: torch.var(x, 0, correction=2),
    "two results, complex": lambda x, out: torch.var_mean(torch.complex(x, x)[0, 0]),
    "bounds": lambda x, out: out.random_(0, 2**24 + 2),
    "bounds in half precision": lambda x, out: out.half().random_(0, 2**11 + 2),
    "two results, bounds": lambda x, out: out.random_(-(2**24) - 1, 2**25),
    "silent, bounds": lambda x, out: out.random_(0, 2**24 + 1),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_call_warns_once(name: str) -> None:
    lazyxla.sync()
    expected = heard(CALLS[name], "cpu", 3)
    none = name == "right size" or name.startswith("silent")
    assert len(expected) == (0 if none else 2 if name.startswith("two results") else 1)
    for _ in range(3):
        assert heard(CALLS[name], DEVICE, 3) == expected


def test_a_call_that_infers_nothing_warns() -> None:
    first = heard(CALLS["pointwise"], DEVICE, 7)
    with counted() as n:
        assert heard(CALLS["pointwise"], DEVICE, 7) == first
    assert n.shape_inferences == 0
    assert len(first) == 1


def test_a_warning_that_is_an_error_ends_the_call() -> None:
    out = torch.empty(2, device=DEVICE)
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match="was resized"):
                torch.sin(torch.ones(3, device=DEVICE), out=out)
        out.resize_(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_imaginary_parts_that_are_lost(dtype: torch.dtype) -> None:
    def seen(device: str) -> list[str]:
        x = torch.ones(3, dtype=torch.complex64).to(device)
        torch.set_warn_always(True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            x.to(dtype)
            torch.ones(3, dtype=dtype, device=device).copy_(x)
        torch.set_warn_always(False)
        return [str(w.message).split(" (Triggered")[0] for w in caught]

    assert len(seen("cpu")) == (0 if dtype is torch.bool else 2)
    assert seen(DEVICE) == seen("cpu")


def test_conditions_of_bytes() -> None:
    condition, x = torch.tensor([1, 0, 3]).byte(), torch.ones(3)
    with pytest.warns(UserWarning, match="where received a uint8 condition tensor"), counted() as n:
        result = torch.where(condition.to(DEVICE), x.to(DEVICE), 0.0)
    assert n.fallbacks == 0
    assert result.tolist() == [1.0, 0.0, 1.0]


def test_kernels_that_are_not_deterministic() -> None:
    def calls(d: str) -> list[tuple[type, str]]:
        x, i = torch.ones(1, 1, 2, 2).to(d), torch.zeros(1, 1, 2, 2).long().to(d)
        flat = i.flatten()[:1], x.flatten()[:1]
        tried = [
            lambda: x.put(*flat),
            lambda: x.put(*flat, accumulate=True),
            lambda: torch.nn.functional.max_unpool2d(x, i, 2),
        ]
        return [error_of(call) for call in tried]

    calls(DEVICE)  # what is known of the calls does not depend on the setting
    torch.use_deterministic_algorithms(True)
    try:
        assert calls(DEVICE) == calls("cpu")
        assert sum("deterministic" in text for _, text in calls(DEVICE)) == 2
    finally:
        torch.use_deterministic_algorithms(False)
