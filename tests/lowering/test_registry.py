"""The registry: what is found how, and that looking is light."""

import subprocess
import sys
from typing import Any

import pytest
import torch

from lazyxla import _C
from lazyxla.compat import REMOVED_OPERATORS
from lazyxla.lowering import how, jax_rule, names, registry, rule


def test_importing_all_rules_loads_no_compiler() -> None:
    script = (
        "import sys, lazyxla.lowering as l; l.names(); l.how('aten::add.Tensor');"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('jax', 'jaxlib')))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aten::add.Tensor", "rule"),
        ("lazyxla::view", "rule"),
        ("aten::huber_loss_backward", "decomposition"),
        ("aten::permute", "graph"),
        ("aten::nonzero", "host"),
        ("nowhere::nothing", "host"),
    ],
)
def test_how(name: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names()
    if expected == "decomposition":
        monkeypatch.setattr(registry, "_rules", {})
    assert how(name) == expected


def test_names_leave_out_internal_and_graph_operators() -> None:
    listed = names()
    assert listed == sorted(set(listed))
    assert "aten::add.Tensor" in listed
    assert "aten::permute" not in listed
    assert not [n for n in listed if n.startswith(("lazyxla::", "prims::"))]


OF_OTHER_FORMS = {"aten::conj_physical"}
"""They decompose, but not their in-place and out= forms, which their rules are for."""


def test_names_are_functional_operators_of_pytorch() -> None:
    from lazyxla.lowering.operators import find_op

    for name in names():
        if not name.startswith("aten::"):
            continue
        op = find_op(name)
        if op is None and name in REMOVED_OPERATORS:
            continue
        assert op is not None, f"{name} does not exist"
        assert not op._schema.is_mutable, f"{name} is an in-place or out form"
        assert _decomposes(op) == (name in OF_OTHER_FORMS), f"{name} decomposes by itself"
        views = [r for r in op._schema.returns if r.alias_info is not None]
        assert not views, f"{name} is a view"


@pytest.mark.parametrize("name", sorted(OF_OTHER_FORMS))
def test_what_decomposes_is_left_to_pytorch(name: str) -> None:
    """Its rule would cut gradients off."""
    x = torch.ones(2, dtype=torch.complex64, device="lazyxla", requires_grad=True)
    assert _C.kernel_origin(name, "PrivateUse1") == ""
    assert getattr(torch, name.removeprefix("aten::"))(x).requires_grad


def _decomposes(op: Any) -> bool:
    """Whether PyTorch differentiates the operator through its parts, which a rule would cut off."""
    keys = torch._C.DispatchKey
    return op.has_kernel_for_dispatch_key(keys.CompositeImplicitAutograd) and not (
        op.has_kernel_for_dispatch_key(keys.Autograd)
    )


# In a process of its own: loading the rules anew would leave two copies of their classes here.
_TWO_RULES = """
import os
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
from lazyxla.lowering import registry

class Once(dict):
    def __setitem__(self, name, function):
        assert name not in self, f"{name} is registered twice"
        super().__setitem__(name, function)

registry._rules, registry._jax_rules, registry._graph_rules = Once(), Once(), Once()
registry._loaded = False
import sys
for name in [n for n in sys.modules if n.startswith("lazyxla.lowering.rules.")]:
    del sys.modules[name]
for name in ("graph_rules", "prim_rules"):
    sys.modules.pop(f"lazyxla.lowering.{name}", None)
registry.names()
both = set(registry._rules) & set(registry._jax_rules)
assert not both, f"operators with a rule need no JAX rule: {sorted(both)}"
assert len(registry._rules) > 300
"""


def test_no_operator_has_two_rules(run_python: Any) -> None:
    run_python(_TWO_RULES)


def test_graph_rules_are_of_operators_that_no_other_way_serves() -> None:
    """A rule comes before a graph rule; PyTorch takes composite operators apart as it traces."""
    from lazyxla.lowering.operators import find_op, is_composite

    registry.names()
    served = registry._rules.keys() | registry._jax_rules.keys()
    assert not registry._graph_rules.keys() & served
    ops = {name: find_op(name) for name in registry._graph_rules}
    assert not [name for name, op in ops.items() if op is not None and is_composite(op)]


def test_a_rule_comes_before_a_jax_rule() -> None:
    @jax_rule("test::both", "test::jax")
    def on_arrays(x: object) -> object:
        return x

    @rule("test::both", "test::own")
    def own(b: object, x: object) -> object:
        return x

    assert how("test::both") == "rule"
    assert how("test::own") == "rule"
    assert how("test::jax") == "jax"
    assert registry.find_rule("test::both") is own
    assert {"test::both", "test::own", "test::jax"} <= set(names())
