"""Kernels as operators: in the program where they are for, and their reference elsewhere."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu, triton
from torch import Tensor

import lazyxla
from tests.conftest import RunPython
from tests.support import needs_libtpu

DEVICE = "lazyxla"

pytestmark = pytest.mark.usefixtures("uncut")

numbers = itertools.count()


def gated(x: Tensor, y: Tensor, by: float) -> Tensor:
    return torch.tanh(x * by) + y


class Kernel:
    """`gated` as a kernel, and how often JAX has traced it."""

    def __init__(self, platforms: tuple[str, ...], **kwargs: Any) -> None:
        self.traced = 0
        self.parameters: dict[str, Any] = {}

        def compute(x: Any, y: Any, by: float, *, interpret: bool = False) -> Any:
            self.traced += 1

            def body(x_ref: Any, y_ref: Any, out_ref: Any) -> None:
                out_ref[...] = jnp.tanh(x_ref[...] * by) + y_ref[...]

            shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
            call = pl.pallas_call(body, out_shape=shape, interpret=interpret, **self.parameters)
            return call(x, y)

        name = f"lazyxla_tests::gated_{next(numbers)}"
        define = lazyxla.kernel(name, gated, platforms=platforms, static=("by",), **kwargs)
        self.op = define(compute)


def inputs(device: str = "cpu") -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(8, 128).to(device).requires_grad_() for _ in range(2)]


def check(call: Callable[..., Tensor], programs: int = 1) -> None:
    """Values and gradients, and in how many programs."""
    ours, theirs = inputs(DEVICE), inputs()
    lazyxla.sync(wait=True)
    before = lazyxla.counters()
    result = call(*ours)
    result.square().sum().backward()
    lazyxla.sync(wait=True)
    after = lazyxla.counters()
    assert after["executions"] == before["executions"] + programs
    assert after["fallbacks"] == before["fallbacks"]
    expected = gated(*theirs, 2.0)
    expected.square().sum().backward()
    torch.testing.assert_close(result.detach().cpu(), expected.detach())
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad.cpu(), y.grad)


def by_hand(inputs: Any, outputs: Any, gradients: Any) -> Any:
    x, _, by = inputs
    (gradient,) = gradients
    return gradient * (1 - torch.tanh(x * by) ** 2) * by, gradient, None


@pytest.mark.parametrize("backward", [None, by_hand])
def test_interpreted_on_the_cpu(backward: Any) -> None:
    kernel = Kernel(("tpu", "cpu"), backward=backward)
    check(lambda x, y: kernel.op(x, y, 2.0))
    assert kernel.traced == 1
    check(lambda x, y: kernel.op(x, y, 2.0))
    assert kernel.traced == 1


def test_in_compiled_functions(fresh_dynamo: None) -> None:
    kernel = Kernel(("cpu",))
    compiled = torch.compile(lambda x, y: kernel.op(x, y, 2.0), backend="lazyxla", fullgraph=True)
    check(compiled)
    region = Kernel(("cpu",))
    # The region is a program of its own.
    check(lazyxla.compile(lambda x, y: region.op(x, y, 2.0)), programs=2)
    assert (kernel.traced, region.traced) == (1, 1)


def test_a_decoder_with_a_kernel_settles() -> None:
    """Nothing is compiled after the second step."""
    kernel = Kernel(("cpu",))

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attention = torch.nn.LayerNorm(32), torch.nn.Linear(32, 96)
            self.gate, self.out = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.attention(self.norm(x)).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + mixed.transpose(1, 2).flatten(2)
            return x + self.out(kernel.op(self.gate(x), x, 2.0))

    embedding, head = torch.nn.Embedding(50, 32), torch.nn.Linear(32, 50)
    model = torch.nn.Sequential(embedding, Block(), Block(), head).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(50, (2, 9)).to(DEVICE)
    lazyxla.sync(wait=True)
    lazyxla.reset_counters()
    for number in range(6):
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        lazyxla.sync()
        if number == 1:
            compiles = lazyxla.counters()["compiles"]
    assert lazyxla.counters()["compiles"] == compiles
    assert lazyxla.counters()["fallbacks"] == 0
    assert kernel.traced == 1


def test_the_reference_elsewhere() -> None:
    kernel = Kernel(("tpu", "cuda"))
    check(lambda x, y: kernel.op(x, y, 2.0))
    x, y = inputs()
    torch.testing.assert_close(kernel.op(x, y, 2.0), gated(x, y, 2.0))
    assert kernel.traced == 0


def test_for_some_arguments_only() -> None:
    asked = []

    def suits(x: Tensor, y: Tensor, by: float) -> bool:
        asked.append((tuple(x.shape), x.dtype, x.device.type, by))
        return len(x) > 4

    kernel = Kernel(("cpu",), suits=suits)
    check(lambda x, y: kernel.op(x, y, 2.0))
    assert kernel.traced == 1
    x, y = (v.detach()[:4] for v in inputs(DEVICE))
    torch.testing.assert_close(kernel.op(x, y, 2.0), gated(x, y, 2.0))
    assert kernel.traced == 1
    asked_for = {((8, 128), torch.float32, "meta", 2.0), ((4, 128), torch.float32, "meta", 2.0)}
    assert set(asked) == asked_for


def test_as_an_operator_of_pytorch() -> None:
    kernel = Kernel(("cpu",))
    torch.library.opcheck(kernel.op, (*inputs(), 2.0))
    checks = ("test_schema", "test_faketensor")  # the others know PyTorch's own devices only
    torch.library.opcheck(kernel.op, (*inputs(DEVICE), 2.0), test_utils=checks)
    x, y = (v.detach() for v in inputs(DEVICE))
    rows = torch.func.vmap(lambda a, b: kernel.op(a, b, 2.0))(x, y)
    torch.testing.assert_close(rows, gated(x, y, 2.0))
    found = []
    for function, device in ((kernel.op, DEVICE), (gated, "cpu")):
        x, y = inputs(device)
        (first,) = torch.autograd.grad(function(x, y, 2.0).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), x)[0].cpu())
    torch.testing.assert_close(*found)


def test_several_results_and_lists() -> None:
    def parts(xs: list[Tensor], scale: Tensor) -> tuple[Tensor, Tensor]:
        return xs[0] * scale, xs[1] + scale

    @lazyxla.kernel("lazyxla_tests::parts", parts, platforms=("cpu",))
    def op(xs: Any, scale: Any) -> Any:
        return xs[0] * scale, xs[1] + scale

    x, y = inputs(DEVICE)
    scale = torch.tensor(3.0, device=DEVICE)
    first, second = op([x.detach(), y.detach()], scale)
    torch.testing.assert_close(first, x.detach() * 3)
    torch.testing.assert_close(second, y.detach() + 3)


def test_gradients_and_samples_of_lists_and_of_complex_numbers() -> None:
    def weighted(xs: list[Tensor], powers: list[int]) -> Tensor:
        return xs[0] ** powers[0] + xs[1] * powers[1]

    @lazyxla.kernel("lazyxla_tests::weighted", weighted, platforms=("cpu",), static=("powers",))
    def op(xs: Any, powers: Any) -> Any:
        return xs[0] ** powers[0] + xs[1] * powers[1]

    for dtype in (torch.float32, torch.complex64):
        found = []
        for function, device in ((op, DEVICE), (op, "cpu"), (weighted, "cpu")):
            torch.manual_seed(0)
            xs = [torch.randn(2, 3, dtype=dtype).to(device).requires_grad_() for _ in range(2)]
            function(xs, [2, 3]).abs().sum().backward()
            found.append([x.grad.cpu() for x in xs])
        torch.testing.assert_close(found[0], found[2])
        torch.testing.assert_close(found[1], found[2])
    x, y = (x.detach() for x in xs)
    rows = torch.func.vmap(lambda a, b: op([a, b], [2, 3]), (0, None))(x, y[0])
    torch.testing.assert_close(rows, weighted([x, y[0]], [2, 3]))


def test_tensors_that_are_spread_take_the_reference(run_python: RunPython) -> None:
    code = """
import torch, lazyxla
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2
@lazyxla.kernel("mylib::double", double, platforms=("cpu",))
def op(x):
    raise AssertionError("the partitioner cannot split it")
mesh = lazyxla.Mesh((4,), ("data",))
x = lazyxla.shard(torch.arange(8.0).to("lazyxla"), mesh, ("data",))
y = op(x)
assert y.tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
assert lazyxla.sharding(y).spec == ("data",)
"""
    run_python(code, LAZYXLA_CPU_DEVICES="4")


@needs_libtpu
def test_compiled_for_a_tpu() -> None:
    kernel = Kernel(("tpu",))
    x, y = (v.detach() for v in inputs(DEVICE))
    program = lazyxla.aot.compile(lambda x, y: kernel.op(x, y, 2.0), (x, y), topology="v5e:1x1")
    assert "tpu_custom_call" in program.optimized_hlo()
    assert kernel.traced == 1


@needs_libtpu
def test_functions_are_told_the_model_of_the_tpu() -> None:
    x = torch.ones(8, 128, device=DEVICE)
    function = lazyxla.jax_function(lambda x: x * tpu.get_tpu_info().generation)
    for topology, generation in (("v5e:1x1", 5), ("v6e:1x1", 6)):
        text = lazyxla.stablehlo(function, x, topology=topology)
        assert f"dense<{generation}.0" in text


def test_compiled_for_a_gpu() -> None:
    pytest.importorskip("jax_plugins.xla_cuda13")
    kernel = Kernel(("cuda",))
    kernel.parameters["compiler_params"] = triton.CompilerParams(num_warps=4)
    x, y = (v.detach() for v in inputs(DEVICE))
    program = lazyxla.aot.compile(lambda x, y: kernel.op(x, y, 2.0), (x, y), topology="h100")
    assert "triton" in program.optimized_hlo()
    assert kernel.traced == 1


def untyped(x):  # type: ignore[no-untyped-def]
    return x


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: lazyxla.kernel("gated", gated), ValueError, "no name of an operator"),
        (lambda: lazyxla.kernel("a::b", gated, platforms=("mps",)), ValueError, "no platform mps"),
        (lambda: lazyxla.kernel("a::b", gated, static=("z",)), ValueError, "no parameter z"),
        (lambda: lazyxla.kernel("a::b", untyped), ValueError, "type annotation"),
        (lambda: lazyxla.kernel("a::b", gated)(lambda x: x), TypeError, "the kernel takes"),
        (
            lambda: lazyxla.kernel("aten::sin", torch_sin)(lambda x: x),
            ValueError,
            "an operator aten::sin already",
        ),
    ],
)
def test_bad_definitions(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def torch_sin(x: Tensor) -> Tensor:
    return x.sin()
