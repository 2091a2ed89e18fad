"""Convolutions and their gradients, in the CPU forms and in the plain ones of the accelerators."""

import re

import pytest
import torch
from torch.nn import functional as F

import lazyxla
from lazyxla import aot
from lazyxla.lowering import Target, lower, lower_to_text
from tests.lowering import harness
from tests.lowering.harness import check, record, run

# input, weight, stride, padding, dilation, transposed, output_padding, groups
_CASES = {
    "1d": ((2, 3, 9), (4, 3, 3), [2], [1], [1], False, [0], 1),
    "2d": ((2, 3, 7, 8), (4, 3, 3, 2), [2, 1], [1, 0], [1, 2], False, [0, 0], 1),
    "2d, more positions than features": ((2, 3, 9, 9), (4, 3, 3, 3), [1], [1], [1], False, [0], 1),
    "2d, features": ((2, 10, 9, 8), (4, 10, 3, 2), [1, 1], [1, 1], [1, 2], False, [0, 0], 1),
    "2d, large image": ((1, 9, 33, 34), (4, 9, 3, 5), [1, 1], [1, 2], [1, 1], False, [0, 0], 1),
    "2d, features, strided": ((2, 9, 9, 8), (4, 9, 3, 3), [2, 1], [1, 0], [1], False, [0, 0], 1),
    "2d, a rest": ((1, 2, 8, 8), (3, 2, 3, 3), [3, 3], [0, 0], [1, 1], False, [0, 0], 1),
    "2d, wide padding": ((1, 2, 4, 4), (3, 2, 1, 1), [1, 1], [2, 2], [1, 1], False, [0, 0], 1),
    "2d, wide": ((1, 4, 3, 3), (32, 4, 3, 3), [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    "3d": ((1, 2, 4, 5, 4), (3, 2, 2, 3, 2), [1, 2, 1], [1, 1, 0], [1, 1, 2], False, [0] * 3, 1),
    "1x1": ((2, 5, 4, 4), (7, 5, 1, 1), [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    "1x1, strided": ((2, 5, 5, 4), (7, 5, 1, 1), [2, 2], [0, 0], [1, 1], False, [0, 0], 1),
    "grouped": ((2, 6, 6, 5), (4, 3, 3, 3), [1, 2], [1, 1], [1, 1], False, [0, 0], 2),
    "grouped, product": ((1, 40, 5, 5), (44, 20, 3, 3), [2, 2], [1, 1], [1, 1], False, [0, 0], 2),
    "grouped, split": ((1, 8, 35, 35), (8, 4, 3, 3), [1, 1], [0, 0], [1, 1], False, [0, 0], 2),
    "grouped, rows": ((2, 8, 5, 6), (12, 4, 3, 3), [1, 1], [1, 1], [1, 1], False, [0, 0], 2),
    "grouped, far taps": ((1, 8, 7, 9), (8, 4, 5, 3), [1, 1], [4, 3], [2, 3], False, [0, 0], 2),
    "grouped, tiny image": ((2, 8, 1, 2), (8, 4, 5, 5), [1, 1], [2, 2], [1, 1], False, [0, 0], 2),
    "grouped, 1x1": ((2, 8, 5, 4), (6, 4, 1, 1), [1, 1], [0, 0], [1, 1], False, [0, 0], 2),
    "depthwise": ((2, 6, 7, 7), (6, 1, 3, 3), [1, 1], [1, 1], [1, 1], False, [0, 0], 6),
    "depthwise, one": ((1, 6, 7, 5), (6, 1, 3, 5), [1, 1], [2, 2], [2, 1], False, [0, 0], 6),
    "depthwise, one tiny": ((1, 3, 2, 1), (6, 1, 5, 5), [1, 1], [2, 2], [1, 1], False, [0, 0], 3),
    "depthwise, strided": ((2, 6, 7, 8), (6, 1, 3, 3), [2, 2], [1, 1], [1, 1], False, [0, 0], 6),
    "depthwise, multiplier": ((2, 3, 6, 6), (6, 1, 5, 5), [1, 1], [2, 2], [1, 1], False, [0, 0], 3),
    "tiles": ((2, 3, 6, 4), (5, 3, 3, 2), [3, 2], [0, 0], [1, 1], False, [0, 0], 1),
    "tiles 3d": ((2, 2, 4, 6, 2), (3, 2, 2, 3, 1), [2, 3, 1], [0], [1], False, [0], 1),
    "transposed tiles": ((2, 4, 3, 3), (4, 2, 2, 2), [2, 2], [0, 0], [1, 1], True, [0, 0], 1),
    "transposed 1d": ((2, 3, 5), (3, 4, 3), [2], [1], [1], True, [1], 1),
    "transposed 2d": ((2, 3, 4, 5), (3, 4, 3, 2), [2, 1], [1, 0], [1, 2], True, [1, 0], 1),
    "transposed, many positions": ((2, 3, 8, 9), (3, 4, 3, 3), [2], [0], [1], True, [0], 1),
    "transposed, cropped": ((1, 2, 6, 6), (2, 3, 2, 2), [1, 1], [2, 2], [1, 1], True, [0, 0], 1),
    "transposed, features": ((2, 9, 7, 6), (9, 10, 3, 3), [2], [1], [1], True, [1], 1),
    "transposed 3d": ((1, 2, 3, 3, 3), (2, 3, 2, 2, 2), [2], [0], [1], True, [0], 1),
    "transposed, grouped": ((2, 4, 4, 4), (4, 3, 3, 3), [2, 2], [1, 1], [1, 1], True, [1, 1], 2),
    "transposed, rows": ((1, 8, 4, 5), (8, 5, 3, 3), [1, 1], [1, 1], [1, 1], True, [0, 0], 2),
    "transposed, depthwise": ((1, 4, 4, 4), (4, 1, 2, 2), [2, 2], [0, 0], [1, 1], True, [0, 0], 4),
    "transposed, output padding": ((2, 3, 4, 5), (3, 4, 3, 2), [1], [1], [2, 3], True, [1, 2], 1),
    "transposed, tiles and more": ((2, 3, 4, 5), (3, 2, 1, 1), [1], [0], [2], True, [1], 1),
    "transposed, padded rows": ((1, 4, 5, 6), (4, 2, 3, 3), [1], [2], [2], True, [1], 2),
    "transposed, padded terms": ((1, 4, 5, 6), (4, 1, 3, 3), [1], [1], [3], True, [2], 4),
}  # fmt: skip
_FORMS = Target("cpu", host_calls=False)
_BY_NAME = [pytest.param(case, id=name) for name, case in _CASES.items()]


@pytest.fixture(params=["cpu", "tpu"])
def platform(request, monkeypatch):
    """Runs the forms for each platform; all are plain StableHLO, so they run on the CPU client."""
    target = _FORMS._replace(platform=request.param)
    monkeypatch.setattr(harness, "lower", lambda p, _, **k: lower(p, target, **k))


def text(*call):
    return lower_to_text(record(*call).program, _FORMS)


def _operands(case, dtype=torch.float32):
    sizes, weight, *rest = case
    out_features = weight[1] * rest[5] if rest[3] else weight[0]
    x, w, bias = (torch.randn(s).to(dtype) for s in (sizes, weight, (out_features,)))
    return x, w, bias, rest


@pytest.mark.parametrize("case", _BY_NAME)
def test_convolution(platform, case):
    x, w, bias, rest = _operands(case)
    check("aten::convolution", x, w, bias, *rest)


@pytest.mark.parametrize("case", _BY_NAME)
def test_convolution_backward(platform, case):
    x, w, bias, rest = _operands(case)
    grad = torch.randn_like(torch.ops.aten.convolution(x, w, None, *rest))
    if grad[0, 0].numel() > 1000:
        # The order of so long sums shows (4.8e-5 measured), but not in those of whole numbers.
        x, grad = x.round(), grad.round()
    check("aten::convolution_backward", grad, x, w, list(bias.shape), *rest, [True, True, True])


@pytest.mark.parametrize(
    "name",
    ["2d", "2d, wide", "grouped", "grouped, rows", "depthwise", "depthwise, one", "transposed 2d"],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(name, dtype):
    """Against float64, rounded once; PyTorch's float16 gradients were measured to be up to 1,209
    units of the last place off that.
    """
    x, w, bias, rest = _operands(_CASES[name], dtype)
    grad = torch.randn_like(torch.ops.aten.convolution(x, w, None, *rest))
    doubles = [t.double() for t in (grad, x, w, bias)]
    expected = torch.ops.aten.convolution(*doubles[1:], *rest)
    (got,) = run("aten::convolution", x, w, bias, *rest)
    torch.testing.assert_close(got, expected.to(dtype))
    sizes, mask = list(bias.shape), [True, True, True]
    got = run("aten::convolution_backward", grad, x, w, sizes, *rest, mask)
    expected = torch.ops.aten.convolution_backward(*doubles[:3], sizes, *rest, mask)
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e.to(dtype))


def test_integers():
    x, w, _, rest = _operands(_CASES["2d, a rest"])
    check("aten::convolution", (x * 5).long(), (w * 5).long(), None, *rest)


@pytest.mark.parametrize("mask", [[True, False, False], [False, True, False], [False, True, True]])
def test_only_the_gradients_asked_for(mask):
    x, w, bias, rest = _operands(_CASES["2d"])
    grad = torch.randn_like(torch.ops.aten.convolution(x, w, None, *rest))
    check(
        "aten::convolution_backward",
        grad,
        x,
        w,
        list(bias.shape),
        *rest,
        mask,
    )


def test_no_elements():
    rest = [[1, 1], [1, 1], [1, 1], False, [0, 0], 1]
    x, w = torch.randn(0, 3, 4, 4), torch.randn(2, 3, 3, 3)
    check("aten::convolution", x, w, torch.randn(2), *rest)
    grad = torch.randn(0, 2, 4, 4)
    check("aten::convolution_backward", grad, x, w, [2], *rest, [True, True, True])


def test_the_cpu_form_leaves_a_large_weight_as_it_is():
    rest = [[1, 1], [1, 1], [1, 1], False, [0, 0], 1]
    x, w = torch.randn(1, 4, 2, 2), torch.randn(64, 4, 3, 3)
    program = text("aten::convolution", x, w, None, *rest)
    assert "stablehlo.convolution" not in program
    assert program.count("stablehlo.dot_general") == 1


def test_grouped_convolutions_are_one_product():
    x, w, _, rest = _operands(_CASES["grouped, rows"])
    program = text("aten::convolution", x, w, None, *rest)
    assert "stablehlo.convolution" not in program
    assert program.count("stablehlo.dot_general") == 1
    grad = torch.randn_like(torch.ops.aten.convolution(x, w, None, *rest))
    mask = [True, False, False]
    program = text("aten::convolution_backward", grad, x, w, None, *rest, mask)
    assert "stablehlo.convolution" not in program
    assert program.count("stablehlo.dot_general") == 1


def test_gradients_for_few_input_features_are_products():
    def products(outputs):
        x, w = torch.randn(2, 8, 17, 17), torch.randn(outputs, 8, 3, 3)
        rest = [[2, 2], [1, 1], [1, 1], False, [0, 0], 1]
        grad = torch.randn_like(torch.ops.aten.convolution(x, w, None, *rest))
        program = text("aten::convolution_backward", grad, x, w, None, *rest, [True, True, False])
        return program.count("stablehlo.dot_general"), program.count("stablehlo.convolution")

    assert products(20) == (2, 0)
    assert products(4) == (0, 2)  # 72 elements of each window would be 18 times the result's


@pytest.mark.parametrize("transposed", [False, True])
def test_the_program_does_not_grow_with_the_kernel(transposed):
    """As a Fourier transform by convolution has it: short hops, few positions, a feature or two."""

    def program(kernel):
        weight, geometry = torch.randn(520, 2, kernel), [[64], [0], [1], transposed, [0], 1]
        x = torch.randn(1, 520 if transposed else 2, 9 if transposed else 64 * 8 + kernel)
        grad = torch.randn_like(torch.ops.aten.convolution(x, weight, None, *geometry))
        backward = "aten::convolution_backward", grad, x, weight, None, *geometry
        return text("aten::convolution", x, weight, None, *geometry) + text(
            *backward, [True, True, False]
        )

    assert program(1024).count("stablehlo.") == program(512).count("stablehlo.")


_MANY_GROUPS = {
    "2d": ((2, 64, 24, 24), (64, 4, 3, 3), [1, 1], [1, 1], [1, 1], False, [0, 0], 16),
    "strided": ((2, 64, 49, 50), (64, 4, 3, 3), [2, 2], [1, 1], [1, 2], False, [0, 0], 16),
    "1d": ((2, 64, 600), (128, 4, 5), [1], [2], [1], False, [0], 16),
    "3d": ((1, 64, 12, 12, 12), (64, 4, 2, 2, 2), [1], [0], [1], False, [0], 16),
    "depthwise": ((1, 16, 40, 40), (16, 1, 12, 11), [1, 1], [6, 5], [1, 1], False, [0, 0], 16),
    "transposed": ((1, 64, 34, 34), (64, 4, 3, 3), [2, 2], [1, 1], [1, 1], True, [1, 1], 16),
}


@pytest.mark.parametrize("case", [pytest.param(c, id=name) for name, c in _MANY_GROUPS.items()])
def test_many_groups_are_one_call(case):
    """One convolution for each takes seconds to compile."""
    x, w, _, rest = _operands(case)
    x, w = (2 * x).round(), (2 * w).round()  # no sum of these is rounded, in whatever order
    grad = torch.ones_like(torch.ops.aten.convolution(x, w, None, *rest))
    forward = "aten::convolution", x, w, None, *rest
    backward = "aten::convolution_backward", grad, x, w, None, *rest, [True, True, False]
    for call, most in ((forward, 1), (backward, 2)):
        program = lower_to_text(record(*call).program, "cpu")
        assert 1 <= program.count("stablehlo.custom_call") <= most
        assert "stablehlo.convolution" not in program
        check(*call)


def test_depthwise_gradients_of_large_kernels_do_not_grow():
    def program(kernel):
        x, w = torch.randn(1, 16, 40, 40), torch.randn(16, 1, kernel, kernel)
        rest = [[1, 1], [kernel // 2] * 2, [1, 1], False, [0, 0], 16]
        grad = torch.randn_like(torch.ops.aten.convolution(x, w, None, *rest))
        call = "aten::convolution_backward", grad, x, w, None, *rest, [True, True, False]
        return lower_to_text(record(*call).program, "cpu")

    assert program(33).count("stablehlo.") == program(17).count("stablehlo.")


@pytest.mark.parametrize(("size", "padding", "pads"), [(34, 0, 0), (32, 1, 1)])
def test_the_weights_gradient_of_a_large_image_pads_it_before(size, padding, pads):
    x, w = torch.randn(2, 9, size, size), torch.randn(4, 9, 3, 3)
    rest = [[1, 1], [padding] * 2, [1, 1], False, [0, 0], 1]
    grad = torch.randn_like(torch.ops.aten.convolution(x, w, None, *rest))
    program = text("aten::convolution_backward", grad, x, w, None, *rest, [False, True, False])
    assert program.count("stablehlo.convolution") == 1
    assert "pad = [[0, 0], [0, 0]]" in program
    assert program.count("stablehlo.pad") == pads
    assert program.count("optimization_barrier") == 2 * pads


def test_terms_are_summed_once():
    """However many operations read the result. The compiler would sum them for each."""

    def layer(x, w):
        y = F.conv2d(x, w, padding=2, groups=8).permute(0, 2, 3, 1)
        return F.layer_norm(y, (8,)), y.exp().sum(0)

    shapes = [(2, 8, 6, 6), (8, 1, 5, 5)]
    program = aot.compile(layer, tuple(torch.randn(shape) for shape in shapes))
    products = re.findall(r" multiply\(.*aten::convolution\b", program.optimized_hlo())
    assert len(products) == 25


def test_gradients_of_one_feature_are_not_fused_with_each_other():
    """Each window of one would compute all windows of the one before: n layers, 9**n products."""

    def layers(x, w):
        y = x
        for _ in range(3):
            y = F.conv2d(y, w, padding=1).tanh()
        return torch.autograd.grad(y.sum(), x)[0]

    x = torch.randn(2, 1, 6, 7, requires_grad=True)
    program = aot.compile(layers, (x, torch.randn(1, 1, 3, 3)))
    parts = program.optimized_hlo().split("\n}\n")
    sums = [len(re.findall(r" add\(.*aten::convolution_backward", part)) for part in parts]
    assert [n for n in sums if n] == [8, 8, 8]


def test_equal_convolutions_share_a_function():
    def layers(x, w, v):
        for weight in (w, v, w):
            x = F.conv2d(x, weight, padding=1, groups=8).tanh()
        return x

    shapes = [(2, 8, 6, 6), (8, 1, 3, 3), (8, 1, 3, 3)]
    text = lazyxla.stablehlo(layers, *(torch.randn(shape) for shape in shapes))
    assert len(re.findall(r"func\.func private", text)) == 1
    assert len(re.findall(r"call @.*inlineable = \"false\"", text)) == 3
