"""A training step of twenty of timm's networks on the CPU: batch 2, SGD with momentum.

    pip install --no-deps timm safetensors huggingface_hub pyyaml
    python benchmarks/run.py --only timm --rounds 1          # all, about twenty minutes
    python benchmarks/timm_training.py --side eager --model resnet18

Each side has processes of its own: both keep threads, and more of them than processors slow down
either side's.
"""

from __future__ import annotations

from common import arguments, settled

MODELS = (
    *("resnet18", "resnet26", "resnest14d", "res2net50_14w_8s", "regnetx_002", "densenet121"),
    *("mobilenetv3_small_100", "efficientnet_b0", "ghostnet_100", "edgenext_xx_small"),
    *("convnext_atto", "coatnet_pico_rw_224", "mobilevit_xxs", "levit_128s", "poolformer_s12"),
    *("vit_tiny_patch16_224", "deit_tiny_patch16_224", "swin_tiny_patch4_window7_224"),
    *("xcit_nano_12_p16_224", "mixer_s32_224"),
)
BATCH, CLASSES = 2, 100

args = arguments("lazyxla", "eager", models=MODELS)

import torch  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torchvision_import import import_torchvision  # noqa: E402

import_torchvision()  # before timm does
import timm  # noqa: E402

ours = args.side == "lazyxla"
if ours:
    import lazyxla


def sync(wait: bool = False) -> None:
    if ours:
        lazyxla.sync(wait=wait)


device = "lazyxla" if ours else "cpu"
torch.manual_seed(0)
model = timm.create_model(args.model, num_classes=CLASSES)
images = torch.randn(BATCH, *model.default_cfg["input_size"]).to(device)
labels = torch.randint(CLASSES, (BATCH,)).to(device)
model = model.to(device).train()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def step() -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    sync()
    return loss


settled(step, sync, blocks=4, steps=3)
