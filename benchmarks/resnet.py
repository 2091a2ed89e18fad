"""One training step of ResNet-50, batch 4 at 64x64, SGD with momentum."""

from __future__ import annotations

from common import arguments, report, since_start, step_times

args = arguments("lazyxla", "eager", "torch_xla")

import torch  # noqa: E402
from torchvision_import import import_torchvision  # noqa: E402

if args.side == "lazyxla":
    import lazyxla

    device, sync, wait = "lazyxla", lazyxla.sync, lambda: lazyxla.sync(wait=True)
elif args.side == "torch_xla":
    import torch_xla

    device, sync, wait = torch_xla.device(), torch_xla.sync, lambda: torch_xla.sync(wait=True)
else:
    device, sync, wait = "cpu", lambda: None, lambda: None

WARM_UP, BLOCKS, STEPS = 3, 3, 3

torchvision = import_torchvision()
if torchvision is None:
    raise SystemExit("torchvision is not installed")
torch.manual_seed(0)
model = torchvision.models.resnet50().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
images, labels = torch.randn(4, 3, 64, 64), torch.randint(1000, (4,))
losses: list[torch.Tensor] = []


def step() -> None:
    loss = torch.nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    sync()
    losses[:] = [loss]


figures: dict[str, float] = {}
for number in range(WARM_UP):
    step()
    wait()
    if number == 0:
        figures["first_step_s"] = since_start()
        figures["first_loss"] = losses[0].item()
figures["warm_up_s"] = since_start()

figures |= step_times(step, wait, blocks=BLOCKS, steps=STEPS)
if args.side == "lazyxla":
    figures |= {name: lazyxla.counters()[name] for name in ("compiles", "fallbacks")}
report(**figures)
