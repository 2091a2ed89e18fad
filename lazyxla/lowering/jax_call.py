"""Calling functions on JAX arrays from a module under construction.

The function is traced and lowered by JAX for the operands' types, once per process; its module is
merged into ours as private functions. JAX is a compiler library here: it opens no device, since one
process may own a TPU only once and that process's client is ours, and the user's configuration of
JAX does not change (`compiling`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering.errors import LoweringError
from lazyxla.lowering.kernel_device import KernelDevice, kernel_device
from lazyxla.lowering.partition import MESH
from lazyxla.lowering.refinement import is_symbolic, refine
from lazyxla.lowering.scalar import Scalar, wrap_number

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

# For these platforms JAX lowers as it does itself. What it lowers for "cuda" calls functions of
# JAX's own CUDA packages, which the plugin does not know; for a name that JAX does not know it uses
# XLA's operations only.
_LOWERED_AS = {"cpu": "cpu", "tpu": "tpu"}
_BY_XLA_ALONE = "xla"

# JAX's own defaults of what decides how a function is traced. Rules are written for these.
_DEFAULTS = {
    "default_matmul_precision": None,
    "default_prng_impl": "threefry2x32",
    "numpy_dtype_promotion": "standard",
    "numpy_rank_promotion": "allow",
    "threefry_partitionable": True,
}

Aval = tuple[torch.dtype, tuple[int, ...], bool]
"""dtype, shape, and whether the dtype is weak in promotion (a Python number)."""


def call_jax(
    b: Builder,
    function: Callable[..., Any],
    xs: tuple[Any, ...],
    static: dict[str, Any],
    lowered_as: str | None = None,
) -> Any:
    """See Builder.call_jax. JAX lowers the function for its platform `lowered_as`."""
    values, avals = [], []
    for x in xs:
        x = wrap_number(x) if isinstance(x, (bool, int, float, complex)) else x
        value = b.unfolded(b.value(x))
        values.append(value)
        avals.append((*b.spec(value), isinstance(x, Scalar) and x.wrapped))
    key = (function, tuple(avals), tuple(sorted(static.items())))
    lowered_as = lowered_as or lowered_for(b.platform)
    bytecode, single = _trace(*key, lowered_as, kernel_device(b.target))
    results = call_module(b, key, bytecode, function.__name__, values)
    return results[0] if single else results


def lowered_for(platform: str) -> str:
    """The name of JAX's platform whose lowering a platform of ours takes."""
    return _LOWERED_AS.get(platform, _BY_XLA_ALONE)


def call_module(b: Builder, key: Any, bytecode: bytes, name: str, values: list[Any]) -> list[Any]:
    """Calls a module's `main`. Within a program, one with the same key is there once."""
    symbol = b.symbols.get(key)
    if symbol is None:
        symbol = b.symbols[key] = _merge(b, bytecode, name)
    return b.call(b.callees[symbol], values)


@functools.lru_cache(maxsize=1024)
def _trace(
    function: Callable[..., Any],
    avals: tuple[Aval, ...],
    static: tuple[tuple[str, Any], ...],
    lowered_as: str,
    device: KernelDevice | None,
) -> tuple[bytes, bool]:
    """The function's module in bytecode, and whether it returns one array rather than several."""
    with compiling(True, device, _DEFAULTS) as jax:
        operands = [
            jax.ShapeDtypeStruct(shape, numpy_dtype(dtype), weak_type=weak)
            for dtype, shape, weak in avals
        ]
        bound = functools.partial(function, **dict(static))
        traced = jax.jit(bound, keep_unused=True).trace(*operands)
        lowered = traced.lower(lowering_platforms=(lowered_as,))
        return bytecode_of(lowered), jax.tree.structure(lowered.out_info).num_nodes == 1


def bytecode_of(lowered: Any) -> bytes:
    """The module of StableHLO of what `jax.jit(f).lower()` returns."""
    stream = io.BytesIO()
    module = lowered.compiler_ir("stablehlo")
    module.operation.write_bytecode(stream)
    # It may call an exported program with symbolic dimensions.
    return refine(stream.getvalue()) if is_symbolic(module) else stream.getvalue()


@contextlib.contextmanager
def compiling(
    wide: bool, device: KernelDevice | None, settings: Mapping[str, Any] | None = None
) -> Iterator[Any]:
    """JAX, to trace and lower functions within the block, with 64-bit types if they are `wide`.

    JAX asks for a device to lower for, and would open all there are. It gets one of a private
    client. Kernels that ask for the device's model get that of `device`. The user's settings of JAX
    hold, but for these `settings`, and `jax.disable_jit`, with which nothing is traced.
    """
    jax: Any = importlib.import_module("jax")
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.enable_x64(wide))
        stack.enter_context(jax.default_device(_device()))
        stack.enter_context(jax.disable_jit(False))
        for name, value in (settings or {}).items():
            stack.enter_context(getattr(jax, name)(value))
        if device:
            model = jax.sharding.AbstractDevice(**device._asdict())
            mesh = jax.sharding.AbstractMesh((), (), abstract_device=model)
            stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
        yield jax


@functools.cache
def _device() -> Any:
    from jaxlib import xla_client

    client: Any = xla_client.make_cpu_client()
    return client.devices()[0]


def numpy_dtype(dtype: torch.dtype) -> Any:
    """The NumPy (or ml_dtypes) dtype of a torch dtype."""
    import ml_dtypes
    import numpy as np

    name = str(dtype).removeprefix("torch.")
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def find_module(name: str, *needs: str) -> Any:
    """A module of JAX's, or None if this JAX has none, or lacks one of the names in it."""
    try:
        module = importlib.import_module(name)
    except ImportError:
        return None
    return module if all(hasattr(module, need) for need in needs) else None


def annotate_kernel_costs(
    b: Builder, result: Any, costs: Callable[[str], dict[str, int] | None]
) -> None:
    """Declares to XLA the cost of the kernels for TPUs in the call that made `result`.

    `costs` gets a kernel's name and returns its "flops", "transcendentals" and "bytes_accessed", or
    None. A kernel that has these already keeps them.
    """
    ir = b.mlir.ir
    symbol = ir.FlatSymbolRefAttr(result.owner.attributes["callee"]).value

    def visit(op: Any) -> Any:
        if op.name == "stablehlo.custom_call" and "kernel_name" in op.attributes:
            settings = json.loads(ir.StringAttr(op.attributes["backend_config"]).value)
            told = costs(ir.StringAttr(op.attributes["kernel_name"]).value)
            if told is not None and "custom_call_config" in settings:
                settings["custom_call_config"].setdefault("cost_estimate", told)
                op.attributes["backend_config"] = ir.StringAttr.get(json.dumps(settings))
        return ir.WalkResult.ADVANCE

    for op in b.module.body.operations:
        if "sym_name" in op.attributes:
            name = ir.StringAttr(op.attributes["sym_name"]).value
            if name == symbol or name.startswith(f"{symbol}."):
                op.operation.walk(visit)


def _take_mesh(b: Builder, module: Any, op: Any) -> None:
    """Replaces a mesh of `jax.shard_map`'s by our module's mesh."""
    mesh = op.attributes["mesh"]
    if b.annotations is None:
        raise LoweringError(
            f"a function with jax.shard_map over the mesh {mesh} was given tensors of one "
            "device: spread one of them over the mesh (lazyxla.shard, lazyxla.replicate)"
        )
    if mesh != b.annotations.mesh:
        raise LoweringError(
            f"a function with jax.shard_map over the mesh {mesh} was given tensors of "
            f"another one, {b.annotations.mesh}"
        )
    ir = b.mlir.ir
    symbol = ir.StringAttr(op.attributes["sym_name"]).value
    if symbol != MESH:
        ir.SymbolTable.replace_all_symbol_uses(symbol, MESH, module.operation)
    op.operation.erase()


def _merge(b: Builder, bytecode: bytes, name: str) -> str:
    """Moves the functions of a module into ours under new names; returns the name of its `main`."""
    ir = b.mlir.ir
    module = ir.Module.parse(bytecode)
    number = len(b.symbols)
    main = ""
    for op in list(module.body.operations):
        if op.operation.name == "sdy.mesh":
            _take_mesh(b, module, op)
        elif op.operation.name == "func.func":
            old = ir.StringAttr(op.attributes["sym_name"]).value
            new = f"{name}.{number}" if old == "main" else f"{name}.{number}.{old}"
            ir.SymbolTable.replace_all_symbol_uses(old, new, module.operation)
            ir.SymbolTable.set_symbol_name(op, new)
            ir.SymbolTable.set_visibility(op, "private")
            for attribute in ("arg_attrs", "res_attrs"):
                if attribute in op.attributes:
                    del op.attributes[attribute]
            if old == "main":
                main = new
                b.callees[new] = op
    for op in list(module.body.operations):
        op.operation.detach_from_parent()
        b.module.body.append(op)
    return main
