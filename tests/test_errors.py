"""Errors: a wrong call raises PyTorch's error at the call; what has no lowering says so."""

from __future__ import annotations

import pytest
import torch

from tests.support import assert_same, error_of, numbers, on_device

WRONG = {
    "shapes": lambda x, y: x + y,
    "shapes_in_place": lambda x, y: x.add_(y),
    "broadcast_in_place": lambda x, y: x[0].add_(x.clone()),
    "comparison": lambda x, y: x < y,
    "where": lambda x, y: torch.where(x > 0, x, y),
    "cast_in_place": lambda x, y: y.add_(1.5),
    "complex_in_place": lambda x, y: x.mul_(1j),
    "float_into_bool": lambda x, y: (x > 0).add_(x),
    "out_cast": lambda x, y: torch.add(x, 1.5, out=y),
    "copy": lambda x, y: x.copy_(y),
    "copy_dims": lambda x, y: x[0].copy_(x.clone()),
    "setitem": lambda x, y: x.__setitem__(0, y[0, :5]),
    "mm": lambda x, y: x @ x,
    "mm_dtypes": lambda x, y: x @ y.t(),
    "bmm": lambda x, y: torch.bmm(x[None], x[None]),
    "mv": lambda x, y: torch.mv(x, x[:, 0]),
    "dot": lambda x, y: torch.dot(x[0], x[:, 0]),
    "addmm": lambda x, y: torch.addmm(x, x, x.t()),
    "linear": lambda x, y: torch.nn.functional.linear(x, x.t()),
    "cat": lambda x, y: torch.cat([x, y], 1),
    "stack": lambda x, y: torch.stack([x, y]),
    "sum_dim": lambda x, y: x.sum(2),
    "sum_dims": lambda x, y: x.sum((0, 0)),
    "mean_of_int": lambda x, y: y.mean(),
    "softmax_dim": lambda x, y: x.softmax(3),
    "max_of_empty": lambda x, y: x[:0].max(),
    "negative_of_bool": lambda x, y: -(x > 0),
    "bool_subtraction": lambda x, y: (x > 0) - (x > 1),
    "clamp": lambda x, y: x.clamp(),
    "lerp": lambda x, y: torch.lerp(x, y, 0.5),
    "gather_dtype": lambda x, y: x.gather(0, x),
    "gather_dims": lambda x, y: x.gather(0, y[0]),
    "index_select": lambda x, y: x.index_select(0, x[0]),
    "index_dtype": lambda x, y: x[x],
    "mask_shape": lambda x, y: x[y > 0],
    "embedding": lambda x, y: torch.nn.functional.embedding(x, x),
    "conv": lambda x, y: torch.conv2d(x[None, None], x[None]),
    "cross_entropy": lambda x, y: torch.nn.functional.cross_entropy(x, y[:, 0]),
    "item": lambda x, y: x.item(),
    "bool": lambda x, y: bool(x),
    "index_of_number": lambda x, y: [1, 2][x[0, 0]],
    "int_of_many": lambda x, y: int(x),
    "flip": lambda x, y: x.flip(2),
    "roll": lambda x, y: x.roll((1, 2), 0),
    "cumsum": lambda x, y: x.cumsum(2),
    "topk": lambda x, y: x.topk(9),
    "sort": lambda x, y: x.sort(5),
    "tril": lambda x, y: x[0].tril(),
    "masked_fill": lambda x, y: x.masked_fill(x, 1),
    "masked_fill_value": lambda x, y: y.masked_fill_(y > 0, x),
    "set_dtype": lambda x, y: x.set_(y),
    "numpy": lambda x, y: x.as_strided((2,), (1,), -1),
    "new_negative": lambda x, y: x.new_empty(-1),
    "dropout": lambda x, y: torch.nn.functional.dropout(x, 2.0),
    "backward": lambda x, y: x.backward(),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.filterwarnings("ignore")
def test_errors_are_pytorchs(name):
    """A wrong call raises at the call what it raises on the CPU, and leaves its arguments alone."""
    x, y = numbers(4, 6), numbers(5, 6, dtype=torch.int64)
    kind, text = error_of(WRONG[name], x, y)
    assert kind is not type(None)
    ours = on_device((x, y))
    assert error_of(WRONG[name], *ours) == (kind, text)
    assert_same(ours, (x, y))


@pytest.mark.parametrize("operator", ["__and__", "__or__", "__xor__", "__lshift__", "__invert__"])
def test_bitwise_operators_refuse_floats(operator):
    """PyTorch names its CPU kernel in these errors; here only their kind is the same."""
    x = on_device(numbers(4, 6))
    with pytest.raises((NotImplementedError, TypeError, RuntimeError), match=r"float|Float|integ"):
        getattr(x, operator)(*[] if operator == "__invert__" else [x])


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_element_types_that_xla_lacks():
    x = on_device(numbers(2).half())
    for call in (
        lambda: x * 1j,
        lambda: x.to(torch.complex32),
        lambda: x.new_zeros(2, dtype=torch.complex32),
        lambda: torch.empty(2, dtype=torch.complex32, device=x.device),
    ):
        with pytest.raises(
            (NotImplementedError, TypeError),
            match="XLA has no element type for torch's ComplexHalf",
        ):
            call()


OTHER = {
    "add": lambda x, y: x + y,
    "add_in_place": lambda x, y: x.add_(y),
    "cpu_in_place": lambda x, y: y.add_(x),
    "cat": lambda x, y: torch.cat([x, y]),
    "mm": lambda x, y: x @ y,
    "where": lambda x, y: torch.where(x > 0, x, y),
    "out": lambda x, y: torch.add(x, x, out=y),
    "linear": lambda x, y: torch.nn.functional.linear(x, y),
}


@pytest.mark.parametrize("device", ["cpu", "lazyxla:1"])
@pytest.mark.parametrize("name", OTHER)
def test_mixed_devices(name, device):
    x, y = torch.ones(3, 3, device="lazyxla:0"), torch.ones(3, 3, device=device)
    with pytest.raises(
        RuntimeError,
        match=r"Expected all tensors to be on the same device, .* at least two devices",
    ) as error:
        OTHER[name](x, y)
    assert "lazyxla:0" in str(error.value)
    assert device in str(error.value)


INDEXED = {
    "getitem": lambda x, where: x[where],
    "setitem": lambda x, where: x.__setitem__(where, torch.ones(1, device=x.device)),
    "setitem, a number": lambda x, where: x.__setitem__(where, 2.0),
}


@pytest.mark.parametrize("index", [torch.tensor([0]), torch.tensor([True, False, False])])
@pytest.mark.parametrize("name", INDEXED)
def test_indices_on_another_device(name, index):
    x = torch.ones(3, device="lazyxla:0")
    INDEXED[name](x, index)
    text = r"either on cpu or on the same device as the indexed tensor \(lazyxla:0\)"
    with pytest.raises(RuntimeError, match=text):
        INDEXED[name](x, index.to("lazyxla:1"))


def test_cpu_scalars_may_meet_device_tensors():
    x = on_device(numbers(2, 3))
    assert_same(x + torch.tensor(2), numbers(2, 3) + 2)
    assert_same(torch.tensor(2) - x, 2 - numbers(2, 3))
    with pytest.raises(RuntimeError, match=r"same device"):
        torch.tensor(2.0).add_(x[0, 0])


def test_an_error_leaves_the_device_usable():
    x = on_device(numbers(4, 6))
    y = x * 2
    with pytest.raises(RuntimeError, match="must match the size"):
        y + on_device(numbers(5, 5))
    with pytest.raises(ZeroDivisionError):
        y.add_(1 / 0)
    y.add_(1)
    assert_same(y, numbers(4, 6) * 2 + 1)


# --- The host fallback ---------------------------------------------------------------------------


def test_host_fallback_is_counted_and_named_once(run_python):
    result = run_python(
        """
import torch, lazyxla
library = torch.library.Library("lazyxla_test", "DEF")
library.define("triple(Tensor x) -> Tensor")
library.impl("triple", lambda x: x * 3, "CPU")
x = torch.ones(2, 3, device="lazyxla")
y = x + 1
z = torch.ops.lazyxla_test.triple(y)
z = torch.ops.lazyxla_test.triple(z)
assert lazyxla._C.fallbacks() == {"lazyxla_test::triple": 2}
assert lazyxla.counters()["fallbacks"] == 2
assert z.device.type == "lazyxla" and torch.equal(z.cpu(), torch.full((2, 3), 18.0))
lazyxla.reset_counters()
assert lazyxla._C.fallbacks() == {}
lazyxla.settings.strict_fallback = True
try:
    torch.ops.lazyxla_test.triple(y)
except NotImplementedError as error:
    text = str(error)
    assert "lazyxla_test::triple(Float[2, 3])" in text and "LAZYXLA_STRICT" in text, text
else:
    raise AssertionError("strict mode let it pass")
assert (y + 1).sum().item() == 18
"""
    )
    text = "lazyxla_test::triple has no meta function, which would tell its result's shape,"
    assert result.stderr.count(text) == 1


@pytest.mark.parametrize(
    "function",
    [
        torch.digamma,
        torch.lgamma,
        torch.erfinv,
        torch.nn.functional.hardswish,
        lambda z: torch.fmod(z, z),
        lambda z: torch.nextafter(z, z),
    ],
)
def test_functions_of_real_numbers_in_compiled_code(function):
    """There only rules refuse complex ones. The compiler ends the process over some."""
    torch._dynamo.reset()  # these share the code that Dynamo counts compilations of
    z = on_device(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(NotImplementedError, match="not defined for torch\\.complex64"):
        torch.compile(function, backend="lazyxla")(z).cpu()
