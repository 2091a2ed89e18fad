"""PyTorch's code with the user's in it."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.step_places import common
from tests.step_places.common import Config, Place, fresh, place, set_scale, unwatched
from tests.support import DEVICE


@place
def function_of_torch_that_is_patched() -> Place:
    """Called by name, and by a module of PyTorch's."""
    before, relu = F.relu, nn.ReLU()

    def patch(value: float) -> None:
        F.relu = lambda x, inplace=False: before(x + 10) * value * common.SCALE

    return Place(lambda x: relu(x), [patch, set_scale], lambda: setattr(F, "relu", before))


@place
def method_of_torch_that_is_patched() -> Place:
    before, relu = nn.ReLU.forward, nn.ReLU()

    def patch(value: float) -> None:
        nn.ReLU.forward = lambda self, x: before(self, x + 10) * value * common.SCALE

    def undo() -> None:
        nn.ReLU.forward = before

    return Place(lambda x: relu(x), [patch, set_scale], undo)


@place
def method_of_torch_that_is_patched_by_a_wrapper_of_torch_s() -> Place:
    """Whose own code is PyTorch's, or Python's."""
    before, relu = nn.ReLU.forward, nn.ReLU()

    @torch.enable_grad()
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x * common.SCALE

    def patch(value: float) -> None:
        nn.ReLU.forward = torch.autocast("cpu", enabled=False)(lambda self, x: x * value)

    def undo() -> None:
        nn.ReLU.forward = before

    nn.ReLU.forward = forward
    return Place(lambda x: relu(x), [set_scale, patch], undo)


@place
def method_of_tensors_that_is_patched() -> Place:
    before = torch.Tensor.sigmoid

    def patch(value: float) -> None:
        torch.Tensor.sigmoid = lambda self: self * value * common.SCALE

    def undo() -> None:
        torch.Tensor.sigmoid = before

    return Place(lambda x: x.sigmoid(), [patch, set_scale], undo)


@place
def method_that_is_added_to_modules() -> Place:
    relu: Any = nn.ReLU()

    def add(value: float) -> None:
        nn.Module.scaled_relu = lambda self, x: self(x) * value * common.SCALE  # type: ignore[attr-defined]

    def remove() -> None:
        del nn.Module.scaled_relu

    add(1.0)
    return Place(lambda x: relu.scaled_relu(x), [add, set_scale], remove)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


@place
def forward_of_an_instance() -> Place:
    block = Block()

    def patch(value: float) -> None:
        block.forward = lambda x: x * value * common.SCALE  # type: ignore[method-assign]

    return Place(lambda x: block(x), [patch, set_scale, lambda v: setattr(block, "factor", v)])


@place
def forward_that_is_an_object() -> Place:
    forward = fresh()()
    block = fresh(base=nn.Module, forward=forward)()
    return Place(lambda x: block(x), [lambda v: setattr(forward, "scale", v)])


@place
def forward_of_an_inner_layer() -> Place:
    layers = nn.Sequential(nn.Identity(), Block())

    def patch(value: float) -> None:
        layers[0].forward = lambda x: x * value * common.SCALE  # type: ignore[method-assign]

    def replace(value: float) -> None:
        layers[1] = Block()
        layers[1].factor = value

    return Place(
        lambda x: layers(x),
        [patch, set_scale, replace, lambda v: setattr(layers[1], "factor", v)],
    )


def _hooked(register: Callable[[nn.Module, Any], Any]) -> Place:
    block = Block()
    handles: list[Any] = []

    def add(value: float) -> None:
        handles.append(
            register(block, lambda module, args, *out: (out or args)[0] * value * common.SCALE)
        )

    def remove(value: float) -> None:
        if handles:
            handles.pop().remove()

    return Place(
        lambda x: block(x), [add, remove, set_scale], lambda: [h.remove() for h in handles]
    )


@place
def forward_hooks() -> Place:
    return _hooked(nn.Module.register_forward_hook)


@place
def forward_pre_hooks() -> Place:
    return _hooked(nn.Module.register_forward_pre_hook)


@place
def order_of_forward_hooks() -> Place:
    block = Block()
    for add in (0.25, 0.5):
        block.register_forward_hook(lambda module, args, out, add=add: out * add + add)
    return Place(
        lambda x: block(x), [lambda v: block._forward_hooks.move_to_end(min(block._forward_hooks))]
    )


@place
def hooks_of_all_modules() -> Place:
    block = Block()
    handles: list[Any] = []

    def add(value: float) -> None:
        def hook(module: nn.Module, args: Any, out: Any) -> Any:
            return out * value if module is block else None

        handles.append(nn.modules.module.register_module_forward_hook(hook))

    def remove(value: float) -> None:
        if handles:
            handles.pop().remove()

    return Place(lambda x: block(x), [add, remove], lambda: [h.remove() for h in handles])


@place
def buffer() -> Place:
    block = Block()
    block.register_buffer("factor2", torch.ones((), device=DEVICE), persistent=False)
    block.forward = types.MethodType(lambda self, x: x * self.factor2, block)  # type: ignore[method-assign]

    def replace(value: float) -> None:
        block.factor2 = torch.tensor(value, device=DEVICE)

    return Place(
        lambda x: block(x), [lambda v: block.factor2.fill_(v), replace, lambda v: block.half()]
    )


@place
def parametrization() -> Place:
    class Scaled(nn.Module):
        amount = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.amount * common.SCALE

    layer = nn.Linear(4, 4, bias=False).to(DEVICE)
    scaled = Scaled()
    nn.utils.parametrize.register_parametrization(layer, "weight", scaled)
    return Place(lambda x: layer(x), [set_scale, lambda v: setattr(scaled, "amount", v)])


@unwatched
def traced_module() -> Place:
    class Traced(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _leaf(x)

    graph = _symbolic_trace(Traced())
    return Place(lambda x: graph(x), [set_scale])


def _leaf(x: torch.Tensor) -> torch.Tensor:
    return x * common.SCALE


def _symbolic_trace(module: nn.Module) -> Any:
    tracer = torch.fx.Tracer(autowrap_functions=(_leaf,))
    return torch.fx.GraphModule(module, tracer.trace(module))


class Scaling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * common.SCALE

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * common.SCALE * Config.scale


@place
def autograd_function() -> Place:
    return Place(
        lambda x: Scaling.apply(x),
        [set_scale, lambda v: setattr(Config, "scale", v)],
        lambda: setattr(Config, "scale", 1.0),
    )


@torch.library.custom_op("lazyxla_tests::step_scale", mutates_args=())
def step_scale(x: torch.Tensor) -> torch.Tensor:
    return x * common.SCALE


step_scale.register_fake(lambda x: torch.empty_like(x))
step_scale.register_autograd(lambda ctx, grad: grad * common.SCALE)


@unwatched
def operator_of_one_s_own() -> Place:
    return Place(lambda x: step_scale(x), [set_scale])


@unwatched
def operator_found_by_name() -> Place:
    return Place(lambda x: torch.ops.lazyxla_tests.step_scale(x), [set_scale])


_library = torch.library.Library("lazyxla_tests", "FRAGMENT")
_library.define("step_scale_composite(Tensor x) -> Tensor")
_library.impl("step_scale_composite", lambda x: x * common.SCALE, "CompositeImplicitAutograd")


@unwatched
def composite_operator() -> Place:
    return Place(lambda x: torch.ops.lazyxla_tests.step_scale_composite(x), [set_scale])


def _neg(x: torch.Tensor) -> torch.Tensor:
    return x * common.SCALE


def _take_over_neg() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it overrides
        library.impl("neg", _neg, "PrivateUse1")
    return library


@unwatched
def kernel_of_an_operator() -> Place:
    library = _take_over_neg()
    return Place(lambda x: torch.neg(x), [set_scale], library._destroy)


@place
def kernel_that_is_registered_later() -> Place:
    libraries: list[torch.library.Library] = []

    def change(value: float) -> None:
        set_scale(value)
        libraries.append(_take_over_neg())

    def remove(value: float | None = None) -> None:
        while libraries:
            libraries.pop()._destroy()

    return Place(lambda x: torch.neg(x), [change, remove], remove)


@place
def pytree_node() -> Place:
    class Node(list):
        pass

    def flatten(node: Any) -> Any:
        return [node[0] * common.SCALE], None

    torch.utils._pytree.register_pytree_node(Node, flatten, lambda values, _: Node(values))

    def read(x: torch.Tensor) -> torch.Tensor:
        return torch.utils._pytree.tree_leaves(Node([x]))[0]

    return Place(read, [set_scale], lambda: torch.utils._pytree._deregister_pytree_node(Node))


@place
def saved_tensor_hooks() -> Place:
    def read(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * common.SCALE):
            return x.exp() * 0.125

    return Place(read, [set_scale])


@place
def checkpointed() -> Place:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return x.tanh() * common.SCALE

    return Place(
        lambda x: torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False),
        [set_scale],
    )


@place
def function_mode() -> Place:
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, f: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = f(*args, **(kwargs or {}))
            return out * common.SCALE if f is torch.neg else out

    mode = Mode()

    def read(x: torch.Tensor) -> torch.Tensor:
        with mode:
            return torch.neg(x)

    return Place(read, [set_scale])
