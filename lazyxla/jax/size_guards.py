"""Whether a function does the same for all sizes of symbolic dimensions.

PyTorch traces it with symbolic sizes, and keeps what it had to know of them ("n <= 10"). The answer
must be the same for all sizes. What PyTorch itself asks, such as a tensor's layout in memory, has
other answers for sizes of 1, with the same values: for them only the questions of other code count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lazyxla.jax.torch_functions import Function, trace_with
from lazyxla.lowering import DifferentProgramsError, errors
from lazyxla.runtime import BACKEND

_NEAR = 70
"""This many sizes from the least one on are tried, and some beyond."""

_FAR = (100, 127, 128, 129, 255, 256, 511, 512, 1000, 1023, 1024, 2048, 4096, 5000, 65536)


def check_guards(function: Function, types: Sequence[Any], variables: Any) -> None:
    """Checks a function of tensors.

    Args:
        types: dtypes and shapes of its arguments, with dimensions of JAX's (``_DimExpr``).
        variables: a `Variables`, of those dimensions.

    Raises:
        DifferentProgramsError: it does something else for other sizes.
        LoweringError: it cannot be traced.
    """
    from torch._dynamo.source import ConstantSource
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import (
        DimDynamic,
        ShapeEnv,
        StatelessSymbolicContext,
    )

    shape_env = ShapeEnv(duck_shape=False, specialize_zero_one=False)
    mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    given: list[torch.Tensor] = []
    symbols: dict[Any, Any] = {}
    for number, (dtype, shape) in enumerate(types):
        static = variables.at(shape, variables.points.sizes[0])
        kinds = [DimDynamic.STATIC if isinstance(d, int) else DimDynamic.DYNAMIC for d in shape]
        x = mode.from_tensor(
            torch.empty(static, dtype=dtype, device="meta"),
            symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds),
            source=ConstantSource(f"x{number}"),
        )
        with mode:
            given.append(torch.empty(x.shape, dtype=dtype, device=BACKEND))
        for dim, size in zip(shape, x.shape, strict=True):
            if isinstance(size, torch.SymInt):
                symbols[size.node.expr] = dim
    trace_with(function, given)
    for guard in shape_env.guards:
        _check(guard, symbols, variables)


def _check(guard: Any, symbols: dict[Any, Any], variables: Any) -> None:
    import sympy

    frame = guard.sloc.framework_loc
    is_users = _is_users(frame)
    for sizes in _sizes(variables):
        if 1 in sizes and not is_users:
            continue
        values = dict(zip(symbols, variables.at([*symbols.values()], sizes), strict=True))
        if guard.expr.xreplace(values):
            continue
        asked = guard.expr.xreplace({s: sympy.Symbol(str(dim)) for s, dim in symbols.items()})
        known = ", ".join(f"{n}={size}" for n, size in zip(variables.names, sizes, strict=True))
        raise DifferentProgramsError(
            "lazyxla: a function of symbolic dimensions does the same for all sizes, but this one "
            f"asks for {asked}, which does not hold for {known}"
            + (f"\n(asked at {frame.filename}:{frame.lineno})" if is_users else "")
        )


def _is_users(frame: Any) -> bool:
    return hasattr(frame, "filename") and errors.is_users(frame.filename)


def _sizes(variables: Any) -> Iterator[tuple[int, ...]]:
    """Each variable by itself, and all together."""
    middle = variables.points.sizes[0]
    tried = [
        [low + i for i in range(_NEAR) if low + i <= high]
        + [n for n in _FAR if low + _NEAR <= n <= high]
        for low, high in variables.bounds
    ]
    for i, sizes in enumerate(tried):
        for n in sizes:
            yield (*middle[:i], n, *middle[i + 1 :])
    yield from zip(*tried, strict=False)
