"""Marks tensors as a model's for the recorder: what modules register, and optimizers are given.

A model made on the device is run before its first training step is recorded, so that the step is
compiled once (csrc/dispatch/settling.h).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.modules import module

from lazyxla import _C
from lazyxla.runtime import BACKEND
from lazyxla.untraced import mark_function

# Not of their subclasses, which need not have memory of their own, as a transform's tensors.
_KINDS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def install() -> None:
    """Watches what modules register and optimizers are given. Once per process."""
    module.register_module_parameter_registration_hook(_note_registered)
    module.register_module_buffer_registration_hook(_note_registered)
    torch.optim.Optimizer.add_param_group = _noting(  # type: ignore[method-assign]
        torch.optim.Optimizer.add_param_group
    )


def _noting(add_param_group: Any) -> Any:
    """PyTorch has no hook for it. A parameter may be no module's, as an image that is optimized."""

    @functools.wraps(add_param_group)
    def noting(self: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
        add_param_group(self, param_group)
        for parameter in param_group["params"]:
            _note(parameter)

    mark_function(noting)  # type: ignore[arg-type]
    return noting


def _note_registered(_module: torch.nn.Module, _name: str, tensor: torch.Tensor | None) -> None:
    _note(tensor)


def _note(tensor: torch.Tensor | None) -> None:
    if tensor is None or type(tensor) not in _KINDS or tensor.device.type != BACKEND:
        return
    if not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        _C.note_model_state(tensor)
