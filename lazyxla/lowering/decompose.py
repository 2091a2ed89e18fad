"""The last resort of a lowering: PyTorch's own decompositions.

A decomposition is a Python function on tensors. It is traced on fake tensors into a functional
graph of operators that have rules, and that graph is lowered node by node. Numbers are built into
the trace, so their slots become static; an operator for which that costs too many compilations
wants a rule.
"""

import functools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering.errors import LoweringError
from lazyxla.lowering.program import TensorSpec
from lazyxla.lowering.scalar import Scalar, wrap_number

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

_DEEPEST = 16
"""Nesting of decompositions at which one is taken to run in circles."""


class _Hole(int):
    """Stands for the tensor argument of this number in the arguments of a trace."""


def find_op(name: str) -> Any:
    """The operator overload that a schema name stands for, or None."""
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
    except AttributeError:
        return None


def schema_name(op: Any) -> str:
    """The inverse of find_op: aten::add.Tensor, and aten::addmm for a default overload."""
    name = op._schema.name
    return f"{name}.{op._schema.overload_name}" if op._schema.overload_name else name


def find_decomposition(name: str) -> Callable[..., Any] | None:
    """PyTorch's decomposition of an operator, if there is one."""
    op = find_op(name)
    if op is None:
        return None
    found = torch._decomp.decomposition_table.get(op)
    if found is None and op.has_kernel_for_dispatch_key(
        torch._C.DispatchKey.CompositeImplicitAutograd
    ):
        found = op.decompose
    return found


def decompose(b: "Builder", name: str, args: tuple[Any, ...]) -> list[Any]:
    """Lowers an operator through its decomposition; `args` as the rules take them."""
    values: list[Any] = []
    specs: list[TensorSpec] = []
    kinds = _tensor_kinds(name)

    def freeze(arg: Any, tensor: bool) -> Any:
        if isinstance(arg, (list, tuple)):
            return tuple(freeze(a, tensor) for a in arg)
        if hasattr(arg, "owner") or (isinstance(arg, Scalar) and tensor and not arg.wrapped):
            values.append(b.value(arg))
            specs.append(b.spec(values[-1]))
            return _Hole(len(values) - 1)
        return arg.item() if isinstance(arg, Scalar) else arg

    frozen = tuple(freeze(a, tensor) for a, tensor in zip(args, kinds, strict=True))
    graph = _trace(name, tuple(specs), frozen)
    b.depth += 1
    try:
        if b.depth > _DEEPEST:
            raise LoweringError(f"{name}: its decomposition never ends")
        return run_graph(b, graph, values)
    except LoweringError as error:
        raise LoweringError(f"{name} is lowered through its decomposition: {error}") from error
    finally:
        b.depth -= 1


def _tensor_kinds(name: str) -> list[bool]:
    """For every argument of the schema, whether it is a tensor (or a list of them)."""
    op = find_op(name)
    if op is None or find_decomposition(name) is None:
        raise NotImplementedError("there is no rule, JAX rule or decomposition for it")
    return ["Tensor" in str(a.type) for a in op._schema.arguments]


@functools.lru_cache(maxsize=1024)
def _trace(name: str, specs: tuple[TensorSpec, ...], args: tuple[Any, ...]) -> torch.fx.GraphModule:
    """The decomposition's functional graph, one level deep: what it calls is lowered by look-up."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils._python_dispatch import _disable_current_modes
    from torch.utils._pytree import tree_leaves

    op, function = find_op(name), find_decomposition(name)
    assert function is not None

    def call(*tensors: torch.Tensor) -> Any:
        def fill(arg: Any) -> Any:
            if isinstance(arg, _Hole):
                return tensors[arg]
            return [fill(a) for a in arg] if isinstance(arg, tuple) else arg

        positional, keywords = [], {}
        for argument, arg in zip(op._schema.arguments, args, strict=True):
            if argument.kwarg_only:
                # Where the schema says None, Python signatures may have better defaults.
                if arg != argument.default_value:
                    keywords[argument.name] = fill(arg)
            else:
                positional.append(fill(arg))
        return tree_leaves(function(*positional, **keywords))

    with _disable_current_modes(), torch.no_grad(), torch.device("cpu"):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            fakes = [torch.empty(s.shape, dtype=s.dtype) for s in specs]
        traced = make_fx(call)(*fakes)
        if _mutates(traced.graph):
            # Not done always, because PyTorch cannot functionalize the views among its prims.
            traced = make_fx(torch.func.functionalize(call, remove="mutations"))(*fakes)
        return traced


def _mutates(graph: torch.fx.Graph) -> bool:
    overloads = (n.target for n in graph.nodes if isinstance(n.target, torch._ops.OpOverload))
    return any(op._schema.is_mutable for op in overloads)


def run_graph(b: "Builder", module: torch.fx.GraphModule, values: list[Any]) -> list[Any]:
    """Lowers an FX graph of operator overloads on `values`; returns its outputs, flattened."""
    known: dict[Any, Any] = {}
    inputs = iter(values)
    randoms = 0
    for node in module.graph.nodes:
        if node.op == "placeholder":
            known[node] = next(inputs)
        elif node.op == "get_attr":
            known[node] = _constant(b, getattr(module, node.target))
        elif node.op == "output":
            results = torch.fx.node.map_arg(node.args[0], known.__getitem__)
            listed = results if isinstance(results, (list, tuple)) else [results]
            return [r for part in listed for r in (part if isinstance(part, list) else [part])]
        elif node.target is operator.getitem:
            known[node] = known[node.args[0]][node.args[1]]
        else:
            if torch.Tag.nondeterministic_seeded in node.target.tags:
                randoms += 1
            known[node] = _run_node(b, node, known, randoms)
    raise AssertionError("a graph has an output")


def _run_node(b: "Builder", node: torch.fx.Node, known: dict[Any, Any], salt: int) -> Any:
    from lazyxla.lowering.apply import apply

    op: Any = node.target
    args = [known_or_wrapped(known, a, kind) for a, kind in schema_arguments(op, node)]
    single = isinstance(node.meta["val"], torch.Tensor)
    parts = [node.meta["val"]] if single else list(node.meta["val"])
    present = [p for p in parts if p is not None]
    before, salt_before = b.outputs, b.salt
    try:
        b.outputs = tuple(TensorSpec(p.dtype, tuple(p.shape)) for p in present)
        b.salt = salt
        results = iter(apply(b, schema_name(op), tuple(args)))
    finally:
        b.outputs, b.salt = before, salt_before
    listed = [None if p is None else next(results) for p in parts]
    return listed[0] if single else listed


def schema_arguments(op: Any, node: torch.fx.Node) -> list[tuple[Any, str]]:
    """All arguments of an FX node in schema order, defaults filled in, with their schema types."""
    count = len(node.args)
    return [
        (node.args[i] if i < count else node.kwargs.get(name, default), kind)
        for i, (name, kind, default) in enumerate(_schema(op))
    ]


@functools.lru_cache(maxsize=4096)
def _schema(op: Any) -> list[tuple[str, str, Any]]:
    """Name, type and default of an operator's arguments."""
    return [(a.name, str(a.type), a.default_value) for a in op._schema.arguments]


def known_or_wrapped(known: dict[Any, Any], arg: Any, kind: str) -> Any:
    """An FX argument as the rules take it: a node's value, a Scalar for a number."""
    if isinstance(arg, torch.fx.Node):
        return known[arg]
    if isinstance(arg, (list, tuple)):
        return [known_or_wrapped(known, a, kind) for a in arg]
    if isinstance(arg, (bool, int, float, complex)):
        if "float" in kind:
            return wrap_number(arg if isinstance(arg, complex) else float(arg))
        if "number" in kind or "Scalar" in kind or "Tensor" in kind:
            return wrap_number(arg)
    return arg


def _constant(b: "Builder", tensor: torch.Tensor) -> Any:
    """A tensor that the trace has captured."""
    value = b.array(tensor.detach().cpu().tolist(), tensor.dtype)
    return b.reshape(value, tuple(tensor.shape))
