"""Which operator is lowered how.

A rule is a function `f(b, *args)` that builds HLO with the builder `b`; a JAX rule is a function on
JAX arrays. Both take all arguments of the operator's schema positionally. An operator with neither
is lowered through PyTorch's decomposition, if there is one. What is left runs on the host: called
from within the program where the device is the CPU (host_call.py), else between two programs.

Names are schema names: "aten::add.Tensor", and "aten::addmm" for a default overload. Only
functional forms are registered, never in-place forms, out forms or views.
"""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class JaxRule(NamedTuple):
    """`static`: names of the parameters that need Python numbers instead of traced 0-dim arrays."""

    function: Callable[..., Any]
    static: tuple[str, ...]


_rules: dict[str, Callable[..., Any]] = {}
_jax_rules: dict[str, JaxRule] = {}
_graph_rules: dict[str, Callable[..., Any]] = {}
_loaded = False

# The graphs (FxGraph) that torch.compile handed over, by the number that their nodes carry. Each
# stays as long as C++ may ask to have it lowered.
graphs: dict[int, Any] = {}


def rule(*names: str) -> Callable[[F], F]:
    """Registers the decorated function `f(b, *args)` as the rule of the operators `names`."""

    def register(function: F) -> F:
        for name in names:
            _rules[name] = function
        return function

    return register


def jax_rule(*names: str, static: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Registers the decorated function on JAX arrays as the JAX rule of the operators `names`.

    Numbers arrive as 0-dim arrays that stay dynamic, except for the parameters named in `static`,
    which arrive as Python numbers and cost one compilation per value. A keyword-only parameter
    `outputs`, if there is one, receives the expected outputs (tuple of TensorSpec).
    """

    def register(function: F) -> F:
        for name in names:
            _jax_rules[name] = JaxRule(function, tuple(static))
        return function

    return register


def graph_rule(*names: str) -> Callable[[F], F]:
    """Like `rule`, for operators that only occur in traced graphs.

    These are views, copies and empty tensors, which the recorder handles itself: in a graph they
    are values like any other. Their names are not among `names()`.
    """

    def register(function: F) -> F:
        for name in names:
            _graph_rules[name] = function
        return function

    return register


def find_rule(name: str) -> Callable[..., Any] | None:
    """The operator's own rule, or else its graph rule."""
    _load()
    return _rules.get(name) or _graph_rules.get(name)


def find_jax_rule(name: str) -> JaxRule | None:
    """The operator's JAX rule."""
    _load()
    return _jax_rules.get(name)


def names() -> list[str]:
    """All operators that have a rule or a JAX rule, internal ones left out, sorted."""
    _load()
    return sorted(n for n in _rules.keys() | _jax_rules.keys() if not n.startswith("lazyxla::"))


def how(name: str) -> str:
    """How `name` is lowered: "rule", "jax", "decomposition", "call" or "host".

    "graph" stands for an operator that is lowered in traced graphs only and is the recorder's own
    business otherwise, "call" for one that a program on the CPU calls on the host, "host" for one
    that is not lowered at all. To tell these two apart the plugin is started.
    """
    _load()
    if name in _rules:
        return "rule"
    if name in _jax_rules:
        return "jax"
    if name in _graph_rules:
        return "graph"
    from lazyxla.lowering.decompose import find_decomposition

    if find_decomposition(name) is not None:
        return "decomposition"
    from lazyxla.lowering import host_call

    return "call" if host_call.possible(name) else "host"


def _load() -> None:
    """Imports the rule files once; they are light, since none imports jaxlib or JAX at its top."""
    global _loaded
    if _loaded:
        return
    _loaded = True
    from lazyxla.lowering import rules

    for name in ("graph_rules", "prim_rules"):
        importlib.import_module(f"lazyxla.lowering.{name}")
    for module in pkgutil.iter_modules(rules.__path__):
        importlib.import_module(f"{rules.__name__}.{module.name}")
