"""What a compiled function takes of memory: as_strided, and results that share it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lazyxla.dynamo import backend, execution
from tests.support import DEVICE, assert_same, counted

Function = Callable[[torch.Tensor], torch.Tensor]

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def numbers() -> torch.Tensor:
    return torch.arange(60.0).reshape(3, 4, 5)


def written(x: torch.Tensor) -> torch.Tensor:
    y = x.as_strided((2, 3), (4, 1), 2)
    y.mul_(-1)
    return y


READS: dict[str, Function] = {
    "read": lambda x: x.as_strided((2, 3), (4, 1), 2) + 1,
    "all of it": lambda x: x.as_strided(x.shape, x.stride()) + 1,
    "windows that overlap": lambda x: x.as_strided((7, 4), (2, 1)) * 2,
    "of a result": lambda x: (x + 1).as_strided((2, 3), (4, 1), 2) + 1,
    "of a view": lambda x: x[:, 1].as_strided((2, 3), (4, 1)) + 1,
    "of a view of a result": lambda x: (x + 1)[..., 1].as_strided((2, 3), (4, 1), 0) + 1,
    "written": written,
    "all of it written": lambda x: x.as_strided(x.shape, x.stride()).neg_(),
}

OPERANDS: dict[str, Function] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.mT,
    "permuted": lambda x: x.permute(2, 0, 1),
    "a part": lambda x: x[1:],
    "with gaps": lambda x: x[..., ::2],
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("read", READS)
def test_as_strided_means_memory(read: str, operand: str, dynamic: bool) -> None:
    function, take = READS[read], OPERANDS[operand]
    compiled = torch.compile(function, backend=backend, dynamic=dynamic)
    theirs, ours = numbers(), numbers().to(DEVICE)
    is_whole = operand in ("contiguous", "transposed", "permuted")
    if ("written" in read and operand == "with gaps") or (read == "written" and not is_whole):
        refused = "writes elements that the tensor itself has not"
        theirs_first = "as_strided_scatter: sizes"  # torch's own, which traces it
        with pytest.raises(Exception, match=f"{refused}|{theirs_first}"):
            compiled(take(ours))
        return
    with counted() as n:
        got = compiled(take(ours))
        assert_same(got, function(take(theirs)))
    assert_same(ours, theirs)
    assert (n.fallbacks, n.data_dependent) == (0, 0)
    if is_whole:
        assert n.executions == 1  # as an operator of the program


@pytest.mark.parametrize("operand", OPERANDS)
def test_memory_of_the_host(operand: str) -> None:
    """PyTorch runs what is on the CPU, on its own memory."""

    ours, theirs = numbers().to(DEVICE), OPERANDS[operand](numbers())
    offset = theirs.storage_offset() + 2

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, y.as_strided((2, 3), (4, 1), offset) + 1

    got = torch.compile(function, backend=backend)(ours, theirs)
    expected = function(numbers(), theirs)
    assert_same(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


@pytest.mark.parametrize("operand", OPERANDS)
def test_graphs_that_pytorch_runs(operand: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operator by operator, on tensors: what was changed for the values means the same for them."""
    monkeypatch.setattr(execution, "divide", lambda graph: None)
    function, take = READS["all of it written"], OPERANDS[operand]
    if operand == "with gaps":
        function = READS["of a view"]
    theirs, ours = numbers(), numbers().to(DEVICE)
    compiled = torch.compile(function, backend=backend)
    assert_same(compiled(take(ours)), function(take(theirs)))
    assert_same(ours, theirs)


def test_no_elements() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x.as_strided((0, 3), (4, 1), 2).zero_()
        return x.as_strided((2, 0), (7, 9), 5)

    compiled = torch.compile(function, backend=backend)
    for x in (numbers(), numbers()[1:, ::2], torch.empty(3, 0, 5), torch.empty(0)):
        assert_same(compiled(x.to(DEVICE)), function(x))


def test_results_share_the_memory_of_a_copy() -> None:
    """Of a reshape that copies PyTorch's graph says that nothing else has the result."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.reshape(-1)
        y.add_(1)
        return y, y.view(3, -1)

    first, second = torch.compile(function, backend=backend)(numbers().mT.to(DEVICE))
    first.zero_()
    assert not second.any()
