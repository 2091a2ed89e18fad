"""Plans the training of a decoder of Llama's or Mixtral's shape on TPUs that are not there: memory,
collectives and time of one step for each chip, by the TPU's compiler. Only shapes count; nothing
has weights.

    python examples/plan_scaling.py --model 8b --topology v5e:4x4 --mesh data=16
    python examples/plan_scaling.py --topology v5e:4x4 --mesh data=16 --mesh data=8,model=2
    python examples/plan_scaling.py --model mixtral --topology v5p:4x4x4 --mesh data=8,expert=8 \\
        --batch 64 --remat full

Needs the TPU's compiler (pip install 'lazyxla[tpu]').
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from decoder_model import SMALL, Decoder, DecoderConfig, next_token_loss
from mixtral_model import MIXTRAL_8X7B, MixtralConfig, shard_experts, use_experts
from torch import Tensor, nn
from train_tensor_parallel import TENSOR_PARALLEL

import lazyxla

MODELS = {
    "small": SMALL,
    "8b": DecoderConfig(
        hidden=4096, layers=32, heads=32, kv_heads=8, intermediate=14336, vocab=128256
    ),
    "70b": DecoderConfig(
        hidden=8192, layers=80, heads=64, kv_heads=8, intermediate=28672, vocab=128256
    ),
    "405b": DecoderConfig(
        hidden=16384, layers=126, heads=128, kv_heads=8, intermediate=53248, vocab=128256
    ),
    "mixtral": MIXTRAL_8X7B,
    "small-mixtral": MixtralConfig(hidden=256, intermediate=1024, vocab=2048, group=128),
}
LLAMA_ROTARY_BASE = 500000.0


class Planned(Decoder):
    """The decoder of the other examples, its layers as one loop if `remat` says what the backward
    keeps of them (:func:`lazyxla.scan_layers`), or one after the other."""

    def __init__(self, config: DecoderConfig, remat: str | None) -> None:
        super().__init__(config)
        if isinstance(config, MixtralConfig):
            use_experts(self, config)
        self.remat = remat

    def forward(self, tokens: Tensor) -> Tensor:
        if self.remat is None:
            return super().forward(tokens)
        length = tokens.shape[1]
        tables = self.cos[:length], self.sin[:length]
        x = lazyxla.scan_layers(self.layers, self.embedding(tokens), *tables, remat=self.remat)
        return self.head(self.norm(x))


def train_step(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Forward, backward and AdamW."""
    optimizer = torch.optim.AdamW(model.parameters())

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = next_token_loss(model(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def shardings(model: nn.Module, mesh: lazyxla.Mesh) -> None:
    """Layers split over "model" and experts over "expert", if the mesh has these, and everything
    over "data". All else is split over "expert" as over "data"."""
    if "model" in mesh.axis_names:
        # A vocabulary as large as these models' is split, too: every chip would compute all of it.
        ends = {"embedding": lazyxla.ColwiseParallel(), "head": lazyxla.ColwiseParallel()}
        lazyxla.parallelize(model, mesh, {**TENSOR_PARALLEL, **ends})
    if "expert" in mesh.axis_names:
        shard_experts(model, mesh)
    lazyxla.fully_shard(model, mesh, batch_axes(mesh.axis_names))


def batch_axes(names: Collection[str]) -> tuple[str, ...]:
    """The axes of a mesh over which batches are split."""
    return tuple(name for name in ("data", "expert") if name in names)


def mesh_of(text: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """``"data=8,model=2"`` as shape and names."""
    pairs = [axis.split("=") for axis in text.split(",")]
    return tuple(int(size) for _, size in pairs), tuple(name for name, _ in pairs)


def configured(name: str, length: int, layers: int | None = None) -> DecoderConfig:
    """A model's sizes, for sequences of this length, and of fewer layers than it has."""
    config = dataclasses.replace(MODELS[name], max_length=length)
    if isinstance(config, MixtralConfig):
        config = dataclasses.replace(config, group=min(config.group, length))
    else:
        config = dataclasses.replace(config, rotary_base=LLAMA_ROTARY_BASE)
    return dataclasses.replace(config, layers=layers) if layers else config


def main(argv: Sequence[str] | None = None) -> Any:
    """The plan, or the ranking of several."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--topology", default="v5e:4x4")
    parser.add_argument("--mesh", action="append", type=mesh_of, help="data=16, or data=8,model=2")
    parser.add_argument("--batch", type=int, default=16, help="sequences of all chips together")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--remat", choices=("none", "full"), help="layers as one loop")
    args = parser.parse_args(argv)

    config = configured(args.model, args.length, args.layers)
    with torch.device("meta"):
        model = Planned(config, args.remat).bfloat16()
        tokens = torch.empty(args.batch, args.length, dtype=torch.int64)
    meshes = args.mesh or [((lazyxla.aot.topology(args.topology).num_devices,), ("data",))]
    common = set(meshes[0][1]).intersection(*(names for _, names in meshes))
    started = time.monotonic()
    plan: Any
    options: dict[str, Any] = {
        "topology": args.topology,
        "shardings": shardings,
        "input_spec": (batch_axes(common),),
        "train_step": train_step,
    }
    if len(meshes) == 1:
        plan = lazyxla.aot.compile(model, (tokens, tokens), mesh=meshes[0], **options)
    else:
        plan = lazyxla.aot.search(model, (tokens, tokens), meshes=meshes, **options)
    print(plan)
    print(f"planned in {time.monotonic() - started:.0f} s")
    return plan


if __name__ == "__main__":
    main()
