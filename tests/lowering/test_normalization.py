"""Normalization operators and their gradients."""

import itertools

import pytest
import torch

from lazyxla.lowering import Node, Program, Ref, Slot, SlotSpec, TensorSpec
from tests.lowering.harness import check, execute

_ALL = [True, True, True]
_INPUTS = [(4, 3), (2, 3, 5), (2, 3, 4, 5), (2, 3, 2, 2, 3)]


def _channel_values(*, affine=True, dtype=torch.float32):
    weight, bias = (torch.randn(3, dtype=dtype) if affine else None for _ in range(2))
    return weight, bias, torch.randn(3), torch.rand(3) + 0.5


@pytest.mark.parametrize("shape", _INPUTS)
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm(shape, affine):
    x = torch.randn(shape) * 2 + 1
    weight, bias, mean, var = _channel_values(affine=affine)
    op = "aten::_native_batch_norm_legit"
    for training in (True, False):
        check(f"{op}_functional", x, weight, bias, mean, var, training, 0.1, 1e-5)
    check(f"{op}.no_stats", x, weight, bias, True, 0.1, 1e-5)
    check(f"{op}_no_training", x, weight, bias, mean, var, 0.1, 1e-5)
    op = "aten::_batch_norm"
    check(f"{op}_with_update_functional", x, weight, bias, mean, var, 0.1, 1e-5)
    check(f"{op}_no_update", x, weight, bias, mean, var, 0.1, 1e-5)


@pytest.mark.parametrize("shape", _INPUTS)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("train", [True, False])
def test_batch_norm_backward(shape, affine, train):
    x, grad = torch.randn(2, *shape)
    weight, _, mean, var = _channel_values(affine=affine)
    _, save_mean, save_rstd = torch.ops.aten._native_batch_norm_legit(
        x, None, None, True, 0.1, 1e-5
    )
    rest = [mean, var, save_mean, save_rstd, train, 1e-5]
    op = "aten::native_batch_norm_backward"
    check(op, grad, x, weight, *rest, _ALL)
    check(op, grad, x, weight, *rest, [True, False, False])
    if affine:
        reserve = torch.empty(0, dtype=torch.uint8)
        check("aten::batch_norm_backward", grad, x, weight, *rest, _ALL, reserve)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_batch_norm_dtypes(dtype):
    x = (torch.randn(4, 3, 5, 5) * 3 + 2).to(dtype)
    parameters = torch.float32 if dtype == torch.bfloat16 else dtype
    weight, bias, mean, var = (t.to(parameters) for t in _channel_values())
    op = "aten::_native_batch_norm_legit_functional"
    check(op, x, weight, bias, mean, var, True, 0.1, 1e-5)
    _, save_mean, save_rstd, *_ = torch.ops.aten._native_batch_norm_legit_functional(
        x, weight, bias, mean, var, True, 0.1, 1e-5
    )
    rest = [mean, var, save_mean, save_rstd, True, 1e-5, _ALL]
    check("aten::native_batch_norm_backward", x.flip(0), x, weight, *rest)


_LAYERS = [((4, 6), [6]), ((2, 3, 4), [4]), ((2, 3, 4), [3, 4]), ((5,), [5])]


@pytest.mark.parametrize(("shape", "normalized"), _LAYERS)
@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm(shape, normalized, affine):
    x, grad = torch.randn(2, *shape)
    weight, bias = (torch.randn(normalized) if affine else None for _ in range(2))
    check("aten::native_layer_norm", x, normalized, weight, bias, 1e-5)
    _, mean, rstd = torch.ops.aten.native_layer_norm(x, normalized, weight, bias, 1e-5)
    op = "aten::native_layer_norm_backward"
    masks = itertools.product([True, False], repeat=3) if affine else [(True, False, False)]
    for mask in masks:
        if any(mask):
            check(op, grad, x, normalized, mean, rstd, weight, bias, list(mask))


@pytest.mark.parametrize("parameters", [torch.bfloat16, torch.float32])
def test_layer_norm_narrow(parameters):
    x = torch.randn(3, 64).bfloat16()
    weight, bias = torch.randn(64).to(parameters), torch.randn(64).to(parameters)
    check("aten::native_layer_norm", x, [64], weight, bias, 1e-5)


@pytest.mark.parametrize("affine", [True, False])
def test_group_norm(affine):
    for shape, group in (
        ((2, 6, 5), 3),
        ((2, 4, 3, 3), 1),
        ((3, 12), 4),
    ):  # a group of one number has no variance to divide by
        n, c, positions = shape[0], shape[1], torch.Size(shape[2:]).numel()
        x, grad = torch.randn(2, *shape)
        weight, bias = (torch.randn(c) if affine else None for _ in range(2))
        sizes = [n, c, positions, group]
        check("aten::native_group_norm", x, weight, bias, *sizes, 1e-5)
        _, mean, rstd = torch.ops.aten.native_group_norm(x, weight, bias, *sizes, 1e-5)
        op, mask = "aten::native_group_norm_backward", _ALL if affine else [True, False, False]
        check(op, grad, x, mean, rstd, weight, *sizes, mask)


def test_group_norm_narrow():
    x = torch.randn(2, 6, 5).bfloat16()
    check("aten::native_group_norm", x, None, None, 2, 6, 5, 3, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("eps", [None, 1e-3])
def test_rms_norm(dtype, eps):
    x = torch.randn(2, 3, 8).to(dtype)
    check("aten::_fused_rms_norm", x, [8], torch.randn(8).to(dtype), eps)
    check("aten::_fused_rms_norm", x, [3, 8], None, eps)


@pytest.mark.parametrize("affine", [True, False])
def test_rms_norm_backward(affine):
    """The gradient has no CPU kernel: autograd through the formula stands in."""
    x = torch.randn(2, 3, 8, requires_grad=True)
    weight = torch.randn(8, requires_grad=True) if affine else None
    rstd = (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    out = x * rstd if weight is None else x * rstd * weight
    grad = torch.randn_like(out)
    leaves = [x] if weight is None else [x, weight]
    expected = torch.autograd.grad(out, leaves, grad)
    inputs = [t.detach() for t in (grad, x, rstd)] + [t.detach() for t in leaves[1:]]
    args = (Ref(0), Ref(1), [8], Ref(2), Ref(3) if affine else None, [True, affine])
    results = _run_node("aten::_fused_rms_norm_backward", args, inputs, expected)
    for got, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(got, wanted)


def _run_node(op, args, inputs, outputs):
    """Runs an operator that has no CPU kernel; `outputs` have the expected dtypes and shapes."""
    specs = [[TensorSpec(t.dtype, tuple(t.shape)) for t in ts] for ts in (inputs, outputs)]
    refs = [Ref(len(inputs) + i) for i in range(len(outputs))]
    node = Node(op, args, tuple(specs[1]), None)
    return execute(Program(specs[0], [node], refs, [], {}), inputs)[0]


@pytest.mark.parametrize("dim", [0, 2])
def test_weight_norm(dim):
    v, grad = torch.randn(2, 3, 4, 5)
    g = torch.randn([n if i == dim else 1 for i, n in enumerate(v.shape)])
    check("aten::_weight_norm_interface", v, g, dim)
    _, norms = torch.ops.aten._weight_norm_interface(v, g, dim)
    check("aten::_weight_norm_interface_backward", grad, v, g, norms, dim)


def test_eps_and_momentum_can_vary():
    """Numbers stay run-time inputs: a momentum schedule compiles once more, not every time."""
    x, mean, var = torch.randn(4, 3), torch.zeros(3), torch.ones(3)
    slots = [SlotSpec(v, torch.float64, True, True) for v in (0.3, 0.5)]
    args = (Ref(0), None, None, Ref(1), Ref(2), True, Slot(0), Slot(1))
    expected = torch.ops.aten._native_batch_norm_legit_functional(
        x, None, None, mean, var, True, 0.3, 0.5
    )
    outputs = [TensorSpec(t.dtype, tuple(t.shape)) for t in expected]
    specs = [TensorSpec(t.dtype, tuple(t.shape)) for t in (x, mean, var)]
    node = Node("aten::_native_batch_norm_legit_functional", args, tuple(outputs), None)
    program = Program(specs, [node], [Ref(3 + i) for i in range(5)], slots, {})
    results, static = execute(program, [x, mean, var])
    assert not static
    for got, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(got, wanted)
