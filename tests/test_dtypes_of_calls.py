"""Dtypes that an operator does not take, or not together: refused as on PyTorch's CPU."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import pytest
import torch

import lazyxla
from tests.sample_calls import OPERATORS, check
from tests.support import DEVICE, error_of

DTYPES = (torch.float16, torch.float64, torch.complex64, torch.int64, torch.uint8, torch.bool)
PARTS = 8

STATISTICS = "the statistics of 16-bit inputs are float32, as on CUDA"
OF_THEIR_OWN = "running statistics may have any floating-point dtype (test_batch_norm_dtypes.py)"
DIFFERENT = {
    "chalf": "XLA has no complex numbers of 16-bit floats",
    "complex": "as above",
    "stft": "as above",
    "_softmax_backward_data": "autograd calls it, with what the forward operator returned",
    "native_dropout_backward": "as above",
    "native_layer_norm": STATISTICS,
    "_batch_norm_with_update": STATISTICS,
    "tensor_split": "it takes the positions from a tensor on the CPU only",
    "index_fill": "the value is in a tensor: what it is, is not known at the call",
    "nn.functional.embedding_bag": "PyTorch's meta function takes no indices of 8 bits",
    "_unsafe_masked_index": "it reads masks as indices that do not fit first",
    "_unsafe_masked_index_put_accumulate": "as above",
    "nn.functional.linear_cross_entropy": "composed of others, whose CPU kernels choose dtypes",
    "nn.functional.batch_norm": OF_THEIR_OWN,
    "nn.functional.instance_norm": OF_THEIR_OWN,
    "native_batch_norm": STATISTICS,
    "_native_batch_norm_legit": STATISTICS,
    "_segment_reduce": "the lengths are checked, which are not known at the call",
}


@pytest.mark.parametrize("part", range(PARTS))
def test_refused_or_accepted_as_on_the_cpu(part: int) -> None:
    changes = {str(dtype): functools.partial(torch.Tensor.to, dtype=dtype) for dtype in DTYPES}
    differ, refused = [], 0
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in OPERATORS[part::PARTS]:
            if name not in DIFFERENT:
                found, count = check(name, changes)
                differ += found
                refused += count
    assert not differ, "\n".join(differ)
    assert refused > 50


RESULTS: dict[str, Callable[[str, torch.dtype], object]] = {
    "isin": lambda d, t: torch.isin(_ones(3, d), _ones(2, d), out=_empty(3, d, t)),
    "isin, of a number": lambda d, t: torch.isin(_ones(3, d), 1.0, out=_empty(3, d, t)),
    "isin, a number": lambda d, t: torch.isin(1.0, _ones(3, d), out=_empty(0, d, t)),
    "lu_solve": lambda d, t: torch.lu_solve(
        _ones((3, 1), d), torch.eye(3).to(d), _pivots(d), out=_empty((3, 1), d, t)
    ),
    "linalg.lu_solve": lambda d, t: torch.linalg.lu_solve(
        torch.eye(3).to(d), _pivots(d), _ones((3, 1), d), out=_empty((3, 1), d, t)
    ),
    "lu_unpack": lambda d, t: torch.lu_unpack(
        torch.eye(3).to(d), _pivots(d), out=tuple(_empty((3, 3), d, t) for _ in range(3))
    ),
}


def _ones(size: int | tuple[int, ...], d: str) -> torch.Tensor:
    return torch.ones(size).to(d)


def _empty(size: int | tuple[int, ...], d: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(size, device=d, dtype=dtype)


def _pivots(d: str) -> torch.Tensor:
    return torch.tensor([1, 2, 3], dtype=torch.int32).to(d)


@pytest.mark.parametrize("name", RESULTS)
def test_results_have_the_kernels_dtype(name: str) -> None:
    refused = 0
    for dtype in (torch.bool, torch.int64, torch.float32, torch.float64, torch.complex64):
        call = functools.partial(RESULTS[name], t=dtype)
        expected = error_of(call, "cpu")
        assert error_of(call, DEVICE) == expected
        refused += expected[0] is RuntimeError
    assert refused == 4


F = torch.nn.functional


@pytest.mark.parametrize("columns", [3, 300, 3000])
@pytest.mark.parametrize(
    "call",
    [
        lambda x, w, b: F.linear(x, w.expand(4, -1)),
        lambda x, w, b: F.linear(x, w.expand(4, -1), b[:4]),
        lambda x, w, b: F.layer_norm(x, w.shape, w, b),
        lambda x, w, b: F.group_norm(x[None], x.shape[0], w[: x.shape[0]], b[: x.shape[0]]),
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
        lambda x, w, b: F.conv1d(x[None], w.expand(2, x.shape[0], -1)),
    ],
    ids=["linear", "linear with bias", "layer_norm", "group_norm", "batch_norm", "conv1d"],
)
def test_a_layers_parameters_have_its_inputs_dtype(
    call: Callable[..., torch.Tensor], columns: int
) -> None:
    """At sizes that the CPU is asked about with fewer elements, too."""
    parameters = torch.ones(max(columns, 8))
    arguments = (torch.ones(8, columns, dtype=torch.float64), parameters[:columns], parameters)
    with pytest.raises(RuntimeError) as expected:
        call(*arguments)
    with pytest.raises(RuntimeError) as found:
        call(*(x.to("lazyxla") for x in arguments))
    if "CPU" not in str(expected.value):
        assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float32), (torch.float32, torch.int64)])
@pytest.mark.parametrize(
    "call",
    [
        lambda x, y: torch.linalg.solve_triangular(x, y, upper=True),
        lambda x, y: torch.addr(x, y[0], y[1]),
        lambda x, y: F.huber_loss(x, y.float(), reduction="none"),
        lambda x, y: F.soft_margin_loss(x, y),
        lambda x, y: torch.tensor([torch.equal(x.to(y.dtype), x), torch.equal(y, y.double())]),
        lambda x, y: F.conv_transpose1d(x[None], x[..., None], y[0]),
    ],
    ids=["solve_triangular", "addr", "huber_loss", "soft_margin_loss", "equal", "conv_transpose"],
)
def test_accepted_with_the_cpus_values(
    call: Callable[..., torch.Tensor], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    x = (torch.arange(9.0).view(3, 3) / 4 + torch.eye(3)).to(dtypes[0])
    y = torch.arange(9).view(3, 3).remainder(3).to(dtypes[1])
    found = call(x.to("lazyxla"), y.to("lazyxla")).cpu()
    torch.testing.assert_close(found, call(x, y))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "layer",
    [
        lambda: torch.nn.LayerNorm(8),
        lambda: torch.nn.GroupNorm(2, 8),
        lambda: torch.nn.RMSNorm(8),
        lambda: torch.nn.BatchNorm1d(8, track_running_stats=False),
        lambda: torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        lambda: torch.nn.LSTM(8, 8, batch_first=True),
    ],
    ids=["LayerNorm", "GroupNorm", "RMSNorm", "BatchNorm1d", "TransformerEncoderLayer", "LSTM"],
)
def test_layers_of_16_bits_are_trained(
    layer: Callable[[], torch.nn.Module], dtype: torch.dtype
) -> None:
    """Their statistics are float32, and go into the gradients."""
    model = layer().to("lazyxla", dtype)
    x = torch.randn(4, 8, 8).to("lazyxla", dtype).requires_grad_()
    result = model(x)
    (result[0] if isinstance(result, tuple) else result).float().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert x.grad is not None
    assert x.grad.dtype == dtype


def test_transforms_are_not_made_on_the_cpu_to_hear_of_dtypes() -> None:
    """PyTorch's own kernel writes beyond its memory for some sizes; and it would take its time."""
    called = []

    def kernel(x: torch.Tensor, *_: object) -> torch.Tensor:
        called.append(x.shape)
        return x

    calls: list[Callable[[torch.Tensor], torch.Tensor]] = [
        torch.fft.irfftn, torch.fft.fft2, torch.fft.rfft2, torch.fft.hfft, torch.fft.ifft
    ]  # fmt: skip
    before = lazyxla.counters()["shape_inferences"]
    with torch.library._scoped_library("aten", "IMPL") as library, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels that are replaced
        for name in ("_fft_c2c", "_fft_c2r", "_fft_r2c"):
            library.impl(name, kernel, "CPU")
        for shape in ((5, 240, 7), (3, 17, 19)):
            for call in calls:
                dtype = torch.float64 if call is torch.fft.rfft2 else torch.complex64
                call(torch.ones(shape, dtype=dtype, device=DEVICE))
    assert lazyxla.counters()["shape_inferences"] - before >= 2 * len(calls)
    assert not called
