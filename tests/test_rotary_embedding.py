"""Rotary position embedding: the formula of transformers' models, and its kernel for TPUs."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lazyxla
from lazyxla import rotary as module
from tests import vision  # noqa: F401 - transformers wants a torchvision that can be imported
from tests.support import needs_cuda, needs_libtpu

DEVICE = "lazyxla"
BATCH, HEADS, GROUPS = 2, 4, 2

pytestmark = pytest.mark.usefixtures("uncut")

numbers = itertools.count()


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def formula(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return query * cos + rotate_half(query) * sin, key * cos + rotate_half(key) * sin


def exact(*inputs: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
    """The formula, rounded once: of bfloat16 it rounds every product."""
    dtype = torch.promote_types(inputs[0].dtype, inputs[2].dtype)
    accumulation = torch.promote_types(dtype, torch.float32)
    return tuple(x.to(dtype) for x in formula(*(x.to(accumulation) for x in inputs), **kwargs))


def angles(tokens: int, size: int, shape: tuple[int, ...] = (BATCH,)) -> tuple[Tensor, Tensor]:
    """Not the same for both halves: the gradient must not depend on that they are."""
    angle = torch.randn(*shape, tokens, size)
    return angle.cos(), angle.sin()


def example(tokens: int, size: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    query = torch.randn(BATCH, HEADS, tokens, size)
    key = torch.randn(BATCH, GROUPS, tokens, size)
    return tuple(x.to(dtype) for x in (query, key, *angles(tokens, size)))


def results(call: Any, inputs: tuple[Tensor, ...], device: str, **kwargs: Any) -> list[Tensor]:
    """Of a call, and the gradients of query and key, on the CPU."""
    query, key, cos, sin = (x.to(device) for x in inputs)
    query, key = query.requires_grad_(), key.requires_grad_()
    turned = call(query, key, cos, sin, **kwargs)
    weights = [torch.linspace(-1, 1, x.numel()).view(x.shape).to(x.dtype) for x in turned]
    grads = torch.autograd.grad(turned, (query, key), [w.to(device) for w in weights])
    return [x.detach().cpu() for x in (*turned, *grads)]


@pytest.mark.parametrize("heads_dim", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_as_the_formula(dtype: torch.dtype, heads_dim: int) -> None:
    query, key, *tables = example(9, 8, dtype)
    if heads_dim == 2:
        query, key = query.transpose(1, 2), key.transpose(1, 2)
    inputs = (query, key, *tables)
    before = lazyxla.counters()["fallbacks"]
    ours = results(lazyxla.rotary_embedding, inputs, DEVICE, unsqueeze_dim=heads_dim)
    expected = results(exact, inputs, "cpu", unsqueeze_dim=heads_dim)
    assert lazyxla.counters()["fallbacks"] == before
    torch.testing.assert_close(ours, expected)
    on_the_cpu = results(lazyxla.rotary_embedding, inputs, "cpu", unsqueeze_dim=heads_dim)
    torch.testing.assert_close(on_the_cpu, expected)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_angles_for_all_samples(shape: tuple[int, ...]) -> None:
    query, key, _, _ = example(9, 8)
    cos, sin = angles(9, 8, shape)
    ours = results(lazyxla.rotary_embedding, (query, key, cos, sin), DEVICE)
    whole = cos.expand(BATCH, 9, 8), sin.expand(BATCH, 9, 8)
    torch.testing.assert_close(ours, results(formula, (query, key, *whole), "cpu"))


def test_types_are_promoted() -> None:
    query, key, cos, sin = example(9, 8)
    ours = results(lazyxla.rotary_embedding, (query.bfloat16(), key.bfloat16(), cos, sin), DEVICE)
    expected = results(exact, (query.bfloat16(), key.bfloat16(), cos, sin), "cpu")
    torch.testing.assert_close(ours, expected)  # with their types


def test_gradients_of_the_angles_and_of_gradients() -> None:
    def second(call: Any, device: str) -> list[Tensor]:
        query, key, cos, sin = (x.to(device).requires_grad_() for x in example(9, 8, torch.float64))
        first, other = call(query, key, cos, sin)
        loss = (first**3).sum() + (other**3).sum()
        grads = torch.autograd.grad(loss, (query, key, cos, sin), create_graph=True)
        more = torch.autograd.grad(sum(g.square().sum() for g in grads), (query, key))
        return [x.detach().cpu() for x in (*grads, *more)]

    ours, theirs = second(lazyxla.rotary_embedding, DEVICE), second(formula, "cpu")
    torch.testing.assert_close(ours, theirs)


SIZES = [(160, 128), (300, 64), (128, 32), (512, 256)]
"""Tokens and sizes: one block and several, the last one whole or not; heads that share registers,
that fill one, and two."""


FLAGS = [(True, False, False), (False, True, True), (False, False, False), (True, True, True)]
"""Tokens before heads in the argument, in the result; and backwards."""


@pytest.mark.parametrize(("tokens", "size"), SIZES)
@pytest.mark.parametrize("flags", FLAGS)
def test_the_kernel_interpreted(flags: tuple[bool, bool, bool], tokens: int, size: int) -> None:
    x, _, cos, sin = example(tokens, size)
    cos, sin = (t[:1] if size == 64 else t for t in (cos, sin))
    x = x.transpose(1, 2).contiguous() if flags[0] else x
    assert module._suits(x, cos, sin, *flags)
    traced = []

    def kernel(
        x: Any, cos: Any, sin: Any, from_tokens: bool, to_tokens: bool, inverse: bool, *,
        interpret: bool = False,
    ) -> Any:  # fmt: skip
        traced.append(interpret)
        return module._kernel(x, cos, sin, from_tokens, to_tokens, inverse, interpret=interpret)

    name = f"lazyxla_tests::rotary_{next(numbers)}"
    define = lazyxla.kernel(name, module._reference, platforms=("cpu",), static=module._STATIC)
    ours = define(kernel)(*(t.to(DEVICE) for t in (x, cos, sin)), *flags)
    torch.testing.assert_close(ours.cpu(), module._reference(x, cos, sin, *flags))
    assert traced == [True]


class Attention(nn.Module):
    """As transformers' models have it."""

    def __init__(self, hidden: int, size: int, rotate: Any) -> None:
        super().__init__()
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, hidden // 2, bias=False)
        self.value = nn.Linear(hidden, hidden // 2, bias=False)
        self.size, self.rotate = size, rotate

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = (
            f(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        query, key = self.rotate(query, key, cos, sin)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return y.transpose(1, 2).flatten(2)


def training(model: nn.Module) -> Any:
    def step(*inputs: Tensor) -> list[Tensor]:
        loss = model(*inputs).float().square().mean()
        return list(torch.autograd.grad(loss, list(model.parameters())))

    return step


def kernels(program: lazyxla.aot.CompiledProgram) -> int:
    made = r"%rotary_embedding[.\w]* = \S+ custom-call"  # the name ends as JAX likes it
    return len(re.findall(made, program.optimized_hlo()))


def compiled(rotate: Any, size: int) -> lazyxla.aot.CompiledProgram:
    with torch.device("meta"):
        model = Attention(1024, size, rotate).bfloat16()
        x, table = torch.empty(2, 512, 1024), torch.empty(1, 512, size)
    inputs = [x.bfloat16(), table.bfloat16(), table.bfloat16()]
    return lazyxla.aot.compile(model, inputs, topology="v5e:1x1", train_step=training)


@needs_libtpu
@pytest.mark.parametrize("size", [64, 128])
def test_less_work_on_a_tpu(size: int) -> None:
    """Neither rotated halves in memory, nor copies of queries and keys to put heads first."""
    ours, plain = compiled(lazyxla.rotary_embedding, size), compiled(formula, size)
    assert kernels(ours) == 4  # each way, of query and of key
    assert kernels(plain) == 0
    assert ours.estimated_cycles is not None
    assert plain.estimated_cycles is not None
    assert ours.estimated_cycles < 0.8 * plain.estimated_cycles


@needs_libtpu
@pytest.mark.parametrize("topology", ["v4:2x2x1", "v6e:2x2"])
def test_compiles_for_other_tpus(topology: str) -> None:
    x, table = torch.empty(2, 4, 256, 64, device="meta"), torch.empty(1, 256, 64, device="meta")

    def call(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        x = x.detach().requires_grad_()
        turned = lazyxla.rotary_embedding(x, x.bfloat16(), cos, sin)
        return *turned, *torch.autograd.grad(turned, x, turned)

    assert kernels(lazyxla.aot.compile(call, (x, table, table), topology=topology)) == 4


@needs_libtpu
def test_few_tokens_are_no_kernel() -> None:
    x, table = torch.empty(8, 4, 1, 128, device="meta"), torch.empty(8, 1, 128, device="meta")
    arguments = (x, x, table, table)
    program = lazyxla.aot.compile(lazyxla.rotary_embedding, arguments, topology="v5e:1x1")
    assert kernels(program) == 0


@needs_cuda
def test_no_kernel_on_gpus() -> None:
    """One pass of XLA's own does it there, for query and for key."""
    x, table = torch.empty(2, 4, 256, 128, device="meta"), torch.empty(1, 256, 128, device="meta")
    arguments = (x, x, table, table)
    program = lazyxla.aot.compile(lazyxla.rotary_embedding, arguments, topology="h100")
    assert program.optimized_hlo().count(" fusion(") == 2
    assert " custom-call(" not in program.optimized_hlo()


@pytest.mark.parametrize(
    ("shapes", "dim", "message"),
    [
        (((2, 3, 4), (2, 3, 4), (3, 4)), 1, "four dimensions"),
        (((2, 3, 4, 5), (2, 3, 4, 5), (4, 5)), 1, "last one's size even"),
        (((2, 3, 4, 6), (2, 3, 4, 6), (3, 6)), 1, r"cos and sin of \[batch or 1, 4, 6\]"),
        (((2, 3, 4, 6), (2, 3, 5, 6), (4, 6)), 1, r"\[batch or 1, 5, 6\]"),
        (((2, 3, 4, 6), (2, 3, 4, 6), (4, 6)), 2, r"\[batch or 1, 3, 6\]"),
        (((2, 3, 4, 6), (2, 3, 4, 6), (4, 6)), 3, "dimension 1 or 2, not 3"),
    ],
)
def test_bad_input(shapes: tuple[tuple[int, ...], ...], dim: int, message: str) -> None:
    query, key, table = (torch.ones(shape, device=DEVICE) for shape in shapes)
    with pytest.raises(ValueError, match=message):
        lazyxla.rotary_embedding(query, key, table, table, dim)


def test_in_compiled_functions(fresh_dynamo: None) -> None:
    inputs = tuple(x.to(DEVICE) for x in example(9, 8))
    call = torch.compile(lazyxla.rotary_embedding, backend="lazyxla", fullgraph=True)
    torch.testing.assert_close(call(*inputs), lazyxla.rotary_embedding(*inputs))


def test_in_place_of_transformers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaConfig, LlamaModel
    from transformers.models.llama import modeling_llama

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
    )
    torch.manual_seed(0)
    model = LlamaModel(config).eval()
    tokens = torch.randint(50, (2, 7))
    expected = model(tokens).last_hidden_state
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lazyxla.rotary_embedding)
    ours = model.to(DEVICE)(tokens.to(DEVICE)).last_hidden_state
    torch.testing.assert_close(ours.detach().cpu(), expected.detach(), rtol=1e-4, atol=1e-5)
