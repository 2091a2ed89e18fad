"""The decorators for users' rules: those of registry.py, with their mistakes reported at the
call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from lazyxla.lowering import registry
from lazyxla.lowering.explanation import own_kernel
from lazyxla.lowering.operators import find_op, is_composite

F = TypeVar("F", bound=Callable[..., Any])

_PLATFORMS = ("cpu", "cuda", "tpu")


def rule(*names: str, platforms: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Registers the decorated function `f(b, *args)` as the rule of the operators `names`.

    It replaces any rule or JAX rule that an operator has. With `platforms` ("cpu", "cuda", "tpu")
    it does so on these alone.

    Raises:
        TypeError: a name is no string, as in a decorator without its parentheses.
        ValueError: a name is no operator's, or the operator is none that can have a rule; there is
            no such platform.
    """
    _check_names("rule", names)
    _check_platforms(platforms)
    return registry.rule(*names, platforms=platforms)


def jax_rule(
    *names: str, static: tuple[str, ...] = (), platforms: tuple[str, ...] = ()
) -> Callable[[F], F]:
    """Registers the decorated function on JAX arrays as the JAX rule of the operators `names`.

    Numbers arrive as 0-dim arrays that stay dynamic, except for the parameters named in `static`,
    which arrive as Python numbers and cost one compilation per value. A keyword-only parameter
    `outputs`, if there is one, receives the expected outputs (tuple of TensorSpec). With
    `platforms` ("cpu", "cuda", "tpu"), others lower the operators as if they had no rule.

    It replaces any rule or JAX rule that an operator has; it raises what `rule` raises.
    """
    _check_names("jax_rule", names)
    _check_platforms(platforms)
    return registry.jax_rule(*names, static=static, platforms=platforms)


def _check_platforms(platforms: tuple[str, ...]) -> None:
    if unknown := set(platforms) - set(_PLATFORMS):
        raise ValueError(f"there is no platform {', '.join(sorted(unknown))}: {_PLATFORMS}")


def _check_names(decorator: str, names: tuple[Any, ...]) -> None:
    """Raises what `rule` raises."""
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f'{decorator} takes names of operators: @{decorator}("mylib::myop")')
    for name in names:
        namespace, _, rest = name.partition("::")
        if not namespace or not rest:
            raise ValueError(f'{name!r} is no name of an operator, such as "mylib::myop"')
        op: Any = find_op(name)
        if op is None:
            continue  # it may be defined later
        if op._schema.is_mutable:
            base = name.partition(".")[0].removesuffix("_")
            raise ValueError(
                f"{name} writes to its arguments; only functional operators have rules. Define "
                f"{base}_functional, which returns what {name} returns and then the new values of "
                "what it writes, and give that one the rule"
            )
        if kernel := own_kernel(name):
            raise ValueError(
                f"{name} has a kernel of the backend's own ({kernel}), so that a rule for it is "
                "never asked for"
            )
        if is_composite(op):
            raise ValueError(
                f"{name} is made of other operators (CompositeImplicitAutograd), so that a rule "
                "for it is never asked for"
            )
