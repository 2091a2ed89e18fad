"""Calling JAX's functions on tensors."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from lazyxla import _C, untraced
from lazyxla.jax import operator
from lazyxla.jax.flat_functions import FlatFunction, constant_key, recorded_device
from lazyxla.lowering.jax_call import numpy_dtype
from lazyxla.runtime import BACKEND


def call_jax(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a JAX function on tensors of the device: ``function(*args, **kwargs)``.

    The call is recorded like any operator. The function is traced by JAX once for each combination
    of the tensors' shapes and dtypes and of the other arguments' values, in the width and with the
    ``jax.default_matmul_precision``, rules of promotion and random generator that JAX is set to: if
    ``jax_enable_x64`` is off, 64-bit integers arrive as 32-bit ones. Derivatives are JAX's, of any
    order, backward and forward (``jax.vjp``, ``jax.jvp``), and so is what ``torch.func.vmap`` does
    (``jax.vmap``). JAX opens no device for it.

    Args:
        function: any function that ``jax.jit`` takes; hashable. Tracing it is remembered as long as
            the same function is called: define it once, not in every step.
        args, kwargs: pytrees of tensors, which arrive as arrays, and of other values, which arrive
            as they are and are constants of the program: hashable ones, such as an axis. A number
            that varies is better given as a tensor.

    Returns:
        What the function returns, with tensors in place of its arrays.

    Raises:
        TypeError: a tensor is not on the device, an argument is not hashable, there is no such
            dtype on the other side, or the function is not hashable.
        ValueError: tensors are on different devices.
    """
    return _known(function)(*args, **kwargs)


def jax_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function of tensors out of a JAX function; see :func:`call_jax`. Also a decorator::

        @lazyxla.jax_function
        def gelu(x):
            return jax.nn.gelu(x)

        gelu(torch.randn(3, device="lazyxla"))

    Args:
        function: any function that ``jax.jit`` takes; hashable.
    """
    return recorded(function)


def recorded(function: Callable[..., Any], wide: bool | None = None) -> Callable[..., Any]:
    """:func:`jax_function`; `wide`: whether JAX has 64-bit types in it; None: as it is set."""
    calls = Calls(function, wide)

    def call(*args: Any, **kwargs: Any) -> Any:
        return calls(*args, **kwargs)

    functools.update_wrapper(call, function)
    return untraced.opaque(call)


def jax_key(device: torch.device | str = BACKEND) -> torch.Tensor:
    """A key for functions of ``jax.random``, drawn from the device's generator: uint32, shape (2,).

    ``lazyxla.manual_seed`` and ``torch.manual_seed`` decide on it, as on every random number.

    Args:
        device: whose generator it is drawn from, and where the key is.
    """
    drawn = torch.randint(0, 2**32, (2,), device=device, dtype=torch.int64)
    return drawn.to(torch.uint32)


class _Plan(NamedTuple):
    flat: FlatFunction
    results: Any  # their tree
    is_single: bool  # whether that is one array


class Calls:
    """A JAX function as one on tensors, with what was traced of it."""

    def __init__(self, function: Callable[..., Any], wide: bool | None = None) -> None:
        """`wide`: whether JAX has 64-bit types in it; None: as it is set."""
        self._function = function
        self._wide = wide
        self._plans: dict[Hashable, _Plan] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        jax = _jax()
        config = jax.config
        wide: bool = config.jax_enable_x64 if self._wide is None else self._wide
        settings = (
            *(wide, config.jax_default_matmul_precision, config.jax_default_prng_impl),
            *(config.jax_numpy_dtype_promotion, config.jax_numpy_rank_promotion),
            config.jax_threefry_partitionable,
        )
        # Kernels may depend on the model of the device that a capture is for.
        key: list[Any] = [settings, _C.captured_platform() and recorded_device().kind]
        tensors: Sequence[torch.Tensor] = args
        for x in args:
            if x.__class__ is not torch.Tensor and x.__class__ is not torch.nn.Parameter:
                break
            key += (x.dtype, x.shape, x.device)
        if kwargs or len(key) != 2 + 3 * len(args):  # not only tensors, which take less long
            tensors = self._add_trees(key, args, kwargs)
        plan = self._plans.get(tuple(key))
        if plan is None:
            _check_device(tensors)
            leaves, tree = jax.tree.flatten((args, kwargs))
            plan = self._plans[tuple(key)] = self._trace(leaves, tree, wide)
        results = operator.call(plan.flat, tensors or [torch.empty(0, device=BACKEND)])
        return results[0] if plan.is_single else jax.tree.unflatten(plan.results, results)

    @staticmethod
    def _add_trees(key: list[Any], args: Any, kwargs: Any) -> list[torch.Tensor]:
        """Adds what identifies pytrees to a key; returns the tensors in them."""
        leaves, tree = _jax().tree.flatten((args, kwargs))
        key[2:] = [tree]
        tensors = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                key += (leaf.dtype, leaf.shape, leaf.device)
                tensors.append(leaf)
            else:
                key += constant_key(leaf)
        try:
            hash(tuple(key))
        except TypeError:
            raise TypeError(_unhashable(leaves)) from None
        return tensors

    def _trace(self, leaves: list[Any], tree: Any, wide: bool) -> _Plan:
        jax = _jax()
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        constants = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        avals = [(leaves[i].dtype, tuple(leaves[i].shape)) for i in places]
        found: dict[str, Any] = {}

        def flat(*arrays: Any) -> list[Any]:
            values = list(constants)
            for i, array in zip(places, arrays):
                values[i] = array
            args, kwargs = jax.tree.unflatten(tree, values)
            results, found["tree"] = jax.tree.flatten(self._function(*args, **kwargs))
            return results

        function = FlatFunction(flat, avals or [(torch.float32, (0,))], wide)
        return _Plan(function, found["tree"], found["tree"] == jax.tree.structure(0))


@functools.cache
def _jax() -> Any:
    return importlib.import_module("jax")


_known = functools.lru_cache(maxsize=1024)(Calls)


def _check_device(tensors: Sequence[torch.Tensor]) -> None:
    for x in tensors:
        if x.device.type != BACKEND:
            raise TypeError(
                f'a JAX function takes tensors of the device "{BACKEND}", got one on {x.device}'
            )
        numpy_dtype(x.dtype)
    devices = sorted({str(x.device) for x in tensors})
    if len(devices) > 1:
        raise ValueError(f"a JAX function takes tensors of one device, got {', '.join(devices)}")


def _unhashable(leaves: list[Any]) -> str:
    for leaf in leaves:
        try:
            hash(leaf)
        except TypeError:
            return (
                f"an argument of a JAX function is a {type(leaf).__name__}, which is not hashable: "
                "give it as a tensor of the device"
            )
    return "an argument of a JAX function is not hashable"
