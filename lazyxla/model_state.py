"""Marks tensors as a model's for the recorder, as modules register them.

A model made on the device is run before its first training step is recorded, so that the step is
compiled once (csrc/dispatch/settling.h).
"""

from __future__ import annotations

import torch
from torch.nn.modules import module

from lazyxla import _C
from lazyxla.runtime import BACKEND

# Not of their subclasses, which need not have memory of their own, as a transform's tensors.
_KINDS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def install() -> None:
    """Watches what modules register. Once per process."""
    module.register_module_parameter_registration_hook(_note)
    module.register_module_buffer_registration_hook(_note)


def _note(_module: torch.nn.Module, _name: str, tensor: torch.Tensor | None) -> None:
    if tensor is None or type(tensor) not in _KINDS or tensor.device.type != BACKEND:
        return
    if not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        _C.note_model_state(tensor)
