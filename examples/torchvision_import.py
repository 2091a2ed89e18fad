"""Imports torchvision, also where its compiled part does not fit the torch that runs.

torchvision's own operators (``nms`` and others, for detection) live in a compiled library. A wheel
built for another platform than torch cannot load it, and then even ``import torchvision`` fails,
for it registers shape rules for operators that do not exist. The networks need none of them, so
declaring these operators is enough.
"""

from __future__ import annotations

from types import ModuleType

import torch

_library: torch.library.Library | None = None  # its registrations live as long as it does


def import_torchvision() -> ModuleType | None:
    """torchvision, or None if it is not installed."""
    global _library
    try:
        import torchvision
    except ImportError:
        return None
    except RuntimeError:  # "operator torchvision::nms does not exist"
        _library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision
    return torchvision
