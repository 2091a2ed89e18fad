"""What the tests of an older PyTorch need, and the installed one lacks."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.testing._internal import common_device_type
from torch.testing._internal import common_methods_invocations as known

from examples.torchvision_import import import_torchvision

_OWN_CLASS = "super(self.__class__, self)"
"""What some files write for `super()`. The classes made for a device are subclasses now, in which
it is the method that calls it."""


def add_missing_names() -> None:
    """Adds what the files import; what is there already stays as it is."""
    import_torchvision()  # some files try to, and take no other error than that it is missing
    for module, name, value in _missing():
        found = importlib.import_module(module)
        if not hasattr(found, name):
            setattr(found, name, value)


def make_for_all_devices() -> None:
    """Makes tests for the device that their file makes for the CPU and CUDA only."""
    make = common_device_type.instantiate_device_type_tests

    @functools.wraps(make)
    def make_also_here(cls: type, scope: dict[str, Any], *args: Any, **options: Any) -> None:
        only = options.get("only_for") or ()
        if {"cpu", "cuda"} <= set(only):
            del options["only_for"]
        make(cls, scope, *args, **options)

    common_device_type.instantiate_device_type_tests = make_also_here


def load(path: Path) -> ModuleType:
    """The module of a file of tests."""
    spec = spec_from_loader(path.stem, loader=None, origin=str(path))
    assert spec is not None
    module = module_from_spec(spec)
    module.__file__ = str(path)
    sys.modules[path.stem] = module
    text = path.read_text().replace(_OWN_CLASS, "super()")
    exec(compile(text, path, "exec"), module.__dict__)
    return module


def _missing() -> list[tuple[str, str, Any]]:
    internal = "torch.testing._internal"
    return [
        # TF32 exists on CUDA only.
        (f"{internal}.common_cuda", "tf32_is_not_fp32", lambda: False),
        # About the CPU's own library for convolutions.
        (f"{internal}.common_mkldnn", "bf32_on_and_off", _leaves_tests_alone),
        # Of classes that are not instantiated for devices.
        (f"{internal}.common_nn", "new_module_tests", []),
        # binary_ufuncs has the references, too, since they have one name.
        (known.__name__, "binary_ufuncs_and_refs", known.binary_ufuncs),
        # They are elsewhere now, and the decorator finds out whose test it is given.
        (known.__name__, "skip", common_device_type.skip),
        (known.__name__, "xfail", common_device_type.xfail),
        (known.__name__, "skipOps", lambda cls, test, names: common_device_type.skipOps(names)),
        # A prototype that is gone.
        ("torch.nn.attention.flex_attention", "create_nested_block_mask", None),
    ]


def _leaves_tests_alone(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    return lambda test: test
