"""PyTorch's ``flex_attention`` on this device.

PyTorch knows the devices that it is for by a list, and makes kernels of it for some. Here it is the
operators that define it: outside ``torch.compile`` they are recorded, and within they are part of
the graph (dynamo/flex_attention.py). XLA fuses the modifications of the scores with the softmax.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C import DispatchKey
from torch.nn.attention import flex_attention as module

from lazyxla import untraced
from lazyxla.runtime import BACKEND

_AUTOCAST: Any = getattr(DispatchKey, "AutocastPrivateUse1")  # noqa: B009 - the stubs lack it
_validate_device = module._validate_device


@untraced.traced
def _validate(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    if query.device.type != "lazyxla":
        _validate_device(query, key, value)


def _autocast(query: Any, key: Any, value: Any, *args: Any) -> Any:
    """Casts to autocast's dtype, as PyTorch does on its own devices."""
    from torch._higher_order_ops.flex_attention import flex_attention

    dtype = torch.get_autocast_dtype(BACKEND)
    lowered = [x.to(dtype) if x.is_floating_point() else x for x in (query, key, value)]
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_AUTOCAST)):
        return flex_attention(*lowered, *args)


def install() -> None:
    """Lets PyTorch take tensors of the device. Once per process."""
    from torch._higher_order_ops.flex_attention import flex_attention

    if module._validate_device is not _validate:
        module._validate_device = _validate
        flex_attention.py_impl(_AUTOCAST)(_autocast)
