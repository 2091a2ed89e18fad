"""The training steps of tpu.py written by hand in JAX: the mathematics and the dtypes that the
models have in PyTorch, as one writes them in JAX. This is what they share, and the decoder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks import tpu_torch
from examples.decoder_model import DecoderConfig

Weights = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]
B1, B2, EPS = 0.9, 0.999, 1e-8


class Network(NamedTuple):
    """`loss(weights, *inputs)` returns a loss, and with `statistics` (running ones, without a
    gradient, by name of weights) also the new ones; `inputs` are shapes with dtypes."""

    loss: Callable[..., Any]
    shapes: Shapes
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    statistics: Shapes | None = None


class Training(NamedTuple):
    """`step(state, *inputs)` is jitted; state and inputs are shapes with dtypes."""

    step: Callable[..., Any]
    state: Any
    inputs: tuple[jax.ShapeDtypeStruct, ...]


def dtypes(name: str) -> tuple[Any, Any]:
    """What weights are kept in, and what products are computed in."""
    kept = jnp.bfloat16 if name == "bfloat16" else jnp.float32
    return kept, jnp.float32 if name == "float32" else jnp.bfloat16


def with_adam(network: Network, dtype: str) -> Training:
    """A step of training with Adam."""
    kept, _ = dtypes(dtype)

    def of(shapes: Shapes) -> Weights:
        return {name: jax.ShapeDtypeStruct(shape, kept) for name, shape in shapes.items()}

    def loss(w: Weights, statistics: Weights, *inputs: Array) -> tuple[Array, Weights]:
        if network.statistics:
            return network.loss(w, statistics, *inputs)  # type: ignore[no-any-return]
        return network.loss(w, *inputs), statistics

    def step(state: Any, *inputs: Array) -> Any:
        w, m, v, count, statistics = state
        grad = jax.value_and_grad(loss, has_aux=True)
        (value, statistics), grads = grad(w, statistics, *inputs)
        count = count + 1
        return (*adam(w, m, v, grads, count), count, statistics), value

    weights, count = of(network.shapes), jax.ShapeDtypeStruct((), jnp.float32)
    state = (weights, weights, weights, count, of(network.statistics or {}))
    return Training(step, state, network.inputs)


def adam(w: Weights, m: Weights, v: Weights, grads: Weights, count: Array) -> tuple[Weights, ...]:
    """The weights and both moments after a step, computed in float32 and kept in their dtypes."""
    first, second = 1 - B1**count, 1 - B2**count

    def update(*values: Array) -> tuple[Array, ...]:
        w, m, v, g = (x.astype(jnp.float32) for x in values)
        m = B1 * m + (1 - B1) * g
        v = B2 * v + (1 - B2) * g * g
        w = w - tpu_torch.RATE * (m / first) / (jnp.sqrt(v / second) + EPS)
        return tuple(x.astype(values[0].dtype) for x in (w, m, v))

    new = {name: update(w[name], m[name], v[name], grads[name]) for name in w}
    return tuple({name: new[name][i] for name in w} for i in range(3))


def einsum(dtype: Any, subscripts: str, *xs: Array) -> Array:
    """In this dtype."""
    return jnp.einsum(subscripts, *(x.astype(dtype) for x in xs))


def layer_norm(x: Array, w: Weights, name: str, eps: float) -> Array:
    """Computed in float32, in the dtype of the weights as PyTorch's autocast has it."""
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    wide = (wide - mean) * jax.lax.rsqrt(jnp.var(wide, -1, keepdims=True) + eps)
    weight = w[f"{name}.weight"]
    return (wide * weight + w[f"{name}.bias"]).astype(weight.dtype)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * weight).astype(x.dtype)


def cross_entropy(logits: Array, targets: Array) -> Array:
    """The mean of logits (..., C) in float32 against targets (...), as optax computes it."""
    logits = logits.astype(jnp.float32)
    of_targets = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - of_targets)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Of x (N, T, ..., D), by angles (T, D)."""
    shape = (x.shape[1], *(1,) * (x.ndim - 3), x.shape[-1])
    first, second = jnp.split(x, 2, axis=-1)
    turned = jnp.concatenate((-second, first), axis=-1)
    return x * cos.reshape(shape) + turned * sin.reshape(shape)


class Decoder:
    """The decoder of examples/decoder_model.py."""

    def __init__(self, config: DecoderConfig, dtype: str) -> None:
        self.config = config
        self.kept, self.dtype = dtypes(dtype)

    def network(self) -> Network:
        tokens = jax.ShapeDtypeStruct((tpu_torch.BATCH, self.config.max_length), jnp.int32)
        return Network(self.loss, self.shapes(), (tokens, tokens))

    def shapes(self) -> Shapes:
        """Of all weights."""
        c = self.config
        shared = c.kv_heads * c.head_dim
        layer = {
            "attention_norm": (c.hidden,),
            "query": (c.hidden, c.hidden),
            "key": (shared, c.hidden),
            "value": (shared, c.hidden),
            "out": (c.hidden, c.hidden),
            "feed_forward_norm": (c.hidden,),
            "gate": (c.intermediate, c.hidden),
            "up": (c.intermediate, c.hidden),
            "down": (c.hidden, c.intermediate),
        }
        shapes: Shapes = {"embedding": (c.vocab, c.hidden), "norm": (c.hidden,)}
        shapes["head"] = (c.vocab, c.hidden)
        for i in range(c.layers):
            shapes |= {f"{i}.{name}": shape for name, shape in layer.items()}
        return shapes

    def tables(self, length: int) -> tuple[Array, Array]:
        """Cosines and sines of every position's angles, each (length, head_dim)."""
        size = self.config.head_dim
        exponents = jnp.arange(0, size, 2, dtype=jnp.float32) / size
        rates = self.config.rotary_base**-exponents
        angles = jnp.outer(jnp.arange(length, dtype=jnp.float32), rates)
        angles = jnp.concatenate((angles, angles), axis=-1)
        return jnp.cos(angles).astype(self.kept), jnp.sin(angles).astype(self.kept)

    def linear(self, x: Array, weight: Array) -> Array:
        return einsum(self.dtype, "...i,oi->...o", x, weight)

    def attention(self, x: Array, w: Weights, cos: Array, sin: Array) -> Array:
        c, (samples, length, _) = self.config, x.shape

        def heads(name: str, *shape: int) -> Array:
            return self.linear(x, w[name]).reshape(samples, length, *shape, c.head_dim)

        groups = c.heads // c.kv_heads
        q = rotate(heads("query", c.kv_heads, groups), cos, sin)
        k = rotate(heads("key", c.kv_heads), cos, sin)
        scores = einsum(self.dtype, "bqkgd,blkd->bkgql", q, k) * c.head_dim**-0.5
        seen = jnp.tril(jnp.ones((length, length), bool))
        scores = jnp.where(seen, scores.astype(jnp.float32), -jnp.inf)
        shares = jax.nn.softmax(scores, axis=-1)
        y = einsum(self.dtype, "bkgql,blkd->bqkgd", shares, heads("value", c.kv_heads))
        return self.linear(y.reshape(x.shape), w["out"])

    def loss(self, w: Weights, tokens: Array, targets: Array) -> Array:
        c = self.config
        x = w["embedding"][tokens]
        cos, sin = self.tables(tokens.shape[1])
        for i in range(c.layers):
            own = {n.removeprefix(f"{i}."): v for n, v in w.items() if n.startswith(f"{i}.")}
            x = x + self.attention(rms_norm(x, own["attention_norm"], c.eps), own, cos, sin)
            y = rms_norm(x, own["feed_forward_norm"], c.eps)
            gate, up = self.linear(y, own["gate"]), self.linear(y, own["up"])
            x = x + self.linear(jax.nn.silu(gate) * up, own["down"])
        return cross_entropy(self.linear(rms_norm(x, w["norm"], c.eps), w["head"]), targets)
