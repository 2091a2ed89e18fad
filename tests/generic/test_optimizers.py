"""Every optimizer in every form, by PyTorch's table of optimizers: the parameters as on the CPU."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db, optims
from torch.testing._internal.common_utils import TestCase

import lazyxla
from tests.generic.comparison import DEVICE

STEPS = 3

# Its estimate of the curvature magnifies rounding: in float32 the parameters differ by 2e-5 after
# three steps.
IN_DOUBLE = ("LBFGS",)

# Orthogonalises the update by five matrix iterations in bfloat16: that dtype's default tolerances.
IN_BFLOAT16 = ("Muon",)


def train(info: OptimizerInfo, kwargs: dict[str, Any], device: str) -> tuple[list[Any], Any]:
    """Parameters and state after a few steps with the same gradients everywhere."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float64 if info.optim_cls.__name__ in IN_DOUBLE else torch.float32

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    shapes = [(4, 3), (3, 5)]  # Muon takes matrices only
    parameters = [torch.nn.Parameter(random(*shape)) for shape in shapes]
    optimizer = info.optim_cls(parameters, **kwargs)
    for _ in range(STEPS):
        fixed = [random(*shape) for shape in shapes]

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            first, second = ((p * p + p * g).sum() for p, g in zip(parameters, fixed))  # noqa: B023
            loss = first + second
            loss.backward()
            return loss

        if info.step_requires_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return [p.detach() for p in parameters], optimizer.state_dict()["state"]


class TestOptimizers(TestCase):
    @optims([info for info in optim_db if not info.only_supports_sparse_grads])
    def test_as_on_the_cpu(
        self, device: str, dtype: torch.dtype, optim_info: OptimizerInfo
    ) -> None:
        possible = [f for f in ("foreach", "fused") if f in optim_info.supported_impls]
        forms = [dict.fromkeys(possible, False), *({form: True} for form in possible)]
        tolerances = {}
        if optim_info.optim_cls.__name__ in IN_BFLOAT16:
            tolerances = {"rtol": 1.6e-2, "atol": 1e-5}
        lazyxla.reset_counters()
        for case in optim_info.optim_inputs_func(device="cpu"):
            reference, state = train(optim_info, deepcopy(case.kwargs), "cpu")
            for form in forms:
                with self.subTest(case=case.desc, form=form):
                    actual, own = train(optim_info, {**deepcopy(case.kwargs), **form}, device)
                    torch.testing.assert_close([x.cpu() for x in actual], reference, **tolerances)
                    assert own.keys() == state.keys()
        assert lazyxla.fallbacks() == {}


instantiate_device_type_tests(TestOptimizers, globals(), only_for=DEVICE)
