"""Numbers that no shape depends on are inputs of the program once they vary: where a view begins,
how far a roll goes, the bounds of a range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lazyxla
from tests.support import DEVICE, counted

Tensor = torch.Tensor
ROUNDS = 8


def assign(x: Tensor, place: Any, value: Any) -> Tensor:
    x[place] = value
    return x


def gradient(of: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    (result,) = torch.autograd.grad(of(leaf).square().sum(), leaf)
    return result


def images(x: Tensor) -> Tensor:
    return x.view(4, 4, 16)


# name, what each round does with a tensor of 16 x 16 and the round's number, programs in all
LOOPS: list[tuple[str, Callable[[Tensor, int], Tensor], int]] = [
    ("x[i]", lambda x, i: x[i] * 2, 2),
    ("x[:, i]", lambda x, i: x[:, i] * 2, 2),
    ("x[i, j]", lambda x, i: x[i, 2 * i] + 1, 2),
    ("x[-i]", lambda x, i: x[-1 - i] + 1, 2),
    ("x[i:i + n]", lambda x, i: x[i : i + 4].sum(0), 2),
    ("x[i:i + n:2]", lambda x, i: x[i : i + 6 : 2] + 1, 2),
    ("x[:, i:i + n].t()", lambda x, i: x[:, i : i + 4].t() @ x[:, i : i + 4], 2),
    ("crop", lambda x, i: images(x)[:, i % 3 : i % 3 + 2, i : i + 5].mean(), 2),
    ("flat", lambda x, i: x.view(-1)[i : i + 8] + 1, 2),
    # Within a row, and over the end of one, are two kinds of windows.
    ("flat, over rows", lambda x, i: x.view(-1)[12 + i : 18 + i] + 1, 4),
    ("narrow", lambda x, i: x.narrow(1, i, 3) + 1, 2),
    ("select", lambda x, i: x.select(0, i) + 1, 2),
    ("unbind", lambda x, i: x.unbind(1)[i] + 1, 2),
    ("split", lambda x, i: x.split(2)[i] + 1, 2),
    ("chunk", lambda x, i: x.chunk(8, 1)[i] + 1, 2),
    ("window of windows", lambda x, i: x.unfold(1, 4, 2)[i, :, 1:] + 1, 2),
    ("as_strided", lambda x, i: x.as_strided((3, 3), (17, 1), i) + 1, 2),
    ("diagonal", lambda x, i: x[i:, : 16 - i].diagonal()[:4] + 1, 2),
    ("flip", lambda x, i: x[i : i + 4].flip(0), 2),
    ("pieces", lambda x, i: torch.cat([x[i : i + 2], x[i + 3 : i + 5]]), 2),
    ("another dtype", lambda x, i: x.view(torch.int32)[i] + 1, 2),
    ("a narrower dtype", lambda x, i: x.view(torch.int16)[:, i : i + 4] + 1, 2),
    ("complex", lambda x, i: torch.view_as_complex(x.view(16, 8, 2))[:, i] + 1, 2),
    ("real of complex", lambda x, i: torch.view_as_real(x.to(torch.cfloat))[i, :, 1] + 1, 2),
    ("gradient of x[i]", lambda x, i: gradient(lambda x: x[i], x), 2),
    ("gradient of x[i:i + n]", lambda x, i: gradient(lambda x: x[:, i : i + 4], x), 2),
    ("gradient of a diagonal", lambda x, i: gradient(lambda x: x[i : i + 4, 2:6].diagonal(), x), 2),
    ("select_scatter", lambda x, i: torch.select_scatter(x, x[0] + 1, 1, i), 2),
    ("slice_scatter", lambda x, i: torch.slice_scatter(x, x[:4] + 1, 0, i, i + 4), 2),
    ("select_copy", lambda x, i: torch.select_copy(x, 0, i) + 1, 2),
    ("x[i] = tensor", lambda x, i: assign(x, i, x[0] + 1), 2),
    ("x[i] = number", lambda x, i: assign(x, i, 3.5), 2),
    ("x[i:i + n] = ", lambda x, i: assign(x, slice(i, i + 3), x[:3] * 2), 2),
    ("x[i, j] = ", lambda x, i: assign(x, (i, 3), 2.0), 2),
    ("x[:, i] = ", lambda x, i: assign(x, (slice(None), i), -1.0), 2),
    ("every other column", lambda x, i: assign(x, (slice(None), slice(i, i + 6, 2)), 0.5), 2),
    ("cache", lambda x, i: assign(images(x), (slice(None), slice(None), slice(i, i + 1)), 7.0), 2),
    ("copy_", lambda x, i: x[i : i + 2].copy_(x[i + 5 : i + 7]), 2),
    ("add_", lambda x, i: x[i : i + 2].add_(x[i + 5 : i + 7]), 2),
    ("a view of a view", lambda x, i: assign(x.t()[i], slice(2, 5), 9.0), 2),
    ("roll", lambda x, i: x.roll(i, 0), 2),
    ("roll all", lambda x, i: x.roll(-i * 3), 2),
    ("roll both", lambda x, i: x.roll((i, -2 * i), (0, 1)), 2),
    ("tril", lambda x, i: x.tril(i - 4), 2),
    ("triu_", lambda x, i: x.triu_(20 - i), 2),
    ("arange", lambda x, i: x[0, :5] + torch.arange(i, i + 5, device=x.device), 2),
    ("arange by steps", lambda x, i: torch.arange(0, 3 * i + 3, i + 1, device=x.device) + 1, 2),
    ("arange of floats", lambda x, i: torch.arange(i / 2, i / 2 + 4, device=x.device), 2),
    ("arange in place", lambda x, i: torch.arange(i, i + 16, out=x[0]), 2),
    ("linspace", lambda x, i: torch.linspace(i, 2 * i, 6, device=x.device), 2),
    ("logspace", lambda x, i: torch.logspace(0, i / 4, 6, device=x.device), 2),
    ("full", lambda x, i: torch.full((3,), i * 1.5, device=x.device), 2),
    ("full_like", lambda x, i: torch.full_like(x, i), 2),
    ("bounds of a histogram", lambda x, i: torch.histc(x, 5, i / 4 - 3, i / 2), 2),
    # Equal bounds mean the least and the greatest element, which a program of their own reads.
    ("bounds of a histogram, some equal", lambda x, i: torch.histc(x, 5, 0, i % 4), 3),
    ("scalar_tensor", lambda x, i: torch.scalar_tensor(i, device=x.device) + 1, 2),
    ("eye", lambda x, i: torch.eye(4, device=x.device) * i, 2),
]


@pytest.mark.parametrize("mode", [False, True], ids=["lazy", "eager"])
@pytest.mark.parametrize(("name", "step", "programs"), LOOPS, ids=[name for name, *_ in LOOPS])
def test_a_loop_settles(
    name: str, step: Callable[[Tensor, int], Tensor], programs: int, mode: bool
) -> None:
    expected = torch.linspace(-3, 3, 256).view(16, 16)
    x = expected.to(DEVICE)
    lazyxla.sync()
    with lazyxla.eager_mode(mode):
        compiles = []
        for i in range(ROUNDS):
            with counted() as n:
                result = step(x, i)
                lazyxla.sync()
            compiles.append(n.compiles)
            torch.testing.assert_close(result.cpu(), step(expected, i))
    torch.testing.assert_close(x.cpu(), expected)
    if not mode:
        assert sum(compiles) <= programs, compiles
    # Eager mode runs several operators a round; each settles.
    assert sum(compiles[6:]) == 0, compiles


def test_random_numbers_do_not_depend_on_what_is_an_input() -> None:
    def draw(high: int) -> Tensor:
        torch.manual_seed(1)
        return torch.randint(high - 3, high, (1000,), device=DEVICE).cpu()

    highs = [5, 100, 2**31 - 1, -7]
    with counted() as n:
        varying = [draw(high) for high in highs]
    assert n.compiles <= 2
    for high, numbers in zip(highs, varying, strict=True):
        assert numbers.min() == high - 3
        assert numbers.max() == high - 1
        # The same draws, whatever the bounds.
        assert torch.equal(numbers - high, varying[0] - highs[0])


def test_random_numbers_of_more_bits_have_programs_of_their_own() -> None:
    for high in (2**31, 2**32 + 5, 2**40):
        numbers = torch.randint(high - 3, high, (1000,), device=DEVICE).cpu()
        assert (numbers.min(), numbers.max()) == (high - 3, high - 1)


@pytest.mark.parametrize("bounds", [(5, 5), (7, 3), (0, 300), (-200, 5)])
def test_bounds_are_checked_at_each_call(bounds: tuple[int, int]) -> None:
    torch.empty(4, dtype=torch.int8, device=DEVICE).random_(1, 5)
    with pytest.raises(RuntimeError) as expected:
        torch.empty(4, dtype=torch.int8).random_(*bounds)
    with pytest.raises(RuntimeError) as found:
        torch.empty(4, dtype=torch.int8, device=DEVICE).random_(*bounds)
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda device, n: torch.full((3,), n, dtype=torch.int8, device=device),
        lambda device, n: torch.scalar_tensor(n, dtype=torch.int8, device=device),
        lambda device, n: torch.linspace(0, n, 3, dtype=torch.int8, device=device),
        lambda device, n: torch.linspace(n, 1, 3, dtype=torch.int8, device=device),
    ],
    ids=["full", "scalar_tensor", "linspace to", "linspace from"],
)
def test_numbers_that_do_not_fit_are_refused(make: Callable[[str, int], Tensor]) -> None:
    make(DEVICE, 3)  # the same call with a number that fits is known
    with pytest.raises(RuntimeError) as expected:
        make("cpu", 1000)
    with pytest.raises(RuntimeError) as found:
        make(DEVICE, 1000)
    assert str(found.value) == str(expected.value)


def test_views_of_one_step_stay_constants() -> None:
    """A program whose views do not move has no input for them, whatever other programs do."""
    x = torch.arange(64.0).view(8, 8).to(DEVICE)
    for i in range(4):
        (x[i] + 1).cpu()
    with counted() as n:
        for _ in range(3):
            q, k, v = x[:, :2], x[:, 2:4], x[:, 4:6]
            y = q * k + v
            lazyxla.sync()
    assert n.compiles == 1
    torch.testing.assert_close(y.cpu(), x.cpu()[:, :2] * x.cpu()[:, 2:4] + x.cpu()[:, 4:6])


@st.composite
def moved_views(draw: st.DrawFn) -> tuple[Tensor, list[int], list[int], list[int]]:
    """A base, sizes and strides of a view, and offsets at which it fits."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(sizes))))
    base = torch.arange(1.0, 1 + torch.Size(sizes).numel()).view(sizes).permute(*order)
    total = base.numel()
    view, strides, reach = [], [], 0
    for _ in range(draw(st.integers(0, 3))):
        stride = draw(st.integers(0, max(total - 1 - reach, 0)))
        most = 4 if stride == 0 else min(4, 1 + (total - 1 - reach) // stride)
        size = draw(st.integers(1, most))
        view.append(size)
        strides.append(stride)
        reach += (size - 1) * stride
    offsets = draw(st.lists(st.integers(0, total - 1 - reach), min_size=2, max_size=5))
    return base, view, strides, offsets


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(moved_views())
def test_any_view_moved_anywhere(case: tuple[Tensor, list[int], list[int], list[int]]) -> None:
    base, sizes, strides, offsets = case
    memory = base.clone(memory_format=torch.preserve_format)
    x = base.to(DEVICE)
    assert x.stride() == base.stride()
    overlaps = len(set(torch.arange(64000).as_strided(sizes, strides).flatten().tolist())) < (
        torch.Size(sizes).numel()
    )
    for offset in offsets:
        found = x.as_strided(sizes, strides, offset) + 1
        assert torch.equal(found.cpu(), memory.as_strided(sizes, strides, offset) + 1)
        if overlaps:
            continue
        for tensor in (x, memory):
            tensor.as_strided(sizes, strides, offset).mul_(-2)
        assert torch.equal(x.cpu(), memory)


def test_ranges_that_begin_elsewhere_are_captured_as_they_run() -> None:
    """Where a range begins is built in once, and an input from then on."""

    def ranges() -> None:
        for start in range(5):
            kept = torch.arange(start, start + 3, device=DEVICE) * 2
            lazyxla.sync()
            del kept

    with lazyxla.aot.capture() as captured:
        ranges()
    assert [program.times for program in captured] == [1, 4]
    with counted() as n:
        ranges()
    assert n.compiles == 2
