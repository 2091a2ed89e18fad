"""PyTorch's tables of operators, modules and optimizers, made fit for thousands of tests."""

from __future__ import annotations

from torch.testing._internal import common_utils
from torch.testing._internal.opinfo import core


def forget_test_functions() -> None:
    """Lets nobody look for the test that is running.

    The tables' iterators note their samples in it, and search Python's whole stack for it each
    time, with the source of each frame: most of a test's time.
    """
    for module in (common_utils, core):
        module.extract_test_fn = lambda: None  # type: ignore[attr-defined]
