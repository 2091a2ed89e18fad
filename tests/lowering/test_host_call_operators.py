"""Which operators become host calls, and which run outside of programs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from lazyxla.lowering import how
from tests.lowering.host_calls import in_one_program
from tests.support import DEVICE, assert_same, counted, on_device


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


_STEPS = """
#include <ATen/ATen.h>
#include <torch/library.h>
#include <tuple>
std::tuple<at::Tensor, at::Tensor> steps(const at::Tensor& x, const at::Tensor& more, double size,
                                         int64_t high) {
  return {(x / size).clamp_max(high) + more, x < high};
}
TORCH_LIBRARY(lazyxla_tests_compiled, m) {
  m.def("steps(Tensor x, Tensor more, float size=3.0, int high=7) -> (Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(lazyxla_tests_compiled, CPU, m) { m.impl("steps", steps); }
"""


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An operator of a user's, with a compiled kernel, that takes tensors and numbers."""
    if not shutil.which("c++"):
        pytest.skip("needs a C++ compiler")
    path = tmp_path_factory.mktemp("steps")
    (path / "steps.cpp").write_text(_STEPS)
    root = Path(torch.__file__).parent
    flags = ["-std=c++20", "-shared", "-fPIC", f"-I{root / 'include'}", f"-L{root / 'lib'}"]
    flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}")
    command = ["c++", *flags, "steps.cpp", "-o", "steps.so", "-ltorch_cpu", "-lc10"]
    subprocess.run(command, cwd=path, check=True)
    torch.ops.load_library(path / "steps.so")

    @torch.library.register_fake("lazyxla_tests_compiled::steps")
    def _(x: torch.Tensor, more: torch.Tensor, size: float = 3.0, high: int = 7) -> Any:
        return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)

    return torch.ops.lazyxla_tests_compiled.steps


def test_operators_of_users_with_compiled_kernels_run_within(steps: Any) -> None:
    for size in (3.0, 2.5):
        in_one_program(lambda x, size=size: steps(x + 1, x, size, 2), torch.arange(4.0))
    in_one_program(lambda x: steps(x, x), torch.arange(4.0))


def test_a_number_that_changes_is_an_input(steps: Any) -> None:
    x = torch.linspace(-2, 2, 6)
    ours = on_device(x)
    compiles = []
    for size in (0.1, 0.2, 0.3, 0.4, 0.5):
        with counted() as n:
            assert_same(steps(ours, ours, size), steps(x, x, size))
        assert n.host_calls == 1
        compiles.append(n.compiles)
    assert compiles[0] == 1
    assert compiles[2:] == [0, 0, 0]
