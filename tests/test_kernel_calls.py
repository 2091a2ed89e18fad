"""What programs for the CPU leave to PyTorch's kernels: which convolutions, and when not."""

import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

import lazyxla
from lazyxla.lowering.cpu import convolution_kernels
from tests.support import assert_same, counted, on_device

SIZES, WEIGHT, GROUPS = (2, 64, 26, 29), (64, 4, 3, 3), 16
"""Of a convolution that is called. The sizes here are of no other test's programs."""


def convolve(x: torch.Tensor, w: torch.Tensor, **options: int) -> list[torch.Tensor]:
    """A convolution's result, and the gradients of its sum of squares."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    dims = x.dim() - 2
    function: Callable[..., torch.Tensor] = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
    y = function(x, w, **options)
    y.square().sum().backward()
    assert x.grad is not None
    assert w.grad is not None
    return [y.detach(), x.grad, w.grad]


@pytest.mark.parametrize(
    ("sizes", "weight", "options", "calls"),
    [
        (SIZES, WEIGHT, {"groups": 16, "padding": 1}, 3),
        (SIZES, WEIGHT, {"groups": 16, "stride": 2, "padding": 1}, 0),  # few positions
        ((2, 64, 1200), (64, 4, 5), {"groups": 16, "dilation": 2}, 3),
        ((1, 64, 13, 13, 13), (64, 4, 3, 3, 3), {"groups": 16}, 3),
        (SIZES, (64, 64, 3, 3), {"padding": 1}, 3),
        (SIZES, (64, 64, 1, 1), {}, 0),  # a matmul
        ((2, 64, 8, 8), (64, 64, 2, 2), {"stride": 2}, 0),  # and this
        ((2, 64, 9, 9), (64, 64, 3, 3), {"padding": 1}, 0),  # small
        (SIZES, (64, 8, 3, 3), {"groups": 8, "padding": 1}, 0),
        (SIZES, (64, 1, 3, 3), {"groups": 64, "padding": 1}, 0),  # a sum of few terms
        ((0, 64, 26, 29), WEIGHT, {"groups": 16}, 0),
        ((2, 3, 7, 13, 13), (5, 3, 3, 3, 3), {"padding": 1}, 3),  # of three dimensions
        ((1, 3, 4, 5, 5), (5, 3, 3, 3, 3), {"padding": 1}, 0),  # small
        ((2, 3, 97, 98), (9, 3, 3, 3), {"padding": 1}, 1),  # the map from few features alone
        ((2, 9, 97, 98), (3, 9, 3, 3), {"padding": 1}, 1),  # to few
        ((2, 9, 97, 98), (9, 9, 3, 3), {"padding": 1}, 0),
    ],
)
def test_which_convolutions(
    sizes: tuple[int, ...], weight: tuple[int, ...], options: dict[str, int], calls: int
) -> None:
    # Whole numbers: the order of sums does not show.
    x, w = torch.randn(sizes).round(), torch.randn(weight).round()
    expected = convolve(x, w, **options)
    ours = on_device(x), on_device(w)
    with counted() as n:
        got = convolve(*ours, **options)
        lazyxla.sync(wait=True)
    assert (n.kernel_calls, n.host_calls, n.fallbacks, n.executions) == (calls, 0, 0, 1)
    for a, b in zip(got, expected, strict=True):
        assert_same(a, b)


def test_transposed() -> None:
    x, w, bias = torch.randn(SIZES).round(), torch.randn(WEIGHT).round(), torch.randn(64).round()
    options = {"stride": 2, "padding": 1, "output_padding": 1, "groups": GROUPS}
    ours = [on_device(t) for t in (x, w, bias)]
    with counted() as n:
        y = F.conv_transpose2d(*ours, **options)
        lazyxla.sync(wait=True)
    assert (n.kernel_calls, n.host_calls, n.fallbacks, n.executions) == (1, 0, 0, 1)
    assert_same(y, F.conv_transpose2d(x, w, bias, **options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    x, w = torch.randn(SIZES, dtype=dtype).round(), torch.randn(WEIGHT, dtype=dtype).round()
    ours = on_device(x), on_device(w)
    with counted() as n:
        y = F.conv2d(*ours, groups=GROUPS)
        lazyxla.sync(wait=True)
    assert (n.kernel_calls, n.host_calls, n.fallbacks, n.executions) == (1, 0, 0, 1)
    assert_same(y, F.conv2d(x, w, groups=GROUPS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "window", [{"kernel_size": 3, "stride": 2, "padding": 1}, {"kernel_size": 2, "ceil_mode": True}]
)
def test_gradient_of_maximum_pooling(window: dict[str, int], dtype: torch.dtype) -> None:
    x = torch.randint(-5, 5, (2, 3, 9, 9)).to(dtype).requires_grad_()  # with equal maxima
    y = F.max_pool2d(x, **window)
    weight = torch.randint(-5, 5, y.shape).to(dtype)
    (expected,) = torch.autograd.grad((y * weight).sum(), x)
    ours = on_device(x.detach()).requires_grad_()
    with counted() as n:
        (got,) = torch.autograd.grad((F.max_pool2d(ours, **window) * on_device(weight)).sum(), ours)
        lazyxla.sync(wait=True)
    assert (n.kernel_calls, n.host_calls, n.fallbacks, n.executions) == (1, 0, 0, 1)
    assert_same(got, expected)


@pytest.mark.parametrize(
    ("split", "error"),
    [
        ([0, -1, 1], r"aten::convolution: result 0 has the shape \[1, 64, 24, 30\]"),
        ([0, 0], "aten::convolution: split has 2 dimensions"),
    ],
)
def test_errors_of_parts_are_the_programs(
    split: list[int], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = torch.randn(2, 64, 26, 29 + len(split)), torch.randn(64, 4, 3, 3)
    ours = on_device(x), on_device(w)
    with monkeypatch.context() as patch:
        patch.setattr(convolution_kernels, "_split", lambda *_: split)
        y = F.conv2d(*ours, groups=GROUPS)
        with pytest.raises(RuntimeError, match=error):
            y.cpu()
    assert_same(ours[0] + 1, x + 1)


def test_strict_modes_allow_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazyxla.settings, "strict_host_calls", True)
    monkeypatch.setattr(lazyxla.settings, "strict_fallback", True)
    x, w = on_device(torch.randn(SIZES)), on_device(torch.randn(WEIGHT))
    with counted() as n:
        F.conv2d(x, w, groups=GROUPS).cpu()
    assert (n.kernel_calls, n.host_calls) == (1, 0)


def test_what_is_exported_has_none() -> None:
    layer = torch.nn.Conv2d(64, 64, 3, groups=GROUPS).to("lazyxla")
    program = lazyxla.export(layer, (on_device(torch.randn(SIZES)),)).text()
    assert "host_call" not in program
    assert "stablehlo.convolution" in program


def test_a_training_step_is_one_program_still() -> None:
    layers = torch.nn.Conv2d(64, 64, 3, groups=GROUPS), torch.nn.ReLU(), torch.nn.Flatten()
    ours = torch.nn.Sequential(*layers, torch.nn.Linear(64 * 24 * 27, 8)).to("lazyxla")
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    x = on_device(torch.randn(SIZES))

    def step() -> None:
        optimizer.zero_grad()
        ours(x).square().mean().backward()
        optimizer.step()
        lazyxla.sync(wait=True)

    step()
    with counted() as n:
        step()
    # The convolution, and its weight's gradient.
    assert (n.kernel_calls, n.executions, n.compiles) == (2, 1, 0)


def convolved() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, w = torch.ones(SIZES), torch.ones(WEIGHT)
    return on_device(x), on_device(w), F.conv2d(x, w, groups=GROUPS)


def test_as_many_threads_as_torch_is_told() -> None:
    x, w, expected = convolved()
    before = torch.get_num_threads()
    try:
        for threads in (1, before):
            torch.set_num_threads(threads)
            assert_same(F.conv2d(x, w, groups=GROUPS), expected)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_from_many_threads() -> None:
    x, w, expected = convolved()
    assert_same(F.conv2d(x, w, groups=GROUPS), expected)  # compiled
    together = threading.Barrier(300)
    wrong = []

    def work() -> None:
        with lazyxla.eager_mode(True):
            if not torch.equal(F.conv2d(x, w, groups=GROUPS).cpu(), expected):
                wrong.append(1)
            together.wait()  # all of them live until each has computed

    threads = [threading.Thread(target=work) for _ in range(300)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


TEAMS = """
import os, torch, lazyxla
from torch.nn import functional as F

def threads():
    return len(os.listdir("/proc/self/task"))

def run():
    results = [F.conv2d(x + i, w, groups=16) for i in range(8)]
    lazyxla.sync(wait=True)

torch.set_num_threads(4)
x, w = torch.randn(2, 64, 26, 29).to("lazyxla"), torch.randn(64, 4, 3, 3).to("lazyxla")
(x + 1).sum().item()
run()
alone = threads()
for _ in range(8):
    run()
torch.ones(1 << 20).add(1)  # a parallel kernel of the user's own
print(lazyxla.counters()["kernel_calls"], threads() - alone)
"""


def test_kernels_start_no_threads() -> None:
    """They share the plugin's; the user's own have a team, as ever."""
    done = subprocess.run([sys.executable, "-c", TEAMS], capture_output=True, text=True)
    assert done.stdout.split() == ["72", "3"], done.stderr
