"""Every module of torch.nn, by PyTorch's table of modules: results and gradients as on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db, modules
from torch.testing._internal.common_utils import TestCase, freeze_rng_state
from torch.utils._pytree import tree_leaves

import lazyxla
from tests.generic.comparison import DEVICE, backward, check, moved

SAMPLES = 5
"""Of each module at most. LinearCrossEntropyLoss has 68, Transformer 64: minutes of compiling."""

RANDOM = (
    torch.nn.AlphaDropout,
    torch.nn.Dropout,
    torch.nn.Dropout1d,
    torch.nn.Dropout2d,
    torch.nn.Dropout3d,
    torch.nn.FeatureAlphaDropout,
    torch.nn.FractionalMaxPool2d,
    torch.nn.FractionalMaxPool3d,
    torch.nn.RReLU,
)
"""In training mode they draw random numbers, which are the device's own."""


class TestModules(TestCase):
    @modules(module_db, allowed_dtypes=[torch.float32])
    def test_as_on_the_cpu(
        self, device: str, dtype: torch.dtype, module_info: ModuleInfo, training: bool
    ) -> None:
        cls = module_info.module_cls
        made = module_info.module_inputs_func(
            module_info, device="cpu", dtype=dtype, requires_grad=True, training=training
        )
        lazyxla.reset_counters()
        cases = []
        for sample in [s for s in made if s.forward_input is not None][:SAMPLES]:
            random = training and (
                issubclass(cls, RANDOM) or "dropout" in sample.constructor_input.kwargs
            )
            run = runner(cls, sample, training)
            cases.append((run, run(device, dtype), random))
        lazyxla.sync()  # all samples are one program
        for run, actual, random in cases:
            if random:
                expected = [x.shape for x in flat(run("cpu", dtype)[0])]
                assert [x.shape for x in flat(actual[0])] == expected
            else:
                expected = run("cpu", dtype)
                exact = lambda: run("cpu", torch.float64)  # noqa: B023, E731
                check(module_info.name, actual, expected, exact)
        assert lazyxla.fallbacks() == {}


def runner(cls: type, sample: ModuleInput, training: bool) -> Callable[[str, torch.dtype], Any]:
    """A function that runs the sample on a device: results, gradients and buffers."""
    init, call = sample.constructor_input, sample.forward_input
    original = cls(*init.args, **init.kwargs).train(training)
    if issubclass(cls, LazyModuleMixin):
        original(*call.args, **call.kwargs)  # makes the parameters
    given = moved((call.args, call.kwargs), "cpu")

    def run(device: str, dtype: torch.dtype) -> Any:
        module = copy.deepcopy(original).to(device, dtype)
        args, kwargs = moved(given, device, dtype)
        with freeze_rng_state():
            result = module(*args, **kwargs)
        backward(result)
        leaves = [*module.parameters(), *flat((args, kwargs))]
        return result, [x.grad for x in leaves], dict(module.named_buffers())

    return run


def flat(tree: object) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


instantiate_device_type_tests(TestModules, globals(), only_for=DEVICE)
