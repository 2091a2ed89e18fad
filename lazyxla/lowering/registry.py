"""Which operator is lowered how.

A rule is a function `f(b, *args)` that builds HLO with the builder `b`; a JAX rule is a function on
JAX arrays. Both take all arguments of the operator's schema positionally. An operator with neither
is lowered through PyTorch's decomposition, if there is one. What is left runs on the host: called
from within the program where the device is the CPU (host_call.py), else between two programs.

Names are schema names: "aten::add.Tensor", and "aten::addmm" for a default overload. Only
functional forms are registered, never in-place forms, out forms or views.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class JaxRule(NamedTuple):
    """`static`: names of the parameters that need Python numbers instead of traced 0-dim arrays.
    `platforms`: those that it is for; none means all."""

    function: Callable[..., Any]
    static: tuple[str, ...]
    platforms: tuple[str, ...] = ()


_rules: dict[str, Callable[..., Any]] = {}
_platform_rules: dict[str, dict[str, Callable[..., Any]]] = {}  # by name, then by platform
_jax_rules: dict[str, JaxRule] = {}
_graph_rules: dict[str, Callable[..., Any]] = {}
_loaded = False
_loading = False
_own_rules: dict[str, Callable[..., Any] | JaxRule] = {}
_own_platform_rules: dict[str, dict[str, Callable[..., Any]]] = {}
_listeners: list[Callable[[str, bool], None]] = []


class Graph(Protocol):
    """A traced graph, which is one node of the pending graph."""

    @property
    def is_padded(self) -> bool:
        """Whether there is one such graph for each of a few buckets of sizes."""

    def lower(self, b: Any, values: list[Any]) -> list[Any]:
        """Lowers it on the values of the node's inputs; returns those of its outputs."""


# By the number that their nodes carry. Each is kept as long as C++ may have it lowered.
graphs: dict[int, Graph] = {}


def rule(*names: str, platforms: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Registers the decorated function `f(b, *args)` as the rule of the operators `names`.

    It replaces any rule or JAX rule that an operator has. With `platforms` ("cpu", "cuda", "tpu")
    it does so on these alone, and others lower the operators as before: they must have another rule
    or a decomposition. So are calls lowered for which such a rule returns NotImplemented.
    """

    def register(function: F) -> F:
        for name in names:
            if platforms:
                _platform_rules[name] = {
                    **_platform_rules.get(name, {}),
                    **dict.fromkeys(platforms, function),
                }
            else:
                _jax_rules.pop(name, None)
                _rules[name] = function
                _drop_platform_rules(name)
            _changed(name)
        return function

    return register


def jax_rule(
    *names: str, static: tuple[str, ...] = (), platforms: tuple[str, ...] = ()
) -> Callable[[F], F]:
    """Registers the decorated function on JAX arrays as the JAX rule of the operators `names`.

    Numbers arrive as 0-dim arrays that stay dynamic, except for the parameters named in `static`,
    which arrive as Python numbers and cost one compilation per value. A keyword-only parameter
    `outputs`, if there is one, receives the expected outputs (tuple of TensorSpec). With
    `platforms` ("cpu", "cuda", "tpu"), others lower the operators as if they had no rule.

    It takes the place of any rule or JAX rule that an operator has.
    """

    def register(function: F) -> F:
        for name in names:
            _rules.pop(name, None)
            _drop_platform_rules(name)
            _jax_rules[name] = JaxRule(function, tuple(static), tuple(platforms))
            _changed(name)
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


def on_change(listener: Callable[[str, bool], None]) -> None:
    """Calls `listener(name, is_users)` whenever an operator gets another rule.

    `is_users`: it is a user's rule, not ours, which is restored at the end of `temporary`.
    """
    _load()
    _listeners.append(listener)


@contextlib.contextmanager
def temporary() -> Iterator[None]:
    """Takes back, at its end, every rule that was given or removed within."""
    _load()
    tables: list[dict[str, Any]] = [_rules, _platform_rules, _jax_rules, _graph_rules]
    before = [dict(table) for table in tables]
    try:
        yield
    finally:
        changed = set()
        for table, old in zip(tables, before):
            if table == old:
                continue
            changed |= {n for n in table.keys() | old.keys() if table.get(n) is not old.get(n)}
            table.clear()
            table.update(old)
        for name in sorted(changed):
            _changed(name)


def has_user_rules() -> bool:
    """Whether any operator is lowered by a user's rule."""
    _load()
    names = _rules.keys() | _platform_rules.keys() | _jax_rules.keys() | _own_rules.keys()
    return any(map(_is_users, names))


def has_own_rule(name: str) -> bool:
    """Whether an operator's rule is ours."""
    _load()
    return name in _rules and not _is_users(name)


def _is_users(name: str) -> bool:
    """Whether the operator's rule, or that it has none, is not our doing."""
    if _platform_rules.get(name) is not _own_platform_rules.get(name):
        return True
    return (_rules.get(name) or _jax_rules.get(name)) is not _own_rules.get(name)


def _drop_platform_rules(name: str) -> None:
    """A user's rule replaces all of ours, which are imported in any order."""
    if not _loading:
        _platform_rules.pop(name, None)


def _changed(name: str) -> None:
    if not _loading:
        for listener in _listeners:
            listener(name, _is_users(name))


def find_rule(name: str, platform: str | None = None) -> Callable[..., Any] | None:
    """The operator's rule for a platform, the one for all of them, or else its graph rule."""
    _load()
    if platform is not None and (found := _platform_rules.get(name, {}).get(platform)):
        return found
    return _rules.get(name) or _graph_rules.get(name)


def has_rule(name: str) -> bool:
    """Whether an operator has a rule on all platforms, and not for graphs only."""
    _load()
    return name in _rules


def platforms_of(name: str) -> set[str]:
    """The platforms for which an operator has a rule of their own."""
    _load()
    return set(_platform_rules.get(name, ()))


def find_jax_rule(name: str, platform: str | None = None) -> JaxRule | None:
    """The operator's JAX rule for a platform, or for any."""
    _load()
    found = _jax_rules.get(name)
    if found and platform and found.platforms and platform not in found.platforms:
        return None
    return found


def names(platform: str | None = None) -> list[str]:
    """All operators that have a rule or a JAX rule, sorted, without ours.

    These are the operators with one on every platform, and on `platform`, if it is given.
    """
    _load()
    jax = {n for n, r in _jax_rules.items() if not r.platforms or platform in r.platforms}
    own = {n for n, rules in _platform_rules.items() if platform in rules}
    ours = ("lazyxla::", "lazyxla_c10d::")
    return sorted(n for n in _rules.keys() | own | jax if not n.startswith(ours))


def _load() -> None:
    """Imports the rule files once; they are light, since none imports jaxlib or JAX at its top."""
    global _loaded, _loading
    if _loaded:
        return
    _loaded = _loading = True
    from lazyxla.lowering import cpu, cuda, rules, tpu

    try:
        for name in ("graph_rules", "prim_rules", "control_flow"):
            importlib.import_module(f"lazyxla.lowering.{name}")
        for room in (rules, cpu, cuda, tpu):
            for module in pkgutil.iter_modules(room.__path__):
                importlib.import_module(f"{room.__name__}.{module.name}")
        _own_platform_rules.update(_platform_rules)
        _own_rules.update(_jax_rules)
        _own_rules.update(_rules)
    finally:
        _loading = False
