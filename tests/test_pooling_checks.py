"""Pooling refuses at the call what PyTorch's CPU refuses and no program could compute rightly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.support import error_of

Call = Callable[[torch.Tensor], torch.Tensor]

# Rows of 6 are no multiple of 4: each of those windows has weights of its own.
REFUSED: dict[str, tuple[Call, int, torch.dtype]] = {
    "average of bool, 2d": (lambda x: F.avg_pool2d(x, 2), 2, torch.bool),
    "average of bool, 3d": (lambda x: F.avg_pool3d(x, 2), 3, torch.bool),
    "adaptive average of int64": (lambda x: F.adaptive_avg_pool2d(x, 4), 2, torch.int64),
    "adaptive average of uint8": (lambda x: F.adaptive_avg_pool3d(x, 4), 3, torch.uint8),
    "adaptive average of bool": (lambda x: F.adaptive_avg_pool2d(x, 4), 2, torch.bool),
    "maximum of complex, 2d": (lambda x: F.max_pool2d(x, 2), 2, torch.complex64),
    "maximum of complex, 3d": (lambda x: F.max_pool3d(x, 2), 3, torch.complex64),
    "adaptive maximum, 2d": (lambda x: F.adaptive_max_pool2d(x, 4), 2, torch.complex64),
    "adaptive maximum, 3d": (lambda x: F.adaptive_max_pool3d(x, 4), 3, torch.complex64),
}


@pytest.mark.parametrize("name", REFUSED)
def test_dtypes_without_such_a_result(name: str) -> None:
    call, rank, dtype = REFUSED[name]
    x = torch.ones(2, 3, *[6] * rank, dtype=dtype)
    kind, words = error_of(call, x.to("lazyxla"))
    assert (kind, words) == error_of(call, x)
    assert kind is NotImplementedError


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_integers_have_a_greatest_one(dtype: torch.dtype) -> None:
    x = torch.arange(72).reshape(2, 1, 6, 6).flip(3).to(dtype)
    found = F.max_pool2d(x.to("lazyxla"), 2).cpu()
    torch.testing.assert_close(found, F.max_pool2d(x.float(), 2).to(dtype))


SAMPLES = {
    "of fewer images": ((1, 3), torch.float32),
    "of fewer channels": ((2, 2), torch.float32),
    "of another dtype": ((2, 3), torch.float64),
}


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("name", SAMPLES)
def test_samples_that_do_not_fit(name: str, rank: int) -> None:
    lead, dtype = SAMPLES[name]
    pool = (F.fractional_max_pool2d, F.fractional_max_pool3d)[rank - 2]

    def call(x: torch.Tensor) -> torch.Tensor:
        samples = torch.full((*lead, rank), 0.3, dtype=dtype, device=x.device)
        return pool(x, 2, output_size=3, _random_samples=samples)

    x = torch.ones(2, 3, *[6] * rank)
    kind, words = error_of(call, x.to("lazyxla"))
    assert (kind, words) == error_of(call, x)
    assert kind is RuntimeError


@pytest.mark.parametrize(
    ("rank", "window"), [(2, ()), (2, (2,)), (2, (2, 2, 2)), (3, ()), (3, (2,)), (3, (2, 2))]
)
def test_windows_of_another_rank(rank: int, window: tuple[int, ...]) -> None:
    pool = (F.fractional_max_pool2d, F.fractional_max_pool3d)[rank - 2]

    def call(x: torch.Tensor) -> torch.Tensor:
        samples = torch.full((1, 2, rank), 0.3, device=x.device)
        return pool(x, window, output_size=3, _random_samples=samples)

    # Without a dimension of batches: that of channels must not count as one.
    for sizes in ((2, *[7] * rank), (1, 2, *[7] * rank)):
        x = torch.ones(sizes)
        assert error_of(call, x.to("lazyxla")) == error_of(call, x)


WITHOUT_WINDOWS: dict[str, tuple[Call, int]] = {
    "average, 1d": (lambda x: F.adaptive_avg_pool1d(x, 0), 1),
    "average, 2d": (lambda x: F.adaptive_avg_pool2d(x, (0, 2)), 2),
    "average, 3d": (lambda x: F.adaptive_avg_pool3d(x, (1, 0, 2)), 3),
    "maximum, 1d": (lambda x: F.adaptive_max_pool1d(x, 0), 1),
    "maximum, 2d": (lambda x: F.adaptive_max_pool2d(x, (0, 2)), 2),
    "maximum, 3d": (lambda x: F.adaptive_max_pool3d(x, (1, 0, 2)), 3),
}


@pytest.mark.parametrize("name", WITHOUT_WINDOWS)
def test_the_gradient_of_no_windows(name: str) -> None:
    pool, rank = WITHOUT_WINDOWS[name]

    def gradient(x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        pool(x).sum().backward()
        assert x.grad is not None
        return x.grad

    x = torch.ones(2, 3, *[5] * rank)
    kind, words = error_of(gradient, x.to("lazyxla"))
    assert (kind, words) == error_of(gradient, x)
    assert "non-zero size for non-batch dimensions" in words


def test_the_gradient_of_no_images() -> None:
    x = torch.ones(0, 3, 6, 6, device="lazyxla", requires_grad=True)
    (F.adaptive_avg_pool2d(x, 2).sum() + F.adaptive_max_pool2d(x, 2).sum()).backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
