"""Functions of JAX's, traced for the shapes and dtypes of their arguments.

One takes and returns a list of arrays. What JAX makes of it is itself such a function: its
derivatives and its form for batches. The name of one is made of what it computes, so that programs
that contain it are found again in another process.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from lazyxla import _C
from lazyxla.foreign_functions import provide_lapack
from lazyxla.lowering.jax_call import bytecode_of, compiling, lowered_for, numpy_dtype
from lazyxla.lowering.kernel_device import KernelDevice, kernel_device
from lazyxla.lowering.program import Target
from lazyxla.runtime import platform

Aval = tuple[torch.dtype, tuple[int, ...]]
"""dtype and shape of an array."""

Function = Callable[..., Sequence[Any]]

_TOO_WIDE = (torch.float64, torch.complex128)
_NARROWED = {torch.int64: torch.int32, torch.uint64: torch.uint32}


class FlatFunction:
    """A traced function.

    Attributes:
        name: of its content and of the types of its arguments.
        inputs: dtypes and shapes of the arguments.
        outputs: dtypes and shapes of the results.
    """

    def __init__(self, function: Function, inputs: Sequence[Aval], wide: bool) -> None:
        """Traces a function for arguments of these types; `wide`: JAX has 64-bit types.

        Raises:
            TypeError: an argument's or a result's dtype is one that JAX, or PyTorch, has not.
        """
        self.inputs = tuple(inputs)
        self.wide = wide
        with compiling(wide, _kernel_device()) as jax:
            structs = [
                jax.ShapeDtypeStruct(shape, numpy_dtype(taken_as(dtype, wide)))
                for dtype, shape in self.inputs
            ]

            def flat(*arrays: Any) -> list[Any]:
                return [jax.numpy.asarray(x) for x in function(*arrays)]

            self._traced = jax.jit(flat, keep_unused=True).trace(*structs)
        self.outputs = tuple(
            (_torch_dtype(x.dtype), tuple(x.shape)) for x in self._traced.jaxpr.out_avals
        )
        self._bytecodes: dict[str, bytes] = {}
        self._derived: dict[Any, Any] = {}
        self.name = self._make_name()

    def bytecode(self, where: str) -> bytes:
        """Its module of StableHLO for a platform, whose function `main` it is."""
        name = lowered_for(where)
        found = self._bytecodes.get(name)
        if found is None:
            # Without a lock, like all that is made here: lowering takes one whose holder may call
            # this. Two threads may make the same; the first is kept.
            with compiling(self.wide, _kernel_device()):
                lowered = self._traced.lower(lowering_platforms=(name,))
                found = bytecode_of(lowered)
            if b"lapack_" in found:
                provide_lapack()
            found = self._bytecodes.setdefault(name, found)
        return found

    def split(self, variables: tuple[int, ...]) -> Split:
        """The function, to be differentiated by the arguments with these numbers, and its pullback,
        which does not compute it again."""
        return self._derive(("residuals", variables), lambda: self._split_vjp(variables))

    def pullback(self, variables: tuple[int, ...]) -> FlatFunction:
        """From the arguments and the gradients of the results to those of `variables`.

        It computes the function again, and can be differentiated.
        """

        def compute(*arrays: Any) -> Any:
            import jax

            of, primals = self._of(arrays[: len(self.inputs)], variables)
            _, vjp, _ = jax.vjp(of, *primals, has_aux=True)
            return _pulled_back(vjp, arrays[len(self.inputs) :])

        tangents = [self.outputs[i] for i in self.differentiable_outputs]
        make = functools.partial(FlatFunction, compute, [*self.inputs, *tangents], self.wide)
        return self._derive(("pullback", variables), make)

    def pushforward(self, variables: tuple[int, ...]) -> FlatFunction:
        """From the arguments and the tangents of `variables` to the tangents of the results that
        have some."""

        def compute(*arrays: Any) -> Any:
            import jax

            of, primals = self._of(arrays[: len(self.inputs)], variables)
            tangents = tuple(arrays[len(self.inputs) :])
            _, results, _ = jax.jvp(of, tuple(primals), tangents, has_aux=True)
            return results

        tangents = [self.inputs[i] for i in variables]
        make = functools.partial(FlatFunction, compute, [*self.inputs, *tangents], self.wide)
        return self._derive(("pushforward", variables), make)

    def batched(self, axes: tuple[int | None, ...], size: int) -> FlatFunction:
        """For `size` samples, which arguments have along these axes (None: not at all), and results
        along the first one."""
        inputs = []
        for (dtype, shape), axis in zip(self.inputs, axes, strict=True):
            if axis is not None:
                shape = (*shape[:axis], size, *shape[axis:])
            inputs.append((dtype, shape))
        import jax

        compute = jax.vmap(self._function, in_axes=axes, out_axes=0, axis_size=size)
        make = functools.partial(FlatFunction, compute, inputs, self.wide)
        return self._derive(("batched", axes, size), make)

    @functools.cached_property
    def differentiable_outputs(self) -> list[int]:
        return [i for i, (dtype, _) in enumerate(self.outputs) if is_differentiable(dtype)]

    @functools.cached_property
    def _function(self) -> Function:
        from jax.extend.core import jaxpr_as_fun

        return jaxpr_as_fun(self._traced.jaxpr)  # type: ignore[no-any-return]

    def _of(self, args: Sequence[Any], variables: tuple[int, ...]) -> tuple[Any, list[Any]]:
        """A function of the variables alone, with the results without gradients apart; and their
        values."""

        def of(*values: Any) -> Any:
            given = list(args)
            for i, value in zip(variables, values, strict=True):
                given[i] = value
            results = self._function(*given)
            known = set(self.differentiable_outputs)
            others = [x for i, x in enumerate(results) if i not in known]
            return [results[i] for i in self.differentiable_outputs], others

        return of, [args[i] for i in variables]

    def _split_vjp(self, variables: tuple[int, ...]) -> Split:
        import jax
        from jax.extend.core import Literal

        found: dict[str, Any] = {}

        def forward(*args: Any) -> Any:
            of, primals = self._of(args, variables)
            known, vjp, others = jax.vjp(of, *primals, has_aux=True)
            residuals, found["tree"] = jax.tree.flatten(vjp)
            results: list[Any] = [None] * len(self.outputs)
            for i, x in zip(self.differentiable_outputs, known, strict=True):
                results[i] = x
            rest = iter(others)
            return [*(next(rest) if x is None else x for x in results), *residuals]

        def backward(*arrays: Any) -> Any:
            count = len(arrays) - len(self.differentiable_outputs)
            return _pulled_back(jax.tree.unflatten(found["tree"], arrays[:count]), arrays[count:])

        first = FlatFunction(forward, self.inputs, self.wide)
        tangents = [self.outputs[i] for i in self.differentiable_outputs]
        count = len(self.outputs)
        arrays = [*first.outputs[count:], *tangents]
        second = FlatFunction(backward, arrays, self.wide)
        # A residual that is an unchanged argument need not be returned.
        jaxpr = first._traced.jaxpr.jaxpr
        numbers = {variable: i for i, variable in enumerate(jaxpr.invars)}
        arguments = [
            None if isinstance(variable, Literal) else numbers.get(variable)
            for variable in jaxpr.outvars[count:]
        ]
        kept = [*range(count), *(count + i for i, a in enumerate(arguments) if a is None)]

        def shorter(*args: Any) -> Any:
            results = first._function(*args)
            return [results[i] for i in kept]

        return Split(FlatFunction(shorter, self.inputs, self.wide), second, tuple(arguments))

    def _derive(self, key: Any, make: Callable[[], Any]) -> Any:
        found = self._derived.get(key)
        return self._derived.setdefault(key, make()) if found is None else found

    def _make_name(self) -> str:
        content = hashlib.sha256(self.bytecode(_C.captured_platform() or platform()))
        content.update(repr(self.inputs).encode())
        name = content.hexdigest()[:32]
        by_name.setdefault(name, self)
        return name


class Split(NamedTuple):
    """A function in two, so that its backward does not compute it again.

    Attributes:
        forward: returns the results, and then the residuals that are no arguments.
        backward: from all residuals, and the gradients of the results that have some, to those of
            the variables.
        arguments: for each residual, which argument it is; None for those that `forward` returns.
    """

    forward: FlatFunction
    backward: FlatFunction
    arguments: tuple[int | None, ...]


by_name: dict[str, FlatFunction] = {}
"""Every function that was traced: recorded calls know them by their names."""


def _pulled_back(vjp: Any, gradients: Sequence[Any]) -> list[Any]:
    """Calls the function from `jax.vjp` on PyTorch's gradients, which are conjugates of JAX's."""
    from jax import numpy as jnp

    return [jnp.conj(x) for x in vjp([jnp.conj(x) for x in gradients])]


def taken_as(dtype: torch.dtype, wide: bool) -> torch.dtype:
    """The dtype that JAX converts an array's dtype to. `wide`: it has 64-bit types."""
    if wide:
        return dtype
    if dtype in _TOO_WIDE:
        raise TypeError(
            f"JAX has {dtype} only if it is told to: call "
            'jax.config.update("jax_enable_x64", True), or give it a tensor of another dtype'
        )
    return _NARROWED.get(dtype, dtype)


def recorded_device() -> Any:
    """The device that programs are recorded for: a _C.DeviceDescription."""
    from lazyxla.aot.capturing import device

    return device()


def _kernel_device() -> KernelDevice | None:
    return kernel_device(Target.of(_C.captured_platform() or platform(), recorded_device(), None))


def constant_key(value: Any) -> tuple[type, Hashable]:
    """What tells constants of a traced function apart: 1 and True, 0.0 and -0.0 are equal."""
    is_signed = isinstance(value, (float, complex, np.inexact))
    return value.__class__, repr(value) if is_signed else value


def is_differentiable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _torch_dtype(dtype: Any) -> torch.dtype:
    found = getattr(torch, str(dtype), None)
    if not isinstance(found, torch.dtype):
        raise TypeError(
            f"a JAX function returned an array of {dtype}, for which PyTorch has no dtype"
            + (": return jax.random.key_data(key)" if str(dtype).startswith("key<") else "")
        )
    return found
