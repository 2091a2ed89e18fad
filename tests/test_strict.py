"""Strict mode: operators on the host are errors that name the operator, its dtypes and the line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lazyxla
from lazyxla.dynamo import backend
from tests.support import DEVICE, assert_same, counted, on_host


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazyxla.settings, "strict_fallback", True)


@pytest.fixture
def strict_host_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazyxla.settings, "strict_host_calls", True)


def error_at(function: Callable[[], Any]) -> str:
    """The text of the NotImplementedError, which must name the line below the function's first."""
    with pytest.raises(NotImplementedError) as error:
        function()
    line = inspect.getsourcelines(function)[1] + 1
    text = str(error.value).split("\nException raised from")[0]
    prefix = f"lazyxla: {__file__}:{line}: "
    assert text.startswith(prefix)
    return text.removeprefix(prefix)


def test_a_host_fallback(strict: None) -> None:
    x = torch.ones(2, 3, device=DEVICE, dtype=torch.float64)

    def call() -> None:
        on_host(x)

    assert error_at(call) == (
        "lazyxla_tests::on_host(Double[2, 3]) has no lowering and would run on the host; strict "
        "mode (LAZYXLA_STRICT) makes this an error"
    )
    lazyxla.settings.strict_fallback = False
    assert_same(on_host(x), torch.ones(2, 3, dtype=torch.float64))


def test_assertions_are_reads(strict: None) -> None:
    """They can only look at their argument: no lowering of theirs could return anything."""
    x = torch.ones(2, device=DEVICE)
    with counted() as n:
        torch._assert_async((x > 0).all())
        torch._assert_async((x > 0).all(), "x has to be positive")
    assert (n.data_dependent, n.fallbacks) == (2, 0)
    with pytest.raises(RuntimeError, match=r"^x has to be positive"):
        torch._assert_async((x > 1).any(), "x has to be positive")


def test_operators_of_users_that_return_nothing_are_fallbacks(strict: None) -> None:
    library = torch.library.Library("lazyxla_tests_strict_look", "DEF")
    library.define("look(Tensor x) -> ()")
    library.impl("look", lambda x: None, "CPU")
    x = torch.ones(2, device=DEVICE)

    def call() -> None:
        torch.ops.lazyxla_tests_strict_look.look(x)

    assert error_at(call).startswith("lazyxla_tests_strict_look::look(Float[2]) has no lowering")


def test_all_operands_are_named(strict: None) -> None:
    library = torch.library.Library("lazyxla_strict", "DEF")
    library.define("total(Tensor[] xs, Tensor? y, float by) -> Tensor")
    library.impl("total", lambda xs, y, by: sum(xs) * by, "CPU")
    x = torch.ones(2, device=DEVICE)

    def call() -> None:
        torch.ops.lazyxla_strict.total([x, x.int()], None, 2.0)

    text = "lazyxla_strict::total(Float[2], Int[2]) has no lowering and would run on the host; "
    assert error_at(call).startswith(text)


def test_an_operator_without_a_fake_implementation(strict: None) -> None:
    library = torch.library.Library("lazyxla_strict_fake", "DEF")
    library.define("same(Tensor x) -> Tensor")
    library.impl("same", torch.clone, "CPU")
    lazyxla.lowering.rule("lazyxla_strict_fake::same")(lambda b, x: x)
    x = torch.ones(2, device=DEVICE)

    def call() -> None:
        torch.ops.lazyxla_strict_fake.same(x)

    assert error_at(call).startswith(
        "lazyxla_strict_fake::same(Float[2]) has no meta function, which would tell its result's "
        "shape, and would run on the host; strict"
    )


def test_operators_whose_result_depends_on_data_are_allowed(
    strict: None, strict_host_calls: None
) -> None:
    x = torch.tensor([0.0, 1.0], device=DEVICE)
    assert x.nonzero().tolist() == [[1]]
    assert x[x > 0].tolist() == [1]
    assert x.sum().item() == 1


def test_host_calls_are_allowed_by_strict_mode(strict: None) -> None:
    with counted() as n:
        torch.linalg.qr(torch.eye(2, device=DEVICE)).Q.cpu()
    assert n.host_calls == 1


def test_a_host_call(strict_host_calls: None) -> None:
    x = torch.eye(2, device=DEVICE)

    def call() -> None:
        torch.linalg.eigvalsh(x)

    assert error_at(call) == (
        "aten::_linalg_eigh(Float[2, 2]) would run on the host, called by the program; strict mode "
        "(LAZYXLA_STRICT_HOST_CALLS) makes this an error"
    )
    # Also where the call is known already.
    lazyxla.settings.strict_host_calls = False
    values = torch.linalg.eigvalsh(x)
    lazyxla.settings.strict_host_calls = True
    assert "aten::_linalg_eigh(Float[2, 2])" in error_at(call)
    lazyxla.settings.strict_host_calls = False
    assert_same(values, torch.ones(2))
    assert lazyxla.settings.strict_fallback is False


def test_a_host_call_within_a_decomposition(strict_host_calls: None) -> None:
    library = torch.library.Library("lazyxla_strict_parts", "DEF")
    library.define("grow(Tensor x) -> Tensor")
    library.impl("grow", torch.linalg.matrix_exp, "CPU")
    library.impl("grow", torch.empty_like, "Meta")
    grow = torch.ops.lazyxla_strict_parts.grow
    torch._decomp.register_decomposition(grow.default)(lambda x: torch.linalg.matrix_exp(x) + 1)
    x = torch.zeros(2, 2, device=DEVICE)

    def call() -> None:
        grow(x)

    text = "lazyxla_strict_parts::grow(Float[2, 2]) would run on the host, called by the program"
    assert error_at(call).startswith(text)
    lazyxla.settings.strict_host_calls = False
    assert_same(grow(x), torch.eye(2) + 1)


def test_in_traced_graphs(strict: None, strict_host_calls: None, fresh_dynamo: None) -> None:
    x = torch.eye(3, device=DEVICE)

    def traced(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.qr(x + 1).Q

    with pytest.raises(Exception, match=r"(?s)aten::linalg_qr\(float32\[3, 3\], .*would run") as e:
        torch.compile(traced, backend=backend)(x).cpu()
    line = inspect.getsourcelines(traced)[1] + 1
    assert f"(traced from {__file__}:{line}: return torch.linalg.qr(x + 1).Q)" in str(e.value)
    # Such an operator is not traced into a program: it is an error when the function runs.
    with pytest.raises(NotImplementedError, match=r"lazyxla_tests::on_host\(Float\[3, 3\]\) has"):
        torch.compile(lambda x: on_host(x + 1), backend=backend)(x)


def test_eager_mode_and_regions(strict: None) -> None:
    x = torch.ones(2, device=DEVICE)
    with lazyxla.eager_mode(True), pytest.raises(NotImplementedError, match="LAZYXLA_STRICT"):
        on_host(x)
    with pytest.raises(NotImplementedError, match="LAZYXLA_STRICT"):
        lazyxla.compile(on_host)(x)
    assert (x + 1).tolist() == [2, 2]


def test_by_variable(run_python: Any) -> None:
    code = """
import torch, lazyxla
assert lazyxla.settings.strict_fallback and lazyxla.settings.strict_host_calls
x = torch.eye(2, device="lazyxla")
for call in (lambda: torch.linalg.qr(x), lambda: torch.linalg.eigvals(x)):
    try:
        call()
    except NotImplementedError as error:
        print(str(error).splitlines()[0])
"""
    out = run_python(code, LAZYXLA_STRICT="1", LAZYXLA_STRICT_HOST_CALLS="1").stdout.splitlines()
    assert out[0].startswith("lazyxla: <string>:5: aten::linalg_qr(Float[2, 2]) would run")
    assert "aten::_linalg_eigvals" in out[1]
