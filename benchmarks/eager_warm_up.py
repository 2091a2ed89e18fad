"""Prints the seconds of ResNet-18's first forward pass in eager mode, with empty caches.

Every kind of operator call is inferred, lowered and compiled on its way. Importing and moving the
model are not counted.
"""

from __future__ import annotations

import os
import tempfile
import time

from common import arguments

args = arguments("lazyxla", "torch_xla")
with tempfile.TemporaryDirectory(prefix="lazyxla-bench-") as cache:
    os.environ["LAZYXLA_CACHE_DIR"] = cache
    import torch
    from torchvision_import import import_torchvision

    torchvision = import_torchvision()
    if torchvision is None:
        raise SystemExit("torchvision is not installed")
    if args.side == "lazyxla":
        import lazyxla

        device, wait = "lazyxla", lambda: lazyxla.sync(wait=True)
    else:
        import torch_xla

        device, wait = torch_xla.device(), lambda: torch_xla.sync(wait=True)
        torch_xla.experimental.eager_mode(True)
    model = torchvision.models.resnet18().eval().to(device)
    images = torch.randn(1, 3, 224, 224).to(device)
    if args.side == "lazyxla":
        wait()
        lazyxla.eager_mode(True)
    begin = time.perf_counter()
    with torch.no_grad():
        model(images)
    wait()
    print(time.perf_counter() - begin)
