"""A training step of an LSTM and of a GRU on the CPU: 64 and 256 steps, batch 16, SGD.

python benchmarks/run.py --only recurrent --rounds 1
python benchmarks/recurrent.py --side eager --model lstm_64
"""

from __future__ import annotations

from common import arguments, settled

MODELS = ("lstm_64", "lstm_256", "gru_64", "gru_256")
BATCH, FEATURES, HIDDEN = 16, 64, 128

args = arguments("lazyxla", "eager", models=MODELS)

import torch  # noqa: E402

ours = args.side == "lazyxla"
if ours:
    import lazyxla


def sync(wait: bool = False) -> None:
    if ours:
        lazyxla.sync(wait=wait)


device = "lazyxla" if ours else "cpu"
kind, steps = args.model.split("_")
torch.manual_seed(0)
x = torch.randn(int(steps), BATCH, FEATURES).to(device)
model = getattr(torch.nn, kind.upper())(FEATURES, HIDDEN).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)


def step() -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(x)[0].square().mean()
    loss.backward()
    optimizer.step()
    sync()
    return loss


settled(step, sync, blocks=10, steps=10)
