"""Element-wise operators: every dtype PyTorch's CPU kernels take, and the values that go wrong."""

from typing import Any

import pytest
import torch

from lazyxla import compat
from tests.lowering.batch import (
    ALL,
    COMPLEX,
    FLOATS,
    INF,
    INTEGERS,
    NAN,
    REAL,
    Batch,
    each,
    grid,
    samples,
)
from tests.lowering.harness import OnHost

BOOL = (torch.bool,)
SIGNED = tuple(d for d in REAL if d != torch.uint8)
NARROW = (torch.bfloat16, torch.float16)

UNARY: dict[str, tuple[torch.dtype, ...]] = {
    **dict.fromkeys(("neg", "abs"), (*SIGNED, torch.uint8, *COMPLEX)),
    **dict.fromkeys(("sgn", "isnan", "isinf", "reciprocal", "logical_not"), ALL),
    **dict.fromkeys(("sign", "signbit", "isposinf", "isneginf", "erfc", "exp2"), REAL + BOOL),
    **dict.fromkeys(("ceil", "floor", "round", "trunc"), REAL),
    **dict.fromkeys(("frac",), FLOATS),
    **dict.fromkeys(("bitwise_not",), INTEGERS + BOOL),
    **dict.fromkeys(
        [
            "acos",
            "acosh",
            "asin",
            "asinh",
            "atan",
            "atanh",
            "cos",
            "cosh",
            "erf",
            "erfinv",
            "exp",
            "expm1",
            "log",
            "log10",
            "log1p",
            "log2",
            "rsqrt",
            "sigmoid",
            "sin",
            "sinh",
            "sqrt",
            "tan",
            "tanh",
            "angle",
            "deg2rad",
            "rad2deg",
            "lgamma",
            "sinc",
            "nan_to_num",
        ],
        REAL + BOOL,
    ),
    **dict.fromkeys(
        [
            "relu",
            "silu",
            "mish",
            "hardswish",
            "hardsigmoid",
            "gelu",
            "logit",
            "celu",
            "elu",
            "hardtanh",
            "leaky_relu",
            "softplus",
            "softshrink",
            "hardshrink",
        ],
        FLOATS,
    ),
}
COMPLEX_UNARY = [
    "cos",
    "cosh",
    "exp",
    "log",
    "log1p",
    "log2",
    "log10",
    "rsqrt",
    "sigmoid",
    "sin",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
    "asin",
    "acos",
    "atan",
    "asinh",
    "acosh",
    "atanh",
    "expm1",
    "angle",
    "_conj_physical",
    "exp2",
    "sinc",
    "silu",
]

BINARY: dict[str, tuple[torch.dtype, ...]] = {
    **dict.fromkeys(("add.Tensor", "mul.Tensor", "logical_and", "logical_or", "logical_xor"), ALL),
    **dict.fromkeys(("sub.Tensor", "rsub.Tensor"), REAL + COMPLEX),
    **dict.fromkeys(("eq.Tensor", "ne.Tensor", "where.self"), ALL),
    **dict.fromkeys(("lt.Tensor", "le.Tensor", "gt.Tensor", "ge.Tensor"), REAL + BOOL),
    **dict.fromkeys(("maximum", "minimum", "fmax", "fmin"), REAL + BOOL),
    **dict.fromkeys(("div.Tensor", "atan2", "xlogy.Tensor", "special_xlog1py", "heaviside"), REAL),
    **dict.fromkeys(("copysign.Tensor",), REAL),
    **dict.fromkeys(("hypot", "logaddexp", "logaddexp2", "_prelu_kernel"), FLOATS),
    **dict.fromkeys(
        ("bitwise_and.Tensor", "bitwise_or.Tensor", "bitwise_xor.Tensor"), INTEGERS + BOOL
    ),
    **dict.fromkeys(("gcd", "lcm"), INTEGERS),
    **dict.fromkeys(("nextafter",), (torch.float32, torch.float64)),
}
# A second operand that must not be zero for integers.
DIVISION = ("remainder.Tensor", "fmod.Tensor", "floor_divide")

SCALAR: dict[str, tuple[torch.dtype, ...]] = {
    **dict.fromkeys(("mul.Scalar", "div.Scalar", "eq.Scalar", "ne.Scalar"), ALL),
    **dict.fromkeys(
        ("add.Scalar", "sub.Scalar", "rsub.Scalar"),
        (torch.float32, torch.float64, *INTEGERS, *COMPLEX),
    ),
    **dict.fromkeys(("lt.Scalar", "le.Scalar", "gt.Scalar", "ge.Scalar"), REAL + BOOL),
    **dict.fromkeys(("remainder.Scalar", "fmod.Scalar", "floor_divide.Scalar"), REAL),
    **dict.fromkeys(("clamp_min", "clamp_max", "xlogy.Scalar_Other", "copysign.Scalar"), REAL),
}


def _given(table: dict[str, tuple[torch.dtype, ...]]) -> Any:
    return pytest.mark.parametrize(("op", "dtypes"), list(table.items()))


@_given(UNARY)
def test_unary(op: str, dtypes: tuple[torch.dtype, ...]) -> None:
    def call(batch: Batch, dtype: torch.dtype) -> None:
        x = samples(dtype)
        if op == "gelu":  # which PyTorch's CPU kernel gets wrong for inf
            x = x[x != INF]
        batch.add(f"aten::{op}", x)
        batch.add(f"aten::{op}", x[1])

    each(dtypes, call)


@pytest.mark.parametrize("op", COMPLEX_UNARY)
def test_complex_unary(op: str) -> None:
    each(COMPLEX, lambda batch, d: batch.add(f"aten::{op}", samples(d)))


@_given(BINARY)
def test_binary(op: str, dtypes: tuple[torch.dtype, ...]) -> None:
    def call(batch: Batch, dtype: torch.dtype) -> None:
        x, y = grid(dtype)
        if op == "where.self":
            batch.add("aten::where.self", x != y, x, y)
            return
        batch.add(f"aten::{op}", x, y)
        batch.add(f"aten::{op}", x[1, 0], y)

    each(dtypes, call)


@pytest.mark.parametrize("op", DIVISION)
def test_division(op: str) -> None:
    def call(batch: Batch, dtype: torch.dtype) -> None:
        x, y = grid(dtype)
        batch.add(f"aten::{op}", x, y if dtype.is_floating_point else y[y != 0])

    each(REAL, call)


@pytest.mark.parametrize("mode", [None, "floor", "trunc"])
def test_rounding_mode(mode: str | None) -> None:
    def call(batch: Batch, dtype: torch.dtype) -> None:
        x, y = grid(dtype)
        # By 0.001 the quotient's rounding decides, and XLA multiplies by reciprocals of divisors
        # that it broadcasts. PyTorch rounds quotients to 16 bits before it truncates them.
        y = (
            y[y.float().abs() != torch.tensor(1e-3).to(dtype)]
            if dtype.is_floating_point
            else y[y != 0]
        )
        if mode != "trunc" or dtype.itemsize > 2:
            batch.add("aten::div.Tensor_mode", x, y, rounding_mode=mode)
        if dtype.is_floating_point:
            whole = torch.arange(1.0, 60.0).to(dtype)
            batch.add("aten::div.Tensor_mode", whole.unsqueeze(1), whole, rounding_mode=mode)
        batch.add("aten::div.Scalar_mode", x, 3, rounding_mode=mode)
        batch.add("aten::div.Scalar_mode", x, -0.75, rounding_mode=mode)

    each(REAL, call)


@_given(SCALAR)
def test_scalar(op: str, dtypes: tuple[torch.dtype, ...]) -> None:
    def call(batch: Batch, dtype: torch.dtype) -> None:
        for number in (2, -3, 2.5, -0.5):
            refused = compat.CLAMP_SATURATES and op == "clamp_max" and not dtype.is_signed
            if not (refused and number < 0):
                batch.add(f"aten::{op}", samples(dtype), number)

    each(dtypes, call)


def test_add_alpha() -> None:
    def call(batch: Batch, dtype: torch.dtype) -> None:
        x, y = grid(dtype)
        # PyTorch rounds 16-bit products before it adds them in short rows, but not in long ones.
        for op in ("add.Tensor", "sub.Tensor", "rsub.Tensor"):
            batch.add(f"aten::{op}", x, y, alpha=3, rounded_once=True)
        batch.add("aten::add.Scalar", x, 2, 3)

    each(FLOATS + INTEGERS + COMPLEX, call)


def test_pow() -> None:
    def call(batch: Batch, dtype: torch.dtype) -> None:
        x, y = grid(dtype)
        exact = not dtype.is_floating_point and not dtype.is_complex
        exponents = y[(y >= 0) & (y < 100)] if exact else y
        x = x if dtype in (torch.float32, torch.float64) or exact else x[:6]
        for wanted in (torch.float32, torch.float64, *NARROW):
            if dtype == wanted:
                exponents = y[:13]
        batch.add("aten::pow.Tensor_Tensor", x, exponents)
        batch.add("aten::pow.Scalar", 2, exponents)
        for number in (0, 1, 2, 3, 5):
            batch.add("aten::pow.Tensor_Scalar", x, number)
        for number in (0.5, -0.5, -1.0, -2.0, 1.7):
            batch.add("aten::pow.Tensor_Scalar", x.abs() + 1, number)

    each(REAL + COMPLEX, call)


def test_negative_integer_powers() -> None:
    batch = Batch()
    bases = torch.tensor([[1], [-1], [2], [-3]])
    batch.add("aten::pow.Tensor_Tensor", bases, torch.tensor([-1, -2, -3, 0, 3]))
    batch.check()


def test_shifts() -> None:
    def call(batch: Batch, dtype: torch.dtype) -> None:
        x = samples(dtype).unsqueeze(1)
        y = torch.tensor([0, 1, 3, 7, 40, 63, 64, 100]).to(dtype)
        for op in ("bitwise_left_shift", "bitwise_right_shift"):
            batch.add(f"aten::{op}.Tensor", x, y)
            batch.add(f"aten::{op}.Tensor_Scalar", x, 2)
            batch.add(f"aten::{op}.Scalar_Tensor", 5, y)

    each(INTEGERS, call)


def test_clamp() -> None:
    def call(batch: Batch, dtype: torch.dtype) -> None:
        x, y = grid(dtype)
        batch.add("aten::clamp", x, 1, 3)
        batch.add("aten::clamp", x, 3, 1)
        batch.add("aten::clamp", x, None, 2)
        batch.add("aten::clamp", x, 2, None)
        batch.add("aten::clamp.Tensor", x, y, None)
        batch.add("aten::clamp.Tensor", x, None, y)
        batch.add("aten::clamp.Tensor", x, y, y[1])
        batch.add("aten::clamp_min.Tensor", x, y)
        batch.add("aten::clamp_max.Tensor", x, y)

    each(REAL, call)
    batch = Batch()
    batch.add("aten::clamp", torch.arange(5), 0.5, 2.5)
    batch.add("aten::clamp", samples(torch.float32), NAN, 1.0)
    batch.check()


def test_ternary() -> None:
    def call(batch: Batch, dtype: torch.dtype) -> None:
        x, y = grid(dtype)
        for value in (1, 2):
            batch.add("aten::addcmul", x, y, x, value=value)
        if dtype in INTEGERS:
            return
        batch.add("aten::addcdiv", x, y, y + 20, value=0.5)
        for weight in (0.25, 0.75):
            batch.add("aten::lerp.Scalar", x, y, weight)
        weights = torch.linspace(-1, 2, y.shape[0]).to(dtype)
        batch.add("aten::lerp.Tensor", x, y, weights)

    each(FLOATS + INTEGERS + COMPLEX, call)


def test_masks_and_fills() -> None:
    def call(batch: Batch, dtype: torch.dtype) -> None:
        x = samples(dtype)
        mask = torch.arange(x.shape[0]) % 2 == 0
        batch.add("aten::masked_fill.Scalar", x, mask.unsqueeze(1), 1)
        batch.add("aten::masked_fill.Tensor", x, mask, OnHost(torch.tensor(1)))
        batch.add("aten::masked_fill.Tensor", x, mask, x[0])
        batch.add("aten::fill.Scalar", x, 1)
        batch.add("aten::fill.Tensor", x, x[1])
        batch.add("aten::zero", x)
        batch.add("aten::where.self", mask, x, OnHost(torch.tensor(0, dtype=dtype)))

    each(ALL, call)


def test_promotion() -> None:
    """Mixed operands: integers meet floats, 0-dim tensors meet dimensioned ones, and numbers meet
    both.
    """
    batch = Batch()
    dtypes = (torch.bool, torch.uint8, torch.int32, torch.bfloat16, torch.float32)
    for x in dtypes:
        for y in dtypes:
            left = torch.tensor([0, 1, 1]).to(x)
            batch.add("aten::add.Tensor", left, torch.tensor([1, 1, 0]).to(y))
            batch.add("aten::mul.Tensor", left, torch.tensor(1, dtype=y))
            batch.add("aten::mul.Tensor", left, OnHost(torch.tensor(1, dtype=y)))
            batch.add("aten::le.Tensor", left, OnHost(torch.tensor(1, dtype=y)))
        batch.add("aten::mul.Scalar", left, 2)
        batch.add("aten::mul.Scalar", left, 2.5)
        batch.add("aten::div.Scalar", left, 2)
        batch.add("aten::mul.Scalar", left, True)
        batch.add("aten::mul.Scalar", torch.tensor([1.0, 2.0]), 1j)
    batch.check()


def test_round_decimals() -> None:
    batch = Batch()
    x = torch.tensor([1.2345, -6.789, 1250.0, 15.0, NAN, INF])
    for decimals in (-2, -1, 0, 1, 3):
        batch.add("aten::round.decimals", x, decimals=decimals)
        batch.add("aten::round.decimals", x.double(), decimals=decimals)
    batch.check()


def test_parameters() -> None:
    """Activations with other parameters than the defaults."""
    x = samples(torch.float32)
    batch = Batch()
    batch.add("aten::nan_to_num", x, 1.0, 2.0, 3.0)
    batch.add("aten::nan_to_num", torch.complex(x, x.flip(0)), 1.0, 2.0, 3.0)
    batch.add("aten::logit", x, 0.1)
    batch.add("aten::gelu", x, approximate="tanh")
    batch.add("aten::elu", x, 1.5, 0.7, 0.3)
    batch.add("aten::celu", x, 1.5)
    batch.add("aten::hardtanh", x, -0.5, 2.0)
    batch.add("aten::leaky_relu", x, 0.2)
    batch.add("aten::softplus", x, 2.0, 1.0)
    batch.add("aten::threshold", x, 0.4, 7.0)
    batch.add("aten::complex", x, x.flip(0))
    batch.add("aten::polar", x[:13], x[:13].flip(0))
    batch.add("aten::ldexp.Tensor", x, torch.tensor(3))
    below = torch.tensor([-8.3, -2.7, -0.4])
    batch.add("aten::polygamma", 1, below)
    batch.add("aten::polygamma", 2, torch.tensor([-2.0, 0.0, 0.5]))
    for order in (0, 1, 3):
        batch.add("aten::polygamma", order, x[x > 0.2][:3])
    batch.check()
