"""Reading and writing through geometries: values, and which HLO operations appear."""

import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyxla.lowering import Geometry, Node, Program, Ref, TensorSpec, lower_to_text
from lazyxla.lowering.view_plan import plan
from tests.lowering.harness import execute

Tensor = torch.Tensor

B, S, H, D = 2, 3, 4, 5


def base(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    count = int(torch.Size(sizes).numel())
    return torch.arange(1, count + 1).to(dtype).reshape(sizes)


def channels_last(*sizes: int) -> Tensor:
    return base(*sizes).to(memory_format=torch.channels_last)


# name, base, view, operations of a read in order, operations of a write (None: any but gather and
# scatter)
CASES: list[tuple[str, Tensor, Callable[[Tensor], Tensor], str | None, str | None]] = [
    ("identity", base(3, 4), lambda x: x[:], "", ""),
    ("transpose", base(3, 4), lambda x: x.t(), "transpose", "transpose"),
    ("permute", base(2, 3, 4), lambda x: x.permute(2, 0, 1), "transpose", "transpose"),
    ("permute size 1", base(2, 1, 4), lambda x: x.transpose(0, 2), "transpose", "transpose"),
    ("view", base(3, 4), lambda x: x.view(2, 6), "reshape", "reshape"),
    ("flatten", base(2, 3, 4), lambda x: x.flatten(1), "reshape", "reshape"),
    ("flatten all", base(2, 3, 4), lambda x: x.view(-1), "reshape", "reshape"),
    ("unflatten", base(2, 12), lambda x: x.unflatten(1, (3, 4)), "reshape", "reshape"),
    ("unsqueeze", base(2, 3), lambda x: x.unsqueeze(1), "reshape", "reshape"),
    ("squeeze", base(2, 1, 3), lambda x: x.squeeze(1), "reshape", "reshape"),
    ("select first", base(3, 4), lambda x: x[1], "slice reshape", None),
    ("select last", base(3, 4), lambda x: x[:, 2], "slice reshape", None),
    ("select middle", base(2, 3, 4), lambda x: x.select(1, 2), "slice reshape", None),
    ("select all", base(2, 3), lambda x: x[1, 2], "slice reshape", None),
    ("narrow", base(5, 4), lambda x: x.narrow(0, 1, 3), "slice", "dynamic_update_slice"),
    ("slice both", base(5, 6), lambda x: x[1:4, 2:5], "slice", "dynamic_update_slice"),
    ("slice step", base(7, 3), lambda x: x[1::2], "slice", "pad select"),
    ("slice step inner", base(3, 7), lambda x: x[:, 1:6:3], "slice", "pad select"),
    ("slice steps", base(6, 8), lambda x: x[::2, ::4], "slice", "pad select"),
    ("split", base(6, 4), lambda x: x.split(2)[1], "slice", "dynamic_update_slice"),
    ("chunk inner", base(3, 8), lambda x: x.chunk(2, 1)[1], "slice", "dynamic_update_slice"),
    ("expand", base(1, 4), lambda x: x.expand(3, 4), "reshape broadcast_in_dim", None),
    ("expand new", base(4), lambda x: x.expand(3, 4), "broadcast_in_dim", None),
    ("expand scalar", base(), lambda x: x.expand(3, 4), "broadcast_in_dim", None),
    ("slice of transpose", base(5, 6), lambda x: x.t()[1:3], "slice transpose", None),
    ("diagonal", base(4, 4), lambda x: x.diagonal(), "reshape slice", None),
    ("diagonal offset", base(4, 6), lambda x: x.diagonal(1), "reshape slice", None),
    ("column of steps", base(4, 6), lambda x: x[::3, 4], "slice reshape", None),
    (
        "split heads",
        base(B, S, H * D),
        lambda x: x.view(B, S, H, D).transpose(1, 2),
        "reshape transpose",
        "transpose reshape",
    ),
    (
        "keys of packed heads",
        base(B, S, 3 * H * D),
        lambda x: x.chunk(3, -1)[1].view(B, S, H, D).permute(0, 2, 3, 1),
        "slice reshape transpose",
        None,
    ),
    (
        "keys of stacked heads",
        base(B, S, 3 * H * D),
        lambda x: x.view(B, S, 3, H, D).permute(2, 0, 3, 1, 4)[1],
        None,
        None,
    ),
    ("merged heads", base(B, H, S, D), lambda x: x.view(B * H, S, D), "reshape", "reshape"),
    (
        "transposed merged heads",
        base(B, H, S, D),
        lambda x: x.transpose(2, 3).view(B * H, D, S),
        "reshape transpose",
        "transpose reshape",
    ),
    (
        "repeated key heads",
        base(B, 2, S, D),
        lambda x: x[:, :, None].expand(B, 2, 3, S, D),
        "broadcast_in_dim",
        None,
    ),
    ("blocks", base(4, 6), lambda x: x.view(2, 2, 3, 2).permute(0, 2, 1, 3), None, None),
    ("view of a slice", base(13), lambda x: x[1:13].view(3, 4), "slice reshape", None),
    ("rows with gaps", base(13), lambda x: x.as_strided((3, 3), (5, 1), 0), None, None),
    ("inside blocks", base(12), lambda x: x.view(3, 4)[:, 1:3], "reshape slice", None),
    ("flat slice", base(4, 6), lambda x: x.view(-1)[2:9], "reshape slice", None),
    ("channels last", channels_last(2, 3, 4, 5), lambda x: x, "", ""),
    ("channels last select", channels_last(2, 3, 4, 5), lambda x: x[:, 1], "slice reshape", None),
    (
        "channels last pixels",
        channels_last(2, 3, 4, 5),
        lambda x: x.permute(0, 2, 3, 1).view(2, 20, 3),
        "reshape transpose",
        "transpose reshape",
    ),
    (
        "channels last flat",
        channels_last(2, 3, 4, 5),
        lambda x: x.permute(0, 2, 3, 1).view(-1),
        "transpose reshape",
        "reshape transpose",
    ),
    ("column-major base", base(4, 3).t(), lambda x: x[1:, ::2], "slice", None),
    ("windows apart", base(12), lambda x: x.unfold(0, 3, 4), None, None),
    ("real of complex", base(3, 4, dtype=torch.complex64), torch.view_as_real, None, None),
    ("complex of real", base(3, 4, 2), torch.view_as_complex, None, None),
    ("real part", base(3, 4, dtype=torch.complex64), lambda x: x.real[1:], None, None),
    (
        "bytes of float",
        base(3, 4),
        lambda x: x.view(torch.uint8),
        "optimization_barrier bitcast_convert reshape",
        None,
    ),
    ("float of bytes", base(3, 8, dtype=torch.uint8), lambda x: x.view(torch.float32), None, None),
    ("int of float", base(3, 4), lambda x: x.view(torch.int32)[1:], "slice bitcast_convert", None),
    ("double of float", base(3, 4), lambda x: x.view(torch.float64), None, None),
    ("complex of doubles", base(3, 4), lambda x: x.view(torch.complex64), None, None),
    ("bytes of bool", base(4).gt(2), lambda x: x.view(torch.uint8), None, None),
    ("bool of bytes", base(4, dtype=torch.uint8), lambda x: x.view(torch.bool), None, None),
    ("empty", base(3, 4), lambda x: x[1:1], None, ""),
]
IDS = [case[0] for case in CASES]


def geometry(tensor: Tensor) -> Geometry:
    return Geometry(tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())


def spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tensor.dtype, tuple(tensor.shape))


def reading(x: Tensor, view: Tensor) -> Program:
    node = Node("lazyxla::view", (Ref(0), geometry(x), geometry(view)), (spec(view),))
    return Program([spec(x)], [node], [Ref(1)], [], {})


def writing(x: Tensor, view: Tensor) -> Program:
    args = (Ref(0), Ref(1), geometry(x), geometry(view))
    node = Node("lazyxla::view_scatter", args, (spec(x),))
    return Program([spec(x), spec(view)], [node], [Ref(2)], [], {})


def operations(program: Program) -> list[str]:
    return re.findall(r"stablehlo\.(\w+)", lower_to_text(program, "cpu"))


def assert_reads(x: Tensor, view: Tensor) -> None:
    (result,), _ = execute(reading(x, view), [x])
    torch.testing.assert_close(result, view.contiguous(), rtol=0, atol=0, equal_nan=True)


def assert_writes(x: Tensor, to_view: Callable[[Tensor], Tensor]) -> None:
    expected = x.clone()
    view = to_view(expected)
    update = torch.randint(0, 100, view.shape).to(view.dtype)
    view.copy_(update)
    (result,), _ = execute(writing(x, to_view(x)), [x, update])
    torch.testing.assert_close(result, expected.contiguous(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("name", "x", "to_view", "wanted", "_"), CASES, ids=IDS)
def test_read(
    name: str, x: Tensor, to_view: Callable[[Tensor], Tensor], wanted: str | None, _: str | None
) -> None:
    view = to_view(x)
    assert_reads(x, view)
    used = operations(reading(x, view))
    assert not {"gather", "dynamic_gather", "scatter"} & set(used)
    if wanted is not None:
        assert used == wanted.split()


@pytest.mark.parametrize(("name", "x", "to_view", "_", "wanted"), CASES, ids=IDS)
def test_write(
    name: str, x: Tensor, to_view: Callable[[Tensor], Tensor], _: str | None, wanted: str | None
) -> None:
    view = to_view(x)
    if any(s == 0 and n > 1 for s, n in zip(view.stride(), view.shape, strict=True)):
        pytest.skip("PyTorch does not write to expanded tensors")
    assert_writes(x, to_view)
    used = operations(writing(x, view))
    assert not {"gather", "dynamic_gather", "scatter"} & set(used)
    if wanted is not None:
        moves = [op for op in used if op in MOVES]
        assert moves == wanted.split()


MOVES = {"transpose", "reshape", "slice", "dynamic_update_slice", "pad", "select", "concatenate"}


@pytest.mark.parametrize(
    ("x", "to_view"),
    [
        (base(10), lambda x: x.unfold(0, 4, 2)),
        (base(3, 10), lambda x: x.unfold(1, 4, 1)),
        (base(4, 10, 3), lambda x: x.unfold(1, 4, 3).transpose(0, 2)),
        (base(12), lambda x: x.as_strided((3, 4), (2, 2), 1)),
    ],
)
def test_overlapping_windows_are_gathered_along_one_dimension(
    x: Tensor, to_view: Callable[[Tensor], Tensor]
) -> None:
    assert_reads(x, to_view(x))
    program = lower_to_text(reading(x, to_view(x)), "cpu")
    assert "stablehlo.gather" in program
    assert not re.search(r"constant dense<\[", program)  # indices are computed, not stored


def test_write_to_overlapping_windows_with_equal_values() -> None:
    x = base(3, 10)
    view = x.unfold(1, 4, 2)
    update = torch.full(view.shape, 5.0)
    expected = x.clone()
    expected.unfold(1, 4, 2).fill_(5.0)
    (result,), _ = execute(writing(x, view), [x, update])
    torch.testing.assert_close(result, expected)


def test_view_beyond_the_storage_is_refused() -> None:
    inside = Geometry(torch.float32, (3, 4), (4, 1), 0)
    beyond = Geometry(torch.float32, (3, 4), (4, 1), 1)
    with pytest.raises(ValueError, match="beyond its storage of 12 elements"):
        plan(inside, beyond)


@st.composite
def bases(draw: st.DrawFn) -> Tensor:
    sizes = draw(st.lists(st.integers(1, 5), min_size=0, max_size=4))
    order = draw(st.permutations(range(len(sizes))))
    return base(*sizes).permute(*order) if sizes else base()


@st.composite
def view_chains(draw: st.DrawFn) -> list[tuple[str, int, int, int, int]]:
    """Abstract view steps; `follow` maps their numbers into what the tensor at hand allows."""
    number = st.integers(0, 1000)
    names = ["transpose", "slice", "select", "unsqueeze", "flatten", "unflatten", "diagonal"]
    step = st.tuples(st.sampled_from(names), number, number, number, number)
    return draw(st.lists(step, max_size=6))


def follow(x: Tensor, chain: list[tuple[str, int, int, int, int]]) -> Tensor:
    for name, i, j, k, step in chain:
        if x.dim() == 0:
            x = x.unsqueeze(0)
        dim, other = i % x.dim(), j % x.dim()
        size = x.size(dim)
        if name == "transpose":
            x = x.transpose(dim, other)
        elif name == "slice":
            start = j % size
            x = x[(slice(None),) * dim + (slice(start, start + 1 + k % size, 1 + step % 3),)]
        elif name == "select":
            x = x.select(dim, j % size)
        elif name == "unsqueeze" and x.dim() < 6:
            x = x.unsqueeze(dim)
        elif name == "flatten" and dim + 1 < x.dim():
            if x.stride(dim) == x.stride(dim + 1) * x.size(dim + 1):
                x = x.flatten(dim, dim + 1)
        elif name == "unflatten" and x.dim() < 6:
            factors = [f for f in range(1, size + 1) if size % f == 0]
            x = x.unflatten(dim, (factors[j % len(factors)], -1))
        elif name == "diagonal" and dim != other:
            x = x.diagonal(0, dim, other)
    return x


@settings(max_examples=60, deadline=None)
@given(bases(), view_chains())
def test_any_chain_of_views(x: Tensor, chain: list[tuple[str, int, int, int, int]]) -> None:
    assert_reads(x, follow(x, chain))
    assert_writes(x, lambda y: follow(y, chain))


@st.composite
def strided(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    x = base(*draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    sizes = draw(st.lists(st.integers(1, 4), min_size=0, max_size=4))
    strides = [draw(st.integers(0, 8)) for _ in sizes]
    room = x.numel() - 1
    for i, stride in enumerate(strides):
        if stride:
            sizes[i] = min(sizes[i], room // stride + 1)
            room -= (sizes[i] - 1) * stride
    return x, x.as_strided(sizes, strides, draw(st.integers(0, room)))


@settings(max_examples=60, deadline=None)
@given(strided())
def test_any_strides(pair: tuple[Tensor, Tensor]) -> None:
    assert_reads(*pair)
