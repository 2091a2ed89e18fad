"""Functions of arrays with symbolic dimensions: one program for all sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import lazyxla
from lazyxla.lowering import DifferentProgramsError, LoweringError
from lazyxla.lowering.size_polynomials import Points

jax.config.update("jax_platforms", "cpu")

SIZES = [(1, 1), (2, 1), (3, 5), (8, 8), (17, 4), (64, 33), (3, 300)]


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda x: x + x.mean(0),
    "arange": lambda x: x * torch.arange(x.shape[0])[:, None],
    "argmax": lambda x: (x.argmax(0), x.argmin(1)),
    "attention": lambda x: F.scaled_dot_product_attention(*[x[None, None, :, :1] * 0.1] * 3),
    "broadcast": lambda x: x[:, None, :] + x[None, :, :],
    "cat": lambda x: torch.cat([x, x[:1], x], 0),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "conv1d": lambda x: F.conv1d(x[:, None], torch.ones(2, 1, 3), padding=1),
    "cross entropy": lambda x: F.cross_entropy(x, torch.zeros(x.shape[0], dtype=torch.long)),
    "cumsum": lambda x: x.cumsum(0),
    "diagonal": lambda x: (x @ x.T).diagonal(),
    "einsum": lambda x: torch.einsum("nm,km->nk", x, x),
    "embedding": lambda x: F.embedding((x > 0).long(), torch.arange(6.0).reshape(2, 3)),
    "flatten": lambda x: x.flatten(),
    "flip": lambda x: x.flip(0).roll(1, 1),
    "gather": lambda x: x.gather(1, torch.zeros_like(x, dtype=torch.long)),
    "group norm": lambda x: F.group_norm(x[:, None, :].repeat(1, 4, 1), 2),
    "index_add": lambda x: torch.zeros(2, x.shape[1]).index_add(0, (x[:, 0] > 0).long(), x),
    "index": lambda x: x[(x[:, 0] > 9).long()],
    "integers": lambda x: (x * 100).long() // 7 % 5,
    # Of different numbers: of equal ones it divides what rounding leaves of 0 by almost 0.
    "layer norm": lambda x: F.layer_norm(torch.stack((x, x * 2, x + 1), 2), (3,)),
    "logsumexp": lambda x: (x.logsumexp(0), x.log_softmax(1)),
    "matmul": lambda x: x.T @ x,
    "max": lambda x: (x.max(0).values, x.amin(1)),
    "mean": lambda x: (x.mean(), x.mean(0), x.mean(1)),
    "new": lambda x: torch.ones(x.shape[1], x.shape[0]) + x.new_full((x.shape[0],), 2.0),
    "norm": lambda x: (x.norm(), F.normalize(x, dim=1)),
    "numbers": lambda x: x * x.shape[0] + 1 / x.shape[1],
    "one_hot": lambda x: F.one_hot((x > 0).long(), 3),
    "pad": lambda x: F.pad(x, (1, 2, 0, 3), value=1.0),
    "products": lambda x: torch.bmm(x[None].expand(3, -1, -1), x.T[None].expand(3, -1, -1)),
    "relu": lambda x: F.gelu(F.relu(x)),
    "reshape": lambda x: x.reshape(1, -1, 1).expand(2, -1, 3),
    "rms norm": lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6),
    "scatter": lambda x: torch.zeros_like(x).scatter(1, (x[:, :1] > 9).long(), 1.0),
    "slices": lambda x: (x[: x.shape[0] // 1], x[:, -1:], x[::1], x[:1]),
    "softmax": lambda x: x.softmax(-1),
    "sort": lambda x: x.sort(0),
    "stack": lambda x: torch.stack([x, -x], 1),
    "tril": lambda x: (x @ x.T).tril(),
    "unbind": lambda x: x.T.unsqueeze(0).unbind(0),
    "var": lambda x: x.var(0, correction=0),
    "view": lambda x: x[:, :, None].expand(-1, -1, 4).reshape(x.shape[0], -1),
    "where": lambda x: torch.where(x > 0, x, torch.zeros(())),
    "windows": lambda x: x.repeat(1, 3).unfold(1, 3, 1),
}
"""Of (n, m), float32. Both are symbolic."""


def rows(n: int, m: int) -> Tensor:
    return torch.randn(n, m, generator=torch.Generator().manual_seed(n * 1000 + m))


def symbolic(
    function: Callable[..., Any], shape: str = "n, m", constraints: tuple[str, ...] = ()
) -> Any:
    """The exported program of a function of one float32 array."""
    scope = jax.export.SymbolicScope(constraints)
    struct = jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape, scope=scope), np.float32)
    return jax.export.export(jax.jit(function))(struct)


def check(program: Any, function: Callable[..., Any], x: Tensor, **tolerances: float) -> None:
    found = jax.tree.leaves(program.call(x.numpy()))
    expected = torch.utils._pytree.tree_leaves(function(x))
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        mine = torch.from_numpy(np.array(mine))
        torch.testing.assert_close(mine, theirs, **tolerances)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_program_serves_all_sizes(name: str) -> None:
    function = FUNCTIONS[name]
    with jax.enable_x64(True):
        program = symbolic(lazyxla.jax_view(function))
        for sizes in SIZES:
            x = rows(*sizes)
            check(program, function, x)


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "fewer": lambda x: x[:100],
    "halves": lambda x: x[: x.shape[0] // 2],
    "if": lambda x: x.sin() if x.shape[0] > 10 else x.cos(),
    "list": lambda x: [x] * x.shape[0],
    "loop": lambda x: sum((x * i for i in range(x.shape[0])), x),
    "multiple": lambda x: F.pad(x, (0, 0, 0, -x.shape[0] % 128)),
    "one": lambda x: x.sin() if x.shape[0] == 1 else x.cos(),
    "squeezed": lambda x: x.squeeze(0) * 2,
    "number": lambda x: x * x.shape[0] ** 0.5,
    "rank": lambda x: x if x.shape[0] > 10 else x[0],
    "random": lambda x: x + torch.rand_like(x),
    "table": lambda x: torch.zeros(64, 2)[: x.shape[0]],
}
"""What is another program for other sizes."""


def test_attention_of_many_and_of_few_scores() -> None:
    """For known sizes the one goes over blocks, the other does not."""

    def attention(x: Tensor) -> Tensor:
        rows = x[:, None, :, None].expand(-1, 12, 200, 4)
        return F.scaled_dot_product_attention(rows, rows, rows)

    program = symbolic(lazyxla.jax_view(attention), "n, 200")
    for n in (2, 12):  # 1 and 6 million scores
        check(program, attention, rows(n, 200))


@pytest.mark.parametrize("name", REFUSED)
def test_what_depends_on_sizes_otherwise_is_refused(name: str) -> None:
    with pytest.raises((LoweringError, ValueError), match=r"size|symbolic|random"):
        symbolic(lazyxla.jax_view(REFUSED[name]), "n, 3")


@pytest.mark.parametrize("name", ["matmul", "conv1d", "group norm", "logsumexp", "sort", "pad"])
def test_derivatives_and_batches_are_symbolic(name: str) -> None:
    view = lazyxla.jax_view(FUNCTIONS[name])
    # Products of products: terms of float32 that cancel, where each side sums in its own order.
    close = {"rtol": 1e-4, "atol": 1e-4} if name == "matmul" else {}

    def total(x: Any) -> Any:
        return sum(jax.numpy.sum(y * y) for y in jax.tree.leaves(view(x)))

    def expected(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        found = torch.utils._pytree.tree_leaves(FUNCTIONS[name](x))
        sum(y.double().square().sum() for y in found).backward()
        assert x.grad is not None
        return x.grad

    def each(x: Tensor) -> Tensor:
        return torch.stack([expected(part) for part in x])

    with jax.enable_x64(True):
        gradient = symbolic(jax.grad(total))
        batched = symbolic(jax.vmap(jax.grad(total)), "k, n, m")
        for n, m in SIZES[:-1]:
            check(gradient, expected, rows(n, m), **close)
        for n, m in ((2, 3), (9, 4)):
            x = torch.stack([rows(n, m), rows(n, m) + 1, rows(n, m) * 2])
            check(batched, each, x)


def test_a_question_about_sizes_is_shown_with_its_line() -> None:
    def function(x: Tensor) -> Tensor:
        return x.sin() if x.shape[0] > 10 else x.cos()

    line = function.__code__.co_firstlineno + 1
    with pytest.raises(DifferentProgramsError, match=r"asks for n <= 10, .* for n=11") as caught:
        symbolic(lazyxla.jax_view(function), "n, 3")
    assert f"{__file__}:{line}" in str(caught.value)
    for name in ("one", "squeezed"):
        check(
            symbolic(lazyxla.jax_view(REFUSED[name]), "n, 3", ("n >= 2",)),
            REFUSED[name],
            rows(5, 3),
        )
    # Within bounds that answer it, it is one program.
    program = symbolic(lazyxla.jax_view(function), "n, 3", ("n >= 11",))
    check(program, function, rows(20, 3))


def test_polynomials_are_found_and_others_are_not() -> None:
    points = Points([(1, 1 << 20), (1, 1 << 20)])
    assert len(points.sizes) == 7
    found = points.fit([3 * n * m + m * m - 2 for n, m in points.sizes])
    assert found is not None
    assert (found.at((100, 7)), found.constant) == (2147, None)
    same = points.fit([5] * 7)
    assert same is not None
    assert same.constant == 5
    for other in (lambda n, m: n // 2, lambda n, m: min(n, 9), lambda n, m: n**3):
        assert points.fit([other(n, m) for n, m in points.sizes]) is None
    with pytest.raises(ValueError, match="four sizes"):
        Points([(3, 5)])
