"""Operators that no sample of PyTorch's table comes down to, on the device: as on the CPU.

What the CPU has no kernel for is compared with formulas or PyTorch's other ways to the same result
in tests/lowering/test_recurrent.py, test_attention.py, test_linear.py, test_cross_entropy.py and
test_meta_functions.py.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests.calls import calls
from tests.support import DEVICE, assert_same, counted, on_device

NO_CPU_KERNEL = {
    "aten::_thnn_fused_gru_cell",
    "aten::_thnn_fused_gru_cell_backward",
    "aten::_thnn_fused_lstm_cell",
    "aten::baddbmm.dtype",
    "aten::linear_backward",
    "lazyxla::cross_entropy",
    "lazyxla::cross_entropy_backward",
    "lazyxla::dropout_attention",
    "lazyxla::dropout_attention_backward",
}

# How many of the results are compared: the others, which only the gradient's formula reads, are
# not those of the CPU, but of devices with kernels of their own.
COMPARED = {
    "aten::_batch_norm_no_update": 1,
    "aten::_embedding_bag_forward_only": 1,
    "aten::_native_batch_norm_legit_no_training": 1,
}


@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("name", sorted(calls().keys() - NO_CPU_KERNEL))
def test_as_on_the_cpu(name: str) -> None:
    call = calls()[name]
    expected = tree_leaves(call.run(name, "cpu"))
    with counted() as n:
        actual = tree_leaves(call.run(name, DEVICE))
    assert n.nodes_recorded
    assert not n.fallbacks
    some = COMPARED.get(name, len(expected))
    assert some < len(expected) or name not in COMPARED
    assert_same(actual[:some], expected[:some])


@pytest.mark.parametrize("name", sorted(NO_CPU_KERNEL))
def test_without_a_cpu_kernel(name: str) -> None:
    """No call falls back: there would be nothing to fall back to."""
    call = calls()[name]
    with pytest.raises(NotImplementedError, match="Could not run"):
        call.run(name, "cpu")
    with counted() as n:
        results = tree_leaves(call.run(name, DEVICE))
    assert n.nodes_recorded == 1
    assert all(x.cpu().isfinite().all() for x in results)


@pytest.mark.parametrize("name", ["_foreach_addcmul", "_foreach_addcdiv"])
def test_numbers_of_lists_in_a_tensor(name: str) -> None:
    """PyTorch wants the numbers on the CPU, on whichever device the lists are."""
    op = getattr(torch, name)
    lists = [[torch.rand(3) + 1, torch.rand(2, 2) + 1] for _ in range(3)]
    numbers = torch.tensor([0.5, 2.0])
    expected, copies = op(*lists, numbers), on_device(lists)
    with counted() as n:
        actual = op(*copies, numbers)
        getattr(torch, f"{name}_")(*copies, numbers)
    assert not n.fallbacks
    assert_same([actual, copies[0]], [expected, expected])
    with pytest.raises(RuntimeError, match="Expected scalars to be on CPU, got lazyxla:0 instead"):
        op(*on_device(lists), numbers.to(DEVICE))
