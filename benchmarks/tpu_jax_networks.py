"""BERT, ViT and ResNet-50 of tpu.py by hand in JAX, see tpu_jax.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks import tpu_torch
from benchmarks.tpu_jax import (
    Decoder,
    Network,
    Shapes,
    Training,
    Weights,
    cross_entropy,
    dtypes,
    einsum,
    layer_norm,
    with_adam,
)

HIDDEN, HEADS, INTERMEDIATE, LAYERS = 768, 12, 3072, 12
NORM_EPS = 1e-12


def training(name: str, dtype: str, layers: int | None) -> Training:
    """A training step of a network with Adam, as tpu_torch.training has it."""
    if name == "decoder":
        config = tpu_torch.decoder_config(layers)
        return with_adam(Decoder(config, dtype).network(), dtype)
    if name == "resnet50":
        return with_adam(resnet50(dtype), dtype)
    make = {"bert": bert, "vit": vit}[name]
    return with_adam(make(dtype, LAYERS if layers is None else layers), dtype)


# ---- transformers ----


def linear(dtype: Any, x: Array, w: Weights, name: str) -> Array:
    product = einsum(dtype, "...i,oi->...o", x, w[f"{name}.weight"])
    return product + w[f"{name}.bias"].astype(dtype)


def attention(dtype: Any, x: Array, w: Weights, name: str) -> Array:
    """Of all positions of x (N, T, HIDDEN) to each other."""

    def heads(part: str) -> Array:
        return linear(dtype, x, w, f"{name}.{part}").reshape(*x.shape[:2], HEADS, -1)

    q, k, v = (heads(part) for part in ("query", "key", "value"))
    scores = einsum(dtype, "bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    shares = jax.nn.softmax(scores.astype(jnp.float32), axis=-1)
    y = einsum(dtype, "bhqk,bkhd->bqhd", shares, v)
    return linear(dtype, y.reshape(x.shape), w, f"{name}.out")


def feed_forward(dtype: Any, x: Array, w: Weights, name: str) -> Array:
    inner = jax.nn.gelu(linear(dtype, x, w, f"{name}.up"), approximate=False)
    return linear(dtype, inner, w, f"{name}.down")


def _linear_shapes(name: str, outputs: int, inputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _norm_shapes(name: str, size: int = HIDDEN) -> Shapes:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def _layer_shapes(i: int) -> Shapes:
    shapes: Shapes = {}
    for part in ("query", "key", "value", "out"):
        shapes |= _linear_shapes(f"{i}.{part}", HIDDEN, HIDDEN)
    shapes |= _linear_shapes(f"{i}.up", INTERMEDIATE, HIDDEN)
    shapes |= _linear_shapes(f"{i}.down", HIDDEN, INTERMEDIATE)
    return shapes | _norm_shapes(f"{i}.first_norm") | _norm_shapes(f"{i}.second_norm")


def bert(dtype: str, layers: int) -> Network:
    """BERT that predicts tokens, its norms behind each part, its head the embedding's table."""
    vocabulary, length = 30522, 128
    _, compute = dtypes(dtype)
    shapes: Shapes = {"words": (vocabulary, HIDDEN), "positions": (512, HIDDEN)}
    shapes |= {"kinds": (2, HIDDEN), "head_bias": (vocabulary,)} | _norm_shapes("norm")
    shapes |= _linear_shapes("head", HIDDEN, HIDDEN) | _norm_shapes("head_norm")
    for i in range(layers):
        shapes |= _layer_shapes(i)

    def loss(w: Weights, tokens: Array, labels: Array) -> Array:
        x = w["words"][tokens] + w["positions"][: tokens.shape[1]] + w["kinds"][0]
        x = layer_norm(x, w, "norm", NORM_EPS)
        for i in range(layers):
            y = attention(compute, x, w, str(i))
            x = layer_norm(x + y, w, f"{i}.first_norm", NORM_EPS)
            y = feed_forward(compute, x, w, str(i))
            x = layer_norm(x + y, w, f"{i}.second_norm", NORM_EPS)
        x = jax.nn.gelu(linear(compute, x, w, "head"), approximate=False)
        x = layer_norm(x, w, "head_norm", NORM_EPS)
        logits = einsum(compute, "...i,oi->...o", x, w["words"])
        return cross_entropy(logits + w["head_bias"].astype(compute), labels)

    tokens = jax.ShapeDtypeStruct((16, length), jnp.int32)
    return Network(loss, shapes, (tokens, tokens))


def vit(dtype: str, layers: int) -> Network:
    """ViT-B/16, its norms before each part."""
    patch, positions = 16, (224 // 16) ** 2
    kept, compute = dtypes(dtype)
    shapes: Shapes = {"patches.weight": (HIDDEN, 3 * patch * patch), "patches.bias": (HIDDEN,)}
    shapes |= {"class": (1, 1, HIDDEN), "positions": (1, positions + 1, HIDDEN)}
    shapes |= _norm_shapes("norm") | _linear_shapes("head", tpu_torch.CLASSES, HIDDEN)
    for i in range(layers):
        shapes |= _layer_shapes(i)

    def loss(w: Weights, images: Array, labels: Array) -> Array:
        samples, side = images.shape[0], images.shape[2] // patch
        x = images.reshape(samples, 3, side, patch, side, patch).transpose(0, 2, 4, 1, 3, 5)
        x = linear(compute, x.reshape(samples, positions, -1), w, "patches")
        first = jnp.broadcast_to(w["class"], (samples, 1, HIDDEN))
        x = jnp.concatenate((first, x.astype(kept)), axis=1) + w["positions"]
        for i in range(layers):
            y = layer_norm(x, w, f"{i}.first_norm", NORM_EPS)
            x = x + attention(compute, y, w, str(i))
            y = layer_norm(x, w, f"{i}.second_norm", NORM_EPS)
            x = x + feed_forward(compute, y, w, str(i))
        x = layer_norm(x, w, "norm", NORM_EPS)[:, 0]
        return cross_entropy(linear(compute, x, w, "head"), labels)

    images = jax.ShapeDtypeStruct((32, 3, 224, 224), kept)
    return Network(loss, shapes, (images, jax.ShapeDtypeStruct((32,), jnp.int32)))


# ---- ResNet-50 ----

STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
"""Width, number of blocks, and stride of the first one."""
MOMENTUM, BATCH_EPS = 0.1, 1e-5


@dataclasses.dataclass
class ResNet:
    """Takes weights and running statistics by name; keeps the new statistics."""

    w: Weights
    statistics: Weights
    dtype: Any

    def __post_init__(self) -> None:
        self.new: Weights = {}

    def conv(self, x: Array, name: str, stride: int = 1) -> Array:
        """Of x (N, H, W, C) with a kernel (H, W, I, O)."""
        kernel = self.w[name].astype(self.dtype)
        around = (kernel.shape[0] - 1) // 2
        return jax.lax.conv_general_dilated(
            x.astype(self.dtype),
            kernel,
            (stride, stride),
            [(around, around)] * 2,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )

    def norm(self, x: Array, name: str) -> Array:
        wide = x.astype(jnp.float32)
        mean, var = wide.mean((0, 1, 2)), wide.var((0, 1, 2))
        count = x.size // x.shape[-1]
        for kind, value in (("mean", mean), ("var", var * (count / (count - 1)))):
            old = self.statistics[f"{name}.{kind}"]
            self.new[f"{name}.{kind}"] = ((1 - MOMENTUM) * old + MOMENTUM * value).astype(old.dtype)
        wide = (wide - mean) * jax.lax.rsqrt(var + BATCH_EPS)
        return (wide * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]).astype(x.dtype)

    def block(self, x: Array, name: str, stride: int) -> Array:
        y = jax.nn.relu(self.norm(self.conv(x, f"{name}.1"), f"{name}.1"))
        y = jax.nn.relu(self.norm(self.conv(y, f"{name}.2", stride), f"{name}.2"))
        y = self.norm(self.conv(y, f"{name}.3"), f"{name}.3")
        if f"{name}.skip" in self.w:
            x = self.norm(self.conv(x, f"{name}.skip", stride), f"{name}.skip")
        return jax.nn.relu(x + y)

    def logits(self, images: Array) -> Array:
        x = jax.nn.relu(self.norm(self.conv(images.transpose(0, 2, 3, 1), "stem", 2), "stem"))
        x = jax.lax.reduce_window(
            x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0))
        )
        for i, (_, blocks, stride) in enumerate(STAGES):
            for j in range(blocks):
                x = self.block(x, f"{i}.{j}", stride if j == 0 else 1)
        x = x.astype(jnp.float32).mean((1, 2)).astype(x.dtype)
        return linear(self.dtype, x, self.w, "head")


def _resnet_convolutions() -> Shapes:
    """Their kernels."""
    kernels: Shapes = {"stem": (7, 7, 3, 64)}
    inputs = 64
    for i, (width, blocks, _) in enumerate(STAGES):
        for j in range(blocks):
            kernels[f"{i}.{j}.1"] = (1, 1, inputs, width)
            kernels[f"{i}.{j}.2"] = (3, 3, width, width)
            kernels[f"{i}.{j}.3"] = (1, 1, width, 4 * width)
            if j == 0:
                kernels[f"{i}.{j}.skip"] = (1, 1, inputs, 4 * width)
            inputs = 4 * width
    return kernels


def resnet50(dtype: str) -> Network:
    """ResNet-50, its images (N, C, H, W) as PyTorch has them."""
    kept, compute = dtypes(dtype)
    kernels = _resnet_convolutions()
    shapes, statistics = dict(kernels), {}
    for name, kernel in kernels.items():
        shapes |= _norm_shapes(name, kernel[-1])
        statistics |= {f"{name}.{kind}": kernel[-1:] for kind in ("mean", "var")}
    shapes |= _linear_shapes("head", tpu_torch.CLASSES, 2048)

    def loss(w: Weights, old: Weights, images: Array, labels: Array) -> tuple[Array, Weights]:
        model = ResNet(w, old, compute)
        return cross_entropy(model.logits(images), labels), model.new

    images = jax.ShapeDtypeStruct((32, 3, 224, 224), kept)
    return Network(loss, shapes, (images, jax.ShapeDtypeStruct((32,), jnp.int32)), statistics)
