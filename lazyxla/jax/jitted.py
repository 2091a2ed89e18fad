"""PyTorch's functions as nodes of the graph, through JAX."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lazyxla import untraced
from lazyxla.jax.calls import Calls, jax_key
from lazyxla.jax.views import Arrays, JaxView, MissingKeyError, State


def jax_jit(function: nn.Module | Callable[..., Any]) -> Callable[..., Any]:
    """A PyTorch function, on tensors of the device, whose call is one node of the graph.

    PyTorch traces it for the shapes and dtypes of its arguments as :func:`jax_view` does, and JAX
    differentiates it. What a module's forward writes to its buffers is written.

    Args:
        function: a module, or a function of tensors, as :func:`jax_view` takes it. Also a
            decorator.

    Returns:
        A function of the same arguments: pytrees of tensors and of hashable values.
    """
    view = JaxView(function)
    module = function if isinstance(function, nn.Module) else None
    is_random = False

    def compute(
        parameters: Arrays, buffers: Arrays, key: Any, state: State, args: Any, kwargs: Any
    ) -> Any:
        """The results, and the buffers that were written. `state` tells calls apart."""
        if module is None:
            return view.run(args, kwargs, None, key)[0], {}
        (results, after), plan = view.run((parameters, *args), kwargs, buffers, key)
        return results, {name: after[name] for name in plan.written}

    calls = Calls(compute, wide=True)

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_random
        parameters = dict(module.named_parameters()) if module else {}
        buffers = dict(module.named_buffers()) if module else {}
        given = {name: x.clone() for name, x in buffers.items()}  # which a backward may need
        state = view.state()
        try:
            key = jax_key() if is_random else None
            results, changed = calls(parameters, given, key, state, args, kwargs)
        except MissingKeyError:
            is_random = True
            results, changed = calls(parameters, given, jax_key(), state, args, kwargs)
        with torch.no_grad():
            for name, value in changed.items():
                buffers[name].copy_(value)
        return results

    functools.update_wrapper(call, function, updated=())
    return untraced.opaque(call)
