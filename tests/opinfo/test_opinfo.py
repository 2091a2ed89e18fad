"""The part of PyTorch's operator table that is checked with every change.

One sample of every entry in float32, and all samples of some entries with gradients, in-place and
out= variants and errors. Of the other dtypes two samples of few entries: of each kind of lowering
one whose result depends on the dtype in a way of its own. `make test-opinfo` checks everything.
"""

from __future__ import annotations

import pytest
import torch

from lazyxla import compat
from tests.opinfo.checks import check_entry
from tests.opinfo.entries import entries, supports
from tests.opinfo.expected import EXPECTED, JUDGED, unexpected
from tests.opinfo.outcome import INTEGERS, PARTS, SIZES, VIEWS

# Of each kind of operator one or two that much depends on.
THOROUGH = [
    "add",
    "addmm",
    "amax",
    "bmm",
    "cat",
    "clamp",
    "cumsum",
    "div.floor_rounding",
    "exp",
    "gather",
    "index_add",
    "index_put",
    "index_select",
    "kron",
    "log_softmax",
    "masked_fill",
    "matmul",
    "max.reduction_with_dim",
    "mean",
    "mul",
    "nn.functional.avg_pool2d",
    "nn.functional.batch_norm",
    "nn.functional.cross_entropy",
    "nn.functional.embedding",
    "nn.functional.gelu",
    "nn.functional.layer_norm",
    "nn.functional.linear",
    "nn.functional.scaled_dot_product_attention",
    "permute",
    "pow",
    "scatter_add",
    "sigmoid",
    "slice_scatter",
    "softmax",
    "sort",
    "sqrt",
    "sub",
    "sum",
    "tanh",
    "topk",
    "tril",
    "var",
    "where",
]
# Per dtype, and why these.
OTHER_DTYPES: dict[str, list[str]] = {
    # Sums and products are accumulated in float32 and rounded once; constants, reductions,
    # windows, sorting and random numbers have paths of their own for 16 bits.
    "bfloat16": [
        *("add", "amax", "bmm", "cat", "cumsum", "div.floor_rounding", "exp", "matmul"),
        *("mean", "nn.functional.avg_pool2d", "nn.functional.conv2d", "nn.functional.gelu"),
        *("nn.functional.layer_norm", "nn.functional.linear", "pow", "softmax", "sort", "std"),
        *("sum", "topk", "var", "where"),
    ],
    # As bfloat16, with a narrow range: what overflows is inf, and small numbers are subnormal.
    "float16": [
        *("add", "clamp", "cumprod", "exp", "logsumexp", "mean", "mm", "mul"),
        *("nn.functional.conv1d", "nn.functional.max_pool2d", "prod", "sigmoid", "sub", "sum"),
    ],
    # Special functions must not fall back to float32; convolutions have another form.
    "float64": [
        *("digamma", "erf", "erfinv", "exp", "fft.fft", "lgamma", "linalg.cholesky", "linalg.eigh"),
        *("linalg.solve", "log1p", "matmul", "nn.functional.conv2d", "pow", "softmax", "std"),
        *("special.i0e", "tan", "var"),
    ],
    # Promotion to float, division that rounds, overflow, indices and bits.
    "int64": [
        *("abs", "add", "all", "argmax", "bitwise_left_shift", "clamp", "cumsum"),
        *("div.floor_rounding", "div.no_rounding_mode", "div.trunc_rounding", "floor_divide"),
        *("fmod", "gather", "gcd", "masked_fill", "matmul", "mul", "neg", "nonzero"),
        *("pow", "prod", "remainder", "scatter_add", "sign", "sort", "sqrt", "sum", "topk"),
    ],
    # Sums widen to int64, all else stays.
    "int32": ["add", "amin", "bincount", "cumprod", "floor_divide", "index_add", "sum", "unique"],
    # No sign: subtraction and negation wrap; images are resampled in fixed point.
    "uint8": [
        *("_upsample_bilinear2d_aa", "add", "amax", "bitwise_not", "div.floor_rounding", "ge"),
        *("mul", "neg", "nn.functional.interpolate.bilinear", "nn.functional.interpolate.nearest"),
        *("remainder", "sub", "sum"),
    ],
    # PyTorch's sums are counts, its products conjunctions, and subtraction is an error.
    "bool": [
        *("add", "all", "any", "cat", "count_nonzero", "eq", "index_put"),
        *("logical_xor", "masked_select", "max.binary", "mul", "nonzero", "sum", "where"),
    ],
    # XLA's own functions on complex numbers, branches, and products as three or four real ones.
    "complex64": [
        *("abs", "acos", "add", "angle", "conj", "div.no_rounding_mode", "exp", "fft.fft"),
        *("fft.ifft2", "linalg.inv", "log", "matmul", "mean", "mul", "pow", "prod", "real"),
        *("reciprocal", "sgn", "sqrt", "sum", "tanh", "view_as_real"),
    ],
}
# Gradients of complex numbers are conjugated where those of real ones are not.
COMPLEX_GRADIENTS = [
    *("abs", "cumprod", "div.no_rounding_mode", "einsum", "exp", "index_put", "linalg.inv"),
    *("linalg.solve", "matmul", "mul", "nn.functional.conv2d", "nn.functional.linear", "pow"),
    *("prod", "scatter_add", "sum", "where"),
]
# Of real numbers PyTorch returns the first as it is.
COMPLEX_IN_PLACE = ["conj_physical", "exp", "mul", "sgn"]
# Of each kind of operator some, each operator by itself: a program per call, results as operands.
EAGER = [
    *("add", "addmm", "amax", "arange", "argmax", "as_strided", "bernoulli", "bmm", "cat", "clamp"),
    *("cumsum", "div.floor_rounding", "exp", "fft.fft", "full", "gather", "index_put"),
    *("index_select", "linalg.solve", "log_softmax", "masked_fill", "masked_select", "matmul"),
    *("mean", "nn.functional.avg_pool2d", "nn.functional.batch_norm", "nn.functional.conv2d"),
    *("nn.functional.cross_entropy", "nn.functional.embedding", "nn.functional.gelu"),
    *("nn.functional.interpolate.bilinear", "nn.functional.layer_norm", "nn.functional.max_pool2d"),
    *("nonzero", "permute", "scatter_add", "softmax", "sort", "split", "topk", "var", "where"),
]
# Of each mechanism that sizes of 0 and 1 were wrong with, one at least, and what most depends on.
SIZED = [
    *("addmv", "all", "amax", "cat", "diagonal_scatter", "gather"),
    *("histogram", "index_reduce.mean", "index_select", "linalg.norm", "masked.median"),
    *("matmul", "mean", "native_batch_norm", "native_dropout_backward"),
    *("nn.functional.conv2d", "nn.functional.cross_entropy", "nn.functional.ctc_loss"),
    *("nn.functional.embedding", "nn.functional.interpolate.bilinear", "nn.functional.layer_norm"),
    *("nn.functional.linear", "nn.functional.max_pool2d", "nn.functional.nll_loss"),
    *("nn.functional.pad.replicate_negative", "nn.functional.soft_margin_loss", "ormqr"),
    *("scatter_add", "slice_scatter", "softmax", "sort", "sum", "topk", "where"),
]
# Of each mechanism that extreme integers were wrong with, one at least, and what most depends on.
WITH_INTEGERS = [
    *("_segment_reduce.lengths", "arange", "as_strided", "chunk", "cumsum", "diagonal", "empty"),
    *("eye", "full", "index_select", "linspace", "movedim", "narrow", "native_group_norm"),
    *("nn.functional.avg_pool2d", "nn.functional.conv_transpose1d", "nn.functional.max_pool1d"),
    *("nn.functional.pad.constant", "nn.functional.pixel_shuffle", "permute"),
    *("polygamma.polygamma_n_2", "repeat", "reshape", "roll", "round.decimals_3", "select"),
    *("softmax", "split", "sum", "topk", "tril", "tril_indices", "triu_indices", "unfold"),
]
FLOAT32 = [n for n, op in entries().items() if supports(op, torch.float32, "forward")]


@pytest.mark.parametrize("name", FLOAT32)
def test_first_sample(name: str) -> None:
    assert unexpected(check_entry(name, torch.float32, "forward", 1), complete=False) == []


@pytest.mark.parametrize("part", [p for p in PARTS if p != "layouts"])
@pytest.mark.parametrize("name", THOROUGH)
def test_all_samples(name: str, part: str) -> None:
    outcome = check_entry(name, torch.float32, part)
    assert unexpected(outcome, complete=True) == []
    # A call that is an error anyway may be tried on the host.
    assert part == "errors" or outcome.fallbacks == {}


@pytest.mark.parametrize(
    ("dtype", "name"), [(d, name) for d, names in OTHER_DTYPES.items() for name in names]
)
def test_other_dtypes(dtype: str, name: str) -> None:
    outcome = check_entry(name, getattr(torch, dtype), "forward", 2)
    assert outcome.samples > 0
    assert unexpected(outcome, complete=False) == []


@pytest.mark.parametrize("name", COMPLEX_GRADIENTS)
def test_complex_gradients(name: str) -> None:
    outcome = check_entry(name, torch.complex64, "backward", 2)
    assert outcome.samples > 0
    assert unexpected(outcome, complete=False) == []


@pytest.mark.parametrize("name", COMPLEX_IN_PLACE)
def test_complex_in_place(name: str) -> None:
    outcome = check_entry(name, torch.complex64, "inplace", 2)
    assert outcome.samples > 0
    assert unexpected(outcome, complete=False) == []
    assert outcome.fallbacks == {}


@pytest.mark.parametrize("name", EAGER)
def test_eager_mode(name: str) -> None:
    outcome = check_entry(name, torch.float32, "forward", 1, eager=True)
    assert outcome.samples == 1
    assert unexpected(outcome, complete=False) == []
    assert outcome.fallbacks == {}


@pytest.mark.parametrize("name", THOROUGH)
def test_layouts(name: str) -> None:
    outcome = check_entry(name, torch.float32, "layouts", 2)
    assert unexpected(outcome, complete=False) == []
    assert outcome.fallbacks == {}


@pytest.mark.parametrize("name", THOROUGH)
def test_views(name: str) -> None:
    """Compiled: test_host_programs.py has PyTorch's kernels compute the same."""
    outcome = check_entry(name, torch.float32, VIEWS, 1)
    assert unexpected(outcome, complete=False) == []


@pytest.mark.parametrize("name", SIZED)
def test_sizes(name: str) -> None:
    """Sizes of 0 and 1, and empty lists: `python -m tests.opinfo.sweep --part sizes` tries all."""
    outcome = check_entry(name, torch.float32, SIZES, 8)
    assert outcome.samples > 0
    assert unexpected(outcome, complete=False) == []


@pytest.mark.parametrize("name", WITH_INTEGERS)
def test_integers(name: str) -> None:
    """`python -m tests.opinfo.sweep --part integers` tries all."""
    dtype = torch.float32 if name in FLOAT32 else torch.int64
    outcome = check_entry(name, dtype, INTEGERS, 8)
    assert outcome.samples > 0
    assert unexpected(outcome, complete=False) == []


def test_expected_failures_name_entries() -> None:
    """Else a name that PyTorch changes would go unnoticed."""
    named = {n for e in (*EXPECTED, *JUDGED) for n in e.entries}
    removed = {n.removeprefix("aten::") for n in compat.REMOVED_OPERATORS}
    assert named - set(entries()) <= removed
