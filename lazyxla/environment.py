"""Environments, as torchax has them: blocks in which tensors are made on the device."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext

from lazyxla import random
from lazyxla.runtime import BACKEND


@dataclass
class EnvironmentConfig:
    """The options of an environment.

    Attributes:
        treat_cuda_as_device: in the block ``device="cuda"`` and ``.cuda()`` mean this device.
    """

    treat_cuda_as_device: bool = False


class Environment:
    """Places what is made in its block on the device::

        env = lazyxla.default_env()
        with env:
            model = torch.nn.Linear(3, 3)         # on the device
            model.load_state_dict(torch.load(f))  # loaded there

    This holds for constructors such as ``torch.randn`` and ``torch.tensor``, for parameters of
    modules, and for what ``torch.load`` reads that was saved from the CPU. It does not hold where
    the call names a device, inside of an inner ``with torch.device(...)``, and for random numbers
    from a CPU generator, which stay on the CPU. A block holds for its thread only, and not for
    processes that are forked in it, such as a loader's workers. It can be entered again within
    itself.

    Attributes:
        config: its settings; a change takes effect at once.
    """

    def __init__(self, config: EnvironmentConfig | None = None) -> None:
        self.config = config or EnvironmentConfig()

    def __enter__(self) -> Environment:
        mode = _Mode(self.config)
        mode.__enter__()  # type: ignore[no-untyped-call]
        _entered.modes.append(mode)
        return self

    def __exit__(self, *exc: object) -> None:
        _entered.modes.pop().__exit__(*exc)

    def to_xla(self, tree: Any) -> Any:
        """See :func:`to_device`.

        Args:
            tree: a pytree, see :func:`to_device`.
        """
        return to_device(tree)

    def manual_seed(self, seed: int) -> None:
        """Seeds the device's random numbers; see ``lazyxla.manual_seed``.

        Args:
            seed: an integer of 64 bits, signed or unsigned.
        """
        random.manual_seed_all(seed)


_default = Environment()


def default_env() -> Environment:
    """The environment that :func:`enable_globally` enters."""
    return _default


def enable_globally() -> None:
    """From now on, this thread makes its tensors on the device, as in a block of ``default_env()``.

    Calling it again changes nothing.
    """
    if _entered.of_all is None:
        _entered.of_all = _Mode(_default.config)
        _entered.of_all.__enter__()  # type: ignore[no-untyped-call]


def disable_globally() -> None:
    """Ends what :func:`enable_globally` began in this thread, if it did."""
    if _entered.of_all is not None:
        mode, _entered.of_all = _entered.of_all, None
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def to_device(tree: Any, device: torch.device | str = BACKEND) -> Any:
    """Moves the tensors, modules and ``PackedSequence`` of a pytree to the device; other leaves
    stay as they are.

    A tensor that is there already is not copied.

    Args:
        tree: tensors and modules in tuples, lists, dicts and other containers of PyTorch's pytree;
            or one of them.
        device: where to; without an index the current device.
    """

    def move(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, _MOVED) else leaf

    # A PackedSequence is a named tuple, of which one part stays on the CPU.
    return pytree.tree_map(move, tree, is_leaf=lambda x: isinstance(x, PackedSequence))


_MOVED: tuple[type[Any], ...] = (torch.Tensor, torch.nn.Module, PackedSequence)


class _Entered(threading.local):
    def __init__(self) -> None:
        self.modes: list[_Mode] = []
        self.of_all: _Mode | None = None


_entered = _Entered()


class _Mode(DeviceContext):
    def __init__(self, config: EnvironmentConfig) -> None:
        super().__init__(BACKEND)  # type: ignore[no-untyped-call]
        self._config = config
        self._process = os.getpid()

    def applies(self) -> bool:
        return os.getpid() == self._process

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.applies():
            return func(*args, **kwargs)
        if self._config.treat_cuda_as_device:
            if func is torch.Tensor.cuda:
                func, (args, kwargs) = torch.Tensor.to, _arguments_of_to(*args, **kwargs)
            args, kwargs = pytree.tree_map(_instead_of_cuda, (args, kwargs))
        generator = kwargs.get("generator")
        if generator is None or generator.device.type == BACKEND:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore
        target = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if func is torch.Tensor.random_ and target is not None and target.device.type == BACKEND:
            # Loaders draw their seeds so.
            drawn = torch.empty(target.shape, dtype=target.dtype, device=generator.device)
            return target.copy_(func(drawn, *args[1:], **kwargs))
        return func(*args, **kwargs)


def _arguments_of_to(x: Any, device: Any = None, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Those of ``Tensor.to`` for the arguments of ``Tensor.cuda``."""
    place = torch.device(BACKEND, device) if isinstance(device, int) else device or BACKEND
    return (x, place, None, *args), kwargs


def _instead_of_cuda(x: Any) -> Any:
    if isinstance(x, torch.device) and x.type == "cuda":
        return torch.device(BACKEND, x.index)
    if isinstance(x, str) and (x == "cuda" or x.startswith("cuda:")):
        return x.replace("cuda", BACKEND, 1)
    return x


def _load(storage: Any, location: str) -> Any:
    """For ``torch.load`` without a ``map_location``: what was saved from the CPU, on the device if
    an environment is entered."""
    current = _current() if location == "cpu" else None
    if current is None or not current.applies() or _is_mapped():
        return None
    return storage.to(device=torch.device(BACKEND))


def _is_mapped() -> bool:
    """Whether ``torch.load`` was given a ``map_location``. Our arguments do not show it."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is torch.load.__code__:
            return frame.f_locals["map_location"] is not None
    return True


def _current() -> _Mode | None:
    """The environment that counts in this thread, if one does."""
    stack = torch.overrides._get_current_function_mode_stack()
    contexts = [mode for mode in stack if isinstance(mode, DeviceContext)]
    return contexts[-1] if contexts and isinstance(contexts[-1], _Mode) else None


# Asked before PyTorch's own for the CPU.
torch.serialization.register_package(5, lambda storage: None, _load)
