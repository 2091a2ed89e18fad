"""What only PyTorch's CPU kernels check is checked at the call on the device, too.

Numbers are no part of what shape inference remembers: a call with a good number comes first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import lazyxla
from tests.support import error_of

Call = Callable[..., Any]


def _gradient(in_place: Call, x: torch.Tensor) -> torch.Tensor:
    """The gradient of a function that overwrites its argument."""
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(in_place(leaf.clone()).sum(), leaf)[0]


# What is called with a tensor of ones and a number; a number that is right and one that is not.
NUMBERS: dict[str, tuple[Call, complex, complex]] = {
    "cauchy": (lambda x, v: x.cauchy_(0, v), 1.0, -1.0),
    "exponential": (lambda x, v: x.exponential_(v), 1.0, -1.0),
    "geometric": (lambda x, v: x.geometric_(v), 0.5, 2.0),
    "log_normal": (lambda x, v: x.log_normal_(1, v), 1.0, -1.0),
    "uniform": (lambda x, v: x.uniform_(0, v), 1.0, -1.0),
    "normal": (lambda x, v: x.normal_(0, v), 1.0, -1.0),
    "normal of a mean": (lambda x, v: torch.normal(x, v), 1.0, -1.0),
    "bernoulli": (lambda x, v: x.bernoulli_(v), 0.5, 2.0),
    "native_dropout": (lambda x, v: torch.native_dropout(x, v, True), 0.5, 2.0),
    "power of integers": (lambda x, v: x.long() ** v, 2, -1),
    "powers of integers": (lambda x, v: torch._foreach_pow([x.long()], v), 2, -1),
    "modulo zero": (lambda x, v: x.long() % v, 2, 0),
    "division by zero": (lambda x, v: x.long() // v, 2, 0),
    "alpha": (lambda x, v: torch.add(x.byte(), x.byte(), alpha=v), 2, 300),
    "clamp": (lambda x, v: x.byte().clamp(min=v), 2, 300),
    "addcmul": (lambda x, v: torch.addcmul(x.byte(), x.byte(), x.byte(), value=v), 2, 300),
    "addmm": (lambda x, v: torch.addmm(x.byte(), x.byte(), x.byte(), alpha=v), 2, 300),
    "fill": (lambda x, v: x.byte().fill_(v), 2, 300),
    "fill of floats": (lambda x, v: x.fill_(v), 2.0, 1e300),
    "full": (lambda x, v: torch.full((3,), v, dtype=torch.int8, device=x.device), 2, 300),
    "full_like": (lambda x, v: torch.full_like(x.byte(), v), 2, 300),
    "where": (lambda x, v: torch.where(x > 0, x.byte(), v), 2, 300),
    "setitem": (lambda x, v: x.byte().__setitem__(0, v), 2, 300),
    "masked_fill": (lambda x, v: x.byte().masked_fill(x > 0, v), 2, 300),
    "index_fill": (lambda x, v: x.byte().index_fill(0, x[0].long(), v), 2, 300),
    "scatter": (lambda x, v: x.byte().scatter(0, x.long(), v), 2, 300),
    "renorm": (lambda x, v: torch.renorm(x, 2, 0, v), 2.0, -1.0),
    "order of renorm": (lambda x, v: torch.renorm(x, v, 0, 1.0), 2.0, -1.0),
    "cdist": (lambda x, v: torch.cdist(x, x, p=v), 3.0, -1.0),
    "huber_loss": (lambda x, v: F.huber_loss(x, x, delta=v), 2.0, -1.0),
    "smooth_l1_loss": (lambda x, v: F.smooth_l1_loss(x, x, beta=v), 2.0, -1.0),
    "softshrink": (lambda x, v: F.softshrink(x, v), 2.0, -1.0),
    "histc": (lambda x, v: torch.histc(x, 10, 0, v), 2.0, -1.0),
    "histc of bytes": (lambda x, v: torch.histc(x.byte(), 4, v, 9), 0, -5),
    "histc of small integers": (lambda x, v: torch.histc(x.char(), 4, 0, v), 9, 300),
    "complex clamp": (lambda x, v: x.clamp(min=v), 2 + 0j, 2 + 1j),
    "celu": (lambda x, v: F.celu(x, v), 2.0, 0.0),
    "elu in place": (lambda x, v: _gradient(lambda y: F.elu_(y, v), x), 2.0, -1.0),
    "leaky_relu in place": (lambda x, v: _gradient(lambda y: F.leaky_relu_(y, v), x), 2.0, -1.0),
    "rrelu in place": (lambda x, v: _gradient(lambda y: F.rrelu_(y, v, 1.0), x), 0.5, -5.0),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_checked_at_every_call(name: str) -> None:
    call, good, bad = NUMBERS[name]
    x, y = torch.ones(4, 4), torch.ones(4, 4, device="lazyxla")
    call(y, good)
    expected = error_of(call, x, bad)
    assert expected[0] is not type(None)
    assert error_of(call, y, bad) == expected
    call(y, good)


def test_checks_leave_the_cpus_generator_alone() -> None:
    x = torch.ones(4, device="lazyxla")
    before = torch.get_rng_state()
    for sigma in (0.5, 0.25):
        x.normal_(0, sigma)
        torch.native_dropout(x, sigma, True)
    assert torch.equal(torch.get_rng_state(), before)


def test_checks_take_no_numbers_from_other_threads() -> None:
    # From a CPU's generator that was set back, a thread would draw the same numbers again.
    draws: list[int] = []
    done = threading.Event()

    def draw() -> None:
        while not done.is_set():
            draws.append(int(torch.randint(2**62, ())))

    thread = threading.Thread(target=draw)
    thread.start()
    for size in range(5, 105):
        x = torch.randn(size, device="lazyxla")
        torch.native_dropout(x, 0.5, True)
        torch.randperm(size, device="lazyxla")
    done.set()
    thread.join()
    assert len(set(draws)) == len(draws)


def test_new_numbers_ask_no_meta_function() -> None:
    x = torch.ones(4, device="lazyxla")
    x.normal_(0, 1.0)
    asked = lazyxla.counters()["shape_inferences"]
    for sigma in (0.5, 0.25, 0.5):
        x.normal_(0, sigma)
    assert lazyxla.counters()["shape_inferences"] == asked


STATIC: dict[str, Call] = {
    "dilation": lambda x: F.conv1d(x[None], x[None], dilation=-1),
    "stride": lambda x: F.conv1d(x[None], x[None], stride=0),
    "padding": lambda x: F.conv3d(x.view(1, 1, 4, 2, 2), x.view(1, 1, 4, 2, 2), padding=-1),
    "output_padding": lambda x: F.conv_transpose1d(x, x[None], output_padding=-1),
    "multinomial": lambda x: x[0].multinomial(5),
    "multinomial of nothing": lambda x: x[0].multinomial(0),
    "multinomial dims": lambda x: x[None].multinomial(2),
    "multinomial dtype": lambda x: x.long().multinomial(2),
    "multinomial out": lambda x: torch.multinomial(x, 2, out=x.clone()),
    "nll_loss": lambda x: F.nll_loss(x, x[0].int()),
    "nll_loss of images": lambda x: F.nll_loss(x[None, :, None], x[None, None, 0].byte()),
    "nll_loss with weights": lambda x: F.nll_loss(x, x[0].long(), x[0].double()),
    "aminmax": lambda x: torch.aminmax(x, dim=0, out=(x[0].clone(), x[0].double())),
    "as_strided_scatter": lambda x: torch.as_strided_scatter(x, x, (4, 4), (200, 200)),
}


@pytest.mark.parametrize("name", STATIC)
def test_what_meta_functions_leave_out(name: str) -> None:
    expected = error_of(STATIC[name], torch.ones(4, 4))
    assert expected[0] is not type(None)
    assert error_of(STATIC[name], torch.ones(4, 4, device="lazyxla")) == expected


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("of", ["running_mean", "running_var"])
def test_running_statistics_have_one_dimension(of: str, train: bool) -> None:
    def call(x: torch.Tensor, shape: tuple[int, ...]) -> None:
        given = {name: torch.ones(3, device=x.device) for name in ("running_mean", "running_var")}
        given[of] = given[of].view(shape)
        F.batch_norm(x, **given, training=train)

    x = torch.ones(2, 3, 4)
    for shape in ((1, 3), (3, 1), (3, 1, 1)):
        expected = error_of(call, x, shape)
        found = error_of(call, x.to("lazyxla"), shape)
        assert found == expected, shape
    call(x.to("lazyxla"), (3,))


def test_real_numbers_of_complex_type_are_bounds() -> None:
    """Of floats; integers refuse them."""
    x = torch.arange(6)
    with pytest.raises(NotImplementedError, match="clamp is not supported for complex types"):
        x.to("lazyxla").clamp(2 + 0j)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for bounds in ({"min": 2 + 0j}, {"max": 3 + 0j}, {"min": 1 + 0j, "max": 3 + 0j}):
            found = x.to("lazyxla", dtype).clamp(**bounds)
            expected = x.to(dtype).clamp(**bounds)
            torch.testing.assert_close(found.cpu(), expected)


def test_nothing_is_unshuffled_as_on_the_cpu() -> None:
    for shape in ((0, 4, 4, 4), (2, 0, 4, 4), (2, 4, 0, 4)):
        found = F.pixel_unshuffle(torch.ones(shape, device="lazyxla"), 2)
        expected = F.pixel_unshuffle(torch.ones(shape), 2)
        assert (found.shape, found.stride()) == (expected.shape, expected.stride())
        assert found.cpu().shape == expected.shape


def test_out_without_a_result_is_refused() -> None:
    """Gradients that the call does not ask for; before, the process could end."""
    x, of_channels = torch.ones(2, 3, 4, device="lazyxla"), torch.ones(3, device="lazyxla")
    out = {f"out{i}": torch.ones(3, device="lazyxla") for i in range(4)}
    reduce = torch.ops.aten.batch_norm_backward_reduce.out
    for wanted in ((False, False, False), (True, False, True)):
        with pytest.raises(
            RuntimeError, match=r"reduce\.out computes no result for one of its out="
        ):
            reduce(x, x, *[of_channels] * 3, *wanted, **out)
    assert all(torch.equal(t.cpu(), torch.ones(3)) for t in out.values())
    reduce(x, x, *[of_channels] * 3, True, True, True, **out)
    assert out["out0"].tolist() == [8.0] * 3


@pytest.mark.parametrize("size", [0, -1, -(2**31)])
def test_fractional_windows_have_elements(size: int) -> None:
    """PyTorch's CPU takes them, and finds -inf or fails within."""
    for pool, sizes in ((F.fractional_max_pool2d, (5, 5)), (F.fractional_max_pool3d, (5, 5, 5))):
        x = torch.ones(1, 1, *sizes, device="lazyxla")
        with pytest.raises(RuntimeError, match=f"a window of size {size} has no greatest element"):
            pool(x, size, output_size=2)
