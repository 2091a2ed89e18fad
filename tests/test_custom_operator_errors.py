"""Errors of users' operators: bad rules, bad registrations, bad fake implementations."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from lazyxla.dynamo import backend
from lazyxla.lowering import jax_rule, rule
from tests.own_operators import X, lower_scale, scale, surrounded
from tests.support import error_of, on_device

BAD_RULES: dict[str, tuple[Any, str]] = {
    "attribute": (
        lambda b, x, by, offset: b.hlo.no_such_thing(x),
        "has no attribute 'no_such_thing'",
    ),
    "shape": (
        lambda b, x, by, offset: b.slice_dim(x, 0, 0, 1),
        r"the rule returned shape \[1\], expected \[3\]",
    ),
    "number": (lambda b, x, by, offset: [x, x], "the rule returned 2 results, expected 1"),
    "nothing": (lambda b, x, by, offset: None, "the rule returned 0 results, expected 1"),
    "type": (lambda b, x, by, offset: 1.0, "the rule returned float, expected a value"),
    "arguments": (lambda b, x: x, "takes 2 positional arguments but 4 were given"),
}
BAD_JAX_RULES: dict[str, tuple[Any, str]] = {
    "arguments": (lambda x: x, "its JAX rule takes 1 arguments, the operator's schema has 3"),
    "error": (lambda x, by, offset: x.reshape(7), "reshape"),
    "shape": (lambda x, by, offset: x[:1], r"the rule returned shape \[1\], expected \[3\]"),
}


@pytest.mark.parametrize(
    ("register", "function", "text"),
    [(rule, *case) for case in BAD_RULES.values()]
    + [(jax_rule, *case) for case in BAD_JAX_RULES.values()],
    ids=[*BAD_RULES, *(f"jax {name}" for name in BAD_JAX_RULES)],
)
def test_errors_in_rules(register: Any, function: Any, text: str) -> None:
    """They name the operator, its operands and the rule's line; the device stays usable."""
    register("lazyxla_own::scale")(function)
    x = on_device(X)
    y = scale(x, 2.0)
    line = inspect.getsourcelines(function)[1]
    call = r"lazyxla_own::scale\(float32\[3\], Scalar\(2.0, torch.float64\), 0\) cannot be lowered:"
    with pytest.raises(Exception, match=rf"(?s){call}.*{text}") as error:
        y.cpu()
    lines = range(line, line + 3)
    assert any(f"({__file__}:{n}, in <lambda>)" in str(error.value) for n in lines)
    assert (x + 1).tolist() == [1, 2, 3]


def test_operations_that_are_not_valid() -> None:
    """The builder does not check each operation: MLIR's verifier does, when all are there."""
    rule("lazyxla_own::scale")(lambda b, x, *_: b.hlo.add(x, b.iota([3], 0, torch.int64)))
    y = scale(on_device(X), 2.0)
    with pytest.raises(RuntimeError) as error:
        y.cpu()
    text = str(error.value)
    assert "the module is not valid: " in text
    assert '"lazyxla_own::scale": op requires the same element type for all operands' in text
    assert f"({__file__}:" in text


def test_a_fake_implementation_may_return_too_few_tensors() -> None:
    with torch.library._scoped_library("lazyxla_few", "DEF") as library:
        library.define("halve(Tensor[] xs) -> Tensor[]")
        library.define("halve_(Tensor(a!)[] xs) -> ()")
        library.impl("halve", lambda xs: [torch.empty_like(xs[0])], "Meta")
        rule("lazyxla_few::halve")(lambda b, xs: xs)
        x, y = on_device((X, X))
        with pytest.raises(RuntimeError, match=r"halve_ writes 2 tensors, .*halve yields 1"):
            torch.ops.lazyxla_few.halve_([x, y])
        assert x.tolist() == X.tolist()


def test_errors_of_a_fake_implementation_are_raised_at_the_call() -> None:
    rule("lazyxla_own::scale")(lower_scale)
    with pytest.raises(ValueError, match="scale takes vectors"):
        scale(on_device(torch.ones(2, 2)), 1.0)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: rule(lower_scale), r'rule takes names of operators: @rule\("mylib::myop"\)'),
        (lambda: jax_rule(), r"jax_rule takes names of operators"),
        (lambda: rule("scale"), "'scale' is no name of an operator, such as \"mylib::myop\""),
        (lambda: jax_rule("own::"), "'own::' is no name of an operator"),
        (
            lambda: rule("lazyxla_own::bump"),
            "lazyxla_own::bump writes to its arguments; only functional operators have rules. "
            "Define lazyxla_own::bump_functional, which returns what lazyxla_own::bump returns "
            "and then the new values of what it writes, and give that one the rule",
        ),
        (lambda: rule("aten::add_.Tensor"), "Define aten::add_functional"),
        (lambda: rule("aten::view"), "aten::view has a kernel of the backend's own"),
    ],
)
def test_errors_of_registering(call: Any, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        call()


def test_a_rule_that_fails_is_named_within_compiled_functions(fresh_dynamo: None) -> None:
    rule("lazyxla_own::scale")(lambda b, x, by, offset: b.hlo.nothing())
    compiled = torch.compile(surrounded, backend=backend)
    kind, text = error_of(lambda: compiled(on_device(X)).cpu())
    assert issubclass(kind, Exception)
    assert "lazyxla_own::scale(float32[3]" in text
    assert f"(traced from {surrounded.__code__.co_filename}" in text
