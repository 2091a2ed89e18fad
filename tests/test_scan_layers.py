"""scan_layers: equal layers as one loop compute what they compute one by one."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazyxla
from lazyxla import lowering
from lazyxla.aot import capturing
from tests.support import DEVICE, counted

LAYERS, WIDTH = 3, 8
POLICIES: list[Any] = ["none", "full", ["act"]]


class Mlp(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = lazyxla.checkpoint_name(F.gelu(self.up(self.norm(x))), "act")
        return x + self.drop(self.down(hidden))


class Attention(nn.Module):
    """A transformer's block, with a mask that is the same for all of them."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp(dropout)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.mlp(x + self.out(mixed.transpose(1, 2).flatten(2)))


class Affine(nn.Module):
    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number = number
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def mlps() -> tuple[nn.Module, list[torch.Tensor]]:
    return nn.ModuleList(Mlp() for _ in range(LAYERS)), [torch.randn(5, WIDTH)]


def attentions() -> tuple[nn.Module, list[torch.Tensor]]:
    # A bias of the keys has no gradient but rounding errors, of which Adam makes steps unless they
    # are far below its epsilon.
    layers = nn.ModuleList(Attention() for _ in range(LAYERS)).double()
    return layers, [torch.randn(2, 4, WIDTH).double(), torch.randn(4, 4).double()]


def encoders() -> tuple[nn.Module, list[torch.Tensor]]:
    layers = nn.ModuleList(
        nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        for _ in range(LAYERS)
    )
    return layers.double(), [torch.randn(2, 4, WIDTH).double()]


def one_by_one(layers: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    for layer in layers:
        x = layer(x, *args, **kwargs)
    return x


def gradients(
    layers: nn.Module, inputs: list[torch.Tensor], apply: Callable[..., Any]
) -> dict[str, torch.Tensor]:
    """The result, and the gradients of inputs and parameters, on the CPU."""
    layers.zero_grad()
    inputs = [x.detach().requires_grad_() for x in inputs]
    result = apply(layers, *inputs)
    result.square().sum().backward()
    found = {"result": result, **{f"input {i}": x.grad for i, x in enumerate(inputs)}}
    found |= {name: p.grad for name, p in layers.named_parameters()}
    return {name: x.detach().cpu() for name, x in found.items() if x is not None}


def on_device(layers: nn.Module, inputs: list[torch.Tensor]) -> tuple[nn.Module, list[Any]]:
    return copy.deepcopy(layers).to(DEVICE), [x.to(DEVICE) for x in inputs]


def scan(remat: Any = "none") -> Callable[..., Any]:
    return lambda layers, *inputs: lazyxla.scan_layers(layers, *inputs, remat=remat)


@pytest.mark.parametrize(
    ("make", "remat"),
    [
        *((mlps, remat) for remat in POLICIES),
        *((attentions, remat) for remat in POLICIES),
        *((encoders, remat) for remat in ("none", "full")),
    ],
)
def test_training(make: Callable[[], Any], remat: Any) -> None:
    """Five steps of AdamW, each one program, of which none is compiled after the second."""
    layers, inputs = make()
    expected = gradients(layers, inputs, one_by_one)
    ours, device_inputs = on_device(layers, inputs)
    torch.testing.assert_close(gradients(ours, device_inputs, scan(remat)), expected)
    ours.zero_grad()
    layers.zero_grad()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (layers, ours)]
    lazyxla.sync()
    for step in range(5):
        with counted() as n:
            for model, given, apply, optimizer in zip(
                (layers, ours), (inputs, device_inputs), (one_by_one, scan(remat)), optimizers
            ):
                apply(model, *given).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            lazyxla.sync()
        if step >= 2:
            assert (n.compiles, n.executions, n.fallbacks) == (0, 1, 0)
    for name, parameter in layers.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name).cpu(), parameter)


# ---- the program ----


def captured(count: int, remat: Any, rows: int = 4) -> capturing.CapturedProgram:
    with lazyxla.aot.capture() as programs:
        layers = nn.ModuleList(Mlp(0.1) for _ in range(count)).to(DEVICE)
        x = torch.randn(rows, WIDTH).to(DEVICE)
        lazyxla.sync()
        lazyxla.scan_layers(layers, x, remat=remat).square().mean().backward()
    return programs[-1]


def operations(count: int, remat: Any) -> Counter[str]:
    found = captured(count, remat)  # it keeps the loops' graphs
    text = lowering.lower_to_text(found.program, "cpu")
    return Counter(re.findall(r"stablehlo\.(\w+)", text))


@pytest.mark.parametrize("remat", POLICIES, ids=str)
def test_program_does_not_grow(remat: Any) -> None:
    """There are two loops, and with depth only the stacking of parameters and the taking apart of
    their gradients grow."""
    few, many = operations(4, remat), operations(16, remat)
    assert few["while"] == many["while"] == 2
    stacking = ("reshape", "slice", "concatenate")
    assert {**few, **dict.fromkeys(stacking, 0)} == {**many, **dict.fromkeys(stacking, 0)}
    assert few["concatenate"] == many["concatenate"]


def test_one_loop_without_gradients() -> None:
    layers = nn.ModuleList(Mlp() for _ in range(4)).to(DEVICE)
    with lazyxla.aot.capture() as programs, torch.no_grad():
        result = lazyxla.scan_layers(layers, torch.ones(2, WIDTH, device=DEVICE))
        lazyxla.sync()
    assert not result.requires_grad
    text = lowering.lower_to_text(programs[-1].program, "cpu")
    assert text.count("stablehlo.while") == 1


def test_memory_by_policy() -> None:
    full, names, none = (
        captured(8, remat, rows=256).compile().memory_stats()["temporary"]
        for remat in ("full", ["act"], "none")
    )
    assert full < names < none
    # The named values of all layers, no less.
    assert names - full >= 7 * 256 * 4 * WIDTH * 4


# ---- random numbers ----


@pytest.mark.parametrize("remat", POLICIES[:2])
def test_recomputed_dropout_is_the_same(remat: Any) -> None:
    """The gradient of dropouts is what they multiply with."""
    layers = nn.ModuleList(nn.Dropout(0.5) for _ in range(3))
    x = torch.ones(1000, device=DEVICE, requires_grad=True)
    y = lazyxla.scan_layers(layers, x, remat=remat)
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad.cpu(), y.detach().cpu())
    # Each layer drops half of what is left: they do not drop the same.
    kept = (y != 0).float().mean().item()
    assert 0.08 < kept < 0.17  # an eighth: four standard deviations
    assert y.max().item() == 8


def test_dropout_in_blocks() -> None:
    """Numbers depend on seed and order, not on the policy."""
    layers, inputs = on_device(
        nn.ModuleList(Attention(0.3) for _ in range(LAYERS)).double(), attentions()[1]
    )
    found = []
    for remat in [*POLICIES, "none"]:
        torch.manual_seed(7)
        found.append(gradients(layers, inputs, scan(remat)))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])
    again = gradients(layers, inputs, scan())
    assert not torch.equal(again["result"], found[0]["result"])


def test_dropout_changes_nothing_compiled() -> None:
    layers, x = nn.ModuleList(Mlp(0.5) for _ in range(2)).to(DEVICE), torch.ones(2, WIDTH)
    device_x = x.to(DEVICE)
    results = []
    for step in range(4):
        with counted() as n:
            results.append(lazyxla.scan_layers(layers, device_x).detach().cpu())
        assert step < 2 or n.compiles == 0
    assert not torch.equal(results[2], results[3])


# ---- modes ----


@pytest.mark.parametrize("mode", [True, "fused"])
@pytest.mark.parametrize("remat", POLICIES, ids=str)
def test_eager(mode: Any, remat: Any) -> None:
    layers, inputs = mlps()
    expected = gradients(layers, inputs, one_by_one)
    with lazyxla.eager_mode(mode):
        ours = gradients(*on_device(layers, inputs), scan(remat))
    torch.testing.assert_close(ours, expected)


def test_eager_is_one_program_per_loop() -> None:
    layers, (x,) = on_device(*mlps())
    with lazyxla.eager_mode(True):
        with counted() as n:
            y = lazyxla.scan_layers(layers, x)
        assert n.executions == 1
        with counted() as n:
            torch.autograd.grad(y, list(layers.parameters()), x)
        assert n.executions == 1


def test_region() -> None:
    layers, inputs = mlps()
    ours, (x,) = on_device(layers, inputs)

    @lazyxla.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = lazyxla.scan_layers(ours, x).square().sum()
        loss.backward()
        return loss

    expected = gradients(layers, inputs, one_by_one)
    step(x)
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.cpu(), expected[name])


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_inference(guard: Any) -> None:
    layers, inputs = encoders()
    layers.eval()
    ours, (x,) = on_device(layers, inputs)
    with guard():
        y = lazyxla.scan_layers(ours, x)
        expected = one_by_one(layers, *inputs)
    assert not y.requires_grad
    torch.testing.assert_close(y.cpu(), expected)


class Residual(Affine):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_autocast(remat: Any) -> None:
    """Against the layers one by one on the device. Numbers are such that bfloat16 holds them once
    it has rounded the weights: sums in another order are the same."""
    layers, inputs = nn.ModuleList(Residual() for _ in range(LAYERS)), torch.randint(-1, 2, (5, 8))
    for layer in layers:
        places = torch.eye(WIDTH)[torch.randperm(WIDTH)]
        layer.linear.weight.data = places * (1 + 2**-12)
        layer.linear.bias.data.zero_()
    ours, given = on_device(layers, [inputs.float()])

    def casting(apply: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            with torch.autocast(DEVICE, torch.bfloat16):
                return apply(*given)

        return call

    expected = gradients(ours, given, casting(one_by_one))
    found = gradients(ours, given, casting(scan(remat)))
    torch.testing.assert_close(found, expected)
    exact = gradients(ours, given, scan(remat))
    assert not torch.equal(found["result"], exact["result"])


class Deep(nn.Module):
    def __init__(self, layers: nn.Module, apply: Callable[..., Any]) -> None:
        super().__init__()
        self.layers, self.apply_all = layers, apply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.apply_all(self.layers, x)
        return result


def test_torch_func() -> None:
    lazyxla.Mesh((1,), ("data",))  # whether tensors are sharded is asked once there is a mesh
    layers, (x,) = mlps()
    theirs, ours = Deep(layers, one_by_one), Deep(copy.deepcopy(layers).to(DEVICE), scan("full"))

    def gradient(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
        def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
            return torch.func.functional_call(model, parameters, (x,)).square().sum()

        found = torch.func.grad(loss)(dict(model.named_parameters()))
        return {name: g.detach().cpu() for name, g in found.items()}

    torch.testing.assert_close(gradient(ours, x.to(DEVICE)), gradient(theirs, x))
    mapped = torch.vmap(ours)(x.expand(2, -1, -1).to(DEVICE))
    torch.testing.assert_close(mapped[1].detach().cpu(), theirs(x).detach())


@pytest.mark.usefixtures("fresh_dynamo")
def test_torch_compile_leaves_it_as_it_is() -> None:
    layers, inputs = mlps()
    ours, (x,) = on_device(layers, inputs)
    compiled = torch.compile(lambda x: scan()(ours, x * 2) + 1, backend="lazyxla")
    expected = one_by_one(layers, inputs[0] * 2) + 1
    torch.testing.assert_close(compiled(x).detach().cpu(), expected.detach())
