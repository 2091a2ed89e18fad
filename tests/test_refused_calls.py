"""Calls that only PyTorch's CPU kernels refuse are refused at the call, in the kernels' words.

Each call takes a device. What it may do instead, with memory that is shared or given, it does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.support import DEVICE, assert_same, counted, error_of

Call = Callable[[str], Any]


def ones(*shape: int, d: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype).to(d)


def table(d: str) -> torch.Tensor:
    return torch.arange(12.0).reshape(3, 4).to(d)


def row(d: str) -> torch.Tensor:
    return torch.arange(4.0).to(d)


def index(*values: int, d: str) -> torch.Tensor:
    return torch.tensor(values).to(d)


def assign(x: torch.Tensor, where: Any, value: Any) -> torch.Tensor:
    x[where] = value
    return x


REFUSED: dict[str, Call] = {
    # Values that do not fit where they are to be put.
    "setitem, shape": lambda d: assign(table(d), index(0, 1, d=d), ones(3, d=d)),
    "setitem, shape of two indices": lambda d: assign(
        table(d), (index(0, 1, d=d), index(0, 1, d=d)), ones(3, d=d)
    ),
    "setitem, shape for a mask": lambda d: assign(table(d), table(d) > 5, ones(3, d=d)),
    "setitem, float64": lambda d: assign(table(d), index(0, d=d), ones(4, d=d).double()),
    "setitem, integers": lambda d: assign(table(d), index(0, d=d), ones(4, d=d).long()),
    "setitem, float64 for a mask": lambda d: assign(table(d), table(d) > 5, ones(6, d=d).double()),
    "setitem, indices": lambda d: assign(table(d), ([0, 1], [0, 1, 2]), 0),
    "setitem, too many indices": lambda d: assign(table(d), ([0, 1], [0, 1], [0, 1]), 0),
    "getitem, indices": lambda d: table(d)[[0, 1], [0, 1, 2]],
    "index_put": lambda d: table(d).index_put((index(0, 1, d=d),), ones(3, d=d)),
    "index_put, accumulating": lambda d: table(d).index_put_(
        (index(0, 1, d=d),), ones(3, d=d), accumulate=True
    ),
    "index_put, dtypes of index and values": lambda d: table(d).index_put(
        (ones(2, d=d),), ones(3, d=d).long()
    ),
    "index_put, shape and dtype of values": lambda d: table(d).index_put(
        (index(0, 1, d=d),), ones(3, d=d).long()
    ),
    "mask of bytes": lambda d: assign(table(d), (table(d) > 3).byte(), 0),
    "_unsafe_masked_index_put_accumulate": lambda d: (
        torch.ops.aten._unsafe_masked_index_put_accumulate(
            table(d), table(d) > 0, [index(0, 1, d=d)], table(d)
        )
    ),
    "logcumsumexp, out of another dtype": lambda d: torch.logcumsumexp(
        row(d).double(), 0, out=row(d)
    ),
    "mode, values of another dtype": lambda d: torch.mode(
        row(d), out=(row(d).long(), row(d).long())
    ),
    "mode, indices of another dtype": lambda d: torch.mode(row(d), out=(row(d), row(d).int())),
    "ldexp_, broadcast": lambda d: ones(3, 1, d=d).ldexp_(ones(4, d=d)),
    "polar": lambda d: torch.polar(row(d), row(d).double()),
    **{
        f"interpolate, {mode}, {dtype}": lambda d, mode=mode, dtype=dtype: F.interpolate(
            ones(1, 3, 4, 4, d=d, dtype=dtype), size=(6, 6), mode=mode, antialias=mode[-1] == "c"
        )
        for mode in ("nearest", "bilinear", "bicubic")
        for dtype in (torch.int8, torch.int32, torch.bool)
    },
    "embedding_bag, weight": lambda d: F.embedding_bag(
        index(0, 1, d=d), ones(2, 2, 2, d=d), index(0, 1, d=d)
    ),
    "embedding_bag, offsets": lambda d: torch.embedding_bag(
        table(d), index(0, 1, d=d), index(0, 1, d=d).view(1, 2)
    ),
    "embedding_bag, indices": lambda d: torch.embedding_bag(
        table(d), ones(1, 2, 2, d=d).long(), index(0, 1, d=d)
    ),
    "embedding_bag, all of them": lambda d: torch.embedding_bag(
        ones(3, d=d), index(0, 1, d=d), ones(1, 2, d=d).long()
    ),
    "put": lambda d: table(d).put(index(0, 1, d=d), ones(3, d=d)),
    "put_": lambda d: table(d).put_(index(0, 1, d=d), ones(3, d=d)),
    "put_, float64": lambda d: table(d).put_(index(0, 1, d=d), ones(2, d=d).double()),
    "put_, index of floats": lambda d: table(d).put_(ones(2, d=d), ones(2, d=d)),
    "put_, index of int32": lambda d: table(d).put_(ones(2, d=d).int(), ones(2, d=d)),
    "index_add": lambda d: table(d).index_add(0, index(0, 1, 2, d=d), ones(3, 5, d=d)),
    # Convolutions.
    "bias": lambda d: F.conv2d(ones(1, 2, 4, 4, d=d), ones(3, 2, 2, 2, d=d), ones(4, d=d)),
    "bias of one": lambda d: F.conv2d(ones(1, 2, 4, 4, d=d), ones(3, 2, 2, 2, d=d), ones(1, d=d)),
    "bias of two dimensions": lambda d: F.conv1d(
        ones(1, 2, 4, d=d), ones(3, 2, 2, d=d), ones(3, 1, d=d)
    ),
    "bias, transposed": lambda d: F.conv_transpose2d(
        ones(1, 2, 4, 4, d=d), ones(2, 3, 2, 2, d=d), ones(4, d=d)
    ),
    "bias, in groups": lambda d: F.conv_transpose2d(
        ones(1, 2, 4, 4, d=d), ones(2, 3, 2, 2, d=d), ones(3, d=d), groups=2
    ),
    "weight of float64": lambda d: F.conv2d(ones(1, 2, 4, 4, d=d), ones(3, 2, 2, 2, d=d).double()),
    "groups": lambda d: F.conv2d(ones(1, 3, 4, 4, d=d), ones(3, 2, 2, 2, d=d), groups=2),
    "window": lambda d: F.conv2d(ones(1, 2, 1, 1, d=d), ones(3, 2, 2, 2, d=d)),
    # Statistics of which one is missing.
    "batch_norm, no mean": lambda d: torch.native_batch_norm(
        table(d), None, None, None, row(d), True, 0.1, 1e-5
    ),
    "batch_norm, no variance": lambda d: torch.native_batch_norm(
        table(d), None, None, row(d), None, True, 0.1, 1e-5
    ),
    # Element types of results.
    "all": lambda d: torch.all(table(d), out=ones(d=d)),
    "all of a dimension": lambda d: torch.all(table(d), 1, out=ones(3, d=d)),
    "all of dimensions": lambda d: torch.all(table(d), (0, 1), out=ones(d=d).int()),
    "any": lambda d: torch.any(table(d), out=ones(d=d)),
    "any of a dimension": lambda d: torch.any(table(d), 1, out=ones(3, d=d)),
    "slogdet": lambda d: torch.linalg.slogdet(
        ones(2, 2, d=d), out=(ones(d=d), ones(d=d, dtype=torch.complex64))
    ),
    "histc": lambda d: torch.histc(row(d), 2, 0, 1, out=ones(2, d=d).double()),
    # Biases of recurrent cells, and histograms' weights.
    "lstm_cell": lambda d: torch.lstm_cell(
        *(ones(2, 3, d=d), [ones(2, 4, d=d)] * 2, ones(16, 3, d=d), ones(16, 4, d=d)),
        *(ones(18, d=d), ones(16, d=d)),
    ),
    "gru_cell": lambda d: torch.gru_cell(
        *(ones(2, 3, d=d), ones(2, 4, d=d), ones(12, 3, d=d), ones(12, 4, d=d)),
        *(ones(12, d=d), ones(14, d=d)),
    ),
    "histogram": lambda d: torch.histogram(row(d), 2, weight=ones(3, d=d)),
    "histogram of given bins": lambda d: torch.histogram(row(d), row(d), weight=ones(3, d=d)),
    # What only the CPU's kernel could compute, which lacks the dtype.
    "det of halves": lambda d: torch.linalg.det(ones(2, 2, d=d).half()),
    "cholesky_inverse of halves": lambda d: torch.cholesky_inverse(ones(2, 2, d=d).half()),
    # Complex numbers.
    "fill_": lambda d: table(d).fill_(1j),
    "fill_ of integers": lambda d: table(d).long().fill_(1j),
    "fill": lambda d: torch.fill(table(d), 1j),
    "full": lambda d: torch.full((2,), 1j, dtype=torch.float32, device=d),
    "full_like": lambda d: torch.full_like(table(d), 1j),
    "new_full": lambda d: table(d).new_full((2,), 1j),
    "new_full of bytes": lambda d: table(d).byte().new_full((2,), 300),
    "index_fill": lambda d: table(d).index_fill(0, index(0, d=d), 1j),
    "index_fill_": lambda d: table(d).index_fill_(0, index(0, d=d), 1j),
    "index_fill_ of a tensor": lambda d: table(d).index_fill_(
        0, index(0, d=d), torch.tensor(1j).to(d)
    ),
    "masked_fill": lambda d: table(d).masked_fill(table(d) > 3, 1j),
    "scatter": lambda d: table(d).scatter(0, index(0, 1, d=d)[None], 1j),
    "fill_diagonal_": lambda d: table(d).fill_diagonal_(1j),
    "setitem, complex": lambda d: assign(table(d), [0, 1], 1j),
    "dropout of integers": lambda d: torch.native_dropout(table(d).long(), 0.5, True),
    # Factories with results of their own.
    "randperm of halves": lambda d: torch.randperm(3000, out=ones(1, d=d).half()),
    "randperm, negative": lambda d: torch.randperm(-1, device=d),
    "randperm, negative, with a result": lambda d: torch.randperm(-1, out=index(0, d=d)),
    "arange, half a step": lambda d: torch.arange(0, 2, 0.5, out=ones(4, d=d).long()),
    "arange, expanded": lambda d: torch.arange(4, out=ones(1, d=d).expand(4)),
    "linspace, expanded": lambda d: torch.linspace(0, 1, 4, out=ones(1, d=d).expand(4)),
    # Layouts and sizes that do not exist.
    "channels_last of three dimensions": lambda d: torch.empty(
        2, 3, 4, device=d, memory_format=torch.channels_last
    ),
    "channels_last_3d of four dimensions": lambda d: ones(2, 3, 4, 5, d=d).contiguous(
        memory_format=torch.channels_last_3d
    ),
    "channels_last of a copy": lambda d: table(d).clone(memory_format=torch.channels_last),
    "a format that is kept, of nothing": lambda d: torch.empty(
        2, 3, device=d, memory_format=torch.preserve_format
    ),
    "empty, negative": lambda d: torch.empty(2, -1, device=d),
    "empty_strided, negative": lambda d: torch.empty_strided((2, -1), (1, 1), device=d),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_the_cpus_words(name: str) -> None:
    kind, text = error_of(REFUSED[name], "cpu")
    # From torch 2.15 on, the CPU takes a range of integers in half steps.
    is_taken = kind is type(None)
    assert not is_taken or name == "arange, half a step"
    with counted() as n:
        assert error_of(REFUSED[name], DEVICE) == (kind, text)
    assert n.compiles == 0 or is_taken or "mask" in name  # whose positions are read
    assert n.fallbacks == 0


def test_sizes_of_large_calls_are_checked() -> None:
    """The CPU is asked about smaller ones that compare as these do."""

    def call(d: str, width: int) -> torch.Tensor:
        return torch.index_add(
            ones(500, 40, d=d), 0, torch.arange(300).to(d), ones(300, width, d=d)
        )

    assert call(DEVICE, 40).shape == (500, 40)
    assert error_of(call, "cpu", 50)[0] is error_of(call, DEVICE, 50)[0] is RuntimeError


def expanded(d: str) -> torch.Tensor:
    return ones(1, d=d).expand(4)


def mask(d: str) -> torch.Tensor:
    return row(d) > 1


# Each writes to the memory that it reads, or twice to the same.
SHARED: dict[str, Call] = {
    "index_put_": lambda d: (x := row(d)).index_put_((index(1, 0, 2, 3, d=d),), x),
    "index_put_, in part": lambda d: (x := row(d)).index_put_((index(1, 0, d=d),), x[:2]),
    "index_put_, index": lambda d: (x := row(d).long()).index_put_((x,), index(1, d=d)),
    "setitem": lambda d: assign(x := row(d), index(1, 0, 2, 3, d=d), x),
    "scatter_": lambda d: (x := row(d)).scatter_(0, index(1, 0, 2, 3, d=d), x),
    "scatter_add_": lambda d: (x := row(d)).scatter_add_(0, index(1, 0, 2, 3, d=d), x),
    "index_add_": lambda d: (x := row(d)).index_add_(0, index(1, 0, 2, 3, d=d), x),
    "index_copy_": lambda d: (x := row(d)).index_copy_(0, index(1, 0, 2, 3, d=d), x),
    "put_": lambda d: (x := row(d)).put_(index(1, 0, 2, 3, d=d), x),
    "masked_fill_": lambda d: (x := mask(d))[1:].masked_fill_(x[:-1], False),
    "take": lambda d: torch.take(x := row(d), index(1, 0, 2, 3, d=d), out=x),
    "gather": lambda d: torch.gather(x := row(d), 0, index(1, 0, 2, 3, d=d), out=x),
    "gather, when resized": lambda d: torch.gather(
        row(d).long(), 0, (i := index(1, 0, 2, 3, d=d))[1:], out=i[:1]
    ),
    "index_select": lambda d: torch.index_select(x := row(d), 0, index(1, 0, 2, 3, d=d), out=x),
    "index": lambda d: torch.ops.aten.index.Tensor_out(
        x := row(d), [index(1, 0, 2, 3, d=d)], out=x
    ),
    "kthvalue": lambda d: torch.kthvalue(x := row(d), 1, 0, True, out=(x[:1], index(0, d=d))),
    "cat": lambda d: torch.cat([x := row(d), row(d)[:0]], out=x),
    "cat, in part": lambda d: torch.cat([(x := row(d))[:2], x[1:3]], out=x),
    "masked_select": lambda d: torch.masked_select(x := row(d), mask(d), out=x),
    "add, in part": lambda d: torch.add((x := row(d))[1:], 1, out=x[:-1]),
    "add_, in part": lambda d: (x := row(d))[1:].add_(x[:-1]),
    "add, expanded": lambda d: torch.add(row(d), 1, out=expanded(d)),
    "gather, expanded": lambda d: torch.gather(row(d), 0, index(1, 0, 2, 3, d=d), out=expanded(d)),
    "masked_select, expanded": lambda d: torch.masked_select(row(d), mask(d), out=expanded(d)),
}


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_shared_memory_is_refused(name: str) -> None:
    kind, text = error_of(SHARED[name], "cpu")
    assert kind is RuntimeError
    assert "unsupported operation" in text
    assert error_of(SHARED[name], DEVICE) == (kind, text)
    assert error_of(SHARED[name], DEVICE) == (kind, text)  # also when the call is known


def into(x: torch.Tensor, part: Any, fill: Callable[[torch.Tensor], Any]) -> Any:
    fill(x[part])
    return x


def in_lists(
    operator: Callable[..., Any], d: str, written: list[Any], other: list[Any] | float
) -> torch.Tensor:
    x = row(d)
    if isinstance(other, list):
        other = [x[part] if isinstance(part, slice) else part for part in other]
    operator([x[part] for part in written], other)
    assert x._version == 2  # as on the CPU
    return x


ACCEPTED: dict[str, Call] = {
    "randperm": lambda d: torch.randperm(4, out=ones(4, d=d).long()).sort()[0],
    "randperm, resized": lambda d: torch.randperm(4, out=ones(0, d=d).long()).sort()[0],
    "randperm of a view": lambda d: torch.randperm(4, out=ones(8, d=d).long()[::2]).sort()[0],
    "randperm of all bytes": lambda d: torch.randperm(256, out=ones(0, d=d).byte()).sort()[0],
    "randperm of floats": lambda d: torch.randperm(4, out=ones(4, d=d)).sort()[0],
    "arange of a view": lambda d: into(
        ones(8, d=d), slice(0, 8, 2), lambda x: torch.arange(4, out=x)
    ),
    "arange of a matrix": lambda d: torch.arange(4, out=ones(2, 2, d=d)),
    "arange of a transposed matrix": lambda d: torch.arange(4, out=ones(2, 2, d=d).t()),
    "linspace of a view": lambda d: into(
        ones(8, d=d), slice(0, 8, 2), lambda x: torch.linspace(0, 3, 4, out=x)
    ),
    "linspace of a matrix": lambda d: torch.linspace(0, 3, 4, out=ones(2, 2, d=d)),
    "logspace of a matrix": lambda d: torch.logspace(0, 3, 4, out=ones(2, 2, d=d)),
    "range of a view": lambda d: into(
        ones(8, d=d), slice(0, 8, 2), lambda x: torch.range(0, 3, out=x)
    ),
    "range of a matrix": lambda d: torch.range(0, 3, out=ones(2, 2, d=d)),
    "all of bytes": lambda d: torch.all(table(d), out=ones(d=d).byte()),
    "add": lambda d: torch.add(x := row(d), 1, out=x),
    "add_": lambda d: (x := row(d)).add_(x),
    "cumsum": lambda d: torch.cumsum(x := row(d), 0, out=x),
    "masked_scatter_": lambda d: (x := row(d)).masked_scatter_(x > 1, x),
    "fill_ with an element": lambda d: (x := row(d)).fill_(x[1]),
    "masked_fill_ with an element": lambda d: (x := row(d)).masked_fill_(x > 1, x[1]),
    "rows apart": lambda d: (x := table(d))[0].add_(x[1]),
    "lists, the same tensor twice": lambda d: in_lists(torch._foreach_add_, d, [0, 0], 1.0),
    "lists, parts that overlap": lambda d: in_lists(
        torch._foreach_mul_, d, [slice(0, 3), slice(1, 4)], [2.0, 3.0]
    ),
    "lists, what another element reads": lambda d: in_lists(
        torch._foreach_add_, d, [slice(0, 2), slice(2, 4)], [slice(2, 4), slice(0, 2)]
    ),
    "lists, parts of one memory": lambda d: in_lists(
        torch._foreach_add_, d, [slice(0, 2), slice(2, 4)], 1.0
    ),
    "index_put_, of a number": lambda d: table(d).index_put_((table(d) > 5,), torch.tensor(2.0)),
    "index_put, of an integer": lambda d: table(d).T.index_put((table(d).T > 5,), torch.tensor(2)),
}


@pytest.mark.parametrize("name", ACCEPTED)
@pytest.mark.filterwarnings("ignore:torch.range is deprecated", "ignore:The number of elements")
def test_accepted_as_on_the_cpu(name: str) -> None:
    assert_same(ACCEPTED[name](DEVICE), ACCEPTED[name]("cpu"))


def test_a_number_where_a_mask_is_true_reads_no_mask() -> None:
    x = table(DEVICE)
    with counted() as n:
        x.index_put_((x > 5,), torch.tensor(2.0))
        filled = x.index_put((x > 1,), torch.tensor([3]))
    assert n.data_dependent == n.executions == 0
    assert (x.max(), filled.max()) == (5, 3)


def test_lists_of_parts_of_one_memory_are_one_operator() -> None:
    x = torch.zeros(1000, device=DEVICE)
    parts = list(x.split(10))
    with counted() as n:
        torch._foreach_add_(parts, 1.0)
    assert n.nodes_recorded == 1 + 2 * len(parts)  # each is read from the memory, and written to it
    assert x.tolist() == [1] * 1000


def test_a_known_call_asks_no_cpu_kernel() -> None:
    """Which full overlaps a kernel accepts is asked once per kind of call."""
    x = row(DEVICE)
    torch.cumsum(x, 0, out=x)
    with counted() as n:
        torch.cumsum(x, 0, out=x)
    assert n.shape_inferences == 0


ELSEWHERE: dict[str, Callable[[torch.Tensor], Any]] = {
    "nonzero": lambda x: torch.nonzero(x, out=torch.empty(0, dtype=torch.int64)),
    "masked_select": lambda x: torch.masked_select(x, x > 3, out=torch.empty(0)),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_results_on_another_device(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"same device.*lazyxla:0 and cpu"):
        ELSEWHERE[name](table(DEVICE))


@pytest.mark.parametrize("mode", ["sum", "max"])
def test_indices_of_no_bag(mode: str) -> None:
    """PyTorch's CPU reads beyond the end of the offsets."""
    indices = index(0, 1, d=DEVICE)
    weights = row(DEVICE)[:2] if mode == "sum" else None
    with pytest.raises(RuntimeError, match="belong to no bag"):
        F.embedding_bag(indices, table(DEVICE), indices[:0], mode=mode, per_sample_weights=weights)


# --- Warnings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, 1.0])
def test_masks_of_bytes_warn(value: float | None) -> None:
    def seen(d: str) -> list[str]:
        x, by = table(d), (table(d) > 3).byte()
        torch.set_warn_always(True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if value is None:
                _ = x[by]
            else:
                x[by] = ones(8, d=d)
        torch.set_warn_always(False)
        return [str(w.message).split(" (Triggered")[0] for w in caught]

    assert any("torch.uint8 is now deprecated" in text for text in seen("cpu"))
    assert seen(DEVICE) == seen("cpu")
