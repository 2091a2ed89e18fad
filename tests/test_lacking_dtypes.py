"""Dtypes for which neither the CPU has a kernel nor XLA a program are refused at the call, in the
words of the CPU; those for which XLA alone has a program are accepted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.support import error_of

Call = Callable[[torch.Tensor], torch.Tensor]


def _mean_of_equal_index(x: torch.Tensor) -> torch.Tensor:
    index = torch.zeros(4, dtype=torch.int64, device=x.device)
    return x.index_reduce(0, index, x, "mean")


REFUSED: dict[str, tuple[Call, torch.dtype]] = {
    "glu of int64": (F.glu, torch.int64),
    "glu of bool": (F.glu, torch.bool),
    "logsigmoid of int64": (F.logsigmoid, torch.int64),
    "logsigmoid of complex64": (F.logsigmoid, torch.complex64),
    "index_reduce of bool": (_mean_of_equal_index, torch.bool),
    "safe softmax": (lambda x: torch.ops.aten._safe_softmax(x, 0), torch.int64),
    "triangular_solve": (lambda x: torch.triangular_solve(x, x)[0], torch.int64),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_the_call(name: str) -> None:
    call, dtype = REFUSED[name]
    x = torch.ones(4, 4, dtype=dtype)
    expected = error_of(call, x)
    assert expected[0] is NotImplementedError
    on_device = x.to("lazyxla")
    assert error_of(call, on_device) == expected
    assert error_of(call, on_device) == expected  # nothing is remembered of the first call


def test_accepted_if_only_xla_has_it() -> None:
    x = torch.tensor([[3, 1], [2, 7]])
    assert error_of(lambda x: F.max_pool1d(x, 2), x)[0] is NotImplementedError
    assert F.max_pool1d(x.to("lazyxla"), 2).tolist() == [[3], [7]]
