"""Kernels, such as Pallas's, as operators of PyTorch's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from lazyxla.compat import signature_of
from lazyxla.jax.flat_functions import is_differentiable
from lazyxla.lowering import rule
from lazyxla.lowering.registry import JaxRule
from lazyxla.lowering.scalar import Scalar, plain
from lazyxla.lowering.value import Value

_PLATFORMS = ("cpu", "cuda", "tpu")
_OTHER_DEVICES = ("CPU", "CUDA", "XPU", "MPS")

_libraries: list[torch.library.Library] = []  # their registrations live as long as they do

Backward = Callable[[Any, Any, Any], Sequence[torch.Tensor | None]]


def kernel(
    name: str,
    reference: Callable[..., Any],
    *,
    platforms: Sequence[str] = ("tpu",),
    static: Sequence[str] = (),
    suits: Callable[..., bool] | None = None,
    backward: Backward | None = None,
) -> Callable[[Callable[..., Any]], Any]:
    """Makes an operator of a kernel and a PyTorch function that computes the same. A decorator::

        def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
            return x * by

        @lazyxla.kernel("mylib::scaled", scaled, static=("by",))
        def scaled_kernel(x, by, *, interpret=False):
            return pl.pallas_call(..., interpret=interpret)(x)

        y = scaled_kernel(x, 2.0)  # on any device

    On the device the call is recorded. Programs for the kernel's platforms call the kernel.
    Programs for other platforms, and for tensors that are sharded over several devices, use the
    operators of the reference, since the partitioner cannot look into a kernel. Other devices run
    the reference.

    Args:
        name: the operator's, with a namespace: "mylib::scaled".
        reference: a function of PyTorch's whose arguments and results have annotations that
            ``torch.library.infer_schema`` understands, and that writes to none of its arguments.
        platforms: where the kernel runs: of "tpu", "cuda", "cpu". If it has a parameter
            ``interpret``, that is true on the CPU, to compare it with the reference in a test.
        static: names of the parameters that need Python numbers, which cost a compilation for each
            value; others arrive as 0-dim arrays.
        suits: a function of the arguments that returns whether the kernel can be used; if not, the
            reference is. It is called when a program is lowered, with tensors on "meta" and the
            static parameters' numbers. By default the kernel is always used.
        backward: the gradients of the inputs, from tuples of the inputs, of the outputs and of the
            outputs' gradients: a tensor for each input, or None. By default the reference's.

    Returns:
        A decorator of the kernel: a function of JAX's of the same arguments, which are arrays. It
        returns the operator.

    Raises:
        ValueError: the name has no namespace, or is taken; there is no such platform; the reference
            has no annotations.
        TypeError: the kernel's parameters are not the reference's.
    """
    namespace, _, base = name.partition("::")
    if not namespace.isidentifier() or not base.isidentifier():
        raise ValueError(f'{name!r} is no name of an operator, such as "mylib::scaled"')
    if unknown := set(platforms) - set(_PLATFORMS):
        raise ValueError(f"there is no platform {', '.join(sorted(unknown))}: {_PLATFORMS}")
    torch.library.infer_schema(reference, mutates_args=())
    parameters = list(signature_of(reference).parameters)
    if unknown := set(static) - set(parameters):
        raise ValueError(f"the reference has no parameter {', '.join(sorted(unknown))}")

    def define(function: Callable[..., Any]) -> Any:
        own = [p for p in signature_of(function).parameters if p != "interpret"]
        if own != parameters:
            raise TypeError(f"the kernel takes {own}, and the reference {parameters}")
        op = define_operator(name, reference, backward)
        given = _Kernel(name, function, tuple(platforms), tuple(static), suits)
        rule(name)(functools.partial(_lower, given))
        return op

    return define


def define_operator(
    name: str, reference: Callable[..., Any], backward: Backward | None = None
) -> Any:
    """An operator that is its reference on other devices and in its decomposition, with a fake
    implementation, derivatives and vmap; arguments and errors are those of `kernel`."""
    namespace, _, base = name.partition("::")
    if hasattr(getattr(torch.ops, namespace), base):
        raise ValueError(f"there is an operator {name} already")
    library = torch.library.Library(namespace, "FRAGMENT")
    _libraries.append(library)
    schema = torch.library.infer_schema(reference, mutates_args=())
    library.define(base + schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device in _OTHER_DEVICES:
        library.impl(base, reference, device)
    op: Any = getattr(getattr(torch.ops, namespace), base).default
    torch.library.register_fake(name, reference, lib=library)
    torch._decomp.register_decomposition(op)(reference)
    _differentiate(library, name, reference, backward)
    torch.library.register_vmap(name, functools.partial(_batched, op), lib=library)
    return op


class _Kernel(NamedTuple):
    name: str
    function: Callable[..., Any]
    platforms: tuple[str, ...]
    static: tuple[str, ...]
    suits: Callable[..., bool] | None


def _lower(kernel: _Kernel, b: Any, *args: Any) -> Any:
    from lazyxla.lowering.apply import apply_jax
    from lazyxla.lowering.decompose import decompose

    if b.platform not in kernel.platforms or b.annotations is not None:
        return decompose(b, kernel.name, args)
    if kernel.suits is not None and not kernel.suits(*_described(kernel, b, args)):
        return decompose(b, kernel.name, args)
    bound = _bound(kernel.function, b.platform == "cpu")
    return apply_jax(b, JaxRule(bound, kernel.static), args, lowered_as=b.platform)


def _described(kernel: _Kernel, b: Any, args: tuple[Any, ...]) -> list[Any]:
    """The arguments as `suits` gets them."""

    def describe(arg: Any) -> Any:
        if isinstance(arg, (list, tuple)):
            return type(arg)(describe(a) for a in arg)
        if isinstance(arg, (Scalar, Value)):
            dtype, shape = b.spec(b.value(arg))
            return torch.empty(shape, dtype=dtype, device="meta")
        return arg

    names = signature_of(kernel.function).parameters
    return [
        plain(arg) if name in kernel.static else describe(arg) for name, arg in zip(names, args)
    ]


@functools.cache
def _bound(function: Callable[..., Any], interpret: bool) -> Callable[..., Any]:
    """The kernel as it is traced: with 64-bit types if a tensor has one, as kernels for TPUs know
    none."""
    signature = signature_of(function)
    given = {"interpret": interpret} if "interpret" in signature.parameters else {}

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        import jax

        arrays = [x for x in jax.tree.leaves((args, kwargs)) if isinstance(x, jax.Array)]
        wide = any(str(x.dtype) in _NARROWER and not x.weak_type for x in arrays)

        def narrowed(x: Any) -> Any:
            dtype = _NARROWER.get(str(getattr(x, "dtype", "")))
            return x if wide or dtype is None else jax.lax.convert_element_type(x, dtype)

        args, kwargs = jax.tree.map(narrowed, (args, kwargs))
        with jax.enable_x64(wide):
            return function(*args, **kwargs, **given)

    others = [p for name, p in signature.parameters.items() if name != "interpret"]
    call.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
    return call


_NARROWER = {
    "float64": "float32",
    "int64": "int32",
    "uint64": "uint32",
    "complex128": "complex64",
}


def _differentiate(
    library: torch.library.Library,
    name: str,
    reference: Callable[..., Any],
    backward: Backward | None,
) -> None:
    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        leaves, ctx.tree = pytree.tree_flatten((inputs, _listed(output)))
        ctx.is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        ctx.others = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        ctx.save_for_backward(*(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)))

    def differentiate(ctx: Any, *gradients: Any) -> Any:
        tensors, others = iter(ctx.saved_tensors), iter(ctx.others)
        leaves = [next(tensors) if is_tensor else next(others) for is_tensor in ctx.is_tensor]
        inputs, outputs = pytree.tree_unflatten(leaves, ctx.tree)
        given = tuple(
            torch.zeros_like(x) if g is None else g for g, x in zip(gradients, outputs, strict=True)
        )
        if backward is not None:
            return tuple(backward(tuple(inputs), tuple(outputs), given))
        return gradients_of(reference, inputs, outputs, given)

    torch.library.register_autograd(name, differentiate, setup_context=setup, lib=library)


def gradients_of(
    reference: Callable[..., Any], inputs: Any, outputs: Any, gradients: tuple[torch.Tensor, ...]
) -> tuple[Any, ...]:
    """A function's gradients of its inputs: a tensor, None, or a list of them for each."""
    # As PyTorch has it: what is in a list of tensors counts by itself, any other list as a whole.
    leaves, tree = pytree.tree_flatten(tuple(inputs), is_leaf=_is_plain_list)
    places = [i for i, x in enumerate(leaves) if _has_gradient(x)]
    known = [i for i, x in enumerate(outputs) if _has_gradient(x)]

    def of(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = list(leaves)
        for i, value in zip(places, values, strict=True):
            given[i] = value
        results = _listed(reference(*pytree.tree_unflatten(given, tree)))
        return tuple(results[i] for i in known)

    pull: Any = torch.func.vjp(of, *(leaves[i] for i in places))[1]
    found = dict(zip(places, pull(tuple(gradients[i] for i in known)), strict=True))
    gathered = pytree.tree_unflatten([found.get(i) for i in range(len(leaves))], tree)
    return tuple(gathered)


def _has_gradient(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and is_differentiable(x.dtype)


def _is_plain_list(x: Any) -> bool:
    return isinstance(x, list) and not any(isinstance(part, torch.Tensor) for part in x)


def _batched(op: Any, info: Any, in_dims: Any, *args: Any) -> Any:
    """Sample by sample."""
    found = []
    for number in range(info.batch_size):
        found.append(_listed(op(*(_sample(x, d, number) for x, d in zip(args, in_dims)))))
    stacked = [torch.stack(parts) for parts in zip(*found, strict=True)]
    is_single = len(op._schema.returns) == 1 and str(op._schema.returns[0].type) == "Tensor"
    return (stacked[0], 0) if is_single else (tuple(stacked), (0,) * len(stacked))


def _sample(x: Any, dim: Any, number: int) -> Any:
    if isinstance(dim, (list, tuple)):
        return [_sample(part, d, number) for part, d in zip(x, dim, strict=True)]
    return x if dim is None else x.select(dim, number)


def _listed(output: Any) -> list[Any]:
    return list(output) if isinstance(output, (list, tuple)) else [output]
