"""Recording: in-place and out= forms, scalars, promotion, element types, layouts."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F

import lazyxla
from tests.support import DEVICE, DTYPES, assert_same, check, counted, numbers, on_device

pytestmark = pytest.mark.cuda


# --- In-place and out= forms ---------------------------------------------------------------------

IN_PLACE = {
    "add_": lambda x, y: x.add_(y),
    "add_alpha": lambda x, y: x.add_(y, alpha=3),
    "broadcast": lambda x, y: x.mul_(y[0]),
    "int_into_float": lambda x, y: x.add_(y.to(torch.int64)),
    "double_into_float": lambda x, y: x.mul_(y.double()),
    "half_into_float": lambda x, y: x.sub_(y.half()),
    "operator": lambda x, y: x.__iadd__(y),
    "clamp_": lambda x, y: x.clamp_(-1, 2),
    "clamp_min_": lambda x, y: x.clamp_(min=y),
    "relu_": lambda x, y: torch.relu_(x),
    "lerp_": lambda x, y: x.lerp_(y, 0.25),
    "addcmul_": lambda x, y: x.addcmul_(x, y, value=0.5),
    "addcdiv_": lambda x, y: x.addcdiv_(x, y + 10, value=2),
    "pow_": lambda x, y: x.abs_().pow_(2),
    "sigmoid_": lambda x, y: x.sigmoid_(),
    "where": lambda x, y: x.copy_(torch.where(x > y, x, y)),
    "masked_fill_": lambda x, y: x.masked_fill_(y > 0, 9),
    "masked_fill_tensor": lambda x, y: x.masked_fill_(y > 0, y.sum()),
    "copy_broadcast": lambda x, y: x.copy_(y[:, :1]),
    "copy_cast": lambda x, y: x.copy_(y.to(torch.int32)),
    "fill_tensor": lambda x, y: x.fill_(y[0, 0]),
    "zero_": lambda x, y: x.zero_(),
    "logical_not_": lambda x, y: x.logical_not_(),
    "comparison": lambda x, y: x.gt_(y),
    "floor_divide_": lambda x, y: x.floor_divide_(2),
    "remainder_": lambda x, y: x.remainder_(2),
    "neg_": lambda x, y: x.neg_(),
    "triu_": lambda x, y: x.triu_(1),
    "with_itself": lambda x, y: x.mul_(x).add_(x),
    "add_out": lambda x, y: torch.add(x, y, out=y),
    "out_cast": lambda x, y: torch.add(x, y, out=torch.zeros_like(x, dtype=torch.float64)),
    "out_of_comparison": lambda x, y: torch.gt(x, y, out=torch.zeros_like(x, dtype=torch.float32)),
    "sum_out": lambda x, y: torch.sum(x, 1, out=y[:, 0]),
    "max_out": lambda x, y: torch.max(
        x, 1, out=(y[:, 0], torch.zeros(4, dtype=torch.int64, device=x.device))
    ),
    "out_strided": lambda x, y: torch.mul(x, 2, out=y.new_zeros(6, 4).t()),
    "cat_out": lambda x, y: torch.cat([x, y], out=x.new_zeros(8, 6)),
    "mm_out": lambda x, y: torch.mm(x, y.t(), out=x.new_zeros(4, 4)),
    "addmm_": lambda x, y: x[:, :4].addmm_(x.clone(), y.t(), beta=2, alpha=0.5),
    "arange_out": lambda x, y: torch.arange(4, out=x[:, 0]),
    "clone_to_channels_last": lambda x, y: x.view(1, 4, 2, 3).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_writing_forms(name):
    x = numbers(4, 6)
    check(IN_PLACE[name], x, x.flip(1) * 2 + 1)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.complex64]
)
def test_writing_forms_of_other_dtypes(dtype):
    def use(x, y):
        if dtype == torch.bool:
            x.logical_xor_(y).bitwise_or_(y[0])
            x &= y
        else:
            x.add_(y).mul_(2).sub_(y[0])
            x *= True
        x[1:].copy_(y[:1])
        return x.fill_diagonal_(1)

    check(use, numbers(4, 4, dtype=dtype), numbers(4, 4, dtype=dtype).flip(0))


def test_resized_out_warns_as_pytorch_does():
    x = numbers(4, 6)
    with pytest.warns(UserWarning, match="An output with one or more elements was resized"):
        check(lambda x: torch.add(x, 1, out=x.new_zeros(2)), x)
    check(lambda x: torch.add(x, 1, out=x.new_zeros(0)), x)
    check(lambda x: torch.sum(x, 0, out=x.new_zeros(0)), x)


def test_multiple_outputs_in_one_call():
    def use(x):
        values, indices = torch.max(x, 1)
        mantissa, exponent = torch.frexp(x)
        variance, mean = torch.var_mean(x, 1)
        return values, indices, mantissa, exponent, variance, mean, torch.aminmax(x)

    check(use, numbers(4, 6) + torch.arange(6) / 8)


def test_a_mask_needs_no_host():
    def use(x, mask):
        x[mask] = 7
        x[x > 2] += 0  # reads a number of elements that only the data tells
        x[:, mask[0]] = x[:, :1]
        return x

    x = numbers(4, 6)
    with counted() as n:
        y = on_device(x)
        y[y > 0] = 1
        y[:, on_device(x[0] > 0)] = 2
    assert n.flushes == n.fallbacks == 0
    x[x > 0] = 1
    x[:, numbers(4, 6)[0] > 0] = 2
    assert_same(y, x)
    check(use, numbers(4, 6), numbers(4, 6) > 1)


def test_foreach():
    def use(x, y, z):
        torch._foreach_add_([x, y], [z, y], alpha=2)
        torch._foreach_mul_([x, y], 0.5)
        torch._foreach_mul_([x, y], [2.0, 3.0])
        torch._foreach_addcdiv_([x, y], [z, z], [z * z + 1, z * z + 2], [0.1, 0.2])
        torch._foreach_lerp_([x], [y], 0.5)
        torch._foreach_sqrt_([z.abs_()])
        torch._foreach_copy_([y], [z])
        norms = torch._foreach_norm([x, y])
        return norms, torch._foreach_neg([x, z]), torch._foreach_maximum([x, y], 0.25)

    check(use, numbers(4, 6), numbers(4, 6).flip(1), numbers(4, 6).flip(0))


def test_results_beyond_the_first_65536():
    x, y = numbers(2), numbers(2) + 1
    results = torch._foreach_neg([on_device(x)] * 65_536 + [on_device(y)] * 4)
    early, late = results[3], results[65_539]
    del results
    with counted() as n:
        assert_same(early + 10 * late, -x - 10 * y)
    assert n.executions == 1


# --- Scalars and promotion -----------------------------------------------------------------------

SCALARS = {
    "bool": True,
    "int": 2,
    "float": 1.5,
    "complex": 1 + 2j,
    "int_tensor": torch.tensor(2),
    "float_tensor": torch.tensor(1.5),
    "double_tensor": torch.tensor(0.75, dtype=torch.float64),
    "bool_tensor": torch.tensor(True),
    "bfloat16_tensor": torch.tensor(1.5, dtype=torch.bfloat16),
    "complex_tensor": torch.tensor(2 - 1j),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_promotion_with_scalars(dtype):
    """A number or a CPU scalar counts by its category only; 0-dim device tensors likewise."""
    x = numbers(6, dtype=dtype)
    # There is no complex number of half precision; bcomplex32 comes with torch 2.15.
    halves = (torch.complex32, getattr(torch, "bcomplex32", None))
    scalars = [s for s in SCALARS.values() if torch.result_type(x, s) not in halves]

    def use(x, scalars):
        results = [x + s for s in scalars] + [s * x for s in scalars] + [x[2] * s for s in scalars]
        return [*results, x == 2, torch.where(x == 1, x, 2), x / 3, x[1] + x, x**2]

    ours, theirs = use(on_device(x), scalars), use(x, scalars)
    assert_same(ours, theirs)
    on_both = [s for s in scalars if isinstance(s, torch.Tensor)]
    assert_same(use(on_device(x), on_device(on_both)), use(x, on_both))


@pytest.mark.parametrize("other", DTYPES, ids=str)
def test_promotion_of_tensors(other):
    def use(ys, x):
        return [(x + y, y * x, x == y, torch.cat([x, y])) for y in ys]

    check(use, [numbers(6, dtype=dtype) for dtype in DTYPES], numbers(6, dtype=other))


def test_sums_of_bools():
    """Also of constants, which XLA adds at compile time, modulo 2 if it is not told better."""

    def use(x):
        ones = torch.ones_like(x)
        return (
            ones + ones,
            ones.add_(True),
            x + x,
            x + ones,
            x.sum(0),
            ones.index_add(0, x[0].int(), x),
        )

    check(use, numbers(2, 2, dtype=torch.bool))


def test_default_dtype_of_numbers():
    x = on_device(numbers(3, dtype=torch.int64))
    torch.set_default_dtype(torch.float64)
    try:
        assert (x * 1.5).dtype == torch.float64
        assert torch.ones(2, device=DEVICE).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert (x * 1.5).dtype == torch.float32


def test_large_numbers():
    check(lambda x: [x + 2**62, x * -(2**40), x // 3], numbers(4, dtype=torch.int64))
    check(lambda x: [x + 300, x - 1, x * 77], numbers(4, dtype=torch.uint8))
    check(lambda x: [x * 1e300, x + 1e-300], numbers(4, dtype=torch.float64))
    check(lambda x: [x * float("inf"), x.clamp(max=float("-inf")), x + float("nan")], numbers(4))


# --- Layouts -------------------------------------------------------------------------------------


def test_strides_go_through_operators():
    def use(x):
        y = x.to(memory_format=torch.channels_last)
        z = x.permute(3, 1, 0, 2)
        return [
            y + 1,
            y * y[:, :1],
            y + x,
            x + y,
            torch.where(y > 0, y, 0),
            z.exp(),
            z + z.contiguous(),
            z.clone(),
            torch.empty_like(y).fill_(1),
            torch.zeros_like(z),
            y.clone(memory_format=torch.contiguous_format),
            y.to(torch.float64),
            y.sum(1, keepdim=True),
            torch.nn.functional.relu(y),
            x.mT.to(torch.int32),
            x.expand(2, -1, -1, -1) * 2,
        ]

    check(use, numbers(2, 3, 4, 5))


def test_zero_sizes():
    def use(x):
        y = x.new_zeros(0, 3)
        y.add_(1)
        x[:, 2:2].mul_(3)
        return [
            y,
            y.sum(),
            y.sum(0),
            y.mean(1),
            torch.cat([y, x[:, :3]]),
            x[4:] * 2,
            y.t() @ y,
            y.reshape(3, 0).expand(2, 3, 0),
            x[:0].any(),
            y.view(torch.int32),
        ]

    check(use, numbers(4, 6))
    assert on_device(torch.zeros(0, 3)).tolist() == []


# --- Threads -------------------------------------------------------------------------------------


def test_threads_do_not_disturb_each_other():
    results = {}

    def train(seed):
        w = on_device(numbers(4, 4)) * seed
        for step in range(20):
            w.sub_((w @ w.t() * 0.001 * step).tanh())
            if step % (seed + 2) == 0:
                lazyxla.sync()
            if step % 7 == seed:
                w[0, 0].item()
        results[seed] = w

    threads = [threading.Thread(target=train, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(3):
        w = numbers(4, 4) * seed
        for step in range(20):
            w.sub_((w @ w.t() * 0.001 * step).tanh())
        assert_same(results[seed], w)


def test_counted_names_every_counter():
    with counted() as n:
        on_device(torch.ones(2)).add_(1).cpu()
    assert (n.uploads, n.downloads, n.fallbacks) == (1, 1, 0)


def test_strides_that_meta_functions_get_wrong() -> None:
    x = torch.arange(6.0).reshape(1, 2, 1, 3).contiguous(memory_format=torch.channels_last)
    places = torch.arange(3).expand(1, 2, 1, 3)
    for device in ("cpu", "lazyxla"):
        on = x.to(device), places.to(device)
        unpooled = torch.nn.functional.max_unpool2d(*on, 3, 2, 0, (3, 6))
        assert unpooled.stride() == (36, 1, 12, 2)
        assert torch.nonzero_static(on[0][0, :, 0], size=3).stride() == (2, 1)
        vectors = torch.linalg.eig(torch.eye(3).expand(2, 3, 3).to(device)).eigenvectors
        assert vectors.stride() == (9, 1, 3)


OF_FORMATS = {
    "reflection_pad2d": ((4, 8, 3, 5), lambda x: F.pad(x, (1, 2, 1, 0), "reflect")),
    "replication_pad2d": ((4, 8, 3, 5), lambda x: F.pad(x, (1, 2, 1, 0), "replicate")),
    "reflection_pad3d": ((2, 3, 4, 3, 5), lambda x: F.pad(x, (1, 2, 1, 0, 1, 1), "reflect")),
    "replication_pad3d": ((2, 3, 4, 3, 5), lambda x: F.pad(x, (1, 2, 1, 0, 1, 1), "replicate")),
    "without a batch": ((8, 3, 5), lambda x: F.pad(x, (1, 2, 1, 0), "reflect")),
    "pixel_shuffle": ((4, 8, 3, 5), lambda x: F.pixel_shuffle(x, 2)),
    "channel_shuffle": ((4, 8, 3, 5), lambda x: F.channel_shuffle(x, 2)),
    "attention": ((4, 8, 3, 5), lambda x: F.scaled_dot_product_attention(x, x, x)),
}


@pytest.mark.parametrize("case", OF_FORMATS)
def test_memory_formats_as_on_the_cpu(case: str) -> None:
    """Of results and gradients, for tensors whose channels or whose rows lie innermost."""
    shape, call = OF_FORMATS[case]
    x = numbers(*shape) / 10
    last = x.dim() - 1
    for x_laid_out in (x, x.movedim(1, last).contiguous().movedim(last, 1), x.mT.contiguous().mT):
        made = []
        for device in ("cpu", "lazyxla"):
            leaf = x_laid_out.to(device).detach().requires_grad_()
            result = call(leaf)
            made.append((result, *torch.autograd.grad(result.square().sum(), leaf)))
        for theirs, ours in zip(*made, strict=True):
            assert_same(ours, theirs)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.rms_norm(x, (4,), None, 1e-6),
        torch.nn.functional.silu,
        torch.nn.functional.mish,
    ],
)
def test_operators_with_formulas_for_gradients_are_one_node_each_way(call) -> None:
    """PyTorch takes these apart for a backend that has no kernel."""
    x = torch.randn(3, 4).to("lazyxla")
    grad = torch.randn(3, 4).to("lazyxla")
    with lazyxla.eager_mode(True):
        lazyxla.reset_counters()
        y = x.detach().requires_grad_()
        torch.autograd.grad(call(y), y, grad)
    assert lazyxla.counters()["executions"] == 2
