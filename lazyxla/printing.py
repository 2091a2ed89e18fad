"""Printing tensors.

PyTorch formats a tensor with some twenty operators on it. On this device each of them would be
recorded, compiled and run; here the tensor is read once and formatted on the host. PyTorch does the
same for its own lazy devices, by a list of device types that offers no hook.
"""

import torch
from torch import _tensor_str as formatting


def install() -> None:
    """Makes PyTorch format the elements of lazyxla tensors on the host. Once per process."""
    original = formatting._tensor_str
    if getattr(original, "_lazyxla", False):
        return

    def elements(self: torch.Tensor, indent: int) -> str:
        return original(self.cpu() if self.device.type == "lazyxla" else self, indent)

    elements._lazyxla = True  # type: ignore[attr-defined]
    formatting._tensor_str = elements
