"""PyTorch's functions, traced for the shapes and dtypes of their arguments.

The counterpart of :mod:`lazyxla.jax.flat_functions`: one takes and returns a list of tensors, and
what PyTorch makes of it, its derivatives and its form for batches, is itself such a function. Its
graph is traced with tensors that have no data, and lowered by the rules of this device.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lazyxla import lowering
from lazyxla.jax.flat_functions import Aval, is_differentiable
from lazyxla.lowering import control_flow
from lazyxla.lowering.fx_graph import FxGraph, attribute_of, is_function, user_frame
from lazyxla.lowering.operators import draws, schema_name
from lazyxla.runtime import BACKEND

Function = Callable[..., Sequence[torch.Tensor]]


_composites = contextvars.ContextVar("composites", default=False)


@contextlib.contextmanager
def with_composites() -> Iterator[None]:
    """Programs that are lowered in the block keep the names of some operators."""
    token = _composites.set(True)
    try:
        yield
    finally:
        _composites.reset(token)


class TorchFunction:
    """A function of tensors.

    Attributes:
        function: of tensors, lists of them.
        inputs: dtypes and shapes of the arguments.
        outputs: dtypes and shapes of the results.
        random: whether it draws random numbers.
        derived_from: of a pushforward, the function whose tangents it computes, and the numbers of
            that function's arguments that have tangents; else None.
        size_names: variables whose sizes its module takes: none.
    """

    size_names: Sequence[str] = ()

    def __init__(
        self,
        function: Function,
        inputs: Sequence[Aval],
        *,
        outputs: Sequence[Aval],
        random: bool,
        graph: FxGraph | None = None,
        derived_from: tuple[TorchFunction, tuple[int, ...]] | None = None,
    ) -> None:
        self.function = function
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.random = random
        self.derived_from = derived_from
        self._graph = graph
        self._modules: dict[lowering.Target, bytes] = {}
        self._derived: dict[Any, TorchFunction] = {}

    @classmethod
    def traced(cls, function: Function, inputs: Sequence[Aval], graph: FxGraph) -> TorchFunction:
        """A function whose graph is known."""
        outputs = [(n.meta["val"].dtype, tuple(n.meta["val"].shape)) for n in graph.outputs]
        return cls(function, inputs, outputs=outputs, random=_is_random(graph), graph=graph)

    def bytecode(self, platform: str, any_sizes: bool = False) -> bytes:
        """Its module of StableHLO, whose function `main` it is. If it is `random`, the first
        argument is the key, uint32[2].

        Args:
            any_sizes: see `lowering.Target`.

        Raises:
            LoweringError: something can only run on the host.
        """
        target = lowering.Target(
            platform, host_calls=False, composites=_composites.get(), any_sizes=any_sizes
        )
        found = self._modules.get(target)
        if found is None:  # made without a lock, see FlatFunction.bytecode
            graph = self._graph
            if graph is None:
                graph = self._graph = trace(self.function, self.inputs)
            made = lowering.lower_graph(graph, target, self.random)
            found = self._modules.setdefault(target, made)
        return found

    def pullback(self, variables: tuple[int, ...]) -> TorchFunction:
        """From the arguments and the gradients of the results that have some to those of
        `variables`. It computes the function again."""
        count, known = len(self.inputs), self.differentiable_outputs

        def compute(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
            return _pull_back(self.function, tensors[:count], variables, known, tensors[count:])

        inputs = [*self.inputs, *(self.outputs[i] for i in known)]
        outputs = [self.inputs[i] for i in variables]
        return self._derive(("pullback", variables), compute, inputs, outputs)

    def pushforward(self, variables: tuple[int, ...]) -> TorchFunction:
        """From the arguments and the tangents of `variables` to the tangents of the results that
        have some."""
        count, known = len(self.inputs), self.differentiable_outputs

        def compute(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
            args = tensors[:count]
            of = _of_variables(self.function, args, variables, known)
            primals = tuple(args[i] for i in variables)
            return torch.func.jvp(of, primals, tuple(tensors[count:]))[1]

        inputs = [*self.inputs, *(self.inputs[i] for i in variables)]
        outputs = [self.outputs[i] for i in known]
        return self._derive(
            ("pushforward", variables), compute, inputs, outputs, derived_from=(self, variables)
        )

    def batched(self, axes: tuple[int | None, ...], size: int) -> TorchFunction:
        """For `size` samples, which arguments have along these axes (None: not at all), and results
        along the first one. All draw the same random numbers."""
        if all(axis is None for axis in axes):

            def compute(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
                return [x.expand(size, *x.shape) for x in self.function(*tensors)]
        else:

            def compute(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
                of = lambda *given: tuple(self.function(*given))  # noqa: E731
                return torch.func.vmap(of, in_dims=axes, randomness="same")(*tensors)

        inputs = []
        for (dtype, shape), axis in zip(self.inputs, axes, strict=True):
            if axis is not None:
                shape = (*shape[:axis], size, *shape[axis:])
            inputs.append((dtype, shape))
        outputs = [(dtype, (size, *shape)) for dtype, shape in self.outputs]
        return self._derive(("batched", axes, size), compute, inputs, outputs)

    @functools.cached_property
    def differentiable_outputs(self) -> list[int]:
        return [i for i, (dtype, _) in enumerate(self.outputs) if is_differentiable(dtype)]

    def _derive(
        self,
        key: Any,
        function: Function,
        inputs: Sequence[Aval],
        outputs: Sequence[Aval],
        derived_from: tuple[TorchFunction, tuple[int, ...]] | None = None,
    ) -> TorchFunction:
        found = self._derived.get(key)
        if found is None:
            options: Any = {"random": self.random, "derived_from": derived_from}
            made = TorchFunction(function, inputs, outputs=outputs, **options)
            found = self._derived.setdefault(key, made)
        return found


def trace(function: Function, inputs: Sequence[Aval]) -> FxGraph:
    """The graph of a function, without writes. What it makes itself is on the device, and errors
    that depend on values are not raised.

    Raises:
        LoweringError: it cannot be lowered.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        given = [torch.empty(shape, dtype=dtype, device=BACKEND) for dtype, shape in inputs]
    module = trace_with(function, given)
    _read_constants(module)
    graph = FxGraph.of(module.graph)
    for node in graph.nodes:
        _check(node)
    return graph


def _read_constants(module: fx.GraphModule) -> None:
    """Brings constants to the host: while a graph is lowered nothing can be read, since what is
    pending is lowered under the same lock."""
    for node in module.graph.nodes:
        if node.op == "get_attr" and not is_function(node):
            value = attribute_of(node)
            if isinstance(value, torch.Tensor) and value.device.type == BACKEND:
                setattr(module, node.target, value.detach().cpu())


def trace_with(function: Function, given: Sequence[torch.Tensor]) -> fx.GraphModule:
    """As `trace`, for tensors of a FakeTensorMode, and without a check of what is in the graph."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
    )
    from torch._subclasses.functional_tensor import dispatch_functionalize
    from torch.fx.experimental.proxy_tensor import make_fx

    from lazyxla.dynamo.flex_attention import inline_flex_attention

    is_symbolic = any(isinstance(d, torch.SymInt) for x in given for d in x.shape)
    # Its kernels take symbolic sizes, where some of the dispatcher's own need numbers.
    dispatcher = enable_python_dispatcher if is_symbolic else contextlib.nullcontext

    def call(*tensors: torch.Tensor) -> list[torch.Tensor]:
        with torch.device(BACKEND), _WithoutChecks(), dispatcher():
            return list(function(*tensors))

    traced: Callable[..., fx.GraphModule] = make_fx(
        dispatch_functionalize(call), tracing_mode="fake", _allow_non_fake_inputs=True
    )
    try:
        with torch.inference_mode(False):  # gradients may be part of the function
            module = traced(*given)
            inline_flex_attention(module)
            module.graph.eliminate_dead_code()
            return module
    except DataDependentOutputException as error:
        raise lowering.LoweringError(
            f"lazyxla: {schema_name(error.func)} reads a value, which there is not while a "
            "function is traced for JAX"
        ) from error
    except DynamicOutputShapeException as error:
        raise lowering.LoweringError(
            f"lazyxla: the shape of what {schema_name(error.func)} returns depends on values, "
            "which there are not while a function is traced for JAX"
        ) from error


class _WithoutChecks(TorchDispatchMode):
    """Leaves out what only raises errors for some values: JAX's programs cannot. Constants on the
    CPU are operands on the device."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Whether PyTorch may compile a function within it, as flex_attention has it do."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _CHECKS:
            return None
        is_operator = isinstance(func, torch._ops.OpOverload)  # not torch.cond, say
        if not is_operator or func._schema.is_mutable or func in _OF_NEW_CONSTANTS:
            return func(*args, **(kwargs or {}))
        args, kwargs = pytree.tree_map_only(torch.Tensor, _constant_on_device, (args, kwargs or {}))
        return func(*args, **kwargs)


def _constant_on_device(x: torch.Tensor) -> torch.Tensor:
    """A tensor that the function has besides its arguments, such as an attribute of a module."""
    is_constant = type(x) in (torch.Tensor, torch.nn.Parameter) and x.device.type == "cpu"
    if not is_constant or x.dim() == 0:  # which takes part in operators on any device
        return x
    return torch.ops.aten._to_copy.default(x, device=torch.device(BACKEND))


_OF_NEW_CONSTANTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
_CHECKS = (
    torch.ops.aten._linalg_check_errors.default,
    torch.ops.aten._assert_async.default,
    torch.ops.aten._assert_async.msg,
)


def _check(node: fx.Node) -> None:
    from lazyxla.dynamo import partition

    other = isinstance(node.target, torch._ops.HigherOrderOperator)
    if other and not control_flow.is_control_flow(node.target):
        raise lowering.LoweringError(
            f"lazyxla: {node.target} cannot be lowered{_traced_from(node)}"
        )
    if partition.has_positions_of_masks(node):
        raise lowering.LoweringError(
            "lazyxla: where a mask is true is known on the host only, so that what is indexed by "
            f"it has no shape: use torch.where{_traced_from(node)}"
        )


def _traced_from(node: fx.Node) -> str:
    where = user_frame(node)
    return f"\n(traced from {where})" if where else ""


def _is_random(graph: FxGraph) -> bool:
    return any(draws(node.target) for node in graph.nodes)


def _of_variables(
    function: Function,
    args: Sequence[torch.Tensor],
    variables: tuple[int, ...],
    known: Sequence[int],
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The function of the variables alone, with its results that have gradients."""

    def of(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = list(args)
        for i, value in zip(variables, values, strict=True):
            given[i] = value
        results = function(*given)
        return tuple(results[i] for i in known)

    return of


def _pull_back(
    function: Function,
    args: Sequence[torch.Tensor],
    variables: tuple[int, ...],
    known: Sequence[int],
    gradients: Sequence[torch.Tensor],
) -> Sequence[torch.Tensor]:
    """The gradients of the variables; JAX's are conjugates of PyTorch's."""
    of = _of_variables(function, args, variables, known)
    primals = [args[i] for i in variables]
    given = [x.conj() for x in gradients]
    if torch._C._functorch.peek_interpreter_stack() is not None:
        vjp: Any = torch.func.vjp(of, *primals)[1]
        return [x.conj() for x in vjp(tuple(given))]
    with torch.enable_grad():
        leaves = [
            torch.ops.aten.alias(x) if x.requires_grad else x.detach().requires_grad_()
            for x in primals
        ]
        listed = zip(of(*leaves), given, strict=True)
        results = [(result, gradient) for result, gradient in listed if result.requires_grad]
        if not results:
            return [torch.zeros_like(x) for x in primals]
        found = torch.autograd.grad(
            [result for result, _ in results],
            leaves,
            [gradient for _, gradient in results],
            allow_unused=True,
            materialize_grads=True,
            create_graph=any(x.requires_grad for x in (*args, *gradients)),
        )
    return [x.conj() for x in found]
