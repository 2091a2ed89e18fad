"""Exported programs beside the modules that they were made of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import lazyxla
from tests.conftest import RunPython


def transformer(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers

    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"input_ids": torch.randint(100, (2, 9))}
    if kind == "bert":
        config = transformers.BertConfig(**small, intermediate_size=64, vocab_size=100)
        return transformers.BertModel(config), tokens
    if kind == "gpt2":
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        config = transformers.GPT2Config(
            n_embd=32, n_layer=2, n_head=2, vocab_size=100, use_cache=False, **ends
        )
        return transformers.GPT2LMHeadModel(config), tokens
    config = transformers.ViTConfig(**small, intermediate_size=64, image_size=32, patch_size=8)
    return transformers.ViTForImageClassification(config), {
        "pixel_values": torch.randn(2, 3, 32, 32)
    }


# Runs what was exported, in a process that knows of JAX alone.
READ = """
import sys, json, jax, numpy as np
from pathlib import Path
from safetensors.numpy import load_file
jax.config.update("jax_enable_x64", True)
folder = Path(FOLDER)
program = jax.export.deserialize(bytearray((folder / "program.jax_export").read_bytes()))
manifest = json.loads((folder / "manifest.json").read_text())
weights = load_file(folder / "weights.safetensors")
given = np.load(folder / "given.npz")
kinds = {each["name"]: each["kind"] for each in manifest["inputs"]}
parts = {k: {n: x for n, x in weights.items() if kinds[n] == k} for k in ("parameter", "buffer")}
args = tuple(given[n] for n in given if n.isdigit())
kwargs = {n: given[n] for n in given if not n.isdigit()}
results, changed = program.call(parts["parameter"], parts["buffer"], args, kwargs)
assert sorted(changed) == manifest["mutations"]
np.savez(folder / "found.npz", *jax.tree.leaves(results))
assert not {"torch", "lazyxla"} & set(sys.modules)
"""


def compare(
    exported: lazyxla.Exported,
    module: Callable[..., Any],
    run_python: RunPython,
    folder: Path,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Compares a program's results in JAX alone and on the device with a module's on the CPU."""
    expected = module(*args, **kwargs)
    leaves = [x for x in torch.utils._pytree.tree_leaves(expected) if isinstance(x, Tensor)]
    exported.save(folder)
    given = {**{str(i): x for i, x in enumerate(args)}, **kwargs}
    np.savez(folder / "given.npz", **{name: x.numpy() for name, x in given.items()})
    run_python(READ.replace("FOLDER", repr(str(folder))), JAX_PLATFORMS="cpu")
    found = np.load(folder / "found.npz")
    loaded = lazyxla.load_exported(folder)
    lazyxla.sync(wait=True)
    before = lazyxla.counters()
    ours = loaded(*lazyxla.to_device(args), **lazyxla.to_device(kwargs))
    lazyxla.sync(wait=True)
    after = lazyxla.counters()
    assert after["executions"] == before["executions"] + 1
    assert after["fallbacks"] == before["fallbacks"]
    on_device = [x for x in torch.utils._pytree.tree_leaves(ours) if isinstance(x, Tensor)]
    for a, b, name in zip(leaves, on_device, found, strict=True):
        # Of deep networks: as far as float32's sums in other orders go.
        close = {"rtol": 1e-3, "atol": 1e-4, "check_dtype": True}
        torch.testing.assert_close(b.cpu(), a.detach(), **close)
        torch.testing.assert_close(torch.tensor(found[name]), a.detach(), **close)


def arrays(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    """The same random numbers each time."""
    rng = np.random.default_rng(0)
    return [rng.normal(0, 0.5, shape).astype(np.float32) for shape in shapes]
