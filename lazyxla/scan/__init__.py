"""Deep models: equal layers as one loop, which is in the program once at every depth.

    for layer in self.layers:                          # as many copies of a layer in the program
        x = layer(x, mask)
    x = lazyxla.scan_layers(self.layers, x, mask)      # one, in a loop

The layers keep their own parameters; within the program these are stacked.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lazyxla import _C, spmd, untraced
from lazyxla.runtime import BACKEND
from lazyxla.scan import structure
from lazyxla.scan.structure import Layers

if TYPE_CHECKING:
    from lazyxla.scan.calls import Plan

_MOST_PLANS = 32
"""Traced calls that are kept for a list of layers."""

_plans: weakref.WeakKeyDictionary[nn.Module, dict[Any, Any]] = weakref.WeakKeyDictionary()
"""By the first layer, and what the call depends on."""

_library = torch.library.Library("lazyxla", "FRAGMENT")
_library.define("checkpoint_name(Tensor x, str name) -> Tensor")
_library.impl("checkpoint_name", lambda x, name: x.clone(), "CompositeExplicitAutograd")
torch.library.register_autograd(
    "lazyxla::checkpoint_name", lambda ctx, gradient: (gradient, None), lib=_library
)


def scan_layers(
    layers: Iterable[nn.Module],
    x: Any,
    *args: Any,
    remat: str | Collection[str] = "none",
    **kwargs: Any,
) -> Any:
    """Applies equal layers one after the other: ``x = layer(x, *args, **kwargs)`` for each.

    The program has one loop for the forward and one for the backward. The first layer is traced for
    all of them, once for each combination of shapes, dtypes and the layers' attributes, with what
    these hold; what else its code reads, such as global variables, is read once. The layers are
    called one by one, without a loop, on other devices, with tensor subclasses, inside a layer of
    another call, within ``torch.vmap`` and ``torch.func.jvp``, and if they write to buffers that
    they share.

    Args:
        layers: modules with the same parts, whose tensors have the same shapes and dtypes; a
            ModuleList, for example. They must not differ otherwise, as in a dropout's probability.
        x: a tensor, or tensors in tuples, lists and dicts. Each layer returns the next one, of the
            same shapes and dtypes.
        args, kwargs: the same for all layers. Gradients of tensors are summed over the layers.
        remat: what the forward keeps of each layer for the backward. ``"none"``: all that the
            backward reads; nothing is computed again. ``"full"``: only the layer's input; the
            backward computes the layer again. A collection of names: the input, and the values
            that :func:`checkpoint_name` gives one of these names.

    Returns:
        What the last layer returns.

    Raises:
        TypeError: the layers are no modules; or a layer returns something of another type, shape or
            dtype than it was given.
        ValueError: there is no layer, the layers are not equal, they have hooks, tensors are on
            different devices, or there is no such policy or name.
        NotImplementedError: a layer has an operator that only the host can run, or writes to its
            arguments.
    """
    policy = _policy(remat)
    carry, carry_spec = pytree.tree_flatten(x)
    for leaf in carry:
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(f"scan_layers carries tensors, not a {type(leaf).__name__}")
    if not carry:
        raise TypeError("scan_layers carries at least one tensor")
    leaves, rest_spec = pytree.tree_flatten((args, kwargs))
    constants = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    modules, parts = structure.read(layers)
    tensors = [*carry, *constants, *(t for of_layer in parts.tensors for t in of_layer)]
    if carry[0].device.type != BACKEND or any(map(_is_special, tensors)) or _is_batched():
        return _one_by_one(modules, x, args, kwargs)
    structure.check_devices(parts, carry[0].device, [*carry, *constants])
    plan = _plan_of(modules, parts, carry, carry_spec, constants, leaves, rest_spec, policy)
    columns = zip(*parts.tensors, strict=True)
    arguments = [*(t for c in columns for t in c), *carry, *constants]
    written = [arguments[i] for places in plan.written for i in places]
    if structure.shares_memory(written, arguments):  # later layers read what earlier ones write
        return _one_by_one(modules, x, args, kwargs)
    results = plan.call(arguments)
    torch.autograd.graph.increment_version(written)
    return pytree.tree_unflatten(list(results[: len(carry)]), carry_spec)


def _one_by_one(modules: list[nn.Module], x: Any, args: Any, kwargs: Any) -> Any:
    for layer in modules:
        x = layer(x, *args, **kwargs)
    return x


def checkpoint_name(x: torch.Tensor, name: str) -> torch.Tensor:
    """Returns ``x``, and names it: :func:`scan_layers` keeps named values for the backward if asked
    to. Elsewhere the name has no effect.

    Args:
        x: a tensor, of any shape and dtype.
        name: what ``remat`` of :func:`scan_layers` calls it.
    """
    if not _is_special(x):
        return x
    return torch.ops.lazyxla.checkpoint_name(x, name)  # type: ignore[no-any-return]


untraced.traced(checkpoint_name)


@untraced.traced
def _is_special(x: torch.Tensor) -> bool:
    """Whether a tensor is of a class of its own, as those are that are traced."""
    return type(x) not in (torch.Tensor, nn.Parameter, nn.Buffer)


def _is_batched() -> bool:
    """Whether the call is within a transform of torch.func that needs each operator's rule."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() != torch._C._functorch.TransformType.Grad for level in levels)


def _policy(remat: str | Collection[str]) -> Any:
    if isinstance(remat, str):
        if remat not in ("none", "full"):
            raise ValueError(
                f'remat is "none", "full" or a collection of names, such as ["{remat}"], got '
                f"{remat!r}"
            )
        return remat
    if not isinstance(remat, Collection) or not all(isinstance(name, str) for name in remat):
        raise TypeError(f"remat's names are a collection of strings, got {remat!r}")
    return frozenset(remat)


def _plan_of(
    modules: list[nn.Module],
    parts: Layers,
    carry: list[torch.Tensor],
    carry_spec: Any,
    constants: list[torch.Tensor],
    leaves: list[Any],
    rest_spec: Any,
    policy: Any,
) -> Plan:
    """The traced call, of this kind of arguments."""
    from lazyxla.scan.calls import Plan
    from lazyxla.scan.layer_call import LayerCall, trace_equal
    from lazyxla.scan.tracing import Signature

    columns = list(zip(*parts.tensors, strict=True))
    with_gradient = torch.is_grad_enabled() and any(
        t.requires_grad for t in [*carry, *constants, *(t for c in columns for t in c)]
    )
    own = [any(t.requires_grad for t in c) and with_gradient for c in columns]
    what = Signature(
        (
            *((c[0].shape, c[0].dtype, needs) for c, needs in zip(columns, own, strict=True)),
            # From the second layer on it depends on the first one's parameters.
            *((t.shape, t.dtype, with_gradient and _is_floating(t)) for t in carry),
            *((t.shape, t.dtype, with_gradient and t.requires_grad) for t in constants),
        ),
        len(columns),
        len(carry),
        carry[0].device,
    )
    shardings = tuple(_stacked_sharding(c[0]) for c in columns)
    compared = parts.comparison
    others = tuple(None if isinstance(leaf, torch.Tensor) else compared.of(leaf) for leaf in leaves)
    key = (
        *(parts.structure, parts.attributes, len(modules), what, shardings, policy),
        *(compared.contents(), others, carry_spec, rest_spec),
        *(torch.is_grad_enabled(), torch.get_default_dtype()),
        *(torch.is_autocast_enabled(BACKEND), torch.get_autocast_dtype(BACKEND)),
    )
    plans = _plans.setdefault(modules[0], {})
    plan = plans.get(key)
    if plan is None:
        rest = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        call = LayerCall(parts.names, what, carry_spec, rest, places, rest_spec)
        joint = trace_equal(modules, parts, call, what)
        plan = Plan(joint, len(modules), policy, shardings)
        while len(plans) >= _MOST_PLANS:
            del plans[next(iter(plans))]
        plans[key] = plan
    return plan


def _is_floating(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _stacked_sharding(x: torch.Tensor) -> str | None:
    """How the stack of tensors is spread that are spread as `x` is declared to be; its first
    dimension is whole."""
    raw = _C.declared_sharding(x)
    return None if raw is None else spmd.stacked(raw).text  # type: ignore[no-any-return]
