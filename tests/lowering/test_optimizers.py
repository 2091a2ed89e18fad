"""Operators on lists: foreach operators, fused optimizer steps, gradient scaling."""

import itertools
from typing import Any

import pytest
import torch

from lazyxla.lowering import names
from tests.lowering.batch import INF, NAN, Batch
from tests.lowering.harness import OnHost, text

SHAPES = ((4, 3), (5,), ())
# All numbers are large enough to be seen in a result.
ADAM = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.1, "eps": 0.1}
SGD = {"weight_decay": 0.1, "momentum": 0.9, "lr": 0.01, "dampening": 0.3}
ADAGRAD = {"lr": 0.01, "lr_decay": 0.1, "weight_decay": 0.1, "eps": 0.1}


def _tensors(seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(dtype) for s in SHAPES]


def _steps(value: float) -> list[torch.Tensor]:
    return [torch.tensor(value) for _ in SHAPES]


def _scaling(found: float) -> dict[str, torch.Tensor]:
    return {"grad_scale": torch.tensor([8.0]), "found_inf": torch.tensor([found])}


def _state(seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Second moments: not negative."""
    return [t.square() for t in _tensors(seed, dtype)]


def test_every_foreach_operator_has_a_rule() -> None:
    functional = [
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::_foreach_") and _is_functional(name)
    ]
    assert len(functional) > 70
    # PyTorch itself makes lists of numbers of these tensors of numbers.
    taken_apart = {"aten::_foreach_addcmul.Tensor", "aten::_foreach_addcdiv.Tensor"}
    assert set(functional) - set(names()) == taken_apart


def _is_functional(name: str) -> bool:
    base, _, overload = name.partition(".")
    schema = torch._C._get_schema(base, overload)
    return all(argument.alias_info is None for argument in schema.arguments)


def test_foreach_of_one_list() -> None:
    batch = Batch()
    xs = [t.abs() * 0.3 + 0.1 for t in _tensors(1)]
    for name in names():
        if name.startswith("aten::_foreach_") and "." not in name:
            if name.endswith(("copy", "mm")):
                continue
            batch.add(name, xs)
    assert len(batch.calls) > 30
    batch.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_foreach_with_operands(dtype: torch.dtype) -> None:
    xs, ys, zs = ([(t * 4).to(dtype) for t in _tensors(seed)] for seed in (1, 2, 3))
    zs = [z.abs() + 1 for z in zs]
    exact = dtype == torch.int64
    numbers = [2, 3, 4] if exact else [2.0, 0.5, 1.5]
    batch = Batch()
    for name in ("add", "sub", "mul", "div", "maximum", "minimum", "clamp_min", "clamp_max"):
        batch.add(f"aten::_foreach_{name}.List", xs, zs)
        batch.add(f"aten::_foreach_{name}.Scalar", xs, numbers[0])
        batch.add(f"aten::_foreach_{name}.ScalarList", xs, numbers)
    for name in ("add", "sub"):
        batch.add(f"aten::_foreach_{name}.List", xs, ys, alpha=numbers[0])
    for name in ("add", "mul", "div"):
        batch.add(f"aten::_foreach_{name}.Tensor", xs, torch.tensor(2, dtype=dtype))
        batch.add(f"aten::_foreach_{name}.Tensor", xs, OnHost(torch.tensor(2, dtype=dtype)))
    for name in ("addcmul", "addcdiv"):
        if exact and name == "addcdiv":
            continue
        batch.add(f"aten::_foreach_{name}.Scalar", xs, ys, zs, numbers[0])
        batch.add(f"aten::_foreach_{name}.ScalarList", xs, ys, zs, numbers)
    batch.add("aten::_foreach_pow.Scalar", zs, 2)
    batch.add("aten::_foreach_pow.ScalarAndTensor", 2, zs)
    batch.add("aten::_foreach_pow.List", zs, zs)
    batch.add("aten::_foreach_pow.ScalarList", zs, numbers)
    if not exact:
        batch.add("aten::_foreach_lerp.List", xs, ys, zs)
        batch.add("aten::_foreach_lerp.Scalar", xs, ys, 0.25)
        batch.add("aten::_foreach_lerp.ScalarList", xs, ys, numbers)
        for order in (1, 2, INF):
            batch.add("aten::_foreach_norm.Scalar", xs, order)
    batch.add("aten::_foreach_copy", xs, [y.float() for y in ys])
    matrices = [x.reshape(1, -1) for x in xs]
    batch.add("aten::_foreach_mm", matrices, [m.t().contiguous() for m in matrices])
    batch.check()


ADAM_CALLS: dict[str, list[tuple[torch.dtype, float, dict[str, Any]]]] = {
    "flags": [
        (torch.float32, 1.0, {"amsgrad": amsgrad, "maximize": maximize})
        for amsgrad, maximize in itertools.product((False, True), repeat=2)
    ],
    "dtypes": [(torch.float64, 3.0, {}), (torch.bfloat16, 3.0, {})],
    "numbers": [
        (torch.float32, 1000.0, {"weight_decay": 0.0}),
        (torch.float32, 2.0, {"lr": torch.tensor(0.01)}),
        (torch.float32, 2.0, {"lr": OnHost(torch.tensor(0.01))}),
    ],
    "scaling": [(torch.float32, 2.0, {"amsgrad": True, **_scaling(f)}) for f in (0.0, 1.0)],
}


@pytest.mark.parametrize("calls", ADAM_CALLS)
@pytest.mark.parametrize("op", ["_fused_adam", "_fused_adamw"])
def test_adam(op: str, calls: str) -> None:
    batch = Batch()
    for dtype, step, changes in ADAM_CALLS[calls]:
        settings: dict[str, Any] = {**ADAM, "amsgrad": False, "maximize": False, **changes}
        top = _state(5, dtype) if settings["amsgrad"] else []
        state = (_tensors(3, dtype), _state(4, dtype), top, _steps(step))
        name = f"aten::{op}"
        if not isinstance(settings["lr"], float):
            name += ".tensor_lr"
        batch.add(name, _tensors(1, dtype), _tensors(2, dtype), *state, **settings)
    batch.check()


def test_sgd() -> None:
    batch = Batch()

    def add(
        momenta: list[torch.Tensor], dtype: torch.dtype = torch.float32, **changes: Any
    ) -> None:
        flags = {"nesterov": False, "maximize": False, "is_first_step": False}
        settings: dict[str, Any] = {**SGD, **flags, **changes}
        name = "aten::_fused_sgd"
        if not isinstance(settings["lr"], float):
            name += ".tensor_lr"
        batch.add(name, _tensors(1, dtype), _tensors(2, dtype), momenta, **settings)

    add([], momentum=0.0, dampening=0.0)
    add(_tensors(3))
    add(_tensors(3), is_first_step=True)
    add(_tensors(3), nesterov=True, dampening=0.0, maximize=True)
    add(_tensors(3, torch.float64), torch.float64)
    add(_tensors(3), lr=torch.tensor(0.02))
    for found in (0.0, 1.0):
        add(_tensors(3), **_scaling(found))
    batch.check()


def test_adagrad() -> None:
    batch = Batch()
    for maximize in (False, True):
        state = (_state(3, torch.float32), _steps(4.0))
        batch.add(
            "aten::_fused_adagrad", _tensors(1), _tensors(2), *state, **ADAGRAD, maximize=maximize
        )
    settings = {**ADAGRAD, "lr": torch.tensor(0.01), "maximize": False}
    batch.add(
        "aten::_fused_adagrad.tensor_lr",
        *(_tensors(1), _tensors(2), _state(3, torch.float32), _steps(1.0)),
        **settings,
    )
    batch.check()


def test_numbers_stay_dynamic() -> None:
    """A varying learning rate must not cost a compilation: no rule turns it into a constant."""
    from tests.lowering.harness import execute, record

    state = (_tensors(3), _state(4, torch.float32), [], _steps(1.0))
    flags = {"amsgrad": False, "maximize": False}
    recorded = record("aten::_fused_adam", _tensors(1), _tensors(2), *state, **ADAM, **flags)
    assert execute(recorded.program, recorded.inputs)[1] == set()


def test_short_beta_is_exact_enough() -> None:
    """1 - 0.999 ** 1 keeps its digits in float32 (the text shows expm1, not a power)."""
    state = (_tensors(3), _state(4, torch.float32), [], _steps(1.0))
    flags = {"amsgrad": False, "maximize": False}
    module = text("aten::_fused_adam", _tensors(1), _tensors(2), *state, **ADAM, **flags)
    assert "exponential_minus_one" in module
    assert "power" not in module


def test_unscale() -> None:
    batch = Batch()
    op = "aten::_amp_foreach_non_finite_check_and_unscale"
    for bad in (1.0, INF, NAN):
        grads = [torch.tensor([1.0, 2.0]), torch.tensor([[bad]]), torch.tensor(3.0)]
        for found in (0.0, 1.0):
            batch.add(op, grads, torch.tensor([found]), torch.tensor([0.25]))
    batch.check()


def test_update_scale() -> None:
    batch = Batch()
    for scale, tracker, found in itertools.product((4.0, 3e38), (0, 1), (0.0, 1.0)):
        state = (torch.tensor([scale]), torch.tensor([tracker], dtype=torch.int32))
        batch.add("aten::_amp_update_scale", *state, torch.tensor([found]), 2.0, 0.5, 2)
    batch.check()
