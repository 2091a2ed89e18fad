"""Matrix products, triangular systems and distances."""

import pytest
import torch

from lazyxla.lowering import (
    Geometry,
    LoweringError,
    Node,
    Program,
    Ref,
    Slot,
    SlotSpec,
    Target,
    TensorSpec,
    check_lowering,
    lower_to_text,
)
from lazyxla.lowering.cpu import kernel_limits
from tests.lowering.harness import check, execute, record, text


@pytest.fixture(autouse=True)
def no_kernels():
    """XLA's forms, on processors where kernels are faster, too."""
    with kernel_limits.using({}):
        yield


_NAN = float("nan")


def _random(*shape, dtype=torch.float32):
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)
    return torch.randint(-5, 5, shape, dtype=dtype)


_PRODUCTS = [
    ("aten::mm", (3, 4), (4, 5)),
    ("aten::mm", (3, 0), (0, 5)),
    ("aten::bmm", (2, 3, 4), (2, 4, 5)),
    ("aten::mv", (3, 4), (4,)),
    ("aten::dot", (4,), (4,)),
    ("aten::vdot", (4,), (4,)),
]
_ADDED = [
    ("aten::addmm", (3, 5), (3, 4), (4, 5)),
    ("aten::addmm", (5,), (3, 4), (4, 5)),
    ("aten::addmm", (3, 1), (3, 4), (4, 5)),
    ("aten::baddbmm", (2, 1, 5), (2, 3, 4), (2, 4, 5)),
    ("aten::addbmm", (3, 5), (2, 3, 4), (2, 4, 5)),
    ("aten::addmv", (3,), (3, 4), (4,)),
    ("aten::addr", (3, 4), (3,), (4,)),
]
_DTYPES = [torch.float32, torch.float64, torch.int64, torch.complex64]


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("op", _PRODUCTS, ids=lambda op: f"{op[0]}{list(op[1])}")
def test_product(op, dtype):
    check(op[0], *(_random(*s, dtype=dtype) for s in op[1:]))


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("op", _ADDED, ids=lambda op: f"{op[0]}{list(op[1])}")
def test_added(op, dtype):
    operands = [_random(*s, dtype=dtype) for s in op[1:]]
    check(op[0], *operands)
    check(op[0], *operands, beta=2, alpha=3)
    if dtype == torch.float32:
        check(op[0], *operands, beta=0.5, alpha=-1.5)


@pytest.mark.parametrize("op", _ADDED, ids=lambda op: f"{op[0]}{list(op[1])}")
def test_beta_zero_ignores_nan(op):
    bias, *factors = (_random(*s) for s in op[1:])
    check(op[0], torch.full_like(bias, _NAN), *factors, beta=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_floats_accumulate_in_float32(dtype):
    x, y = _random(4, 256, dtype=dtype), _random(256, 8, dtype=dtype)
    check("aten::mm", x, y)
    check("aten::addmm", _random(8, dtype=dtype) * 50, x, y, beta=0.7, alpha=0.3)
    check("aten::bmm", x[None], y[None])


@pytest.mark.parametrize("use_gelu", [False, True])
def test_addmm_activation(use_gelu):
    operands = _random(5), _random(3, 4), _random(4, 5)
    check("aten::_addmm_activation", *operands, use_gelu=use_gelu)


def test_int_mm():
    x, y = (torch.randint(-128, 128, s, dtype=torch.int8) for s in ((17, 16), (16, 8)))
    check("aten::_int_mm", x, y)


def test_addr_of_bools():
    check("aten::addr", _random(3, 4) > 0, _random(3) > 0, _random(4) > 0)
    check("aten::addr", _random(3, 4) > 0, _random(3) > 0, _random(4) > 0, beta=False, alpha=True)


def test_wider_result():
    x, y = _random(3, 4, dtype=torch.bfloat16), _random(4, 5, dtype=torch.bfloat16)
    specs = [TensorSpec(t.dtype, tuple(t.shape)) for t in (x, y)]
    out = TensorSpec(torch.float32, (3, 5))
    node = Node("aten::mm.dtype", (Ref(0), Ref(1), torch.float32), (out,), None)
    (got,), _ = execute(Program(specs, [node], [Ref(2)], [], {}), [x, y])
    torch.testing.assert_close(got, x.float() @ y.float())


def _linear(rows):
    """The program of x @ w.t() + bias, for x of shape (rows, 8) and w of shape (16, 8)."""
    f32 = torch.float32
    inputs = [TensorSpec(f32, s) for s in ((rows, 8), (16, 8), (16,))]
    base, view = Geometry(f32, (16, 8), (8, 1), 0), Geometry(f32, (8, 16), (1, 8), 0)
    nodes = [
        Node("lazyxla::view", (Ref(1), base, view), (TensorSpec(f32, (8, 16)),), None),
        Node(
            "aten::addmm",
            (Ref(2), Ref(0), Ref(3), Slot(0), Slot(1)),
            (TensorSpec(f32, (rows, 16)),),
            None,
        ),
    ]
    slots = [SlotSpec(1, torch.int64, True, False)] * 2
    return Program(inputs, nodes, [Ref(4)], slots, {})


@pytest.mark.parametrize(
    ("platform", "rows", "operands"),
    [
        ("cpu", 16, "%arg0, %arg1"),
        ("cpu", 2, "%arg1, %arg0"),  # the smaller operand is the one to be laid out anew
        ("cpu", 1, "%arg0, %arg1"),
        ("tpu", 2, "%arg0, %arg1"),
    ],
)
def test_a_transposed_weight_is_not_transposed(platform, rows, operands):
    """x @ w.t() + bias reaches XLA as one product with w."""
    program = _linear(rows)
    x, w, bias = _random(rows, 8), _random(16, 8), _random(16)
    (got,), _ = execute(program, [x, w, bias])
    torch.testing.assert_close(got, x @ w.t() + bias)
    lowered = lower_to_text(program, platform)
    (product,) = (line for line in lowered.splitlines() if "dot_general" in line)
    assert operands in product
    assert "multiply" not in lowered


@pytest.mark.parametrize(
    ("platform", "terms", "rows", "columns", "padded"),
    [
        ("cpu", 256, 1024, 64, True),
        ("cpu", 256, 1000, 64, False),  # rows are no multiple of a page apart
        ("cpu", 64, 1024, 64, False),  # the sum is short
        ("cpu", 256, 1024, 600, False),
        ("cpu", 256, 1024, 1, False),  # a vector
        ("tpu", 256, 1024, 64, False),
    ],
)
def test_rows_a_page_apart_get_a_gap(platform, terms, rows, columns, padded):
    """g.t() @ x, the gradient of a weight."""
    f32 = torch.float32
    shapes = (terms, rows), (terms, columns)
    base = Geometry(f32, (terms, rows), (rows, 1), 0)
    view = Geometry(f32, (rows, terms), (1, rows), 0)
    nodes = [
        Node("lazyxla::view", (Ref(0), base, view), (TensorSpec(f32, (rows, terms)),), None),
        Node("aten::mm", (Ref(2), Ref(1)), (TensorSpec(f32, (rows, columns)),), None),
    ]
    program = Program([TensorSpec(f32, s) for s in shapes], nodes, [Ref(3)], [], {})
    assert ("stablehlo.pad" in lower_to_text(program, platform)) == padded
    g, x = (_random(*s).round() for s in shapes)  # whole numbers add up exactly
    (got,), _ = execute(program, [g, x])
    assert torch.equal(got, g.t() @ x)


@pytest.mark.parametrize(
    ("platform", "inner", "rows", "columns", "padded"),
    [
        ("cpu", 1024, 512, 128, True),
        ("cpu", 1000, 512, 128, False),  # rows are no multiple of a page apart
        ("cpu", 1024, 512, 64, False),  # few columns
        ("cpu", 1024, 1024, 128, False),  # few columns for so many rows
        ("cpu", 1024, 16, 128, False),  # turned around
        ("cpu", 1024, 1, 128, False),  # a vector
        ("tpu", 1024, 512, 128, False),
    ],
)
def test_summed_rows_a_page_apart_get_a_gap(platform, inner, rows, columns, padded):
    """x @ w.t(), a linear layer."""
    x, w = _random(rows, inner).round(), _random(columns, inner).round()  # these add up exactly
    recorded = record("aten::linear", x, w)
    assert ("stablehlo.pad" in lower_to_text(recorded.program, platform)) == padded
    (got,), _ = execute(recorded.program, recorded.inputs)
    assert torch.equal(got, x @ w.t())


@pytest.mark.parametrize(
    ("dtype", "padded"), [(torch.bfloat16, True), (torch.float16, True), (torch.float64, False)]
)
def test_narrow_types_are_multiplied_as_float32(dtype, padded):
    """Hence rows of 1024 elements are a page apart, and get a gap, in these, too."""
    x, w = torch.zeros(512, 1024, dtype=dtype), torch.zeros(128, 1024, dtype=dtype)
    xlas = Target("cpu", host_calls=False)  # PyTorch's kernels multiply as they like
    assert ("stablehlo.pad" in lower_to_text(record("aten::linear", x, w).program, xlas)) == padded


def test_factors_of_one_add_nothing():
    program = text("aten::addmm", _random(5), _random(3, 4), _random(4, 5))
    assert "multiply" not in program
    assert "select" not in program


def _positive(*batch, dtype=torch.float32):
    x = torch.randn(*batch, 4, 4, dtype=dtype)
    return x @ x.mT.conj() + torch.eye(4, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("upper", [False, True])
def test_cholesky(upper, dtype):
    check("aten::linalg_cholesky_ex", _positive(2, dtype=dtype), upper=upper)
    if hasattr(torch.ops.aten, "cholesky"):  # see REMOVED_OPERATORS of lazyxla/compat.py
        check("aten::cholesky", _positive(dtype=dtype), upper)
    factor = torch.linalg.cholesky(_positive(2, dtype=dtype), upper=upper)
    check("aten::cholesky_solve", torch.randn(2, 4, 3, dtype=dtype), factor, upper)


@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("upper", [False, True])
def test_triangular_solve(upper, unit):
    a = torch.randn(2, 4, 4) * 0.3 + torch.eye(4) * 2
    a = a.triu() if upper else a.tril()
    if unit:
        a.diagonal(dim1=-2, dim2=-1).fill_(1)
    op, y = "aten::linalg_solve_triangular", torch.randn(4, 3)
    check(op, a, y, upper=upper, unitriangular=unit)
    check(op, a, torch.randn(2, 3, 4), upper=upper, left=False, unitriangular=unit)
    for transpose in (False, True):
        check("aten::triangular_solve", torch.randn(2, 4, 3), a, upper, transpose, unit)


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 2.0, 3.0, float("inf")])
def test_cdist(p):
    x, y = torch.randn(2, 4, 3), torch.randn(2, 5, 3)
    y[:, 0] = x[:, 1]
    check("aten::_cdist_forward", x, y, p, 2)
    distance = torch.ops.aten._cdist_forward(x, y, p, 2)
    check("aten::_cdist_backward", torch.randn(2, 4, 5), x, y, p, distance)


@pytest.mark.parametrize(("op", "left", "right"), _PRODUCTS)
def test_int64_products_for_the_tpu(op, left, right):
    """XLA's TPU compiler has no product of 64-bit integers; run on the CPU here."""
    x, y = (torch.randint(-(2**40), 2**40, shape) for shape in (left, right))
    recorded = record(op, x, y)
    assert "dot_general" not in lower_to_text(recorded.program, "tpu")
    results, _ = execute(recorded.program, recorded.inputs, "tpu")
    torch.testing.assert_close(results, recorded.expected)


def test_int64_products_of_several_dimensions_for_the_tpu():
    args = [torch.randint(-5, 5, shape) for shape in ((5, 6), (3, 5, 4), (3, 4, 6))]
    recorded = record("aten::addbmm", *args)
    assert "dot_general" not in lower_to_text(recorded.program, "tpu")
    results, _ = execute(recorded.program, recorded.inputs, "tpu")
    torch.testing.assert_close(results, recorded.expected)


def test_int64_convolutions_are_not_lowered_for_the_tpu():
    x, weight = torch.ones(1, 2, 5, dtype=torch.int64), torch.ones(3, 2, 2, dtype=torch.int64)
    program = record("aten::convolution", x, weight, None, [1], [0], [1], False, [0], 1).program
    with pytest.raises(LoweringError, match="no convolution of int64"):
        lower_to_text(program, "tpu")
    assert (check_lowering(program, "tpu"), check_lowering(program, "cpu")) == ("host", "device")


# ---- rows that a reshape merged, for the TPU ----


def _contiguous(shape):
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return Geometry(torch.float32, shape, tuple(strides), 0)


def _product_of_views(op, shapes, views, result):
    """The program that multiplies two inputs, each seen in another contiguous shape."""
    spec = [TensorSpec(torch.float32, shape) for shape in (*views, result)]
    nodes = [
        Node("lazyxla::view", (Ref(i), _contiguous(shapes[i]), _contiguous(views[i])), (spec[i],))
        for i in range(2)
    ]
    nodes.append(Node(op, (Ref(2), Ref(3)), (spec[2],)))
    return Program([TensorSpec(torch.float32, s) for s in shapes], nodes, [Ref(4)], [], {})


@pytest.mark.parametrize(
    ("op", "shapes", "views", "multiplied"),
    [
        ("aten::mm", [(2, 3, 4), (4, 5)], [(6, 4), (4, 5)], "2x3x4xf32>, tensor<4x5x"),
        ("aten::mm", [(2, 3, 7, 4), (4, 5)], [(42, 4), (4, 5)], "2x3x7x4xf32>, tensor<4x5x"),
        ("aten::mm", [(4, 6), (6, 2, 5)], [(4, 6), (6, 10)], "4x6xf32>, tensor<6x2x5x"),
        # Of size 1 nothing is gained.
        ("aten::mm", [(2, 1, 4), (4, 5)], [(2, 4), (4, 5)], "2x4xf32>, tensor<4x5x"),
        # Summed: only where both sides have them apart.
        ("aten::mm", [(4, 2, 3), (2, 3, 5)], [(4, 6), (6, 5)], "4x2x3xf32>, tensor<2x3x5x"),
        ("aten::mm", [(4, 2, 3), (3, 2, 5)], [(4, 6), (6, 5)], "4x6xf32>, tensor<6x5x"),
        ("aten::mm", [(7, 2, 2, 3), (6, 5)], [(14, 6), (6, 5)], "7x2x6xf32>, tensor<6x5x"),
        # A batch stays one; a reshape that splits is none of merged dimensions.
        ("aten::bmm", [(2, 3, 4, 5), (2, 3, 5, 7)], [(6, 4, 5), (6, 5, 7)], "6x4x5x"),
        ("aten::bmm", [(2, 3, 4, 5), (2, 5, 7)], [(2, 12, 5), (2, 5, 7)], "2x3x4x5x"),
        ("aten::mm", [(4, 6), (6, 5)], [(8, 3), (3, 10)], "8x3xf32>, tensor<3x10x"),
    ],
)  # fmt: skip
def test_merged_rows_stay_apart_for_the_tpu(op, shapes, views, multiplied):
    """Its compiler places each dimension of a result; run on the CPU here."""
    inputs = [_random(*shape) for shape in shapes]
    left, right = (x.reshape(view) for x, view in zip(inputs, views, strict=True))
    wanted = left @ right
    program = _product_of_views(op, shapes, views, tuple(wanted.shape))
    (line,) = (line for line in lower_to_text(program, "tpu").splitlines() if "dot_general" in line)
    assert f": (tensor<{multiplied}" in line
    (line,) = (line for line in lower_to_text(program, "cuda").splitlines() if "dot_gen" in line)
    assert f"(tensor<{'x'.join(map(str, views[0]))}xf32>" in line
    (got,), _ = execute(program, inputs, "tpu")
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(("platform", "operands"), [("tpu", "2x3x4"), ("cuda", "6x4")])
def test_rows_of_a_linear_layer(platform, operands):
    x, w, grad = _random(2, 3, 4), _random(5, 4), _random(2, 3, 5)
    recorded = record("aten::linear", x, w)
    assert f"(tensor<{operands}xf32>" in lower_to_text(recorded.program, platform)
    specs = [TensorSpec(torch.float32, tuple(t.shape)) for t in (x, w)]
    node = Node("aten::linear_backward", (Ref(0), Ref(1), Ref(2), [True, True, False]), (*specs,))
    inputs = [specs[0], TensorSpec(torch.float32, (2, 3, 5)), specs[1]]
    program = Program(inputs, [node], [Ref(3), Ref(4)], [], {})
    text = lower_to_text(program, platform)
    summed = "contracting_dims = [0, 1] x [0, 1]"
    assert (summed in text) == (platform == "tpu")
    (got,), _ = execute(recorded.program, recorded.inputs, platform)
    torch.testing.assert_close(got, x @ w.t())
    got, _ = execute(program, [x, grad, w], platform)
    wanted = [grad @ w, torch.einsum("abo,abi->oi", grad, x)]
    torch.testing.assert_close(got, wanted)


def test_a_transpose_behind_merged_rows_is_folded_for_the_tpu():
    """The sum over positions and samples of what lies by samples and positions, and the reverse."""
    f32 = torch.float32
    base, turned = _contiguous((2, 3, 4)), Geometry(f32, (3, 2, 4), (4, 12, 1), 0)
    nodes = [
        Node("lazyxla::view", (Ref(0), base, turned), (TensorSpec(f32, (3, 2, 4)),)),
        Node("lazyxla::view", (Ref(2), _contiguous((3, 2, 4)), _contiguous((6, 4))),
             (TensorSpec(f32, (6, 4)),)),
        Node("lazyxla::view", (Ref(1), _contiguous((3, 2, 5)), _contiguous((6, 5))),
             (TensorSpec(f32, (6, 5)),)),
        Node("lazyxla::view", (Ref(3), _contiguous((6, 4)), Geometry(f32, (4, 6), (1, 4), 0)),
             (TensorSpec(f32, (4, 6)),)),
        Node("aten::mm", (Ref(5), Ref(4)), (TensorSpec(f32, (4, 5)),)),
    ]  # fmt: skip
    inputs = [TensorSpec(f32, (2, 3, 4)), TensorSpec(f32, (3, 2, 5))]
    program = Program(inputs, nodes, [Ref(6)], [], {})
    (line,) = (line for line in lower_to_text(program, "tpu").splitlines() if "dot_general" in line)
    assert "%arg0, %arg1, contracting_dims = [1, 0] x [0, 1]" in line
    x, y = _random(2, 3, 4), _random(3, 2, 5)
    (got,), _ = execute(program, [x, y], "tpu")
    torch.testing.assert_close(got, x.transpose(0, 1).reshape(6, 4).t() @ y.reshape(6, 5))


@pytest.mark.parametrize(
    ("shapes", "dims"),
    [
        (((5, 4), (3, 4, 6), (5, 6)), ([1, 3], [0], [1, 2], [2, 3])),  # nn.Bilinear
        (((5, 3), (3, 4, 6), (5, 6)), ([2, 3], [0], [1, 2], [1, 3])),  # its gradients
        (((5, 4), (5, 3), (5, 6)), ([1, 3], [2, 3], [1, 2], [0])),
        (((2, 3), (3, 4), (2, 4)), ([2], [0], [1], [])),
        (((2, 3, 4), (2, 3, 4), (2, 3, 4)), ([], [], [], [0, 2])),
        (((3,), (4,), (5,)), ([1, 2], [0, 2], [0, 1], [2])),  # a dimension of one operand alone
    ],
)
def test_trilinear(shapes, dims):
    operands = [torch.randn(shape) for shape in shapes]
    check("aten::_trilinear", *operands, *dims)
    program = lower_to_text(record("aten::_trilinear", *operands, *dims).program, "cpu")
    assert program.count("stablehlo.dot_general") == 2
