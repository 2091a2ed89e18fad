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
