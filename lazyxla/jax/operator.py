"""The operator that calls a JAX function, and what autograd and torch.func make of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from lazyxla.jax.flat_functions import Aval, FlatFunction, Split, by_name, is_differentiable

_library = torch.library.Library("lazyxla", "FRAGMENT")
_library.define("jax_call(Tensor[] inputs, str name) -> Tensor[]")
_record = torch.ops.lazyxla.jax_call.default


@torch.library.register_fake("lazyxla::jax_call", lib=_library)
def _(inputs: Sequence[torch.Tensor], name: str) -> list[torch.Tensor]:
    outputs = by_name[name].outputs
    return [inputs[0].new_empty(shape, dtype=dtype) for dtype, shape in outputs]


def call(function: FlatFunction, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The function's results. `inputs` are tensors of one device, at least one."""
    is_transformed = _is_transformed()
    if is_transformed:
        chosen = list(range(len(inputs)))
    elif torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        chosen = [i for i, x in enumerate(inputs) if x.requires_grad]
    else:
        return _record(inputs, function.name)  # type: ignore[no-any-return]
    variables = tuple(i for i in chosen if is_differentiable(inputs[i].dtype))
    split = None
    if variables and function.differentiable_outputs and not is_transformed:
        split = function.split(variables)
    results = JaxCall.apply(function, variables, split, *inputs)  # type: ignore[no-untyped-call]
    return results[: len(function.outputs)]  # type: ignore[no-any-return]


def _is_transformed() -> bool:
    """Whether the call is within forward-mode differentiation or a transform of torch.func."""
    if forward_ad._current_level >= 0:
        return True
    return torch._C._functorch.peek_interpreter_stack() is not None


class JaxCall(torch.autograd.Function):
    """(function, variables, split, *inputs) -> the results.

    `variables` are the numbers of the inputs that have gradients. `split` saves computing the
    function again in the backward; the residuals are further results. Without it, and where
    gradients are to be differentiated again, the backward computes it again.
    """

    @staticmethod
    def forward(
        function: FlatFunction, variables: tuple[int, ...], split: Split | None, *inputs: Any
    ) -> tuple[torch.Tensor, ...]:
        return tuple(_record(inputs, split.forward.name if split else function.name))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.function, ctx.variables, ctx.split, *tensors = inputs
        count = len(ctx.function.outputs)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(x for x in output[:count] if not is_differentiable(x.dtype)), *output[count:]
        )
        ctx.number, ctx.device = len(tensors), tensors[0].device
        if ctx.split is None:
            ctx.save_for_backward(*tensors)
        else:  # others may be written to
            made = iter(output[count:])
            ctx.save_for_backward(
                *(next(made) if i is None else tensors[i] for i in ctx.split.arguments)
            )
            ctx.given = [(x, x._version) for x in tensors]
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        function = ctx.function
        given = [
            _gradient(gradients[i], function.outputs[i], ctx.device)
            for i in function.differentiable_outputs
        ]
        found: Sequence[torch.Tensor | None] = [None] * len(ctx.variables)
        if given and ctx.split is not None and not torch.is_grad_enabled():
            found = call(ctx.split.backward, [*ctx.saved_tensors, *given])
        elif given:
            inputs = ctx.saved_tensors if ctx.split is None else _unchanged(ctx.given)
            found = call(function.pullback(ctx.variables), [*inputs, *given])
        by_variable = dict(zip(ctx.variables, found, strict=True))
        return None, None, None, *(by_variable.get(i) for i in range(ctx.number))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        function = ctx.function
        given = {i: t for i, t in enumerate(tangents[3:]) if t is not None}
        pushed = function.pushforward(tuple(given))
        found = iter(call(pushed, [*ctx.saved_tensors, *given.values()]))
        known = set(function.differentiable_outputs)
        return tuple(next(found) if i in known else None for i in range(len(function.outputs)))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], function: FlatFunction, _: Any, __: Any, *inputs: Any
    ) -> Any:
        results = call(function.batched(tuple(in_dims[3:]), info.batch_size), inputs)
        return tuple(results), (0,) * len(results)


def _gradient(given: torch.Tensor | None, of: Aval, device: torch.device) -> torch.Tensor:
    """A result's gradient, or zeros."""
    dtype, shape = of
    return torch.zeros(shape, dtype=dtype, device=device) if given is None else given


def _unchanged(given: Sequence[tuple[torch.Tensor, int]]) -> list[torch.Tensor]:
    for number, (x, version) in enumerate(given):
        if x._version != version:
            raise RuntimeError(
                f"argument {number} of a JAX function has been modified by an inplace operation "
                "(counting all tensors among its arguments), and is needed for a gradient that "
                "can be differentiated again"
            )
    return [x for x, _ in given]
