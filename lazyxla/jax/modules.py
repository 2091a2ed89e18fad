"""Flax's modules, and functions of parameters, as PyTorch's modules."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lazyxla.jax.arrays import host_tensor
from lazyxla.jax.calls import recorded
from lazyxla.runtime import BACKEND

Arrays = dict[str, Any]
"""Arrays by the names that a module's state dict has for them."""

Apply = Callable[[Arrays, Arrays, bool, tuple[Any, ...], dict[str, Any]], tuple[Any, Arrays]]
"""(parameters, buffers, training, args, kwargs) -> results, and the new buffers."""


def wrap_jax(
    module: Any, variables: Any = None, *, device: torch.device | str = BACKEND
) -> nn.Module:
    """Makes a PyTorch module of a Flax module or of a JAX function.

    Its arrays are copied: parameters become ``nn.Parameter``s, all other arrays buffers, under
    their names in Flax, so that optimizers and state dicts work as ever. Calling it records the
    function as :func:`lazyxla.call_jax` does. Buffers that the function changes, as the statistics
    of a batch norm or the counter of a random stream, are written.

    Args:
        module: a module of ``flax.nnx``; or one of ``flax.linen``; or a function
            ``f(parameters, *args, **kwargs)``.
        variables: for linen what ``module.init`` returned; for a function its parameters, a pytree
            of arrays. Nothing for nnx.
        device: where its tensors are.

    Returns:
        The module. ``train()`` and ``eval()`` count for modules of nnx; a module of linen takes the
        mode as an argument, and changes its variables in training mode only.

    Raises:
        TypeError: there is nothing to take the parameters from.
    """
    if _is_a(module, "flax.nnx", "Module"):
        return _of_nnx(module, device)
    if variables is None:
        raise TypeError(
            "wrap_jax takes a module of flax.nnx, or a module of flax.linen or a function with its "
            f"variables, got a {type(module).__name__} without any"
        )
    if _is_a(module, "flax.linen", "Module"):
        return _of_linen(module, variables, device)
    return _of_function(module, variables, device)


class JaxModule(nn.Module):
    """What :func:`wrap_jax` returns."""

    def __init__(
        self,
        apply: Apply,
        parameters: Arrays,
        buffers: Arrays,
        device: Any,
        wide: bool | None = None,
    ) -> None:
        """`wide`: whether JAX has 64-bit types in it; None: as it is set."""
        super().__init__()
        self._call = recorded(apply, wide)
        for name, array in parameters.items():
            holder, last = self._holder(name)
            tensor = _copy(array).to(device)
            needs = tensor.is_floating_point() or tensor.is_complex()
            holder.register_parameter(last, nn.Parameter(tensor, requires_grad=needs))
        for name, array in buffers.items():
            holder, last = self._holder(name)
            holder.register_buffer(last, _copy(array).to(device))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        buffers = dict(self.named_buffers())
        results, changed = self._call(
            dict(self.named_parameters()), buffers, self.training, args, kwargs
        )
        with torch.no_grad():
            for name, value in changed.items():
                buffers[name].copy_(value)
        return results

    def _holder(self, name: str) -> tuple[nn.Module, str]:
        """The submodule that has a tensor, and the tensor's name there."""
        *path, last = name.split(".")
        holder: nn.Module = self
        for part in path:
            if part not in holder._modules:
                holder.add_module(part, nn.Module())
            holder = holder.get_submodule(part)
        return holder, last


def _of_nnx(module: Any, device: Any) -> nn.Module:
    import jax
    from flax import nnx

    graph, state = nnx.split(module)
    variables = jax.tree_util.tree_leaves_with_path(
        state, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    names = [_name(path) for path, _ in variables]
    learnt = [isinstance(variable, nnx.Param) for _, variable in variables]
    leaves, tree = jax.tree.flatten(state)
    kinds = [_key_kind(leaf) for leaf in leaves]
    raw = [_raw(leaf) for leaf in leaves]

    def apply(
        parameters: Arrays, buffers: Arrays, training: bool, args: Any, kwargs: Any
    ) -> tuple[Any, Arrays]:
        given = {**parameters, **buffers}
        values = [_keyed(given[n], kind) for n, kind in zip(names, kinds, strict=True)]
        called = nnx.merge(graph, jax.tree.unflatten(tree, values))
        called.train() if training else called.eval()
        results = called(*args, **kwargs)
        after = zip(names, jax.tree.leaves(nnx.state(called)), strict=True)
        return results, {n: _raw(leaf) for n, leaf in after if n in buffers}

    return JaxModule(apply, *_parted(names, raw, learnt), device)


def _of_linen(module: Any, variables: Mapping[str, Any], device: Any) -> nn.Module:
    import jax

    listed = jax.tree_util.tree_leaves_with_path(dict(variables))
    tree = jax.tree.structure(dict(variables))
    names = [_name(path).removeprefix("params.") for path, _ in listed]
    learnt = [_name(path[:1]) == "params" for path, _ in listed]
    others = [name for name in variables if name != "params"]

    def apply(
        parameters: Arrays, buffers: Arrays, training: bool, args: Any, kwargs: Any
    ) -> tuple[Any, Arrays]:
        given = {**parameters, **buffers}
        whole = jax.tree.unflatten(tree, [given[name] for name in names])
        if not (training and others):
            return module.apply(whole, *args, **kwargs), {}
        results, changed = module.apply(whole, *args, mutable=others, **kwargs)
        leaves = jax.tree_util.tree_leaves_with_path(dict(changed))
        return results, {_name(path): leaf for path, leaf in leaves}

    arrays = [leaf for _, leaf in listed]
    return JaxModule(apply, *_parted(names, arrays, learnt), device)


def _of_function(function: Callable[..., Any], variables: Any, device: Any) -> nn.Module:
    import jax

    listed = jax.tree_util.tree_leaves_with_path(variables)
    tree = jax.tree.structure(variables)
    names = [_name(path) or "parameter" for path, _ in listed]

    def apply(
        parameters: Arrays, buffers: Arrays, training: bool, args: Any, kwargs: Any
    ) -> tuple[Any, Arrays]:
        whole = jax.tree.unflatten(tree, [parameters[name] for name in names])
        return function(whole, *args, **kwargs), {}

    arrays = [leaf for _, leaf in listed]
    return JaxModule(apply, *_parted(names, arrays, [True] * len(names)), device)


def _parted(
    names: Sequence[str], arrays: Sequence[Any], learnt: Sequence[bool]
) -> tuple[Arrays, Arrays]:
    """Parameters and buffers."""
    listed = list(zip(names, arrays, learnt, strict=True))
    return {n: a for n, a, yes in listed if yes}, {n: a for n, a, yes in listed if not yes}


def _is_a(thing: Any, package: str, name: str) -> bool:
    """Whether it is an instance of a class of a package, which then is imported."""
    found = getattr(sys.modules.get(package), name, None)
    return found is not None and isinstance(thing, found)


def _name(path: Sequence[Any]) -> str:
    """A path in a pytree with dots, as in a state dict."""
    parts = [getattr(k, "key", getattr(k, "idx", getattr(k, "name", None))) for k in path]
    return ".".join(str(part) for part in parts)


def _key_kind(leaf: Any) -> Any:
    """The kind of a key of jax.random's; None for any other array."""
    import jax

    is_key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_impl(leaf) if is_key else None


def _raw(leaf: Any) -> Any:
    """The array, or a key's data."""
    import jax

    return leaf if _key_kind(leaf) is None else jax.random.key_data(leaf)


def _keyed(array: Any, kind: Any) -> Any:
    import jax

    return array if kind is None else jax.random.wrap_key_data(array, impl=kind)


def _copy(array: Any) -> torch.Tensor:
    """A copy of a tensor, or of a JAX or NumPy array, in the host's memory."""
    tensor = array if isinstance(array, torch.Tensor) else host_tensor(array)
    return tensor.cpu().clone()
