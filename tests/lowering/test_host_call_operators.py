"""Which operators become host calls, and which run outside of programs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from lazyxla.lowering import how
from tests.lowering.host_calls import in_one_program
from tests.support import DEVICE, assert_same, counted


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aten::_linalg_svd", "call"),
        ("aten::linalg_qr", "call"),
        ("aten::linalg_lstsq", "host"),  # the shape of its rank depends on data
        ("aten::nonzero", "host"),
        ("aten::quantize_per_tensor", "host"),  # XLA has no such dtype
        ("aten::_linalg_check_errors", "host"),  # returns nothing
        ("aten::rand_like.generator", "host"),  # random
        ("aten::_local_scalar_dense", "host"),  # returns a number
        ("aten::values", "host"),  # a view
        ("aten::linalg_inv_ex.inverse", "host"),  # writes
        ("lazyxla_tests::not_there", "host"),
    ],
)
def test_which_operators_are_called(name: str, expected: str) -> None:
    assert how(name) == expected


def test_operators_of_users_with_python_kernels_run_outside() -> None:
    @torch.library.custom_op("lazyxla_tests::cube", mutates_args=(), device_types="cpu")
    def cube(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.numpy() ** 3)

    @cube.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    assert how("lazyxla_tests::cube") == "host"
    x = torch.arange(3.0)
    with counted() as n:
        assert_same(cube(x.to(DEVICE) + 1), cube(x + 1))
    assert (n.fallbacks, n.host_calls) == (1, 0)


_SCALE = """
#include <ATen/ATen.h>
#include <torch/library.h>
at::Tensor scale(const at::Tensor& x, double by) { return x * by; }
TORCH_LIBRARY(lazyxla_tests_compiled, m) { m.def("scale(Tensor x, float by=3.0) -> Tensor"); }
TORCH_LIBRARY_IMPL(lazyxla_tests_compiled, CPU, m) { m.impl("scale", scale); }
"""


@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
def test_operators_of_users_with_compiled_kernels_run_within(tmp_path: Path) -> None:
    (tmp_path / "scale.cpp").write_text(_SCALE)
    root = Path(torch.__file__).parent
    flags = ["-std=c++20", "-shared", "-fPIC", f"-I{root / 'include'}", f"-L{root / 'lib'}"]
    flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}")
    command = ["c++", *flags, "scale.cpp", "-o", "scale.so", "-ltorch_cpu", "-lc10"]
    subprocess.run(command, cwd=tmp_path, check=True)
    torch.ops.load_library(tmp_path / "scale.so")
    scale = torch.ops.lazyxla_tests_compiled.scale

    @torch.library.register_fake("lazyxla_tests_compiled::scale")
    def _(x: torch.Tensor, by: float = 3.0) -> torch.Tensor:
        return torch.empty_like(x)

    for by in (3.0, 2.5):
        in_one_program(lambda x, by=by: scale(x + 1, by), torch.arange(4.0))
