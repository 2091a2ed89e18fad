"""FFI handlers of other libraries in programs: LAPACK's, and one that is built here."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import lazyxla

pytestmark = pytest.mark.usefixtures("uncut")

SOURCE = r"""
#include "xla/ffi/api/ffi.h"
namespace ffi = xla::ffi;

static ffi::Error scale(float factor, ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y) {
  if (factor < 0) return ffi::Error::InvalidArgument("the factor is negative");
  for (size_t i = 0; i < x.element_count(); ++i) y->typed_data()[i] = factor * x.typed_data()[i];
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(Scale, scale,
                              ffi::Ffi::Bind()
                                  .Attr<float>("factor")
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(Other, scale,
                              ffi::Ffi::Bind()
                                  .Attr<float>("factor")
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ffi")
    source, built = folder / "scale.cpp", folder / "libscale.so"
    source.write_text(SOURCE)
    flags = ["-std=c++17", "-shared", "-fPIC", "-O1", f"-I{jax.ffi.include_dir()}"]
    subprocess.run(["g++", *flags, str(source), "-o", str(built)], check=True)
    lazyxla.register_ffi_target("lazyxla_tests.scale", built, "Scale")
    return built


def scaled(x: Any, factor: float) -> Any:
    call = jax.ffi.ffi_call("lazyxla_tests.scale", jax.ShapeDtypeStruct(x.shape, x.dtype))
    return call(x, factor=np.float32(factor))


def test_a_handler_is_part_of_the_program(library: Path) -> None:
    x = torch.arange(6.0, device="lazyxla").reshape(2, 3)
    lazyxla.sync(wait=True)
    before = lazyxla.counters()
    y = lazyxla.call_jax(scaled, x + 1, 3.0) * 2
    lazyxla.sync(wait=True)
    after = lazyxla.counters()
    assert after["executions"] == before["executions"] + 1
    assert after["fallbacks"] == before["fallbacks"]
    assert y.tolist() == [[6, 12, 18], [24, 30, 36]]


def test_its_error_is_told(library: Path) -> None:
    x = torch.ones(3).to("lazyxla")
    with pytest.raises(RuntimeError, match="the factor is negative"):
        lazyxla.call_jax(scaled, x, -1.0).cpu()
    assert lazyxla.call_jax(scaled, x, 2.0).tolist() == [2, 2, 2]


def test_bad_registrations(library: Path) -> None:
    register = lazyxla.register_ffi_target
    register("lazyxla_tests.scale", library, "Scale")  # once more changes nothing
    with pytest.raises(ValueError, match="name of another function"):
        register("lazyxla_tests.scale", library, "Other")
    with pytest.raises(ValueError, match="has no symbol Missing"):
        register("lazyxla_tests.missing", library, "Missing")
    with pytest.raises(OSError, match="none"):
        register("lazyxla_tests.none", library.parent / "none.so", "Scale")
    with pytest.raises(ValueError, match="for 'tpu'"):
        register("lazyxla_tests.tpu", library, "Scale", platform="tpu")
    register("lazyxla_tests.cuda", library, "Scale", platform="cuda")  # elsewhere


LINALG: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "inv": (jnp.linalg.inv, torch.linalg.inv),
    "cholesky": (jnp.linalg.cholesky, torch.linalg.cholesky),
    "eigh": (jnp.linalg.eigvalsh, torch.linalg.eigvalsh),
    "svd": (lambda x: jnp.linalg.svd(x, compute_uv=False), torch.linalg.svdvals),
    "qr": (lambda x: jnp.abs(jnp.linalg.qr(x)[1]), lambda x: torch.linalg.qr(x)[1].abs()),
    "solve": (lambda x: jnp.linalg.solve(x, x[:, :1]), lambda x: torch.linalg.solve(x, x[:, :1])),
    "slogdet": (lambda x: jnp.linalg.slogdet(x)[1], lambda x: torch.linalg.slogdet(x)[1]),
}


@pytest.mark.parametrize("name", LINALG)
def test_linear_algebra_of_jax(name: str) -> None:
    """On the CPU JAX calls LAPACK, whose handlers are jaxlib's."""
    ours, theirs = LINALG[name]
    torch.manual_seed(0)
    a = torch.randn(5, 5)
    x = a @ a.T + torch.eye(5)
    inputs = [x.clone().requires_grad_(), x.to("lazyxla").requires_grad_()]
    results = [theirs(inputs[0]), lazyxla.call_jax(ours, inputs[1])]
    for result in results:
        result.sum().backward()
    torch.testing.assert_close(results[1].cpu(), results[0])
    # Of other algorithms' steps: as near as the condition of the matrix lets them.
    torch.testing.assert_close(inputs[1].grad.cpu(), inputs[0].grad, rtol=1e-4, atol=1e-4)
