"""What the tests of an older PyTorch import from torch.testing, and the installed one lacks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from examples.torchvision_import import import_torchvision


def add_missing_names() -> None:
    """Adds them; what is there already stays as it is."""
    import_torchvision()  # some files try to, and take no other error than that it is missing
    for module, name, value in _missing():
        found = importlib.import_module(f"torch.testing._internal.{module}")
        if not hasattr(found, name):
            setattr(found, name, value)


def _missing() -> list[tuple[str, str, Any]]:
    return [
        # TF32 exists on CUDA only.
        ("common_cuda", "tf32_is_not_fp32", lambda: False),
        # About the CPU's own library for convolutions.
        ("common_mkldnn", "bf32_on_and_off", _leaves_tests_alone),
        # Of classes that are not instantiated for devices.
        ("common_nn", "new_module_tests", []),
    ]


def _leaves_tests_alone(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    return lambda test: test
