"""PyTorch's modules and functions as functions of JAX's."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from lazyxla.jax.arrays import is_array, to_jax, torch_dtype
from lazyxla.jax.flat_functions import Aval, constant_key
from lazyxla.jax.size_guards import check_guards
from lazyxla.jax.symbolic_functions import SymbolicFunction, Variables, is_symbolic, shape_key
from lazyxla.jax.torch_functions import TorchFunction, trace
from lazyxla.lowering import LoweringError
from lazyxla.lowering.fx_graph import FxGraph
from lazyxla.lowering.program import Settings
from lazyxla.runtime import BACKEND

Arrays = dict[str, Any]
"""Arrays by the names that a module's state dict has for them."""


_BUFFERS = "[1]"
"""Where buffers are among the arguments (parameters, buffers, args, kwargs), as in JAX's paths."""


class MissingKeyError(ValueError):
    """A function draws random numbers, and was given no key."""


def jax_view(function: nn.Module | Callable[..., Any]) -> JaxView:
    """A function of JAX's that computes what a PyTorch module or function does::

        view = lazyxla.jax_view(model)

        def loss(parameters, x, labels):
            logits = view(parameters, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        gradients = jax.jit(jax.grad(loss))(view.parameters, x, labels)

    It is traced by PyTorch for the shapes and dtypes of its arguments, and lowered by the rules of
    this device. It works in ``jax.jit``, ``jax.grad`` and ``jax.vjp`` (PyTorch's autograd),
    ``jax.jvp``, ``jax.vmap``, ``jax.lax.scan`` and in each other; on any device that JAX has. A
    backward computes the forward again, which XLA leaves out where both are in one program.

    Args:
        function: a module, or a function of tensors. It must not depend on tensors' values in
            Python, nor have operators that only the host can run. What it writes must be buffers
            of the module or its own.

    Returns:
        The view, which is called with JAX arrays.
    """
    return JaxView(function)


class JaxView:
    """What :func:`jax_view` returns."""

    def __init__(self, function: nn.Module | Callable[..., Any]) -> None:
        if not callable(function):
            raise TypeError(f"expected a module or a function, got a {type(function).__name__}")
        self._function = function
        self._module = function if isinstance(function, nn.Module) else None
        self._plans: dict[Hashable, Plan] = {}

    @property
    def parameters(self) -> Arrays:
        """A copy of the module's parameters, by their names. A function has none."""
        return _copies(self._module.named_parameters()) if self._module else {}

    @property
    def buffers(self) -> Arrays:
        """A copy of the module's buffers, by their names. A function has none."""
        return _copies(self._module.named_buffers()) if self._module else {}

    def __call__(
        self, *args: Any, buffers: Mapping[str, Any] | None = None, key: Any = None, **kwargs: Any
    ) -> Any:
        """Calls it.

        Args:
            args, kwargs: of a function its arguments; of a module first its parameters, a dict such
                as ``parameters``, and then the arguments. Pytrees of JAX or NumPy arrays and of
                other values, which are hashable and constants. If ``jax_enable_x64`` is off, 64-bit
                numbers among the results are narrowed.
            buffers: of a module, a dict such as ``buffers``, with which to call it. By default
                those that the module has at the time; then they must not be written to.
            key: of ``jax.random``, for what draws random numbers, such as dropout.

        Returns:
            What it returns, with JAX arrays in place of its tensors; with `buffers`, a pair of that
            and the buffers after the call.

        Raises:
            MissingKeyError: it draws random numbers, and there is no key.
            ValueError: parameters or buffers are missing or unknown, or it writes to what it must
                not.
            TypeError: an argument is a tensor, or not hashable.
            lazyxla.lowering.LoweringError: it has an operator that only the host can run.
        """
        return self.run(args, kwargs, buffers, key)[0]

    def run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], buffers: Any = None, key: Any = None
    ) -> tuple[Any, Plan]:
        """What a call returns, and what was traced for it."""
        jax, primitive = _jax()
        parameters: Any = {}
        if self._module is not None:
            if not args or not isinstance(args[0], Mapping):
                raise TypeError("the view of a module takes its parameters first, as a dict")
            parameters, args = dict(args[0]), args[1:]
            _check_names("parameters", parameters, self._module.named_parameters())
            given = self.buffers if buffers is None else dict(buffers)
            _check_names("buffers", given, self._module.named_buffers())
        elif buffers is not None:
            raise TypeError("a function has no buffers")
        else:
            given = {}
        leaves, tree = jax.tree.flatten((parameters, given, args, kwargs))
        arrays = [leaf for leaf in leaves if is_array(leaf)]
        plan = self._plan(leaves, tree, buffers is not None)
        words = None
        if plan.function.random:
            if key is None:
                raise MissingKeyError(
                    "the function draws random numbers: give it key=jax.random.key(seed), another "
                    "one for each call"
                )
            words = _words(key)
        found = iter(primitive.call(plan.function, words, arrays))
        results = [next(found) if made else value for made, value in plan.results]
        return jax.tree.unflatten(plan.tree, results), plan

    def state(self) -> State:
        """What a trace depends on besides the arguments, as it is now."""
        modules = self._module.modules() if self._module else ()
        return State(
            tuple(m.training for m in modules),
            torch.is_autocast_enabled(BACKEND),
            torch.get_autocast_dtype(BACKEND),
            Settings.current(),
        )

    @contextlib.contextmanager
    def _in_state(self, state: State) -> Iterator[None]:
        """A block in which that is what it was: a gradient may be traced later."""
        modules = list(self._module.modules()) if self._module else []
        before = [m.training for m in modules], torch.get_default_dtype()
        for module, training in zip(modules, state.training, strict=False):
            module.training = training
        torch.set_default_dtype(state.settings.default_dtype)
        try:
            with torch.autocast(BACKEND, state.autocast_dtype, enabled=state.autocast):
                yield
        finally:
            for module, training in zip(modules, before[0], strict=True):
                module.training = training
            torch.set_default_dtype(before[1])

    def _plan(self, leaves: list[Any], tree: Any, with_buffers: bool) -> Plan:
        jax, _ = _jax()
        wide: bool = jax.config.jax_enable_x64
        key: list[Any] = [tree, with_buffers, wide, self.state()]
        for leaf in leaves:
            if is_array(leaf):
                key += (leaf.dtype, shape_key(leaf.shape))
            else:
                key += constant_key(leaf)
        try:
            plan = self._plans.get(tuple(key))
        except TypeError:
            raise TypeError(_unusable(leaves)) from None
        if any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            raise TypeError("a view takes JAX arrays, not tensors: lazyxla.to_jax makes them")
        if plan is None:
            plan = self._plans[tuple(key)] = self._plan_anew(leaves, tree, with_buffers, wide)
        return plan

    def _plan_anew(self, leaves: list[Any], tree: Any, with_buffers: bool, wide: bool) -> Plan:
        shapes = {i: leaf.shape for i, leaf in enumerate(leaves) if is_array(leaf)}
        dtypes = {i: torch_dtype(leaves[i].dtype) for i in shapes}

        def trace_for(shapes: Iterable[tuple[int, ...]]) -> Plan:
            types = {i: (d, tuple(s)) for (i, d), s in zip(dtypes.items(), shapes, strict=True)}
            return self._trace(leaves, types, tree, with_buffers, wide)

        if not any(is_symbolic(d) for shape in shapes.values() for d in shape):
            return trace_for(shapes.values())
        variables = Variables(list(shapes.values()))
        plans: list[Plan] = []

        def sample(point: tuple[int, ...]) -> TorchFunction:
            plan = trace_for([variables.at(shape, point) for shape in shapes.values()])
            plans.append(plan)
            if plan[1:] != plans[0][1:]:
                raise LoweringError("lazyxla: what a function returns or writes depends on sizes")
            return plan.function

        function = SymbolicFunction(variables, sample)
        check_guards(plans[0].function.function, function.inputs, variables)
        function.check_ones()
        return plans[0]._replace(function=function)

    def _trace(
        self, leaves: list[Any], types: dict[int, Aval], tree: Any, with_buffers: bool, wide: bool
    ) -> Plan:
        """For arrays of these dtypes and shapes, by their indices among the leaves."""
        jax, _ = _jax()
        places, inputs = list(types), list(types.values())
        state = self.state()
        paths = [jax.tree_util.keystr(path) for path, _ in _with_paths(leaves, tree)]
        found: dict[str, Any] = {}
        # JAX may have narrower integers than the module's buffers.
        widths = {} if self._module is None else dict(self._module.named_buffers())
        own = {
            f"{_BUFFERS}['{n}']": x.dtype for n, x in widths.items() if not x.is_floating_point()
        }

        def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
            """The results, and then what the arguments are afterwards."""
            given = [
                x.to(own.get(paths[i], x.dtype), copy=True)
                for i, x in zip(places, tensors, strict=True)
            ]
            values = list(leaves)
            for i, x in zip(places, given, strict=True):
                values[i] = x
            parameters, buffers, args, kwargs = jax.tree.unflatten(tree, values)
            with self._in_state(state):
                results = _plain(self._apply(parameters, buffers, args, kwargs))
            flat, found["tree"] = jax.tree.flatten((results, buffers) if with_buffers else results)
            found["results"] = [
                (True, None) if isinstance(x, torch.Tensor) else (False, x) for x in flat
            ]
            made = [x for x in flat if isinstance(x, torch.Tensor)]
            return [*(x if wide else _narrow(x) for x in made), *given]

        graph = trace(run, inputs)
        written = [paths[places[i]] for i in _drop_arguments(graph, len(inputs))]
        _check_written([p for p in written if not (with_buffers and p.startswith(_BUFFERS))])
        count = len(graph.outputs)
        function = TorchFunction.traced(lambda *tensors: run(*tensors)[:count], inputs, graph)
        changed = [p[len(_BUFFERS) + 2 : -2] for p in written if p.startswith(_BUFFERS)]
        return Plan(function, found["tree"], found["results"], changed)

    def _apply(self, parameters: Arrays, buffers: Arrays, args: Any, kwargs: Any) -> Any:
        if self._module is None:
            return self._function(*args, **kwargs)
        state = {**parameters, **buffers}
        return torch.func.functional_call(self._module, state, args, kwargs)


def _plain(results: Any) -> Any:
    """What a function returned as JAX's containers: those of other libraries are dicts to it."""
    if isinstance(results, Mapping):
        return {name: _plain(value) for name, value in results.items()}
    if type(results) is list:
        return [_plain(value) for value in results]
    if isinstance(results, tuple):  # a namedtuple remains one; torch.return_types are no pytrees
        parts = [_plain(value) for value in results]
        return type(results)(*parts) if hasattr(results, "_fields") else tuple(parts)
    return results


class State(NamedTuple):
    """What a trace depends on besides the arguments."""

    training: tuple[bool, ...]  # of each module
    autocast: bool
    autocast_dtype: torch.dtype
    settings: Settings


class Plan(NamedTuple):
    """A call as it was traced.

    Attributes:
        function: of its arrays; a SymbolicFunction if dimensions of them are symbolic.
        tree: of the results.
        results: whether each is an array, or else its value.
        written: the names of the buffers that it writes.
    """

    function: Any
    tree: Any
    results: list[tuple[bool, Any]]
    written: list[str]


def _drop_arguments(graph: FxGraph, count: int) -> list[int]:
    """Removes the last results, the arguments' final values, from a graph; returns the indices of
    those that were written to."""
    written = [
        i
        for i, node in enumerate(graph.outputs[len(graph.outputs) - count :])
        if not _is_copy(node, graph.inputs[i])
    ]
    del graph.outputs[len(graph.outputs) - count :]
    needed: set[fx.Node] = set(graph.outputs)
    for node in reversed(list(graph.nodes)):
        if node in needed:
            needed.update(node.all_input_nodes)
        else:
            graph.nodes.remove(node)
    return written


def _is_copy(node: fx.Node, of: fx.Node) -> bool:
    copies = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)
    while node is not of and node.target in copies:
        (node,) = node.all_input_nodes
    return node is of


def _check_written(paths: Sequence[str]) -> None:
    if not paths:
        return
    kinds = {"[0]": "parameter", "[1]": "buffer", "[2]": "argument", "[3]": "argument"}
    named: dict[str, list[str]] = {}
    for path in paths:
        named.setdefault(kinds[path[:3]], []).append(path[3:].removeprefix("[").removesuffix("]"))
    listed = "; ".join(f"{kind} {', '.join(names)}" for kind, names in named.items())
    raise ValueError(
        f"a function of JAX's cannot write to its arguments, as this does: {listed}"
        + (". Give it buffers=view.buffers, and it returns them" if "buffer" in named else "")
    )


def _check_names(what: str, given: Mapping[str, Any], known: Any) -> None:
    names = {name for name, _ in known}
    if names == given.keys():
        return
    missing, unknown = sorted(names - given.keys()), sorted(given.keys() - names)
    raise ValueError(
        f"the module's {what} are others:"
        + (f" missing {', '.join(missing)}" if missing else "")
        + (f" unknown {', '.join(unknown)}" if unknown else "")
    )


def _copies(named: Any) -> Arrays:
    return {name: to_jax(x.detach().cpu()) for name, x in named}


def _words(key: Any) -> Any:
    """64 bits of a key."""
    import jax

    if not is_array(key):
        raise TypeError(f"expected a key of jax.random, got a {type(key).__name__}")
    if jax.numpy.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    if key.dtype != "uint32" or key.ndim != 1 or key.size not in (2, 4):
        raise TypeError(f"expected a key of jax.random, got {key.dtype}{list(key.shape)}")
    return key if key.size == 2 else key[:2] ^ key[2:]


def _narrow(x: torch.Tensor) -> torch.Tensor:
    narrower = {
        torch.float64: torch.float32,
        torch.complex128: torch.complex64,
        torch.int64: torch.int32,
        torch.uint64: torch.uint32,
    }
    return x.to(narrower.get(x.dtype, x.dtype))


def _with_paths(leaves: list[Any], tree: Any) -> list[tuple[Any, Any]]:
    import jax

    return jax.tree_util.tree_leaves_with_path(jax.tree.unflatten(tree, leaves))


def _unusable(leaves: list[Any]) -> str:
    for leaf in leaves:
        try:
            hash(leaf)
        except TypeError:
            return f"an argument is a {type(leaf).__name__}, which is no array and not hashable"
    return "an argument is not hashable"


@functools.cache
def _jax() -> tuple[Any, Any]:
    import jax

    from lazyxla.jax import primitive

    return jax, primitive
