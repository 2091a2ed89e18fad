"""A plan of examples/plan_scaling.py beside that of the same step written by hand in JAX: one
jax.jit with a NamedSharding for each array, compiled for the same topology by the same compiler.

    python benchmarks/plan_jax.py --model 8b --layers 4 --topology v5e:4x4 --length 2048

Prints both reports side by side, and the ratios of lazyxla's estimates to JAX's. Needs the TPU's
compiler, and no TPU.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import plan_scaling  # noqa: E402
from decoder_model import DecoderConfig  # noqa: E402
from jax import Array  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.experimental.pallas.ops.tpu.splash_attention import (  # noqa: E402
    splash_attention_kernel,
    splash_attention_mask,
)
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

import lazyxla  # noqa: E402
from lazyxla.aot import flops  # noqa: E402
from lazyxla.aot.collectives import Grid  # noqa: E402

Weights = dict[str, Any]
RATE, B1, B2, EPS, DECAY = 1e-3, 0.9, 0.999, 1e-8, 1e-2
TILE = 512  # rows and columns of attention's scores that are computed at a time


@jax.custom_vjp
def rows(weight: Array, tokens: Array) -> Array:
    """An embedding; gradients of one row are added up in float32, as lazyxla does."""
    return weight[tokens]


def _rows_backward(kept: tuple[Array, Array], grad: Array) -> tuple[Array, None]:
    weight, tokens = kept
    total = jnp.zeros(weight.shape, jnp.float32).at[tokens].add(grad.astype(jnp.float32))
    return total.astype(weight.dtype), None


rows.defvjp(lambda weight, tokens: (weight[tokens], (weight, tokens)), _rows_backward)


def linear(x: Array, weight: Array) -> Array:
    return jnp.einsum("...i,oi->...o", x, weight)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * weight


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    first, second = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate((-second, first), axis=-1) * sin


def tables(config: DecoderConfig, length: int) -> tuple[Array, Array]:
    """Cosines and sines of every position's angles, each (length, head_dim)."""
    exponents = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    angles = jnp.outer(jnp.arange(length, dtype=jnp.float32), config.rotary_base**-exponents)
    angles = jnp.concatenate((angles, angles), axis=-1)
    return jnp.cos(angles).astype(jnp.bfloat16), jnp.sin(angles).astype(jnp.bfloat16)


class Decoder:
    """The decoder of examples/decoder_model.py, its batch split over the mesh."""

    def __init__(self, config: DecoderConfig, mesh: Mesh) -> None:
        self.config = config
        self.mesh = mesh
        self.split = NamedSharding(mesh, PartitionSpec("data"))

    def shapes(self) -> dict[str, tuple[int, ...]]:
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
        shapes = {
            "embedding": (c.vocab, c.hidden),
            "norm": (c.hidden,),
            "head": (c.vocab, c.hidden),
        }
        for i in range(c.layers):
            shapes |= {f"{i}.{name}": shape for name, shape in layer.items()}
        return shapes

    def sharding(self, shape: tuple[int, ...]) -> NamedSharding:
        """A weight is split along its largest dimension."""
        entries: list[str | None] = [None] * len(shape)
        entries[max(range(len(shape)), key=lambda i: shape[i])] = "data"
        return NamedSharding(self.mesh, PartitionSpec(*entries))

    def whole_features(self, x: Array) -> Array:
        """x, split along its batch only."""
        return jax.lax.with_sharding_constraint(x, self.split)

    def attention(self, x: Array, w: Weights, cos: Array, sin: Array) -> Array:
        def heads(name: str) -> Array:
            y = self.whole_features(linear(x, w[name]))
            return y.reshape(*x.shape[:2], -1, self.config.head_dim).transpose(0, 2, 1, 3)

        scale = self.config.head_dim**-0.5
        query = rotate(heads("query"), cos, sin)
        key = rotate(heads("key"), cos, sin)
        query = (query.astype(jnp.float32) * scale).astype(x.dtype)
        spec = PartitionSpec("data")
        attend = jax.shard_map(
            jax.vmap(self.kernel(x.shape[1])),
            mesh=self.mesh,
            in_specs=(spec, spec, spec),
            out_specs=spec,
            check_vma=False,
        )
        y = attend(query, key, heads("value"))
        y = y.transpose(0, 2, 1, 3).reshape(x.shape)
        return self.whole_features(linear(y, w["out"]))

    @functools.cache  # noqa: B019
    def kernel(self, length: int) -> Any:
        mask = splash_attention_mask.CausalMask((length, length))
        tile = min(TILE, length)
        names = ("q", "kv", "q_dkv", "kv_dkv", "q_dq", "kv_dq")
        return splash_attention_kernel.make_splash_mha(
            splash_attention_mask.MultiHeadMask([mask] * self.config.heads),
            block_sizes=splash_attention_kernel.BlockSizes(**{f"block_{n}": tile for n in names}),
            head_shards=1,
            q_seq_shards=1,
        )

    def layer(self, x: Array, w: Weights, cos: Array, sin: Array) -> Array:
        y = self.whole_features(rms_norm(x, w["attention_norm"], self.config.eps))
        x = x + self.attention(y, w, cos, sin)
        y = self.whole_features(rms_norm(x, w["feed_forward_norm"], self.config.eps))
        gate, up = (self.whole_features(linear(y, w[name])) for name in ("gate", "up"))
        return x + self.whole_features(linear(jax.nn.silu(gate) * up, w["down"]))

    def loss(self, w: Weights, tokens: Array, targets: Array) -> Array:
        cos, sin = tables(self.config, tokens.shape[1])
        x = self.whole_features(rows(w["embedding"], tokens))
        for i in range(self.config.layers):
            own = {n.removeprefix(f"{i}."): v for n, v in w.items() if n.startswith(f"{i}.")}
            x = self.layer(x, own, cos, sin)
        x = self.whole_features(rms_norm(x, w["norm"], self.config.eps))
        logits = self.whole_features(linear(x, w["head"])).astype(jnp.float32)
        logits = logits.reshape(-1, logits.shape[-1])
        log_shares = jax.nn.log_softmax(logits, axis=-1)
        return -jnp.mean(jnp.take_along_axis(log_shares, targets.reshape(-1, 1), axis=-1))


def step_of(model: Decoder) -> Any:
    """Forward, backward and AdamW, a function of weights, both moments, the number of the step,
    tokens and targets."""

    def step(
        w: Weights, m: Weights, v: Weights, count: Array, tokens: Array, targets: Array
    ) -> Any:
        loss, grads = jax.value_and_grad(model.loss)(w, tokens, targets)
        rate = RATE / (1 - B1**count)
        root = jnp.sqrt(1 - B2**count)

        def update(w: Array, m: Array, v: Array, g: Array) -> tuple[Array, Array, Array]:
            kept, wide = w.dtype, jnp.float32
            w, m, v, g = (x.astype(wide) for x in (w, m, v, g))
            m = B1 * m + (1 - B1) * g
            v = B2 * v + (1 - B2) * g * g
            w = w * (1 - RATE * DECAY) - rate * m / (jnp.sqrt(v) / root + EPS)
            return w.astype(kept), m.astype(kept), v.astype(kept)

        new = {n: update(w[n], m[n], v[n], grads[n]) for n in w}
        return (*({n: new[n][i] for n in w} for i in range(3)), loss)

    return step


class Executable:
    """What JAX compiled, as lazyxla's reports take it."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self.num_outputs = len(jax.tree.leaves(compiled.out_info))

    def optimized_program(self) -> tuple[str, bytes]:
        (module,) = self._compiled.runtime_executable().hlo_modules()
        return "hlo", module.as_serialized_hlo_module_proto()

    def cost_analysis(self) -> dict[str, Any]:
        return self._compiled.cost_analysis()  # type: ignore[no-any-return]

    def memory_stats(self) -> dict[str, int]:
        of = self._compiled.memory_analysis()
        return {
            "arguments": of.argument_size_in_bytes,
            "outputs": of.output_size_in_bytes,
            "aliased": of.alias_size_in_bytes,
            "temporary": of.temp_size_in_bytes,
            "generated_code": of.generated_code_size_in_bytes,
            "peak": of.peak_memory_in_bytes,
        }


def products(plan: lazyxla.aot.CompiledProgram) -> float:
    """FLOPs of matrix products. JAX's kernel for attention does not tell its own."""
    program = plan._optimized
    counted = {i: flops.products(computation) for i, computation in program.computations.items()}
    return float(sum(program.runs[i] * count for i, count in counted.items()))


FIGURES: dict[str, Callable[[lazyxla.aot.CompiledProgram], Any]] = {
    "estimated cycles": lambda plan: plan.estimated_cycles,
    "FLOPs of products": products,
    "bytes accessed": lambda plan: plan.bytes_accessed,
    "network time": lambda plan: plan.network_seconds,
    "estimated time": lambda plan: plan.estimated_seconds,
    "peak memory": lambda plan: plan.memory_stats()["peak"],
}


def plan_by_jax(
    config: DecoderConfig, topology: str, batch: int, length: int
) -> lazyxla.aot.CompiledProgram:
    """The step as JAX has it compiled, with the report that lazyxla makes of any program."""
    target = lazyxla.aot.topology(topology)
    described = topologies.get_topology_desc(topology, "tpu")
    mesh = Mesh(np.array(described.devices), ("data",))
    model = Decoder(config, mesh)

    def weight(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=model.sharding(shape))

    weights = {name: weight(shape) for name, shape in model.shapes().items()}
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32, sharding=model.split)
    everywhere = NamedSharding(mesh, PartitionSpec())
    count = jax.ShapeDtypeStruct((), jnp.float32, sharding=everywhere)
    spread = {name: value.sharding for name, value in weights.items()}
    step = jax.jit(
        step_of(model), donate_argnums=(0, 1, 2), out_shardings=(spread,) * 3 + (everywhere,)
    )
    compiled = step.lower(weights, weights, weights, count, tokens, tokens).compile()
    grid = Grid((("data", mesh.size),), tuple(range(mesh.size)))
    report = lazyxla.aot.CompiledProgram(
        Executable(compiled),
        f"{target}, by JAX",
        target.memory_bytes,
        target.chip,
        grid,
        target._network(),
    )
    report.num_parameters = sum(int(np.prod(shape)) for shape in model.shapes().values())
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("small", "8b", "70b"), default="8b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--topology", default="v5e:4x4")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--hlo", type=Path, help="a directory for both optimized programs")
    args = parser.parse_args()

    same = [f"--{n}={getattr(args, n)}" for n in ("model", "layers", "topology", "batch", "length")]
    ours = plan_scaling.main(same)
    config = plan_scaling.configured(args.model, args.length, args.layers)
    theirs = plan_by_jax(config, args.topology, args.batch, args.length)
    print(theirs)
    if args.hlo:
        args.hlo.mkdir(parents=True, exist_ok=True)
        for name, plan in (("lazyxla", ours), ("jax", theirs)):
            (args.hlo / f"{name}.hlo").write_text(plan.optimized_hlo())
    print("\nlazyxla / JAX")
    for name, of in FIGURES.items():
        print(f"  {name:18}{of(ours) / of(theirs):.3f}")


if __name__ == "__main__":
    main()
