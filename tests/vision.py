"""torchvision's models beside a CPU build of torch.

torchvision's wheel is a CUDA build: without its compiled library, importing it fails when it
registers fake kernels for two of its own operators. Declaring them first is enough for the models.
"""

import torch

_library = torch.library.Library("torchvision", "DEF")
for _schema in (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
):
    try:
        _library.define(_schema)
    except RuntimeError:  # the real library is loaded
        break

from torchvision import models  # noqa: E402

__all__ = ["models"]
