"""What PyTorch's code reads besides its arguments: hooks of everything, registries, settings."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules import module as nn_module
from torch.optim import optimizer as torch_optimizer

from lazyxla import config
from lazyxla.steps import trust

_HOOKS = (
    *("_global_backward_pre_hooks", "_global_backward_hooks", "_global_forward_pre_hooks"),
    *("_global_forward_hooks", "_global_forward_hooks_always_called"),
    "_global_forward_hooks_with_kwargs",
)
REGISTRIES = {"torch.distributions.kl": "_KL_REGISTRY"}
"""Where users register functions that PyTorch's call, by the modules that do."""


def globals_of_torch(guards: Any) -> Iterator[tuple[Any, str]]:
    """Adds guards of it.

    Yields:
        objects that hold code of the user's, each with its name.

    Raises:
        Unfit: somebody else has taken an operator over.
    """
    for name in _HOOKS:
        yield vars(nn_module)[name], f"torch.nn.modules.module.{name}"
    full = "_global_is_full_backward_hook"
    guards.add_key(f"torch.nn.modules.module.{full}", vars(nn_module), full)
    for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
        hooks = getattr(torch_optimizer, name)
        guards.add_dict(f"torch.optim.optimizer.{name}", hooks)
        for hook in hooks.values():
            if not hook.__module__.startswith("lazyxla."):  # ours do nothing to a step
                yield hook, "a hook of all optimizers"
    guards.add_dict("lazyxla.settings", vars(config.settings))
    einsum: Any = torch.backends.opt_einsum  # a module whose settings are in another one
    guards.add_dict("torch.backends.opt_einsum", vars(einsum.m))
    guards.add_dict("torch.backends.mha", vars(torch.backends.mha))
    guards.add_dict("the print options", vars(torch._tensor_str.PRINT_OPTS))
    trust.check_kernels()
    guards.add_call("the number of kernels in Python", torch.library._impls.__len__)
    guards.add_call("the classes registered with abc", abc.get_cache_token)
