"""Dynamo traces none of the package's own functions, and what calls them compiles all the same."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch

import lazyxla
from tests.conftest import RunPython

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

PACKAGE = os.path.join(os.path.dirname(os.path.abspath(lazyxla.__file__)), "")

x = torch.linspace(-1, 1, 6)


def _double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _typed(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _with(context: Callable[[], Any]) -> Callable[[], Any]:
    def call() -> None:
        with context():
            pass

    return call


def _refused(call: Callable[[], Any], error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        call()


def _share_late() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.devices()
    _refused(lambda: lazyxla.share_with_jax(), RuntimeError, "devices already")


def _product(scale: Any, x: Any) -> Any:
    return x * scale


MESH = lazyxla.Mesh((1,), ("x",))
SCALE = np.ones(2, np.float32)


def _linear() -> torch.nn.Module:
    return torch.nn.Linear(2, 2)


def _ones() -> torch.Tensor:
    return torch.ones(2, device="lazyxla")


# A call of everything that is public.
CALLS: dict[str, Callable[[], Any]] = {
    "Buckets": lambda: lazyxla.Buckets(dims=0, sizes=[4])(torch.ones(2)),
    "ColwiseParallel": lambda: lazyxla.ColwiseParallel("x").apply(_linear(), MESH),
    "DeviceLoader": lambda: [b.cpu() for b in lazyxla.DeviceLoader([torch.ones(2)])],
    "DeviceProperties": lambda: lazyxla.devices()[0]._replace(name="x"),
    "Environment": _with(lambda: lazyxla.Environment()),
    "Mesh": lambda: lazyxla.Mesh((1,), ("x",)),
    "RowwiseParallel": lambda: lazyxla.RowwiseParallel("x").apply(_linear(), MESH),
    "SequenceParallel": lambda: lazyxla.SequenceParallel("x").apply(_linear(), MESH),
    "Sharding": lambda: lazyxla.Sharding(MESH, ()),
    "Exported": lambda: lazyxla.Exported(None, {}, {})._replace(weights={"x": 1}),
    "aot": lambda: lazyxla.aot.capture,
    "global_device_count": lambda: lazyxla.global_device_count(),
    "shard_local": lambda: lazyxla.shard_local(torch.ones(2), MESH, ()),
    "bucket": lambda: lazyxla.bucket([torch.ones(2)], dims=0, sizes=[4]),
    "call_jax": lambda: lazyxla.call_jax(_double, _ones()),
    "check_torch_version": lambda: lazyxla.check_torch_version("2.1.0", "2.1.1"),
    "checkpoint_name": lambda: lazyxla.checkpoint_name(_ones(), "x"),
    "compile": lambda: lazyxla.compile(_double)(torch.ones(2, device="lazyxla")).cpu(),
    "constrain": lambda: lazyxla.constrain(_ones(), MESH, ("x",)).cpu(),
    "counters": lambda: lazyxla.counters(),
    "current_device": lambda: lazyxla.current_device(),
    "data_parallel": lambda: lazyxla.data_parallel(_linear(), MESH),
    "default_env": _with(lambda: lazyxla.default_env()),
    "device": lambda: lazyxla.device(0),
    "device_count": lambda: lazyxla.device_count(),
    "devices": lambda: lazyxla.devices(),
    "disable_globally": lambda: lazyxla.disable_globally(),
    "eager_mode": _with(lambda: lazyxla.eager_mode(True)),
    "empty_cache": lambda: lazyxla.empty_cache(),
    "enable_globally": lambda: (lazyxla.enable_globally(), lazyxla.disable_globally()),
    "export": lambda: lazyxla.export(torch.nn.ReLU(), (torch.ones(2),)).text(),
    "fallbacks": lambda: lazyxla.fallbacks(),
    "from_dlpack": lambda: lazyxla.from_dlpack(torch.ones(64)),
    "from_jax": lambda: lazyxla.from_jax({"x": np.ones(3, np.float32)}),
    "fully_shard": lambda: lazyxla.fully_shard(_linear(), MESH),
    "get_rng_state": lambda: lazyxla.get_rng_state(),
    "host_view": lambda: lazyxla.host_view(torch.ones(3).to("lazyxla")),
    "is_available": lambda: lazyxla.is_available(),
    "jax_function": lambda: lazyxla.jax_function(_double)(_ones()),
    "jax_jit": lambda: lazyxla.jax_jit(torch.sin)(_ones()),
    "jax_key": lambda: lazyxla.jax_key(),
    "jax_view": lambda: lazyxla.jax_view(torch.sin),
    "kernel": lambda: lazyxla.kernel("mylib::double", _typed),
    "load_exported": lambda: _refused(
        lambda: lazyxla.load_exported("/no/such/folder"), OSError, "manifest"
    ),
    "manual_seed": lambda: lazyxla.manual_seed(3),
    "max_memory_allocated": lambda: lazyxla.max_memory_allocated(),
    "max_memory_reserved": lambda: lazyxla.max_memory_reserved(),
    "mem_get_info": lambda: lazyxla.mem_get_info(),
    "memory_allocated": lambda: lazyxla.memory_allocated(),
    "memory_reserved": lambda: lazyxla.memory_reserved(),
    "memory_stats": lambda: lazyxla.memory_stats(),
    "memory_summary": lambda: lazyxla.memory_summary(),
    "parallelize": lambda: lazyxla.parallelize(_linear(), MESH, {"": lazyxla.ColwiseParallel("x")}),
    "platform": lambda: lazyxla.platform(),
    "ragged_paged_attention": lambda: _refused(
        lambda: lazyxla.ragged_paged_attention(*[torch.ones(2)] * 6), ValueError, "expected query"
    ),
    "register_ffi_target": lambda: _refused(
        lambda: lazyxla.register_ffi_target("x", "y", "z"), OSError, "cannot open"
    ),
    "replicate": lambda: lazyxla.replicate(_ones(), MESH),
    "reset_accumulated_memory_stats": lambda: lazyxla.reset_accumulated_memory_stats(),
    "reset_counters": lambda: lazyxla.reset_counters(),
    "reset_peak_memory_stats": lambda: lazyxla.reset_peak_memory_stats(),
    "rotary_embedding": lambda: _refused(
        lambda: lazyxla.rotary_embedding(*[torch.ones(2, 2)] * 4), ValueError, "expected query"
    ),
    "scan_layers": lambda: lazyxla.scan_layers([torch.nn.ReLU(), torch.nn.ReLU()], _ones()).cpu(),
    "set_device": lambda: lazyxla.set_device(0),
    "set_rng_state": lambda: lazyxla.set_rng_state(lazyxla.get_rng_state()),
    "settings": lambda: setattr(lazyxla.settings, "blocking", lazyxla.settings.blocking),
    "shard": lambda: lazyxla.shard(_ones(), MESH, ("x",)),
    "share_with_jax": _share_late,
    "sharding": lambda: lazyxla.sharding(_ones()),
    "stablehlo": lambda: lazyxla.stablehlo(torch.sin, _ones()),
    "step": _with(lambda: lazyxla.step()),
    "sync": lambda: lazyxla.sync(),
    "synchronize": lambda: lazyxla.synchronize(),
    "to_device": lambda: lazyxla.to_device({"x": torch.ones(2)}),
    "to_jax": lambda: lazyxla.to_jax(3),
    "visualize": lambda: lazyxla.visualize(_ones()),
    "wrap_jax": lambda: lazyxla.wrap_jax(_product, SCALE)(_ones()),
}

# What records an operator, as the user's own functions do.
TRACED = {"checkpoint_name", "constrain", "ragged_paged_attention", "rotary_embedding"}


@pytest.fixture
def traced_files(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The files of all functions that Dynamo traces, as frames of their own or inlined."""
    from torch._dynamo import symbolic_convert

    files: set[str] = set()
    original = symbolic_convert.InstructionTranslatorBase.__init__

    def note(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        files.add(self.f_code.co_filename)

    monkeypatch.setattr(symbolic_convert.InstructionTranslatorBase, "__init__", note)
    return files


def test_everything_public_is_here() -> None:
    assert set(CALLS) == set(lazyxla.__all__)


@pytest.mark.parametrize(
    ("backend", "device"),
    [("eager", "cpu"), ("eager", "lazyxla"), ("aot_eager", "lazyxla"), ("lazyxla", "lazyxla")],
)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore")
def test_no_function_is_traced(
    name: str, backend: str, device: str, traced_files: set[str]
) -> None:
    call = CALLS[name]

    @torch.compile(backend=backend)
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        call()
        return y + 1

    for _ in range(2):
        result = function(x.to(device))
        torch.testing.assert_close(result.cpu(), x.sin() + 1)
    assert any(file.startswith(PACKAGE) for file in traced_files) == (name in TRACED)
    assert __file__ in traced_files


def test_every_function_is_marked() -> None:
    """Also those that are added later."""
    for name in lazyxla.__all__:
        value = getattr(lazyxla, name)
        if inspect.isfunction(value) and name not in TRACED:
            assert inspect.getattr_static(value, "_torchdynamo_disable", False), name


def test_marking_imports_nothing(run_python: RunPython) -> None:
    told = run_python("import lazyxla, sys; print('torch._dynamo' in sys.modules)").stdout
    assert told == "False\n"
