"""What torch.compile hands on: compile options and modes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import lazyxla
from lazyxla.dynamo import backend
from tests.support import DEVICE, counted

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def _compile(function: Any, **kwargs: Any) -> Any:
    return torch.compile(function, backend=backend, **kwargs)


def _error_of(**kwargs: Any) -> str:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        _compile(lambda x: x + 1, **kwargs)(torch.ones(2, device=DEVICE))
    return str(caught.value)


def test_options_reach_the_compiler() -> None:
    x = torch.randn(64)

    def dump(**options: Any) -> torch.Tensor:
        return _compile(lambda t: t.exp() * 3, options=options)(x.to(DEVICE)).cpu()

    torch.testing.assert_close(dump(xla_cpu_enable_fast_math=True), x.exp() * 3)
    torch.testing.assert_close(dump(xla_backend_optimization_level=0), x.exp() * 3)
    torch.testing.assert_close(dump(xla_cpu_enable_fast_math="True"), x.exp() * 3)


def test_an_option_changes_the_program(tmp_path: Any) -> None:
    options = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True}
    compiled = _compile(lambda t: t.cosh() + 7, options=options)
    compiled(torch.ones(11, device=DEVICE)).cpu()
    texts = [path.read_text() for path in tmp_path.glob("*.txt")]
    assert any("f32[11]" in text for text in texts)


def test_functions_with_other_options_are_other_programs() -> None:
    x = torch.ones(5, device=DEVICE)
    with counted() as n:
        for options in ({}, {"xla_cpu_enable_fast_math": True}):
            _compile(lambda t: t.tan() + 1, options=options)(x).cpu()
    assert n.compiles == 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"xla_no_such_option": 1}, "No such compile option: 'xla_no_such_option'"),
        (
            {"xla_cpu_enable_fast_math": 3},
            "While setting option xla_cpu_enable_fast_math, '3' is not a valid bool value",
        ),
        (
            {"xla_cpu_enable_fast_math": 0.5},
            "While setting option xla_cpu_enable_fast_math, '0.5' is not a valid bool value",
        ),
        (
            {"xla_backend_optimization_level": "high"},
            "option xla_backend_optimization_level, 'high' is not a valid int32 value",
        ),
        (
            {"xla_dump_to": True},
            "option xla_dump_to, '1' is not a valid string value",
        ),
        (
            {"xla_backend_optimization_level": [1]},
            "the compile option xla_backend_optimization_level must be a bool, int, float or str, "
            "not [1]",
        ),
        ({"xla_backend_optimization_level": 2**63}, "does not fit in 64 bits"),
        ({1: 2}, "must be a dict from names of XLA's options to values, not {1: 2}"),
    ],
)
def test_wrong_options_are_errors(options: Any, text: str) -> None:
    assert re.search(re.escape(text), _error_of(options=options))


def test_one_program_takes_one_value_of_an_option() -> None:
    x = torch.ones(3).to(DEVICE)
    on = _compile(lambda t: t + 1, options={"xla_cpu_enable_fast_math": True})
    off = _compile(lambda t: t + 2, options={"xla_cpu_enable_fast_math": False})
    other = _compile(lambda t: t + 3, options={"xla_backend_optimization_level": 1})
    y = off(on(x))
    with pytest.raises(ValueError, match="different values of the option xla_cpu_enable_fast_math"):
        lazyxla.sync()
    y = on(x)
    lazyxla.sync()
    torch.testing.assert_close(off(y).cpu(), torch.full((3,), 4.0))
    torch.testing.assert_close(other(on(x)).cpu(), torch.full((3,), 5.0))  # of both: fine


@pytest.mark.parametrize(
    "mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
)
def test_modes_are_all_one_program(mode: str) -> None:
    compiled = _compile(lambda t: t * 2 + 1, mode=mode)
    x = torch.ones(3).to(DEVICE)
    compiled(x).cpu()
    with counted() as n:
        result = compiled(x)
        lazyxla.sync()
    torch.testing.assert_close(result.cpu(), torch.full((3,), 3.0))
    assert (n.nodes_recorded, n.executions, n.compiles) == (1, 1, 0)


def test_unknown_mode_is_an_error() -> None:
    assert "torch.compile has no mode 'fastest'; it has 'default'" in _error_of(mode="fastest")
