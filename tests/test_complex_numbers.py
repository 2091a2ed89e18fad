"""Complex Python numbers are constants of a program until they change, as other numbers are."""

from __future__ import annotations

import cmath
from collections.abc import Callable

import pytest
import torch

import lazyxla
from tests.support import DEVICE, counted

# Without one that is real, which is another kind of call: PyTorch takes that for a real number.
NUMBERS = [cmath.exp(-0.3j * i) * (1 + i) for i in range(1, 7)]

CALLS: dict[str, Callable[[torch.Tensor, complex], torch.Tensor]] = {
    "mul": lambda x, v: x * v,
    "rsub": lambda x, v: v - x,
    "rdiv": lambda x, v: v / x,
    "alpha": lambda x, v: torch.add(x, x, alpha=v),
    "value": lambda x, v: torch.addcmul(x, x, x, value=v),
    "in place": lambda x, v: x.clone().mul_(v).add_(v),
    "fill": lambda x, v: torch.full_like(x, v),
    "where": lambda x, v: torch.where(x.real > 0, x, v),
    "item": lambda x, v: x.index_fill(0, torch.tensor([1], device=x.device), v),
    "cpu tensor": lambda x, v: x * torch.tensor(v),
    "double cpu tensor": lambda x, v: x + torch.tensor(v, dtype=torch.complex128),
    "list": lambda x, v: torch._foreach_mul([x, x], [v, 2 * v])[1],
}


def test_changing_numbers_compile_once_more() -> None:
    x = torch.randn(3, 4, dtype=torch.complex64)
    for name, call in CALLS.items():
        on_device = x.to(DEVICE)
        with counted() as n:
            for number in NUMBERS:
                torch.testing.assert_close(call(on_device, number).cpu(), call(x, number))
        assert n.compiles <= 2, (name, n.compiles)
        assert n.fallbacks == 0


def test_parts_vary_by_themselves() -> None:
    x = torch.randn(5)
    y = x.to(DEVICE)
    for numbers in ([1 + 1j * i for i in range(1, 6)], [i + 1j for i in range(5)]):
        with counted() as n:
            for number in numbers:
                torch.testing.assert_close((y * number).cpu(), x * number)
        assert n.compiles <= 2


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.int64, torch.float32, torch.float64, torch.complex128],
    ids=str,
)
def test_promotion(dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, 1, 0]).to(dtype)
    y = x.to(DEVICE)
    for number in NUMBERS[:3]:
        for scalar in (number, torch.tensor(number), torch.tensor(number, dtype=torch.complex128)):
            torch.testing.assert_close((y + scalar).cpu(), x + scalar)


def test_step_of_a_simulation_settles() -> None:
    def run(device: str) -> torch.Tensor:
        torch.manual_seed(0)
        psi = torch.randn(8, dtype=torch.complex64).to(device)
        h = torch.randn(8, 8, dtype=torch.complex64).to(device)
        for i in range(8):
            psi = psi * cmath.exp(-0.1j * i) - 0.01j * (i + 1) * (h @ psi)
            psi = psi / psi.norm()
            if device != "cpu":
                lazyxla.sync()
        return psi.cpu()

    with counted() as n:
        found = run(DEVICE)
    torch.testing.assert_close(found, run("cpu"))
    assert n.compiles <= 4


def test_numbers_that_a_rule_must_know_are_static() -> None:
    x = torch.randn(4, dtype=torch.complex64)
    y = x.to(DEVICE)
    for number in (2 + 0j, 1j, 0.5 + 0.5j, 1j):
        torch.testing.assert_close((y**number).cpu(), x**number)
        torch.testing.assert_close((number**y).cpu(), number**x)


def test_eager_modes_and_the_host() -> None:
    x = torch.randn(4, dtype=torch.complex64)
    modes: tuple[bool | str, ...] = (True, "fused")
    for mode in modes:
        with lazyxla.eager_mode(mode):  # type: ignore[arg-type]
            y = x.to(DEVICE)
            for number in NUMBERS:
                torch.testing.assert_close((y * number).cpu(), x * number)
    y = x.to(DEVICE)
    for number in NUMBERS:
        back = torch.linalg.vector_norm(y * number)
        torch.testing.assert_close(back.cpu(), torch.linalg.vector_norm(x * number))


def test_errors_are_pytorchs() -> None:
    x = torch.ones(3)
    for call in (lambda x: x.clamp(min=1j), lambda x: x.mul_(2j), lambda x: x > 1j):
        messages = []
        for device in ("cpu", DEVICE):
            with pytest.raises(RuntimeError) as caught:
                call(x.to(device))
            messages.append(str(caught.value).splitlines()[0])
        assert messages[0] == messages[1]


def test_errors_of_values_are_told_after_values_without() -> None:
    x = torch.ones(3)
    y = x.to(DEVICE)
    for number in (2 + 0j, 3 + 0j):
        torch.testing.assert_close(y.clone().fill_(number).cpu(), x.clone().fill_(number))
    with pytest.raises(RuntimeError) as on_cpu:
        x.clone().fill_(2 + 1j)
    with pytest.raises(RuntimeError) as on_device:
        y.clone().fill_(2 + 1j)
    assert str(on_device.value).splitlines()[0] == str(on_cpu.value).splitlines()[0]
