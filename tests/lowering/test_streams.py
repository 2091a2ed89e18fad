"""Random bits by place are those of XLA's generators."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lazyxla.lowering import Node, Program, Ref, TensorSpec, registry, streams
from lazyxla.lowering.builder import Builder
from lazyxla.lowering.streams import _generate
from tests.lowering.harness import execute

SEED, ORDINAL = 0x123456789ABCDEF0, 0x7FFFFFFF00000003


def both(shape: list[int], make: Any) -> list[torch.Tensor]:
    """The results of a rule that returns the generator's bits, and those by place."""
    dtype = make.__defaults__[0]

    @registry.rule("test::op")
    def _(b: Any, x: Any) -> Any:
        return [b.bitcast(y, SIGNED[dtype]) for y in make(b, shape)]

    spec = TensorSpec(SIGNED[dtype], tuple(shape))
    vector = TensorSpec(torch.float32, (1,))
    program = Program(
        [vector], [Node("test::op", (Ref(0),), (spec, spec))], [Ref(1), Ref(2)], [], {}
    )
    return execute(program, [torch.zeros(1)])[0]


SIGNED = {torch.uint32: torch.int32, torch.uint64: torch.int64}
SHAPES = [[], [1], [8], [7], [3, 5], [4, 8], [2, 3, 4], [5, 1], [1000]]


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("dtype", SIGNED)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_philox(
    shape: list[int], dtype: torch.dtype, stacked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Builder, "interleaves_by_stacking", lambda *_: stacked)

    def make(b: Any, shape: list[int], dtype: torch.dtype = dtype) -> Any:
        seed, zero, ordinal = (b.constant(n, torch.uint64) for n in (SEED, 0, ORDINAL))
        bits = b.reshape(_generate(b, "PHILOX", [seed, zero, ordinal], shape or [1], dtype), shape)
        return bits, streams.philox(b, shape, dtype, seed, ordinal)

    assert torch.equal(*both(shape, make))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_philox_below(shape: list[int]) -> None:
    def make(b: Any, shape: list[int], dtype: torch.dtype = torch.uint32) -> Any:
        seed, ordinal = (b.constant(n, torch.uint64) for n in (SEED, ORDINAL))
        limit = b.constant(0.6 * 2**24, torch.float32)
        numbers = streams.philox_bits(b, shape, dtype, seed, ordinal) >> 8
        below = streams.philox_below(b, shape, limit, seed, ordinal)
        return [x.to(dtype) for x in (numbers.to(torch.float32) < limit, below)]

    bits, below = both(shape, make)
    assert torch.equal(bits, below)
    if bits.numel() == 1000:
        assert 500 < bits.sum() < 700


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_threefry(shape: list[int]) -> None:
    def make(b: Any, shape: list[int], dtype: torch.dtype = torch.uint64) -> Any:
        seed, start = (b.constant(n, torch.uint64) for n in (SEED, ORDINAL))
        bits = b.reshape(_generate(b, "THREE_FRY", [seed, start], shape or [1], dtype), shape)
        return bits, streams.threefry(b, shape, dtype, seed, start)

    assert torch.equal(*both(shape, make))


@pytest.mark.parametrize("shape", [[8], [7], [3, 5], [2, 16]], ids=str)
def test_halves_of_threefry(shape: list[int]) -> None:

    def make(b: Any, shape: list[int], unsigned: torch.dtype = torch.uint64) -> Any:
        seed, start = (b.constant(n, torch.uint64) for n in (SEED, ORDINAL))
        count = torch.Size(shape).numel()
        words = -(-count // 2)
        bits = _generate(b, "THREE_FRY", [seed, start], [words], torch.uint64)
        parts = b.hlo.bitcast_convert(b.type(torch.uint32, [words, 2]), bits)
        parts = b.reshape(b.slice_dim(b.reshape(parts, [-1]), 0, 0, count), shape)
        ours = streams.threefry(b, shape, torch.uint32, seed, start)
        return b.convert(parts, torch.uint64), b.convert(ours, torch.uint64)

    assert torch.equal(*both(shape, make))
