"""What the plugin's compiler works out at compile time, since all operands are constants.

The lowering's own tests run on jaxlib's compiler, which may be another version.
"""

from __future__ import annotations

import operator

import pytest
import torch

from tests.support import DEVICE, DTYPES

COMPARISONS = [operator.le, operator.lt, operator.ge, operator.gt, operator.eq, operator.ne]


@pytest.mark.parametrize("dtype", [d for d in DTYPES if not d.is_complex], ids=str)
@pytest.mark.parametrize("compare", COMPARISONS, ids=lambda f: f.__name__)
def test_comparisons(compare: object, dtype: torch.dtype) -> None:
    numbers = (-2, -1, 0, 1, 2) if dtype.is_signed else (0, 1, 2)

    def compared(device: str) -> torch.Tensor:
        full = [torch.full((2,), n, dtype=dtype, device=device) for n in numbers]
        return torch.stack([compare(x, y) for x in full for y in full])  # type: ignore[operator]

    assert torch.equal(compared(DEVICE).cpu(), compared("cpu"))


def test_triangles_of_one_element() -> None:
    x = torch.ones(1, 1)
    for diagonal in (-2, -1, 0, 1):
        for triangle in (torch.tril, torch.triu):
            assert torch.equal(triangle(x.to(DEVICE), diagonal).cpu(), triangle(x, diagonal))
    a = torch.full((1, 1), 2.0)

    def gradient(a: torch.Tensor) -> torch.Tensor:
        a = a.detach().requires_grad_()
        return torch.autograd.grad(torch.linalg.cholesky(a).sum(), a)[0].cpu()

    torch.testing.assert_close(gradient(a.to(DEVICE)), gradient(a))
