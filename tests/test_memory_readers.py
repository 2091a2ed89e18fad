"""Operators that PyTorch composes in kernels that read memory, of which the device shows none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support import DEVICE, assert_same, counted, on_device

aten = torch.ops.aten
X, GRID = (
    torch.linspace(-1, 1, 18).reshape(1, 2, 3, 3),
    torch.linspace(-1, 1, 8).reshape(1, 2, 2, 2),
)
DIRECTIONS = torch._sobol_engine_initialize_state_(torch.zeros(3, 30, dtype=torch.int64), 3)
FIRST = torch.zeros(3, dtype=torch.int64)

CALLS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "_grid_sampler_2d_cpu_fallback": (
        lambda x, grid: aten._grid_sampler_2d_cpu_fallback(x, grid, 0, 0, False),
        (X, GRID),
    ),
    "_grid_sampler_2d_cpu_fallback.out": (
        lambda x, grid: aten._grid_sampler_2d_cpu_fallback.out(
            x, grid, 0, 0, False, out=x.new_empty(1, 2, 2, 2)
        ),
        (X, GRID),
    ),
    "_grid_sampler_2d_cpu_fallback_backward": (
        lambda x, grid: aten._grid_sampler_2d_cpu_fallback_backward(
            x[..., :2, :2], x, grid, 0, 0, False
        ),
        (X, GRID),
    ),
    "choose_qparams_optimized": (
        lambda x: aten.choose_qparams_optimized(x, 18, 100, 0.5, 8),
        (X,),
    ),
    "_sobol_engine_initialize_state_": (
        lambda x: torch._sobol_engine_initialize_state_(x, 3),
        (torch.zeros_like(DIRECTIONS),),
    ),
    "_sobol_engine_draw": (
        lambda first, x: torch._sobol_engine_draw(first, 5, x, 3, 0, torch.float32),
        (FIRST, DIRECTIONS),
    ),
    "_sobol_engine_ff_": (
        lambda first, x: torch._sobol_engine_ff_(first, 5, x, 3, 0),
        (FIRST, DIRECTIONS),
    ),
    "_sobol_engine_scramble_": (
        lambda x, matrices: torch._sobol_engine_scramble_(x, matrices, 3),
        (DIRECTIONS, torch.ones(3, 30, 30, dtype=torch.int64).tril()),
    ),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore:lazyxla")
def test_run_on_the_host(name: str) -> None:
    call, arguments = CALLS[name]
    given, copies = on_device(arguments), [x.clone() for x in arguments]
    expected = call(*copies)
    with counted() as n:
        assert_same(call(*given), expected)
    assert n.fallbacks == 1
    assert_same(given, tuple(copies))  # written alike


@pytest.mark.parametrize("place", [DEVICE, "cpu"])
def test_a_shape_in_a_tensor_makes_a_view(place: str) -> None:
    x = X.to(DEVICE).requires_grad_()
    found = aten._reshape_from_tensor(x, torch.tensor([2, 9]).to(place))
    assert found.shape == (2, 9)
    assert found.data_ptr() == x.data_ptr()
    found.sum().backward()
    assert_same(x.grad, torch.ones_like(X))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.fbgemm_pack_gemm_matrix_fp16(x),
        lambda x: torch.fbgemm_linear_quantize_weight(x),
        lambda x: torch.fbgemm_pack_quantized_matrix(x.to(torch.int8)),
        lambda x: aten._saturate_weight_to_fp16(x),
    ],
)
@pytest.mark.filterwarnings("ignore:fbgemm")
def test_weights_are_not_packed_for_the_cpu(call: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(NotImplementedError, match="packed for the CPU, and takes no tensors of"):
        call(torch.ones(4, 4, device=DEVICE))
