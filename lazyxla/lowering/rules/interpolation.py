"""The weights of interpolations along one dimension: nearest, linear, cubic, antialiased.

Positions follow PyTorch: with `align_corners` the corners coincide and position i is at i * (size -
1) / (out - 1); otherwise pixels are areas and i is at (i + 0.5) * scale - 0.5.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lazyxla.lowering.rules.separable import NO_TAP, Taps

MakeTaps = Callable[[int, int, bool, float | None, torch.dtype], Taps]
"""(input size, output size, align_corners, scale factor or None, dtype) -> taps."""


def _scale(size: int, out: int, factor: float | None, dtype: torch.dtype) -> torch.Tensor:
    """Input pixels per output pixel, for pixels that are areas."""
    if factor is not None and factor > 0:
        return torch.tensor(1 / factor, dtype=dtype)
    return torch.tensor(size, dtype=dtype) / out


def _positions(
    size: int, out: int, align_corners: bool, factor: float | None, dtype: torch.dtype
) -> torch.Tensor:
    """The positions of the output pixels in the input."""
    i = torch.arange(out, dtype=dtype)
    if align_corners:
        step = torch.tensor(size - 1, dtype=dtype) / (out - 1) if out > 1 else 0
        return i * step
    return (i + 0.5) * _scale(size, out, factor, dtype) - 0.5


def nearest(size: int, out: int, _: bool, factor: float | None, dtype: torch.dtype) -> Taps:
    i = torch.arange(out, dtype=torch.float32)
    index = (i * _scale(size, out, factor, torch.float32)).floor().long().clamp(max=size - 1)
    return [(index, torch.ones(out))]


def nearest_exact(size: int, out: int, _: bool, factor: float | None, dtype: torch.dtype) -> Taps:
    i = torch.arange(out, dtype=torch.float32) + 0.5
    index = (i * _scale(size, out, factor, torch.float32)).floor().long().clamp(max=size - 1)
    return [(index, torch.ones(out))]


def linear(
    size: int, out: int, align_corners: bool, factor: float | None, dtype: torch.dtype
) -> Taps:
    if size == out:  # as PyTorch: the second tap is another one only where that changes NaNs
        same = torch.arange(size)
        return [(same, torch.ones(size, dtype=dtype)), (same, torch.zeros(size, dtype=dtype))]
    at = _positions(size, out, align_corners, factor, dtype).clamp(min=0)
    low = at.long().clamp(max=size - 1)
    part = (at - low).clamp(0, 1)
    return [(low, 1 - part), ((low + 1).clamp(max=size - 1), part)]


def cubic(
    size: int, out: int, align_corners: bool, factor: float | None, dtype: torch.dtype
) -> Taps:
    at = _positions(size, out, align_corners, factor, dtype)
    low = at.floor()
    return [
        ((low.long() + tap).clamp(0, size - 1), cubic_filter(at - low - tap, -0.75))
        for tap in range(-1, 3)
    ]


def cubic_filter(x: torch.Tensor, a: float) -> torch.Tensor:
    """Keys' cubic convolution kernel with the parameter `a`."""
    x = x.abs()
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((x - 5) * x + 8) * x * a - 4 * a
    return torch.where(x <= 1, near, torch.where(x < 2, far, 0))


def antialiased(support: float, kernel: Callable[[torch.Tensor], torch.Tensor]) -> MakeTaps:
    """Taps of a filter that widens with the reduction in size, its weights normalized to sum 1."""

    def make(
        size: int, out: int, align_corners: bool, factor: float | None, dtype: torch.dtype
    ) -> Taps:
        if align_corners:
            step = torch.tensor(size - 1, dtype=dtype) / (out - 1) if out > 1 else 0
            scale = torch.as_tensor(step, dtype=dtype)
        else:
            scale = _scale(size, out, factor, dtype)
        stretch = scale.clamp(min=1)
        reach = support * stretch
        center = (torch.arange(out, dtype=dtype) + 0.5) * scale
        start = (center - reach + 0.5).long().clamp(min=0)
        end = (center + reach + 0.5).long().clamp(max=size)
        offsets = torch.arange(int((end - start).max()))
        index = start[:, None] + offsets
        weights = kernel((index - center[:, None] + 0.5) / stretch)
        weights = torch.where(index < end[:, None], weights, 0)
        total = weights.sum(1, keepdim=True)
        weights = weights / total.where(total != 0, 1)  # some factors lead beyond the input
        index = torch.where(index < end[:, None], index, NO_TAP)
        return list(zip(index.unbind(1), weights.unbind(1), strict=True))

    return make


def unless_equal(make: MakeTaps) -> MakeTaps:
    """Taps that copy a dimension which keeps its size."""

    def made(
        size: int, out: int, align_corners: bool, factor: float | None, dtype: torch.dtype
    ) -> Taps:
        if size == out:
            return [(torch.arange(size), torch.ones(size, dtype=dtype))]
        return make(size, out, align_corners, factor, dtype)

    return made


def lanczos_filter(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.abs() < 3, torch.sinc(x) * torch.sinc(x / 3), 0)


def in_16_bits(taps: Taps) -> Taps:
    """The weights as int16 multiples of the power of two that fits the greatest of them."""
    indices, weights = (torch.stack(column) for column in zip(*taps, strict=True))
    for later in range(1, len(indices)):  # taps beyond the border count for its element
        for earlier in range(later):
            same = (indices[later] == indices[earlier]) & (weights[later] != 0)
            weights[earlier] += torch.where(same, weights[later], 0)
            weights[later] = torch.where(same, 0, weights[later])
    greatest, bits = float(weights.max()), 0
    while bits < 22 and int(0.5 + greatest * 2 ** (bits + 1)) < 1 << 15:
        bits += 1
    weights = (weights * 2**bits + torch.where(weights < 0, -0.5, 0.5)).trunc() / 2**bits
    return list(zip(indices.unbind(), weights.unbind(), strict=True))
