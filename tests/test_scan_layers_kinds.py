"""scan_layers: which layers it takes, and which it refuses."""

from __future__ import annotations

import copy
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazyxla
from tests.support import DEVICE
from tests.test_scan_layers import (
    LAYERS,
    WIDTH,
    Affine,
    Deep,
    Mlp,
    gradients,
    mlps,
    on_device,
    one_by_one,
    scan,
)

# ---- what layers may be and do ----


def test_state_dict_is_that_of_the_layers() -> None:
    layers, inputs = mlps()
    scanned = Deep(copy.deepcopy(layers).to(DEVICE), scan())
    before = scanned(inputs[0].to(DEVICE)).detach().cpu()
    plain = Deep(mlps()[0], one_by_one)
    plain.load_state_dict(scanned.state_dict())
    torch.testing.assert_close(plain(inputs[0]).detach(), before)
    other = Deep(mlps()[0].to(DEVICE), scan())
    other.load_state_dict(plain.state_dict())
    torch.testing.assert_close(other(inputs[0].to(DEVICE)).detach().cpu(), before)


class Branches(nn.Module):
    """Carries a float, a count, and what nobody changes; takes numbers and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: dict[str, Any], table: torch.Tensor, *, scale: float, twice: bool = False
    ) -> dict[str, Any]:
        moved = self.linear(x["x"]) * table.exp() * scale + x["fixed"]
        return {"x": x["x"] + moved * (2 if twice else 1), "n": x["n"] + 1, "fixed": x["fixed"]}


@pytest.mark.parametrize("remat", ["none", "full"])
def test_trees_and_arguments(remat: Any) -> None:
    """Gradients of what all layers are given are summed over them."""
    layers = nn.ModuleList(Branches() for _ in range(LAYERS))

    def apply(scanned: bool) -> Callable[..., Any]:
        def call(
            layers: Any, x: torch.Tensor, table: torch.Tensor, fixed: torch.Tensor
        ) -> torch.Tensor:
            start = {"x": x, "n": torch.zeros((), dtype=torch.int64, device=x.device)}
            start["fixed"] = fixed
            more: dict[str, Any] = {"scale": 0.5, "twice": True}
            if scanned:
                more["remat"] = remat
            end = (lazyxla.scan_layers if scanned else one_by_one)(layers, start, table, **more)
            assert end["n"].item() == LAYERS
            result: torch.Tensor = end["x"] + end["fixed"]
            return result

        return call

    layers.double()
    inputs = [torch.randn(*shape).double() for shape in ((4, WIDTH), (WIDTH,), (4, 1))]
    expected = gradients(layers, inputs, apply(False))
    torch.testing.assert_close(gradients(*on_device(layers, inputs), apply(True)), expected)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.relu(self.norm(self.linear(x)))


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("training", [True, False])
def test_buffers_are_written(remat: Any, training: bool) -> None:
    layers = nn.ModuleList(Normed() for _ in range(LAYERS)).double().train(training)
    inputs = [torch.randn(6, WIDTH).double()]
    ours, device_inputs = on_device(layers, inputs)
    expected = gradients(layers, inputs, one_by_one)
    torch.testing.assert_close(gradients(ours, device_inputs, scan(remat)), expected)
    for name, buffer in layers.named_buffers():
        torch.testing.assert_close(ours.get_buffer(name).cpu(), buffer)


def test_frozen_layers_get_no_gradient() -> None:
    layers, (x,) = on_device(*mlps())
    first: Any = layers[0]  # type: ignore[index]
    first.requires_grad_(False)
    lazyxla.scan_layers(layers, x).sum().backward()
    has = [all(p.grad is not None for p in layer.parameters()) for layer in layers.children()]
    assert has == [False, True, True]
    assert all(p.grad is None for p in first.parameters())


def test_attributes_that_do_not_matter_may_differ() -> None:
    layers = nn.ModuleList(Affine(number) for number in range(LAYERS))
    inputs = [torch.randn(2, WIDTH)]
    expected = gradients(layers, inputs, one_by_one)
    torch.testing.assert_close(gradients(*on_device(layers, inputs), scan()), expected)


def test_attribute_that_changes_counts() -> None:
    layers = nn.ModuleList(nn.Dropout(0.0) for _ in range(2))
    x = torch.ones(64, device=DEVICE)
    assert lazyxla.scan_layers(layers, x).min().item() == 1
    for layer in layers:
        layer.p = 1.0
    assert lazyxla.scan_layers(layers, x).max().item() == 0
    assert lazyxla.scan_layers(layers.eval(), x).min().item() == 1


class Scaled(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: torch.Tensor, divisor: float = 1.0) -> torch.Tensor:
        return x * self.config["parts"].scale / divisor


def test_what_an_attribute_holds_counts() -> None:
    parts = types.SimpleNamespace(scale=2.0)
    layers, x = [Scaled({"parts": parts}) for _ in range(2)], torch.ones((), device=DEVICE)
    assert lazyxla.scan_layers(layers, x).item() == 4
    parts.scale = 3.0
    assert lazyxla.scan_layers(layers, x).item() == 9
    for layer in layers:
        layer.config["parts"] = types.SimpleNamespace(scale=-1.0)
    assert lazyxla.scan_layers(layers, x).item() == 1


def test_zeros_of_both_signs() -> None:
    layers, x = [Scaled({"parts": types.SimpleNamespace(scale=1.0)})], torch.ones((), device=DEVICE)
    assert lazyxla.scan_layers(layers, x, 0.0).item() == float("inf")
    assert lazyxla.scan_layers(layers, x, -0.0).item() == float("-inf")


class Activated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.activation = self.doubled
        self.parts = [self.doubled, lambda x: self.doubled(x)]

    def doubled(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(x)


def test_layers_end() -> None:
    layer = Activated()
    x = torch.ones(2, device=DEVICE)
    assert lazyxla.scan_layers([layer], x).max().item() == 2
    reference = weakref.ref(layer)
    del layer
    gc.collect()
    assert reference() is None


class Counting(nn.Module):
    def __init__(self, count: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("count", count)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.count.add_(1)


@pytest.mark.parametrize("apart", [True, False])
def test_buffers_in_the_same_memory(apart: bool) -> None:
    def run(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        memory = torch.zeros(3, device=device)
        layers = [Counting(memory[i] if apart else memory[0]) for i in range(3)]
        made = lazyxla.scan_layers(layers, torch.ones(2, device=device)).cpu()
        return made, memory.cpu()

    torch.testing.assert_close(run(DEVICE), run("cpu"))


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def test_complex() -> None:
    layers = nn.ModuleList(Rotated() for _ in range(2))
    x = torch.randn(2, WIDTH, dtype=torch.complex64)

    def applied(apply: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: torch.view_as_real(apply(*args))

    expected = gradients(layers, [x], applied(one_by_one))
    torch.testing.assert_close(gradients(*on_device(layers, [x]), applied(scan())), expected)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Affine() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = lazyxla.scan_layers(self.layers, x)
        return result


def test_within_a_layer_and_on_the_cpu() -> None:
    layers = nn.ModuleList(Pair() for _ in range(2))
    inputs = [torch.randn(2, WIDTH)]
    expected = gradients(layers, inputs, one_by_one)
    torch.testing.assert_close(gradients(layers, inputs, scan()), expected)
    torch.testing.assert_close(gradients(*on_device(layers, inputs), scan()), expected)


def test_checkpoint_name_elsewhere_is_its_argument() -> None:
    x = torch.ones(2, device=DEVICE)
    assert lazyxla.checkpoint_name(x, "act") is x


# ---- errors ----


class Calls(nn.Module):
    """A layer of any function."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


def calling(function: Callable[[torch.Tensor], Any]) -> list[nn.Module]:
    return [Calls(function), Calls(function)]


def hooked() -> list[nn.Module]:
    layers = [Affine(), Affine()]
    layers[1].linear.register_forward_hook(lambda *_: None)
    return list(layers)


def backward_hooked() -> list[nn.Module]:
    layers = [Affine(), Affine()]
    layers[0].register_full_backward_hook(lambda *_: None)
    return list(layers)


class Writes(Affine):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.add_(1))


def writing() -> list[nn.Module]:
    return [Writes(), Writes()]


_OUTSIDE = torch.ones(WIDTH)

ERRORS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (list, ValueError, "scan_layers takes at least one layer"),
    (lambda: [Affine(), torch.relu], TypeError, "takes modules, layer 1 is a builtin"),
    (lambda: [Affine(), Mlp()], ValueError, "layer 1 differs from layer 0: it is a Mlp, not a"),
    (
        lambda: [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)],
        ValueError,
        "layer 1 differs from layer 0: only one of them has 'bias'",
    ),
    (
        lambda: [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)],
        ValueError,
        r"'weight' has shape \(2, 8\) and dtype torch.float32, not \(8, 8\) and torch.float32",
    ),
    (
        lambda: [nn.Dropout(0.1), nn.Dropout(0.1), nn.Dropout(0.2)],
        ValueError,
        "layer 2 computes something else than layer 0; they differ in 'p'",
    ),
    (hooked, ValueError, r"'linear' of layer 1 \(Linear\) has a forward hook. Remove it"),
    (backward_hooked, ValueError, r"layer 0 \(Affine\) has a backward hook"),
    (
        lambda: [nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2)],
        TypeError,
        r"given a tensor of shape \(2, 8\) and torch.float32, and returned a tensor of shape "
        r"\(2, 2\)",
    ),
    (lambda: calling(torch.Tensor.half), TypeError, "returned a tensor .* torch.float16"),
    (lambda: calling(lambda x: (x, x)), TypeError, r"the next x: .*and returned \(a tensor"),
    (
        lambda: calling(lambda x: x * x.sum().item()),
        NotImplementedError,
        "cannot run aten::_local_scalar_dense in a loop",
    ),
    (
        lambda: calling(lambda x: x[x > 0].sum() + x),
        NotImplementedError,
        "cannot run aten::nonzero in a loop",
    ),
    (
        lambda: calling(lambda x: torch.ops.lazyxla_tests.on_host(x)),
        NotImplementedError,
        "cannot run lazyxla_tests::on_host in a loop: it runs on the host only",
    ),
    (lambda: calling(lambda x: x.add_(1)), NotImplementedError, "must not write to its arguments"),
    (writing, NotImplementedError, "must not write .* values with gradients to its buffers"),
    (
        lambda: calling(lambda x: x + _OUTSIDE),
        ValueError,
        "a layer reads a tensor that is none of its parameters, buffers and arguments",
    ),
]


@pytest.mark.parametrize(("make", "kind", "text"), ERRORS)
def test_errors_of_layers(make: Callable[[], Any], kind: type[Exception], text: str) -> None:
    layers = make()
    moved = [m.to(DEVICE) if isinstance(m, nn.Module) else m for m in layers]
    with pytest.raises(kind, match=text):
        lazyxla.scan_layers(moved, torch.ones(2, WIDTH, device=DEVICE))


def test_errors_of_arguments() -> None:
    layers = nn.ModuleList(Mlp() for _ in range(2)).to(DEVICE)
    x = torch.ones(2, WIDTH, device=DEVICE)
    with pytest.raises(ValueError, match='remat is "none", "full" or a collection of names'):
        lazyxla.scan_layers(layers, x, remat="act")
    with pytest.raises(ValueError, match=r"remat names \['attn'\], but .* named \['act'\]"):
        lazyxla.scan_layers(layers, x, remat=["attn", "act"])
    with pytest.raises(TypeError, match="remat's names are a collection of strings"):
        lazyxla.scan_layers(layers, x, remat=[1])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="carries tensors, not a float"):
        lazyxla.scan_layers(layers, 1.0)
    with pytest.raises(TypeError, match="carries at least one tensor"):
        lazyxla.scan_layers(layers, ())
    with pytest.raises(ValueError, match="argument of the layers is on cpu"):
        lazyxla.scan_layers(layers, x, torch.ones(2))
    layers[1].cpu()
    with pytest.raises(ValueError, match=r"'norm.weight' of layer 1 is on cpu, and the first"):
        lazyxla.scan_layers(layers, x)


def test_no_second_derivative() -> None:
    layers, (x,) = on_device(*mlps())
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(scan()(layers, x).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="scan_layers has no second derivative"):
        gradient.sum().backward()
