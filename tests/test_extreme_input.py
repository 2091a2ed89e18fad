"""Input at the edge of what an operator takes: no elements, great numbers, infinities, nan.

Every row gives the CPU's value, dtype, shape and strides, or raises the CPU's type of error, at the
call.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lazyxla.lowering import lower_to_text
from tests.calls import Call
from tests.support import DEVICE, assert_same, check, counted, error_of, on_device

INF, NAN = float("inf"), float("nan")
Row = tuple[Callable[..., Any], tuple[Any, ...]]

NONE = torch.empty(0)
CLASSES = torch.empty(0, dtype=torch.long)
MATRIX = torch.arange(12.0).reshape(3, 4)
GREAT = [2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**63 - 1, -(2**31), -(2**32), -(2**63)]
UINT32 = torch.tensor([3, 2**31 + 5, 2**31 - 1, 2**32 - 1, 0]).to(torch.uint32)


def _losses() -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for reduction in ("mean", "sum", "none"):
        how = {"reduction": reduction}
        rows |= {
            f"cross_entropy, {reduction}": (
                lambda x, t, how=how: F.cross_entropy(x, t, **how),
                (torch.empty(0, 3), CLASSES),
            ),
            f"smoothed cross_entropy, {reduction}": (
                lambda x, t, w, how=how: F.cross_entropy(x, t, w, label_smoothing=0.1, **how),
                (torch.empty(0, 3), CLASSES, torch.ones(3)),
            ),
            f"cross_entropy of images, {reduction}": (
                lambda x, t, how=how: F.cross_entropy(x, t, **how),
                (torch.empty(2, 3, 0, 2), torch.empty(2, 0, 2, dtype=torch.long)),
            ),
            f"cross_entropy without classes, {reduction}": (
                lambda x, t, how=how: F.cross_entropy(x, t, **how),
                (torch.empty(2, 0), torch.zeros(2, dtype=torch.long)),
            ),
            f"ctc_loss without labels, {reduction}": (
                lambda x, t, how=how: F.ctc_loss(x, t, (4, 4), (0, 0), **how),
                (torch.randn(4, 2, 3), torch.empty(2, 0, dtype=torch.long)),
            ),
            f"ctc_loss without input, {reduction}": (
                lambda x, t, how=how: F.ctc_loss(x, t, (0, 4), (0, 1), **how),
                (torch.randn(4, 2, 3), torch.ones(2, 2, dtype=torch.long)),
            ),
            f"ctc_loss of no time, {reduction}": (
                lambda x, t, how=how: F.ctc_loss(x, t, (0, 0), (0, 0), **how),
                (torch.empty(0, 2, 3), torch.ones(2, 2, dtype=torch.long)),
            ),
            f"multi_margin_loss without classes, {reduction}": (
                lambda x, t, how=how: F.multi_margin_loss(x, t, **how),
                (torch.empty(2, 0), torch.zeros(2, dtype=torch.long)),
            ),
        }
    # With others PyTorch's CPU returns memory that it has not written.
    rows["multi_margin_loss"] = (
        lambda x, t: F.multi_margin_loss(x, t, reduction="none"),
        (torch.empty(0, 3), CLASSES),
    )
    return rows


def _medians() -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for f in (torch.median, torch.nanmedian):
        rows |= {
            f"{f.__name__}": (f, (NONE,)),
            f"{f.__name__} of integers": (f, (CLASSES,)),
            f"{f.__name__} of a matrix": (f, (torch.empty(0, 3),)),
            f"{f.__name__} along nothing": (lambda x, f=f: f(x, 0), (torch.empty(0, 3),)),
            f"{f.__name__} of rows": (lambda x, f=f: f(x, 1), (torch.empty(0, 3),)),
        }
    return rows


def _triangles() -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for diagonal in GREAT:
        for name in ("tril", "triu", "tril_", "triu_"):
            rows[f"{name}({diagonal})"] = (
                lambda x, name=name, diagonal=diagonal: getattr(x, name)(diagonal),
                (MATRIX,),
            )
        rows[f"diag({diagonal})"] = (lambda x, d=diagonal: torch.diag(x, d), (MATRIX,))
        rows[f"select({diagonal})"] = (lambda x, d=diagonal: x.select(0, d), (MATRIX,))
        rows[f"x[{diagonal}]"] = (lambda x, d=diagonal: x[d], (MATRIX,))
        rows[f"narrow({diagonal})"] = (lambda x, d=diagonal: x.narrow(0, d, 1), (MATRIX,))
        rows[f"x[:{diagonal}]"] = (lambda x, d=diagonal: x[:d] + 0, (MATRIX,))
        rows[f"sum({diagonal})"] = (lambda x, d=diagonal: x.sum(d), (MATRIX,))
        rows[f"roll({diagonal})"] = (lambda x, d=diagonal: torch.roll(x, d, 0), (MATRIX,))
    return rows


def _unsigned() -> dict[str, Row]:
    return {
        "sort of uint32": (lambda x: torch.sort(x, stable=True), (UINT32,)),
        "sort of uint32, descending": (
            lambda x: torch.sort(x, stable=True, descending=True),
            (UINT32,),
        ),
        "argsort of uint32": (lambda x: torch.argsort(x, stable=True), (UINT32,)),
        "msort of uint32": (torch.msort, (UINT32,)),
        "unique of uint32": (torch.unique, (UINT32,)),
    }


def _histograms() -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for numbers in ([1.0, INF], [NAN, 1.0], [1.0, 2.0, -INF], [INF], [2.0, 2.0], []):
        x = torch.tensor(numbers)
        rows[f"histc of {numbers}"] = (torch.histc, (x,))
        rows[f"histc of {numbers} between 0 and 3"] = (lambda x: torch.histc(x, 4, 0, 3), (x,))
    for low, high in ((3, 1), (NAN, 1), (0, INF)):
        rows[f"histc between {low} and {high}"] = (
            lambda x, low=low, high=high: torch.histc(x, 4, low, high),
            (torch.ones(2),),
        )
    return rows


def _sums() -> dict[str, Row]:
    rows: dict[str, Row] = {}
    x = torch.tensor([[1.0, NAN], [3.0, 4.0]])
    for name in ("nansum", "sum", "all", "any"):
        for dim in ((), None, (0, 1)):
            for keepdim in (False, True):
                rows[f"{name}({dim}, {keepdim})"] = (
                    lambda x, n=name, d=dim, k=keepdim: getattr(torch, n)(x, dim=d, keepdim=k),
                    (x,),
                )
    return rows


def _factors() -> dict[str, Row]:
    singular = torch.stack([torch.zeros(2, 2), torch.eye(2), torch.diag(torch.tensor([1.0, -1.0]))])
    return {
        "cholesky_ex of singular matrices": (
            lambda x: torch.linalg.cholesky_ex(x),
            (singular,),
        ),
        "cholesky of a zero": (torch.linalg.cholesky, (torch.zeros(1, 1),)),
        **{
            f"{name} of large and infinite numbers": (
                getattr(torch.special, name),
                (torch.tensor([1e30, 3e4, 2.0, INF]), torch.tensor([1e30, 3e4, INF, 2.0])),
            )
            for name in ("gammainc", "gammaincc")
        },
        "norm of nothing": (lambda x: torch.linalg.vector_norm(x, 2), (NONE,)),
        "norm of nothing, -1": (lambda x: torch.linalg.vector_norm(x, -1), (NONE,)),
        "norm of nothing, inf": (lambda x: torch.linalg.vector_norm(x, INF), (NONE,)),
    }


ROWS = {
    **_losses(),
    **_medians(),
    **_triangles(),
    **_unsigned(),
    **_histograms(),
    **_sums(),
    **_factors(),
}


@pytest.mark.parametrize("name", ROWS)
def test_as_on_the_cpu(name: str) -> None:
    function, args = ROWS[name]
    wrong, _ = error_of(function, *on_device(args, "cpu"))
    if wrong is type(None):
        check(function, *args)
    else:
        ours, _ = error_of(function, *on_device(args))
        assert ours is wrong


def test_bytes_beyond_64_bits_are_refused() -> None:
    """PyTorch's meta function of eye does not count them."""
    for device in ("cpu", "lazyxla"):
        with pytest.raises(RuntimeError, match="Storage size calculation overflowed"):
            torch.eye(2**31, device=device)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_histograms_of_integers(dtype: torch.dtype) -> None:
    """PyTorch has them on GPUs; the CPU is asked with floats."""
    x = torch.tensor([0, 1, 2, 2, 3, 7, 7, 200], dtype=dtype)
    for bins, low, high in ((4, 0, 3), (8, 0, 7), (3, 0, 0), (5, 1, 100), (2, 7, 7)):
        found = torch.histc(x.to("lazyxla"), bins, low, high)
        assert found.dtype == dtype
        assert found.tolist() == torch.histc(x.double(), bins, low, high).tolist()
    for low, high in ((3, 1), (float("nan"), 1)):
        ours, theirs = (
            error_of(torch.histc, each, 4, low, high) for each in (x.to("lazyxla"), x.float())
        )
        assert ours == theirs


def test_histograms_with_bounds_read_nothing() -> None:
    x = torch.rand(5).to("lazyxla")
    with counted() as n:
        torch.histc(x, 4, 0, 1)
    assert n.data_dependent == n.executions == 0
    with counted() as n:
        torch.histc(x, 4)
    assert n.data_dependent == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("base", [2, 10])
def test_logarithms_of_powers(base: int, dtype: torch.dtype) -> None:
    """Exact for every power of 2, subnormal ones included, and for every normal power of 10."""
    limits = torch.finfo(dtype)
    least = limits.smallest_normal * (limits.eps if base == 2 else 1)
    powers = [k for k in range(-1074, 1024) if least <= Fraction(base) ** k <= limits.max]
    assert len(powers) > (70 if base == 10 else 270)
    x = torch.tensor([float(Fraction(base) ** k) for k in powers], dtype=torch.float64).to(dtype)
    function = torch.log2 if base == 2 else torch.log10
    assert function(x.to("lazyxla")).tolist() == powers


@pytest.mark.parametrize("kind", ["amax", "amin"])
def test_extrema_of_nan_when_compiled(kind: str, fresh_dynamo: None) -> None:
    x = torch.tensor([[1.0, NAN, 3.0], [4.0, 5.0, 6.0]])
    prim = getattr(torch.ops.prims, kind)
    compiled = torch.compile(lambda x: prim(x, (1,)), backend="lazyxla")
    assert_same(compiled(x.to("lazyxla")), getattr(torch, kind)(x, 1))


@pytest.mark.parametrize(
    "pool",
    [
        lambda x: F.adaptive_max_pool2d(x, 1, return_indices=True),
        lambda x: F.adaptive_max_pool2d(x, (5, 7), return_indices=True),
        lambda x: F.max_pool2d(x, 40, 3, 20, return_indices=True),
        lambda x: F.max_pool2d(x, (1, 150), 9, (0, 70), ceil_mode=True, return_indices=True),
        lambda x: F.max_pool2d(x, 13, 5, 6, dilation=4, return_indices=True),
    ],
)
def test_maxima_of_large_windows(pool: Callable[..., Any]) -> None:
    """The first of equal maxima, the last nan."""
    x = torch.randint(0, 5, (2, 3, 101, 203)).float()
    x[0, 0, 30, 40] = x[0, 0, 31, 2] = NAN
    x[1, 1] = -INF
    check(pool, x)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("aten::adaptive_max_pool2d", ([1, 1],)),
        ("aten::adaptive_max_pool2d", ([3, 3],)),
        ("aten::max_pool2d_with_indices", ([150, 150], [], [0, 0], [1, 1], False)),
    ],
)
def test_programs_do_not_grow_with_windows(name: str, args: tuple[Any, ...]) -> None:
    lines = [
        lower_to_text(Call((torch.zeros(1, 1, n, n), *args), {}).program(name), "cpu").count("\n")
        for n in (224, 640)
    ]
    assert lines[0] == lines[1] < 200


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zeta_far_out(dtype: torch.dtype) -> None:
    """Neither zero for want of digits, nor a loop without an end. The CPU's own ends here."""
    x = torch.tensor([1e5, 2e6, 1e10, 1e15, 1e30, INF, -INF, 2.5, -3.5], dtype=dtype)
    strict = {"rtol": 1e-5, "atol": 0.0, "equal_nan": True}  # these numbers are small
    for function in (
        lambda x: torch.polygamma(1, x),
        lambda x: torch.polygamma(3, x),
        lambda x: torch.special.zeta(2.0, x),
        lambda x: torch.special.zeta(1.0, x),
    ):
        torch.testing.assert_close(function(x.to("lazyxla")).cpu(), function(x), **strict)


# docs/semantics.md has these as a table.
@pytest.mark.parametrize("source", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("dtype", "via"),
    [
        (torch.int64, torch.int64),
        (torch.int32, torch.int32),
        (torch.int16, torch.int32),
        (torch.int8, torch.int32),
        (torch.uint8, torch.int32),
    ],
)
def test_casts_out_of_range(source: torch.dtype, dtype: torch.dtype, via: torch.dtype) -> None:
    """C++ leaves these open. Here they saturate at 64 or 32 bits, of which the lowest are kept."""
    limits = torch.iinfo(via)
    x = torch.tensor([NAN, INF, -INF, 1e30, -1e30, 300.0, -300.0], dtype=source)
    expected = torch.tensor([0, limits.max, limits.min, limits.max, limits.min, 300, -300])
    assert torch.equal(x.to("lazyxla").to(dtype).cpu(), expected.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_subnormal_numbers_are_zeros(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).smallest_normal
    x = torch.tensor([tiny / 4, -tiny / 4], dtype=dtype)
    ours = x.to("lazyxla")
    zeros = torch.zeros(2, dtype=dtype)
    for function in (torch.sqrt, torch.sign, torch.floor, torch.ceil, lambda x: x * 4):
        assert torch.equal(function(ours).cpu(), zeros)
    assert (torch.full((2,), tiny, dtype=dtype).to("lazyxla") / 4).cpu().tolist() == [0, 0]
    assert ours.bool().tolist() == [False, False]
    assert torch.equal((ours + 0 * ours.abs()).cpu(), zeros)
    # What moves elements, and what only looks at signs, keeps them.
    assert torch.equal(ours.flip(0).cpu(), x.flip(0))
    assert torch.equal((-ours).cpu(), -x)
    assert torch.equal(ours.abs().cpu(), x.abs())


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, 3.0, INF])
def test_gradient_of_distances_from_nothing(p: float) -> None:
    x = torch.ones(1, 5, 4, device=DEVICE, requires_grad=True)
    torch.cdist(x[:, :0].expand(2, 0, 4), x, p).sum().backward()
    assert x.grad is not None
    assert not x.grad.any()
