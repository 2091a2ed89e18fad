"""Modules as files that run without PyTorch: in JAX, and again on the device."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from math import nan
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
from torch import Tensor, nn

import lazyxla
from lazyxla.lowering import LoweringError
from lazyxla.platforms import plugin_of
from tests import vision  # before transformers, which imports torchvision
from tests.conftest import ROOT, RunPython
from tests.jax_interop.exporting import compare, transformer
from tests.support import DEVICE

jax.config.update("jax_platforms", "cpu")

NETWORKS = [
    *("alexnet", "vgg11", "resnet18", "squeezenet1_1", "densenet121", "googlenet"),
    *("shufflenet_v2_x0_5", "mobilenet_v2", "mobilenet_v3_small", "mnasnet0_5"),
    *("efficientnet_b0", "regnet_y_400mf", "convnext_tiny", "vit_b_16", "swin_t"),
]
QUICK = ("resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5")


def round_trip(
    module: Any, run_python: RunPython, folder: Path, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    called = module.module() if isinstance(module, torch.export.ExportedProgram) else module
    compare(lazyxla.export(module, args, kwargs), called, run_python, folder, args, kwargs)


@pytest.mark.parametrize("kind", ["bert", "gpt2", "vit"])
def test_transformers(kind: str, run_python: RunPython, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = transformer(kind)
    exported = torch.export.export(model.eval(), (), inputs)
    round_trip(exported, run_python, tmp_path, (), inputs)


@pytest.mark.parametrize("name", NETWORKS)
def test_image_networks(
    name: str, run_python: RunPython, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    if name not in QUICK and not pytestconfig.getoption("--every-size"):
        pytest.skip("takes minutes: --every-size runs it")
    torch.manual_seed(0)
    size = 224 if name in ("vit_b_16", "alexnet") else 64
    model = getattr(vision.models, name)(num_classes=10).eval()
    round_trip(model, run_python, tmp_path, (torch.randn(2, 3, size, size),), {})


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 2, dtype=torch.bfloat16)
    )


class Mixed(nn.Module):
    """Arguments and results of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, pair: Any, *, scale: float, mask: Tensor) -> dict[str, Any]:
        self.calls += 1
        product = pair["x"] @ self.weight * scale
        return {"product": product.masked_fill(~mask, 0), "best": [product.argmax(1)], "no": None}


def test_the_manifest_and_what_is_written(tmp_path: Path) -> None:
    module = Mixed()
    kwargs = {"scale": 2.0, "mask": torch.tensor([[True, False]])}
    x = {"x": torch.randn(4, 3)}
    exported = lazyxla.export(module, (x,), kwargs, platforms=("cpu",))
    exported.save(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest == exported.manifest
    assert manifest["mutations"] == ["calls"]
    assert manifest["constants"] == {"scale": 2.0}
    assert [(each["kind"], each["name"], each["dtype"]) for each in manifest["inputs"]] == [
        ("parameter", "weight", "float32"),
        ("buffer", "calls", "int64"),
        ("argument", "0.x", "float32"),
        ("argument", "mask", "bool"),
    ]
    assert [(each["name"], each["shape"], each["dtype"]) for each in manifest["outputs"]] == [
        ("best.0", [4], "int64"),
        ("product", [4, 2], "float32"),
        ("calls", [], "int64"),
    ]
    text = (tmp_path / "program.mlir").read_text()
    assert "stablehlo.dot_general" in text
    assert (tmp_path / "program.stablehlo").read_bytes()[:4] == b"ML\xefR"
    assert module.calls.item() == 0
    loaded = lazyxla.load_exported(tmp_path)
    assert {name for name, _ in loaded.state_dict().items()} == {"weight", "calls"}
    with pytest.raises(ValueError, match=r"made for scale=2.0, got 3.0"):
        loaded(*lazyxla.to_device((x,)), **lazyxla.to_device({**kwargs, "scale": 3.0}))
    for number in range(1, 4):
        found = loaded(*lazyxla.to_device((x,)), **lazyxla.to_device(kwargs))
        assert loaded.get_buffer("calls").item() == number
    expected = module(x, **kwargs)
    assert found["no"] is None
    torch.testing.assert_close(found["product"].cpu(), expected["product"].detach())
    assert found["best"][0].cpu().equal(expected["best"][0])


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor, factor: float, *, scale: Tensor) -> Tensor:
        return x * factor * self.scale * scale


def test_an_argument_that_is_named_as_a_parameter(tmp_path: Path) -> None:
    x, scale = torch.arange(3.0), torch.tensor(2.0)
    lazyxla.export(Scaled(), (x, 0.5), {"scale": scale}, platforms=("cpu",)).save(tmp_path)
    loaded = lazyxla.load_exported(tmp_path)
    found = loaded(x.to("lazyxla"), 0.5, scale=scale.to("lazyxla"))
    assert list(loaded.state_dict()) == ["scale"]
    torch.testing.assert_close(found.cpu(), x * 3)


@pytest.mark.parametrize(("constant", "others"), [(2, [2.0, True]), (0.0, [-0.0, 0]), (nan, [0.0])])
def test_a_constant_is_the_same_with_its_type(tmp_path: Path, constant: Any, others: Any) -> None:
    x = torch.ones(2)
    lazyxla.export(Shifted(), (x, constant), platforms=("cpu",)).save(tmp_path)
    loaded, x = lazyxla.load_exported(tmp_path), x.to("lazyxla")
    torch.testing.assert_close(loaded(x, constant).cpu(), torch.ones(2) + constant, equal_nan=True)
    for other in others:
        with pytest.raises(ValueError, match=f"made for 1={constant}, got {other}"):
            loaded(x, other)


def test_a_damaged_program_is_told(tmp_path: Path) -> None:
    lazyxla.export(Shifted(), (torch.ones(2), 1), platforms=("cpu",)).save(tmp_path)
    (tmp_path / "program.jax_export").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"program.jax_export is no program that this JAX reads"):
        lazyxla.load_exported(tmp_path)


class Shifted(nn.Module):
    def forward(self, x: Tensor, by: float) -> Tensor:
        return x + by


def test_the_module_stays_as_it_is() -> None:
    model = small()
    model[3].float()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    exported = lazyxla.export(model, (torch.randn(4, 2, 6, 6),))
    assert exported.manifest["platforms"] == ["cpu", "cuda", "tpu"]
    assert sorted(exported.manifest["mutations"]) == [
        *("1.num_batches_tracked", "1.running_mean", "1.running_var"),
    ]
    for name, x in model.state_dict().items():
        assert x.equal(before[name])


class WithTensors(nn.Module):
    """Holds tensors that are neither parameters nor buffers."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 3.0))
        self.offset = torch.arange(3.0).to(device) + 1
        self.listed = [torch.full((3,), 2.0, device=device)]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.offset + self.listed[0] * self.weight, self.offset[1:] * 2


@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_tensors_that_are_attributes_are_constants(device: str, tmp_path: Path) -> None:
    x, expected = torch.randn(3), WithTensors("cpu")
    exported = lazyxla.export(WithTensors(device), (x,), platforms=("cpu",))
    assert [each["name"] for each in exported.manifest["inputs"]] == ["weight", "0"]
    exported.save(tmp_path)
    results = lazyxla.load_exported(tmp_path)(x.to(DEVICE))
    for result, value in zip(results, expected(x), strict=True):
        torch.testing.assert_close(result.cpu(), value.detach())


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.group = nn.LayerNorm(8), nn.GroupNorm(2, 4, affine=False)
        self.rms = nn.RMSNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        q = self.layer(x)
        y = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        y = nn.functional.gelu(self.rms(y), approximate="tanh") + nn.functional.silu(self.group(x))
        return y.softmax(-1)


def test_operators_keep_their_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Named(), torch.randn(2, 4, 6, 8)
    exported = lazyxla.export(model, (x,), platforms=("cpu",))
    found = re.findall(r'stablehlo.composite "aten.(\w+)"', exported.text())
    assert sorted(found) == [
        *("gelu", "group_norm", "layer_norm", "rms_norm"),
        *("scaled_dot_product_attention", "silu", "softmax"),
    ]
    assert 'approximate = "tanh"' in exported.text()
    exported.save(tmp_path)
    loaded = lazyxla.load_exported(tmp_path)
    torch.testing.assert_close(loaded(x.to("lazyxla")).cpu(), model(x).detach())
    assert "composite" not in lazyxla.stablehlo(model, x)
    jitted = jax.jit(lazyxla.jax_view(model)).lower(lazyxla.jax_view(model).parameters, x.numpy())
    assert "composite" not in jitted.as_text()


class Quantized(nn.Module):
    """A linear layer whose weight is stored in few bits, with a scale for each output channel."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        weight = torch.randn(6, 4)
        limit = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
        self.register_buffer("scale", weight.abs().amax(1, keepdim=True) / limit)
        scaled = weight / self.scale
        self.register_buffer(
            "weight", (scaled.round() if dtype == torch.int8 else scaled).to(dtype)
        )

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.int8, "xi8>"), (torch.float8_e4m3fn, "xf8E4M3FN>")], ids=str
)
def test_quantized_weights_stay_so(dtype: torch.dtype, name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Quantized(dtype), torch.randn(3, 4)
    exported = lazyxla.export(model, (x,))
    exported.save(tmp_path)
    assert f"tensor<6x4{name}" in exported.text()
    loaded = lazyxla.load_exported(tmp_path)
    assert loaded.get_buffer("weight").dtype == dtype
    torch.testing.assert_close(loaded(x.to("lazyxla")).cpu(), model(x))


def test_of_a_model_on_the_device(tmp_path: Path) -> None:
    model, x = small().to("lazyxla").eval(), torch.randn(4, 2, 6, 6, device="lazyxla")
    model[3].float()
    program = torch.export.export(model, (x,))
    torch.testing.assert_close(program.module()(x), model(x))
    lazyxla.export(program).save(tmp_path)
    torch.testing.assert_close(lazyxla.load_exported(tmp_path)(x), model(x).detach())


def test_a_program_in_cpp(tmp_path: Path) -> None:
    """Without Python, through the plugin's functions in C."""
    plugin = Path(plugin_of("cpu"))
    runner = tmp_path / "run_exported"
    source = ROOT / "examples" / "cpp" / "run_exported.cpp"
    include = plugin.parent / "include"
    subprocess.run(["g++", "-std=c++17", f"-I{include}", source, "-o", runner, "-ldl"], check=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.BatchNorm1d(5), nn.Flatten(), nn.Linear(20, 2))
    tokens = torch.randint(7, (3, 5))
    exported = lazyxla.export(model, (tokens,), platforms=("cpu",))
    exported.save(tmp_path)
    short = {"float32": "f32", "int64": "i64"}
    words = []
    for number, each in enumerate(exported.manifest["inputs"]):
        x = tokens if each["kind"] == "argument" else exported.weights[each["name"]]
        file = tmp_path / f"in.{number}"
        file.write_bytes(x.numpy().tobytes())
        words.append(f"{short[each['dtype']]}:{','.join(map(str, x.shape))}:{file}")
    program = tmp_path / "program.stablehlo"
    subprocess.run([runner, plugin, program, tmp_path / "out", *words], check=True)
    expected = [
        model(tokens),
        *(dict(model.named_buffers())[n] for n in exported.manifest["mutations"]),
    ]
    assert len(expected) == len(exported.manifest["outputs"]) == 4
    for number, (each, theirs) in enumerate(zip(exported.manifest["outputs"], expected)):
        data = bytearray((tmp_path / f"out.{number}").read_bytes())
        ours = torch.frombuffer(data, dtype=getattr(torch, each["dtype"])).reshape(each["shape"])
        torch.testing.assert_close(ours, theirs.detach())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: lazyxla.export(nn.Dropout(), (torch.ones(2),)), ValueError, "random numbers"),
        (
            lambda: lazyxla.export(nn.ReLU(inplace=True), (torch.ones(2),)),
            ValueError,
            "write to its arguments",
        ),
        (lambda: lazyxla.load_exported("/no/such/folder"), FileNotFoundError, "manifest"),
    ],
)
def test_bad_input(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("dynamic_shapes", [None, ({0: torch.export.Dim("n")},)], ids=str)
def test_loaded_programs_are_lowered_for_each_platform(dynamic_shapes: Any, tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    model = nn.Linear(4, 2)
    lazyxla.export(model, (x,), dynamic_shapes=dynamic_shapes).save(tmp_path)
    loaded = lazyxla.load_exported(tmp_path)
    for topology in (None, "h100", "v5e:2x2"):
        text = lazyxla.stablehlo(loaded, x.to("lazyxla"), topology=topology)
        assert "stablehlo.dot_general" in text
    only_cpu = lazyxla.export(model, (x,), dynamic_shapes=dynamic_shapes, platforms=("cpu",))
    only_cpu.save(tmp_path / "cpu")
    with pytest.raises(ValueError, match="platform"):
        lazyxla.stablehlo(
            lazyxla.load_exported(tmp_path / "cpu"), x.to("lazyxla"), topology="v5e:2x2"
        )


def test_what_only_the_host_can_run() -> None:
    class Hash(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.hash_tensor(x)

    with pytest.raises(LoweringError, match="hash_tensor"):
        lazyxla.export(Hash(), (torch.ones(2),))


def test_a_later_format(tmp_path: Path) -> None:
    lazyxla.export(nn.ReLU(), (torch.ones(2),)).save(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(ValueError, match="has format 99"):
        lazyxla.load_exported(tmp_path)
