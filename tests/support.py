"""What several test files use: comparing a function on the CPU with the same on the device.

The CPU is the oracle: values to PyTorch's default tolerances; element types, shapes, strides and
error messages exactly.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import lazyxla
from lazyxla import platforms

DEVICE = "lazyxla"

# What compiles for devices that are not there: packages that only tests need.
needs_libtpu = pytest.mark.skipif(
    platforms.plugin_of("tpu") is None, reason="the TPU's compiler, libtpu, is not installed"
)
needs_cuda = pytest.mark.skipif(
    platforms.plugin_of("cuda") is None, reason="CUDA's plugin, jax-cuda13-pjrt, is not installed"
)

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


@torch.library.custom_op("lazyxla_tests::on_host", mutates_args=(), device_types="cpu")
def on_host(x: torch.Tensor) -> torch.Tensor:
    """An operator that only the host can run, outside of programs: its kernel is in Python."""
    return x.square()


@on_host.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _gradient(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    return 2 * x * grad


on_host.register_autograd(
    _gradient, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Integers from -3 to 3, in turn."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 7 - 3).to(dtype).reshape(shape)


def fractions(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """From -5/8 to 5/8, in turn."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) % 11 - 5) / 8).to(dtype).reshape(shape)


def on_device(tree: Any, device: str = DEVICE) -> Any:
    """Copies the tensors of a tree to a device; strides and requires_grad stay."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        result = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device
        )
        return result.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)

    return tree_map_only(torch.Tensor, copy, tree)


def assert_same(actual: Any, expected: Any, strides: bool = True) -> None:
    """Compares trees of device results with those of the CPU."""
    actual, expected = tree_leaves(actual), tree_leaves(expected)
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected):
        if not isinstance(theirs, torch.Tensor):
            assert ours == theirs
            continue
        assert ours.device.type == DEVICE
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        if strides:
            assert ours.stride() == theirs.stride()
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), equal_nan=True)


def check(function: Callable[..., Any], *args: Any, strides: bool = True) -> Any:
    """Runs ``function`` on the CPU tensors ``args`` and on copies on the device; results and
    arguments must be the same afterwards. Returns the device's result."""
    theirs_args = tree_map_only(torch.Tensor, lambda t: on_device(t, "cpu"), args)
    ours_args = on_device(args)
    theirs = function(*theirs_args)
    ours = function(*ours_args)
    assert_same(ours, theirs, strides)
    assert_same(ours_args, theirs_args, strides)
    return ours


def error_of(function: Callable[..., Any], *args: Any) -> tuple[type, str]:
    """Type and text of the error that a call raises; (NoneType, "") if it raises none."""
    try:
        function(*args)
    except Exception as error:
        return type(error), str(error).split("\nException raised from")[0]
    return type(None), ""


class Watch(TorchDispatchMode):
    """As a mode notes the operators that it sees, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(op))
        return op(*args, **(kwargs or {}))


def run_all(functions: list[Callable[[], None]], seconds: float = 300) -> None:
    """Runs functions in threads of their own; raises what one of them raised."""
    errors: list[BaseException] = []

    def run(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(f,), daemon=True) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


class Counted(dict[str, int]):
    """How much each counter grew; filled when the block ends."""

    def __getattr__(self, name: str) -> int:
        return self[name]


@contextmanager
def counted() -> Iterator[Counted]:
    """``with counted() as n: ...`` then ``n.compiles`` is what the block compiled."""
    growth = Counted()
    before = lazyxla.counters()
    yield growth
    after = lazyxla.counters()
    growth.update({name: after[name] - before[name] for name in after})


class Programs(logging.Handler):
    """The sizes of the programs that are compiled, and what is told of cuts."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.sizes: list[int] = []
        self.cuts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if ": compiling " in text:
            self.sizes.append(int(text.split(": compiling ")[1].split()[0]))
        elif ": cutting " in text:
            self.cuts.append(text)

    def large(self, operators: int) -> list[int]:
        return [size for size in self.sizes if size >= operators]


@contextmanager
def programs() -> Iterator[Programs]:
    logger, handler = logging.getLogger("lazyxla"), Programs()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def warned(capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder) -> str:
    """All that C++ has warned of. Where Python calls it, PyTorch prints that or makes Python's
    warnings of it, by its version."""
    return capfd.readouterr().err + "".join(str(each.message) for each in recwarn)
