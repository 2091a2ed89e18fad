"""Results that are written to memory which the operator reads: refused where the CPU refuses it.

Of every entry of PyTorch's table with an out= form, each tensor among a sample's arguments is given
as the result, and then one that overlaps with it in part. Either both raise the same error, or both
accept the call. `--overlap-samples` tells how many samples of each entry are tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_leaves, tree_map

from tests.opinfo.compare import DEVICE, copied
from tests.opinfo.entries import entries, samples, supports
from tests.support import error_of


def _results_on_arguments(sample: SampleInput, result: torch.Tensor) -> Iterator[SampleInput]:
    """The sample with results that share memory with an argument."""
    tree = (sample.input, sample.args, sample.kwargs)
    for x in tree_leaves(tree):
        if not isinstance(x, torch.Tensor) or x.dtype != result.dtype:
            continue
        if x.numel() == 0 or result.numel() == 0:
            continue
        memory = torch.zeros(max(x.numel(), result.numel() + 1), dtype=x.dtype)
        memory[: x.numel()] = x.detach().reshape(-1)
        same = memory[: x.numel()].view(x.shape)
        outs = [memory[1 : result.numel() + 1].view(result.shape)]
        if x.shape == result.shape:
            outs.append(same)
        for out in outs:
            first, args, kwargs = tree_map(lambda y: same if y is x else y, tree)  # noqa: B023
            yield SampleInput(first, args=args, kwargs={**kwargs, "out": out})


def _call(op: OpInfo, sample: SampleInput, device: str) -> Any:
    moved = copied(op, sample, device)
    return op(moved.input, *moved.args, **moved.kwargs)


@pytest.mark.filterwarnings("ignore")
def test_shared_memory_is_refused_as_on_the_cpu(request: pytest.FixtureRequest) -> None:
    limit = request.config.getoption("--overlap-samples")
    refused, accepted, differences = 0, 0, {}
    for name, op in entries().items():
        if not supports(op, torch.float32, "out"):
            continue
        for sample in samples(op, torch.float32, limit):
            try:
                result = op(sample.input, *sample.args, **sample.kwargs)
            except Exception:
                continue  # no result to put anywhere
            if not isinstance(result, torch.Tensor):
                continue
            for call in _results_on_arguments(sample, result):
                theirs, ours = error_of(_call, op, call, "cpu"), error_of(_call, op, call, DEVICE)
                refused += theirs[0] is not type(None)
                accepted += theirs[0] is type(None)
                if theirs[0] is not ours[0]:
                    differences[name] = (theirs, ours)
    assert differences == {}
    assert min(refused, accepted) > 100 * limit
