"""lazyxla.lowering.explain: how an operator runs."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from lazyxla.lowering import Explanation, explain
from lazyxla.lowering.explanation import HOW
from tests.support import on_host

library = torch.library.Library("lazyxla_explain", "DEF")
library.define("center(Tensor x) -> Tensor")
library.define("split_up(Tensor x) -> Tensor")
library.define("mixed(Tensor x) -> Tensor")
for _name in ("center", "split_up", "mixed"):
    library.impl(_name, torch.clone, "CPU")
    library.impl(_name, torch.empty_like, "Meta")


@torch._decomp.register_decomposition(torch.ops.lazyxla_explain.center.default)
def center(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean()


@torch._decomp.register_decomposition(torch.ops.lazyxla_explain.split_up.default)
def split_up(x: torch.Tensor) -> torch.Tensor:
    return on_host(x) * 2


@torch._decomp.register_decomposition(torch.ops.lazyxla_explain.mixed.default)
def mixed(x: torch.Tensor) -> torch.Tensor:
    return on_host(x) if x.is_floating_point() else x * 2


@torch.library.custom_op("lazyxla_explain::anywhere", mutates_args=())
def anywhere(x: torch.Tensor) -> torch.Tensor:
    return x + 1


CASES = [
    ("aten::add.Tensor", "cpu", "rule", r"lazyxla/lowering/rules/arithmetic.py:\d+, add"),
    ("aten::mm", "tpu", "rule", r"lazyxla/lowering/rules/matmul.py:\d+, mm"),
    (torch.ops.aten.mm.default, "cpu", "rule", r".*, mm"),
    (torch.ops.aten.mm, "cpu", "rule", r".*, mm"),
    ("aten::cummax", "cpu", "JAX rule", r"lazyxla/lowering/rules/order.py:\d+, cummax"),
    ("aten::topk", "cpu", "rule", r"lazyxla/lowering/cpu/kernels.py:\d+, lower"),
    ("aten::view", "cpu", "kernel", "csrc/dispatch/storage_ops.cpp"),
    ("aten::copy_", "cpu", "kernel", "csrc/dispatch/copies.cpp"),
    ("aten::svd", "cpu", "composite", ""),
    ("aten::rand", "cpu", "composite", ""),
    ("aten::linalg_qr", "cpu", "host call", ""),
    ("aten::_linalg_eigh", "cuda", "host", ""),
    ("aten::nonzero", "cpu", "reads data", ""),
    ("aten::_assert_async.msg", "cuda", "reads data", ""),
    ("aten::_local_scalar_dense", "cpu", "kernel", "csrc/dispatch/copies.cpp"),
    ("lazyxla_tests::on_host", "cpu", "host", ""),
    ("lazyxla_explain::anywhere", "cpu", "composite", ""),
    ("lazyxla_explain::center", "cuda", "decomposition", r".*/tests/test_explain.py:\d+, center"),
    ("lazyxla_explain::split_up", "cpu", "host", r".*"),
]


@pytest.mark.parametrize(("operator", "platform", "how", "where"), CASES, ids=str)
def test_ways(operator: Any, platform: str, how: str, where: str) -> None:
    found = explain(operator, platform)
    assert isinstance(found, Explanation)
    assert (found.how, found.platform) == (how, platform)
    assert re.fullmatch(where, found.where)
    assert str(found).startswith(f"{found.operator} on {platform}: {HOW[how]}")


def test_an_operator_that_writes_is_its_functional_form() -> None:
    for name, functional in (
        ("aten::add_.Tensor", "aten::add.Tensor"),
        ("aten::sum.IntList_out", "aten::sum.dim_IntList"),
    ):
        found = explain(name)
        assert (found.how, found.functional, found.operator) == ("rule", functional, name)
        assert f"writes what {functional} yields, lowered by a rule (lazyxla/" in str(found)


def test_the_platform_is_the_current_one() -> None:
    assert explain("aten::mm").platform == "cpu"
    with pytest.raises(ValueError, match="platform is cpu, cuda or tpu, got 'gpu'"):
        explain("aten::mm", "gpu")


def test_parts_of_a_decomposition() -> None:
    found = explain("lazyxla_explain::center")
    assert [(p.operator, p.how) for p in found.parts] == [
        ("aten::mean", "rule"),
        ("aten::sub.Tensor", "rule"),
    ]
    assert not found.dtypes
    assert "\n    aten::mean: lowered by a rule (" in str(found)
    found = explain("aten::svd")
    assert ("aten::_linalg_svd", "host call") in [(p.operator, p.how) for p in found.parts]


def test_dtypes_where_they_matter() -> None:
    found = explain("lazyxla_explain::mixed")
    assert found.how == "decomposition"
    assert (found.dtypes[torch.float32], found.dtypes[torch.int64]) == ("host", "decomposition")
    lines = str(found).splitlines()
    assert f"    bool, uint8, int32, int64, complex64: {HOW['decomposition']}" in lines
    assert f"    float32, bfloat16, float16, float64: {HOW['host']}" in lines


def test_a_name_that_stands_for_overloads() -> None:
    found = explain("aten::add")
    assert found.how == "overloads"
    assert {"aten::add.Tensor", "aten::add.out"} <= {p.operator for p in found.parts}
    assert str(found).splitlines()[0] == "aten::add on cpu: an operator with overloads"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("aten::ad", "there is no operator 'aten::ad'; did you mean .*aten::add"),
        ("aten::add.Foo", "there is no operator 'aten::add.Foo'; there is aten::add.Tensor, aten"),
        ("aten::mm.Foo", "there is aten::mm"),
        ("layer_norm", "there is no operator 'layer_norm'; did you mean aten::layer_norm"),
        ("mine::layer_nrm", "did you mean aten::layer_norm"),
        ("mine::qqqqqqqqqqq", "there is no operator 'mine::qqqqqqqqqqq'$"),
        ("", "there is no operator ''"),
    ],
)
def test_unknown_names(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        explain(name)


def test_other_things_than_operators() -> None:
    with pytest.raises(TypeError, match=r"one of torch\.ops, got function"):
        explain(center)
