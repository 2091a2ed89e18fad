"""Operators on lists of tensors, by PyTorch's tables of them: results as on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.testing._internal.common_device_type import OpDTypes, instantiate_device_type_tests, ops
from torch.testing._internal.common_methods_invocations import (
    foreach_binary_op_db,
    foreach_other_op_db,
    foreach_pointwise_op_db,
    foreach_reduce_op_db,
    foreach_unary_op_db,
)
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.opinfo.core import ForeachFuncInfo

import lazyxla
from tests.generic.comparison import DEVICE, check, moved

FOREACH = [
    *foreach_unary_op_db,
    *foreach_binary_op_db,
    *foreach_pointwise_op_db,
    *foreach_reduce_op_db,
    *foreach_other_op_db,
]
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.complex64)


class TestForeach(TestCase):
    @ops(FOREACH, dtypes=OpDTypes.supported, allowed_dtypes=DTYPES)
    def test_as_on_the_cpu(self, device: str, dtype: torch.dtype, op: ForeachFuncInfo) -> None:
        calls = [f for f in (op.method_variant, op.inplace_variant) if f is not None]
        lazyxla.reset_counters()
        for sample in op.sample_inputs("cpu", dtype, num_input_tensors=[3]):
            for call in calls:
                given = (sample.input, sample.args, sample.kwargs)
                expected = outcome(call, moved(given, "cpu"))
                if isinstance(expected, Exception):
                    continue  # PyTorch's CPU has no such kernel
                actual = outcome(call, moved(given, device))
                if isinstance(actual, Exception):
                    raise actual
                double = moved(given, "cpu", torch.float64)
                entry = f"{op.name} {str(dtype).removeprefix('torch.')}"
                check(entry, actual, expected, lambda: outcome(call, double))  # noqa: B023
        assert lazyxla.fallbacks() == {}


def outcome(call: Any, given: Any) -> Any:
    """The result, the lists after the call, or the error."""
    first, args, kwargs = given
    try:
        return call(first, *args, **kwargs), first, args
    except (RuntimeError, TypeError, ValueError) as error:
        return error


instantiate_device_type_tests(TestForeach, globals(), only_for=DEVICE)
