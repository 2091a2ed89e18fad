"""Embeddings and bags of them, against PyTorch's CPU kernels."""

from itertools import product
from typing import Any

import pytest
import torch

from tests.lowering.batch import Batch
from tests.lowering.harness import run

WEIGHT = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
INDICES = torch.tensor([1, 5, 5, 0, 2, 5, 6, 1])
OFFSETS = torch.tensor([0, 2, 2, 7])
FREQUENT = [False, True]


def test_embedding() -> None:
    batch = Batch()
    for shape, index_dtype in product([(), (3,), (2, 3), (0,)], [torch.int64, torch.int32]):
        indices = torch.randint(0, 7, shape).to(index_dtype)
        batch.add("aten::embedding", WEIGHT, indices)
        batch.add("aten::embedding", WEIGHT.bfloat16(), indices, 3)
    batch.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_embedding_backward(dtype: torch.dtype) -> None:
    batch = Batch()
    for scale_grad_by_freq, padding_idx in product(FREQUENT, [-1, 5]):
        grad = torch.randn(2, 4, 3).to(dtype)
        indices = INDICES.reshape(2, 4)
        batch.add(
            "aten::embedding_dense_backward", grad, indices, 7, padding_idx, scale_grad_by_freq
        )
    batch.check()


def test_embedding_backward_sums_narrow_floats_exactly() -> None:
    grad, indices = torch.ones(512, 2, dtype=torch.bfloat16), torch.zeros(512, dtype=torch.int64)
    (result,) = run("aten::embedding_dense_backward", grad, indices, 3, -1, False)
    assert result.tolist() == [[512.0, 512.0], [0.0, 0.0], [0.0, 0.0]]


def test_embedding_renorm() -> None:
    batch = Batch()
    for norm_type in [1.0, 2.0, 3.0, float("inf")]:
        for weight in (WEIGHT, torch.complex(WEIGHT, WEIGHT.flip(0))):
            batch.add("aten::embedding_renorm", weight, INDICES[:5], 1.0, norm_type)
    batch.check()


def bag_arguments(mode: int, last: bool, padding_idx: int) -> dict[str, Any]:
    return {"mode": mode, "include_last_offset": last, "padding_idx": padding_idx}


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("padding_idx", [-1, 5])
def test_bags(mode: int, last: bool, padding_idx: int) -> None:
    """Every mode forward; then backward from PyTorch's own intermediate results."""
    batch = Batch()
    offsets = torch.cat([OFFSETS, torch.tensor([8])]) if last else OFFSETS
    options = bag_arguments(mode, last, padding_idx)
    wanted = torch.ops.aten._embedding_bag(WEIGHT, INDICES, offsets, **options)
    for op in ("aten::_embedding_bag", "aten::_embedding_bag_forward_only"):
        got = run(op, WEIGHT, INDICES, offsets, **options)
        torch.testing.assert_close(got[0], wanted[0])
        expected = getattr(torch.ops.aten, op[6:])(WEIGHT, INDICES, offsets, **options)
        assert [x.shape for x in got] == [x.shape for x in expected]
        if got[1].numel():
            assert torch.equal(got[1], wanted[1])
        if mode:
            assert torch.equal(got[2][:4], wanted[2])
        if mode == 2:
            assert torch.equal(got[3], wanted[3])
    grad, rest = torch.randn(4, 4), [INDICES, offsets, *wanted[1:], 7]
    batch.add("aten::_embedding_bag_backward", grad, *rest, False, mode, False, None, padding_idx)
    batch.check()


def test_bags_scaled_by_frequency() -> None:
    """A row's gradient is divided by its count. (PyTorch's CPU kernel takes other rows' counts.)"""
    wanted = torch.ops.aten._embedding_bag(WEIGHT, INDICES, OFFSETS, mode=1)
    grad, rest = torch.randn(4, 4), [INDICES, OFFSETS, *wanted[1:], 7]
    plain = torch.ops.aten._embedding_bag_backward(grad, *rest, False, 1, False, None)
    (got,) = run("aten::_embedding_bag_backward", grad, *rest, True, 1, False, None)
    counts = INDICES.bincount(minlength=7).clamp(min=1)
    torch.testing.assert_close(got, plain / counts[:, None])


def test_bags_on_other_devices() -> None:
    """Meta functions give the auxiliary results in the shapes of PyTorch's CUDA kernels."""
    from lazyxla.lowering import Program, TensorSpec
    from tests.lowering.harness import execute, record

    offsets = torch.cat([OFFSETS, torch.tensor([8])])
    options = bag_arguments(2, True, 5)
    arguments = [WEIGHT, INDICES, offsets]
    outputs = torch.ops.aten._embedding_bag(*[x.to("meta") for x in arguments], **options)
    program: Program = record("aten::_embedding_bag", *arguments, **options).program
    specs = tuple(TensorSpec(x.dtype, tuple(x.shape)) for x in outputs)
    program = program._replace(nodes=[program.nodes[0]._replace(outputs=specs)])
    results, _ = execute(program, arguments)
    wanted = torch.ops.aten._embedding_bag(*arguments, **options)
    torch.testing.assert_close(results[0], wanted[0])
    assert torch.equal(results[1], wanted[1])
    assert results[2].tolist() == [*wanted[2].tolist(), 0]
    assert torch.equal(results[3], wanted[3])


@pytest.mark.parametrize("padding_idx", [-1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weighted_bags(padding_idx: int, dtype: torch.dtype) -> None:
    batch = Batch()
    weight, weights = WEIGHT.to(dtype), torch.randn(8).to(dtype)
    options = bag_arguments(0, False, padding_idx)
    wanted = torch.ops.aten._embedding_bag(
        weight, INDICES, OFFSETS, per_sample_weights=weights, **options
    )
    (got, *_) = run(
        "aten::_embedding_bag", weight, INDICES, OFFSETS, per_sample_weights=weights, **options
    )
    torch.testing.assert_close(got, wanted[0])
    grad, rest = torch.randn(4, 4).to(dtype), [INDICES, OFFSETS, wanted[1]]
    batch.add(
        "aten::_embedding_bag_per_sample_weights_backward",
        grad,
        weight,
        *rest,
        0,
        padding_idx,
    )
    arguments = [grad, *rest, *wanted[2:], 7, False, 0, False, weights, padding_idx]
    batch.add("aten::_embedding_bag_backward", *arguments)
    batch.check()


def test_empty_bags() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    for mode in range(3):
        (got, *_) = run("aten::_embedding_bag", WEIGHT, none, torch.tensor([0, 0]), False, mode)
        assert torch.equal(got, torch.zeros(2, 4))
