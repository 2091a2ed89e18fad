"""Operators whose results torch's own meta functions tell wrongly, or fail to tell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.meta_calls import CORRECTED, MISSING, described, told
from tests.support import DEVICE, assert_same, counted, error_of, on_device


@pytest.mark.parametrize("bias", [torch.float32, torch.bfloat16])
def test_baddbmm_of_another_dtype(bias: torch.dtype) -> None:
    x, y = torch.randn(2, 3, 4).bfloat16(), torch.randn(2, 4, 5).bfloat16()
    added = torch.randn(2, 3, 5).to(bias)
    expected = torch.baddbmm(added.float(), x.float(), y.float(), beta=2, alpha=0.5)
    operands = on_device((added, x, y))
    actual = torch.baddbmm(*operands, out_dtype=torch.float32, beta=2, alpha=0.5)
    assert_same(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_norms_of_weights_are_as_wide_as_the_kernels(dtype: torch.dtype) -> None:
    v, g = torch.full((3, 4), 250, dtype=dtype), torch.ones(3, 1, dtype=dtype)
    expected = torch._weight_norm_interface(v, g)
    assert expected[1].dtype.itemsize >= 4
    assert_same(torch._weight_norm_interface(*on_device((v, g))), expected)


@pytest.mark.parametrize("name", ["linspace", "logspace"])
@pytest.mark.parametrize(
    "ends",
    [
        (torch.tensor(0.5 + 1j), torch.tensor(2.0)),
        (torch.tensor(1), torch.tensor(0.5 + 1j)),
        (torch.tensor(0.5 + 1j), 2.0),
        (0.5, torch.tensor(2 + 1j)),
        (torch.tensor(1.0), torch.tensor(2)),
    ],
)
def test_ranges_between_tensors(name: str, ends: tuple[Any, Any]) -> None:
    op = getattr(torch, name)
    assert_same(op(*on_device(ends), 5, device=DEVICE), op(*ends, 5))


@pytest.mark.parametrize("name", ["linspace", "logspace"])
@pytest.mark.parametrize(
    ("ends", "kwargs"),
    [
        ((torch.ones(2), 3), {}),
        ((3, torch.ones(2, 2)), {}),
        ((torch.tensor(1j), 3), {"dtype": torch.float64}),
    ],
)
def test_errors_of_ranges(name: str, ends: tuple[Any, Any], kwargs: dict[str, Any]) -> None:
    op = getattr(torch, name)
    expected = error_of(lambda: op(*ends, 5, **kwargs))
    assert expected[0] is RuntimeError
    assert error_of(lambda: op(*on_device(ends), 5, device=DEVICE, **kwargs)) == expected


def _known_to_a_process(*args: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "tests.meta_calls", *args],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )
    return json.loads(done.stdout)


def test_other_devices_keep_the_meta_functions_of_torch() -> None:
    """Importing the package changes neither a registration nor a result."""
    before, after = _known_to_a_process(), _known_to_a_process("lazyxla")
    assert len(before["registrations"]) > 3000
    assert before["on meta tensors"]["nansum"] == ["torch.float32 [2, 3] [3, 1]"]  # torch's own
    assert after == before


@pytest.mark.parametrize("name", CORRECTED | MISSING)
def test_shapes_on_the_device(name: str) -> None:
    """Of what is recorded, of fake tensors, and as the CPU's kernel has them where there is one."""
    x, call = (CORRECTED | MISSING)[name]
    actual = described(call(x.to(DEVICE)))
    with FakeTensorMode():
        assert told(name, DEVICE) == actual
    if name not in ("linear_backward", "_thnn_fused_lstm_cell"):
        assert actual == described(call(x))


@pytest.mark.parametrize(
    "name", ["convolution", "linalg_eig", "nonzero_static", "pixel_shuffle", "geqrf"]
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_shapes_in_compiled_code(name: str, dynamic: bool) -> None:
    x, call = (CORRECTED | MISSING)[name]
    compiled = torch.compile(call, backend="lazyxla", dynamic=dynamic)
    assert described(compiled(x.to(DEVICE))) == described(call(x))
    assert described(torch.compile(call, backend="aot_eager", dynamic=dynamic)(x.to(DEVICE))) == (
        described(call(x))
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda x, number: x.masked_fill(x > 0, number),
        lambda x, number: x.clone().masked_fill_(x > 0, number),
        lambda x, number: x.index_fill(0, x[0].argmax(0, keepdim=True), number),
        lambda x, number: x.clone().index_fill_(0, x[0].argmax(0, keepdim=True), number),
        lambda x, number: x.copysign(number),
        lambda x, number: x.clone().copysign_(number),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_numbers_on_the_cpu(call: Any, dtype: torch.dtype) -> None:
    """They meet tensors of any device, and need no kernel on the host for it."""
    x, number = torch.randn(3, 4, dtype=dtype), torch.tensor(-2.0)
    with counted() as n:
        assert_same(call(x.to(DEVICE), number), call(x, number))
    assert n.fallbacks == 0
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        call(x.to(DEVICE), number.expand(3, 4))


def test_numbers_in_place_of_tensors() -> None:
    """PyTorch's decompositions pass them on to operators that take a tensor."""
    with FakeTensorMode():
        x = torch.empty(3, dtype=torch.int64, device="lazyxla")
        for made, dtype in (
            (torch.floor_divide(x, 7), torch.int64),
            (torch.div(x, 7, rounding_mode="trunc"), torch.int64),
            (torch.xlogy(x, 2.0), torch.float32),
        ):
            assert (made.shape, made.dtype, made.device.type) == ((3,), dtype, "lazyxla")
