"""``flex_attention`` with masks known when it is traced: the kernel for TPUs and its formula."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import lazyxla
from lazyxla import flex_kernel
from lazyxla.lowering import Target, lookup, lower_to_text
from lazyxla.lowering.tpu import attention as attention_tpu
from tests.lowering.harness import execute, record
from tests.lowering.test_attention_kernels import interpreted  # noqa: F401 - a fixture
from tests.support import needs_libtpu
from tests.test_flex_attention import by_head, causal, formula, of_documents, softcap

DEVICE = "lazyxla"
TPU = Target("tpu")
FORWARD, BACKWARD = "lazyxla::flex_attention", "lazyxla::flex_attention_backward"

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "uncut")

Index = Tensor


def window(b: Index, h: Index, q: Index, k: Index) -> Tensor:
    return (q >= k) & (q - k <= 140)


def prefix(b: Index, h: Index, q: Index, k: Index) -> Tensor:
    return (q >= k) | (k < 9)


def far(b: Index, h: Index, q: Index, k: Index) -> Tensor:
    return torch.where(q < 128, k < 128, k // 128 != 1)


def dilated(b: Index, h: Index, q: Index, k: Index) -> Tensor:
    return (q - k) % 3 == 0


MASKS: dict[str, Callable[..., Tensor]] = {
    "causal": causal,
    "window": window,
    "prefix": prefix,
    "far": far,
    "dilated": dilated,
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As if graphs were traced for a TPU: which of the operators are in them.

    Each test computes its masks itself: another test's may be of a graph for another device.
    """
    found: list[str] = []
    monkeypatch.setattr(flex_kernel, "masks", {})

    def noted(name: str) -> Callable[..., Any]:
        original = getattr(flex_kernel, name)

        def call(*args: Any) -> Any:
            found.append(name)
            return original(*args)

        return call

    for name in ("forward", "backward"):
        monkeypatch.setattr(flex_kernel, name, noted(name))
    monkeypatch.setattr(lookup, "recorded_platform", lambda: "tpu")
    return found


def example(rows: int, columns: int, heads: int = 4, groups: int = 2) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(2, heads, rows, 8), (2, groups, columns, 8), (2, groups, columns, 8)]
    return [torch.randn(shape) for shape in shapes]


def compiled(**kwargs: Any) -> Any:
    return torch.compile(flex_attention, backend="lazyxla", fullgraph=True, **kwargs)


@pytest.mark.parametrize("name", [*MASKS, "none"])
def test_the_formula_elsewhere(name: str, calls: list[str]) -> None:
    """With the gradients, in one program; the mask is computed on the device."""
    inputs, gradient = example(40, 48), torch.randn(2, 4, 40, 8)
    found = []
    for device in ("cpu", DEVICE):
        q, k, v = given = [x.to(device).requires_grad_() for x in inputs]
        if device == "cpu":
            result, _ = formula(q, k, v, None, MASKS.get(name), 2)
        else:
            mask = None
            if name in MASKS:
                mask = create_block_mask(MASKS[name], None, None, 40, 48, device, BLOCK_SIZE=16)
            lazyxla.sync(wait=True)
            lazyxla.reset_counters()
            result = compiled()(q, k, v, block_mask=mask, enable_gqa=True)
        gradients = torch.autograd.grad(result, given, gradient.to(device))
        found.append([result.detach(), *gradients])
    lazyxla.sync(wait=True)
    assert (lazyxla.counters()["executions"], lazyxla.counters()["fallbacks"]) == (1, 0)
    assert set(calls) == {"forward", "backward"}
    for ours, theirs in zip(found[1], found[0], strict=True):
        # Sums over 48 keys in other orders.
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-5)


def nothing_for_some(b: Index, h: Index, q: Index, k: Index) -> Tensor:
    return q > k


@pytest.mark.parametrize("name", ["score_mod", "by head", "captured", "nothing", "logarithms"])
def test_not_for(name: str, calls: list[str]) -> None:
    """Modified scores, masks that differ by head or have data, queries that see nothing, and
    gradients of the logarithms stay as they were."""
    document = torch.arange(48) // 12
    masks = {"by head": by_head, "captured": of_documents(document), "nothing": nothing_for_some}
    mask_mod, score_mod = masks.get(name, causal), softcap if name == "score_mod" else None
    inputs = example(48, 48, groups=4)
    expected = formula(*inputs, score_mod, mask_mod, 4)
    given = [x.to(DEVICE).requires_grad_() for x in inputs]
    if name == "captured":
        mask_mod = of_documents(document.to(DEVICE))
    mask = create_block_mask(mask_mod, 2, 4, 48, 48, DEVICE, BLOCK_SIZE=16)
    results = compiled()(*given, score_mod=score_mod, block_mask=mask, return_lse=True)
    wanted = results if name == "logarithms" else results[:1]
    torch.autograd.grad([x.sum() for x in wanted], given)
    assert set(calls) == ({"forward"} if name == "logarithms" else set())
    for ours, theirs in zip(results, expected, strict=True):
        # Sums in other orders, as above.
        torch.testing.assert_close(ours.detach().cpu(), theirs, rtol=1e-4, atol=1e-5)


def digest_of(mask_mod: Callable[..., Tensor], rows: int, columns: int) -> str:
    from torch.fx.experimental.proxy_tensor import make_fx

    indices = [torch.zeros((), dtype=torch.int) for _ in range(4)]
    digest = flex_kernel.remember(make_fx(mask_mod)(*indices), rows, columns)
    assert digest is not None
    return digest


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("rows", "columns"), [(256, 256), (256, 384)])
def test_the_kernel_interpreted(
    name: str,
    rows: int,
    columns: int,
    interpreted: None,  # noqa: F811
) -> None:
    """Against the formula, on the CPU."""
    digest = digest_of(MASKS[name], rows, columns)
    inputs = example(rows, columns)
    ours = record(FORWARD, *inputs, digest, 0.3)
    back = record(BACKWARD, *inputs, *ours.expected, torch.randn(2, 4, rows, 8), digest, 0.3)
    for recorded in (ours, back):
        assert "dot_general" not in main(lower_to_text(recorded.program, TPU))
        results, _ = execute(recorded.program, recorded.inputs, TPU)
        for found, expected in zip(results, recorded.expected, strict=True):
            # Sums over tiles in another order.
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def main(text: str) -> str:
    return text[text.index("func.func public @main") :].split("\n  }")[0]


def test_tiles_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_tpu, "_TILE", 128)
    digest = digest_of(far, 384, 384)
    pattern = attention_tpu.Pattern(digest, flex_kernel.masks[digest].seen)
    assert attention_tpu._tiles(384, 384, pattern) == 1 + 2 * 2
    assert pattern == attention_tpu.Pattern(digest, ~pattern.seen)
    assert digest != digest_of(causal, 384, 384)


@needs_libtpu
def test_no_scores_and_no_empty_tiles_on_a_tpu() -> None:
    length = 4096
    mask = create_block_mask(window, None, None, length, length, DEVICE)
    attend = compiled()

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        *inputs, grad = (x.detach().requires_grad_() for x in tensors)
        result = attend(*inputs, block_mask=mask, enable_gqa=True)
        return result.detach(), *torch.autograd.grad(result, inputs, grad)

    with torch.device("meta"):
        query, key = torch.empty(1, 8, length, 128), torch.empty(1, 2, length, 128)
    query, key = query.bfloat16(), key.bfloat16()
    program = lazyxla.aot.compile(call, (query, key, key, query), topology="v5e:1x1")
    assert len(re.findall(r"%splash_mha_\w+[.\d]* = ", program.optimized_hlo())) == 3
    tiles = 8 * (8 + 7) * 512 * 512  # of 64 for each head: the diagonal and what is beside it
    assert program.flops == pytest.approx(2 * 9 * 128 * tiles, rel=0.01)
    assert program.memory_stats()["temporary"] < 8 * length * length / 16
