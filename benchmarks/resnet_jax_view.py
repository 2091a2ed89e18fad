"""resnet.py's training step through ``lazyxla.jax_view``: PyTorch's model in JAX, optax's SGD."""

from __future__ import annotations

from common import arguments, report, since_start, step_times

args = arguments("jax_view")

import jax  # noqa: E402
import optax  # noqa: E402
import torch  # noqa: E402
from torchvision_import import import_torchvision  # noqa: E402

import lazyxla  # noqa: E402

WARM_UP, BLOCKS, STEPS = 3, 3, 3

torchvision = import_torchvision()
if torchvision is None:
    raise SystemExit("torchvision is not installed")
torch.manual_seed(0)
view = lazyxla.jax_view(torchvision.models.resnet50())
optimizer = optax.sgd(0.01, momentum=0.9)
images = lazyxla.to_jax(torch.randn(4, 3, 64, 64))
labels = lazyxla.to_jax(torch.randint(1000, (4,)))


def loss_of(parameters, buffers):
    logits, buffers = view(parameters, images, buffers=buffers)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), buffers


@jax.jit
def train(parameters, buffers, state):
    (loss, buffers), gradients = jax.value_and_grad(loss_of, has_aux=True)(parameters, buffers)
    updates, state = optimizer.update(gradients, state, parameters)
    return optax.apply_updates(parameters, updates), buffers, state, loss


trained = (view.parameters, view.buffers, optimizer.init(view.parameters))
loss = None


def step() -> None:
    global trained, loss
    *trained, loss = train(*trained)


figures: dict[str, float] = {}
for number in range(WARM_UP):
    step()
    jax.block_until_ready(loss)
    if number == 0:
        figures["first_step_s"] = since_start()
        figures["first_loss"] = float(loss)
figures["warm_up_s"] = since_start()

figures |= step_times(step, lambda: jax.block_until_ready(loss), blocks=BLOCKS, steps=STEPS)
report(**figures)
