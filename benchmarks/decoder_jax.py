"""The training step of decoder.py written by hand in JAX: the same mathematics, one jax.jit.

With ``--mesh`` it is spread as decoder.py's is, and runs on the plugin that lazyxla runs on. Other
benchmarks import the step.
"""

from __future__ import annotations

import itertools
from math import prod
from pathlib import Path

from common import Turns, arguments, jax_devices, mesh_of, parser, report, since_start, step_times

axes, turns = None, Turns(None)
if __name__ == "__main__":
    parser.add_argument("--mesh", type=mesh_of)
    parser.add_argument("--turns", type=Path, help="file; see common.Turns")
    args = arguments("jax")
    axes, turns = args.mesh, Turns(args.turns)

import decoder_data as data  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import Array  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

figures: dict[str, float] = {"import_s": since_start()}
Weights = dict[str, Array]
B1, B2, ADAM_EPS = 0.9, 0.999, 1e-8

exponents = np.arange(0, data.HEAD_DIM, 2, dtype=np.float32) / data.HEAD_DIM
angles = np.outer(np.arange(data.LENGTH, dtype=np.float32), data.ROTARY_BASE**-exponents)
angles = np.concatenate((angles, angles), axis=-1)
COS, SIN = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
MASK = np.tril(np.ones((data.LENGTH, data.LENGTH), bool))


def make_mesh(axes: dict[str, int]) -> Mesh:
    devices = jax_devices(prod(axes.values()))
    return Mesh(np.array(devices).reshape(tuple(axes.values())), tuple(axes))


mesh = make_mesh(axes) if axes else None
COLUMNS, ROWS = ("query", "key", "value", "gate", "up"), ("out", "down")


def sharding_of(name: str, weight: np.ndarray) -> NamedSharding | None:
    """That of a weight and of Adam's state for it."""
    if mesh is None:
        return None
    layer = name.removesuffix(".weight").rsplit(".", 1)[-1]
    spec = ("model", "data") if layer in COLUMNS else ("data", "model" if layer in ROWS else None)
    return NamedSharding(mesh, PartitionSpec(*spec[: weight.ndim]))


def split(x: Array) -> Array:
    """Along the batch; all else is the partitioner's to choose."""
    if mesh is None:
        return x
    spec = PartitionSpec("data", *[PartitionSpec.UNCONSTRAINED] * (x.ndim - 1))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def linear(x: Array, weight: Array) -> Array:
    return split(jnp.einsum("...i,oi->...o", x, weight))


def rms_norm(x: Array, weight: Array) -> Array:
    return split(x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + data.EPS) * weight)


def rotate(x: Array) -> Array:
    """x is (batch, length, ..., head_dim)."""
    first, second = jnp.split(x, 2, axis=-1)
    shape = (1, data.LENGTH, *(1,) * (x.ndim - 3), data.HEAD_DIM)
    turned = jnp.concatenate((-second, first), axis=-1)
    return x * COS.reshape(shape) + turned * SIN.reshape(shape)


def attention(x: Array, query: Array, key: Array, value: Array, out: Array) -> Array:
    groups = data.HEADS // data.KV_HEADS
    lead = x.shape[:2]
    q = rotate(linear(x, query).reshape(*lead, data.KV_HEADS, groups, data.HEAD_DIM))
    k = rotate(linear(x, key).reshape(*lead, data.KV_HEADS, data.HEAD_DIM))
    v = linear(x, value).reshape(*lead, data.KV_HEADS, data.HEAD_DIM)
    scores = jnp.einsum("bqkgd,blkd->bkgql", q, k) * data.HEAD_DIM**-0.5
    shares = jax.nn.softmax(jnp.where(MASK, scores, -jnp.inf), axis=-1)
    y = jnp.einsum("bkgql,blkd->bqkgd", shares, v)
    return linear(y.reshape(*lead, data.HIDDEN), out)


def loss_of(w: Weights, tokens: Array, targets: Array) -> Array:
    x = split(w["embedding.weight"][tokens])
    for i in range(data.LAYERS):
        at = f"layers.{i}.attention"
        ff = f"layers.{i}.feed_forward"
        y = rms_norm(x, w[f"{at}_norm.weight"])
        x = x + attention(y, *(w[f"{at}.{n}.weight"] for n in ("query", "key", "value", "out")))
        y = rms_norm(x, w[f"{ff}_norm.weight"])
        gate, up = linear(y, w[f"{ff}.gate.weight"]), linear(y, w[f"{ff}.up.weight"])
        x = x + linear(jax.nn.silu(gate) * up, w[f"{ff}.down.weight"])
    logits = linear(rms_norm(x, w["norm.weight"]), w["head.weight"])
    log_shares = jax.nn.log_softmax(logits, axis=-1)
    return -jnp.mean(jnp.take_along_axis(log_shares, targets[..., None], axis=-1))


def train_step(
    state: tuple[Weights, Weights, Weights, Array], tokens: Array, targets: Array
) -> tuple[tuple[Weights, Weights, Weights, Array], Array]:
    """One step of Adam as torch.optim.Adam takes it; state is (weights, m, v, count)."""
    w, m, v, count = state
    loss, grads = jax.value_and_grad(loss_of)(w, tokens, targets)
    count = count + 1
    m = {n: B1 * m[n] + (1 - B1) * grads[n] for n in w}
    v = {n: B2 * v[n] + (1 - B2) * grads[n] ** 2 for n in w}
    rate, root = data.LEARNING_RATE / (1 - B1**count), jnp.sqrt(1 - B2**count)
    w = {n: w[n] - rate * m[n] / (jnp.sqrt(v[n]) / root + ADAM_EPS) for n in w}
    return (w, m, v, count), loss


def initial_state(
    shardings: dict[str, NamedSharding | None], everywhere: NamedSharding | None
) -> tuple[Weights, Weights, Weights, Array]:
    arrays = data.weights()
    weights = {name: jax.device_put(array, shardings[name]) for name, array in arrays.items()}
    m, v = [jax.tree.map(jnp.zeros_like, weights) for _ in range(2)]
    return weights, m, v, jax.device_put(np.zeros((), np.float32), everywhere)


def main() -> None:
    shardings = {name: sharding_of(name, array) for name, array in data.weights().items()}
    everywhere = NamedSharding(mesh, PartitionSpec()) if mesh else None
    of_state = (shardings, shardings, shardings, everywhere)
    jitted = jax.jit(train_step, donate_argnums=0, out_shardings=(of_state, everywhere))
    state = initial_state(shardings, everywhere)
    loss = jnp.zeros(())
    jax.block_until_ready(state)
    figures["model_s"] = since_start() - figures["import_s"]
    stream = itertools.cycle(data.batches())
    batch = NamedSharding(mesh, PartitionSpec("data")) if mesh else None

    def step() -> None:
        nonlocal state, loss
        tokens, targets = (jax.device_put(array, batch) for array in next(stream))
        state, loss = jitted(state, tokens, targets)

    def wait() -> None:
        jax.block_until_ready((state, loss))

    for number in range(data.WARM_UP):
        step()
        wait()
        if number == 0:
            figures["first_step_s"] = since_start()
    figures["warm_up_s"] = since_start()
    turns.begin()
    times = step_times(step, wait, blocks=data.BLOCKS, steps=data.STEPS)
    turns.end()
    report(**figures, **times, loss=float(loss))


if __name__ == "__main__":
    main()
