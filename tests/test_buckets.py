"""Padding to few sizes: values, masks, and the loader that pads."""

from __future__ import annotations

import pickle
import random
from collections import OrderedDict, UserDict, deque
from collections.abc import Iterator, MutableMapping
from dataclasses import FrozenInstanceError, dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, TensorDataset
from transformers import BatchEncoding

import lazyxla
from lazyxla import Buckets, bucket
from tests.support import DEVICE, DTYPES, counted, on_device


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compares tensors of the host exactly."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


# --- Values --------------------------------------------------------------------------------------


def test_a_tensor() -> None:
    x = torch.tensor([[1, 2, 3], [4, 5, 6]])
    padded, mask = bucket(x, dims=(0, 1), sizes={0: [3], 1: [2, 4, 8]}, value=-1)
    same(padded, torch.tensor([[1, 2, 3, -1], [4, 5, 6, -1], [-1, -1, -1, -1]]))
    yes, no = True, False
    same(mask, torch.tensor([[yes, yes, yes, no], [yes, yes, yes, no], [no] * 4]))
    same(padded[mask], x.flatten())


def test_the_least_size_that_is_enough() -> None:
    for size, expected in [(0, 2), (1, 2), (2, 2), (3, 5), (5, 5), (6, 9), (9, 9)]:
        padded, mask = bucket(torch.ones(size), dims=0, sizes=[9, 2, 5, 5])
        same(padded, torch.tensor([1.0] * size + [0.0] * (expected - size)))
        same(mask, torch.arange(expected) < size)


@pytest.mark.parametrize(
    ("shape", "dims", "expected"),
    [
        ((3, 5), 0, (4,)),
        ((3, 5), 1, (3, 8)),
        ((3, 5), (0, 1), (4, 8)),
        ((3, 5), (1, 0), (4, 8)),
        ((3, 5, 2), 1, (3, 8)),
        ((3, 5), -1, (3, 8)),
        ((3, 5), -2, (4,)),
        ((3, 2, 5), -1, (3, 2, 8)),
        ((3, 2, 5, 7), (2, 3), (3, 2, 8, 8)),
    ],
)
def test_a_mask_covers_the_dimensions_up_to_the_last(
    shape: tuple[int, ...], dims: int | tuple[int, ...], expected: tuple[int, ...]
) -> None:
    x = torch.randn(shape)
    padded, mask = bucket(x, dims=dims, sizes=[4, 8])
    assert mask.dtype == torch.bool
    assert mask.shape == padded.shape[: mask.dim()] == expected
    same(padded[mask].flatten(), x.flatten())
    assert padded.count_nonzero() == x.count_nonzero()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    shape=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_random_shapes(shape: list[int], sizes: list[int], dtype: torch.dtype, seed: int) -> None:
    choice = random.Random(seed)
    dims = choice.sample(range(len(shape)), choice.randint(1, len(shape)))
    written = tuple(dim - choice.choice([0, len(shape)]) for dim in dims)
    each = {dim: [*choice.sample(sizes, choice.randint(1, len(sizes))), 6] for dim in written}
    x = (torch.randn(shape) * 9).to(dtype)
    value = choice.choice([0, 1])
    padded, mask = bucket([x, "text"], dims=written, sizes=each, value=value)
    target = list(shape)
    for dim, name in zip(dims, written):
        target[dim] = min(size for size in each[name] if size >= shape[dim])
    expected = torch.full(target, value, dtype=dtype)
    expected[tuple(map(slice, shape))] = x
    same(padded[0], expected)
    assert padded[1] == "text"
    last = max(dims) + 1
    expected = torch.zeros(target[:last], dtype=torch.bool)
    expected[tuple(map(slice, shape[:last]))] = True
    same(mask, expected)
    if target == shape:
        assert padded[0] is x


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype: torch.dtype) -> None:
    (padded,), mask = bucket((torch.ones(2, dtype=dtype),), dims=0, sizes=[3], value=1)
    same(padded, torch.ones(3, dtype=dtype))
    assert mask.tolist() == [True, True, False]


def test_values_are_exact() -> None:
    x = torch.zeros(1, dtype=torch.int64)
    assert bucket(x, dims=0, sizes=[2], value=2**53 + 1)[0][1].item() == 2**53 + 1
    z = torch.zeros(1, dtype=torch.complex64)
    assert bucket(z, dims=0, sizes=[2], value=1 + 2j)[0][1].item() == 1 + 2j
    y = torch.zeros(1, dtype=torch.bfloat16)
    assert bucket(y, dims=0, sizes=[2], value=float("-inf"))[0][1].item() == float("-inf")


def test_values_of_numpy() -> None:
    for value in (np.float32(0.5), np.complex64(2j), np.int8(3)):
        x = torch.ones(1, dtype=torch.complex64)
        assert bucket(x, dims=0, sizes=[2], value=value)[0].tolist() == [1, complex(value)]
    assert bucket(torch.ones(1), dims=0, sizes=[2], value=np.float32(0.5))[0].tolist() == [1, 0.5]


def test_what_has_the_right_size_is_not_copied() -> None:
    x, y = torch.randn(8, 4).t(), torch.randn(4)
    padded, mask = bucket({"x": x, "y": y}, dims=(0, 1), sizes=[4, 8])
    assert padded["x"] is x
    assert padded["y"] is y
    assert mask.shape == (4, 8)
    assert mask.all()


def test_gradients() -> None:
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    padded, mask = bucket(x, dims=(0, 1), sizes=[4], value=7)
    weight = torch.arange(16.0, dtype=torch.float64).reshape(4, 4)
    (padded * weight).sum().backward()
    same(x.grad, weight[:2, :3])
    assert not mask.requires_grad
    assert torch.autograd.gradcheck(lambda x: bucket(x, dims=1, sizes=[5])[0], x)


def test_tensors_on_the_device() -> None:
    x = torch.randn(3, 5)
    ours, ours_mask = bucket({"x": on_device(x)}, dims=(0, 1), sizes=[4, 8], value=2)
    theirs, theirs_mask = bucket({"x": x}, dims=(0, 1), sizes=[4, 8], value=2)
    assert ours["x"].device.type == ours_mask.device.type == DEVICE
    same(ours["x"].cpu(), theirs["x"])
    same(ours_mask.cpu(), theirs_mask)


def test_buckets_are_values() -> None:
    buckets = Buckets(dims=[0, 1], sizes=[8, 4], value=3)
    assert buckets == Buckets(dims=(0, 1), sizes=(4, 8), value=3)
    assert len({buckets, Buckets(dims=(0, 1), sizes=range(4, 9, 4), value=3)}) == 1
    assert pickle.loads(pickle.dumps(buckets)) == buckets  # for a loader's workers
    with pytest.raises(FrozenInstanceError):
        buckets.dims = 0  # type: ignore[misc]
    x = torch.ones(1, 5)
    for ours, theirs in zip(buckets(x), bucket(x, dims=(0, 1), sizes=[4, 8], value=3)):
        same(ours, theirs)


# --- Batches of several tensors -------------------------------------------------------------------


class Text(NamedTuple):
    tokens: torch.Tensor
    labels: torch.Tensor


@dataclass(frozen=True)
class Sample:
    text: Text
    name: str


def test_a_text_batch() -> None:
    batch = {
        "input_ids": torch.tensor([[5, 6, 7]]),
        "attention_mask": torch.tensor([[1, 1, 0]]),
        "labels": torch.tensor([[6, 7, -100]]),
        "class": torch.tensor([3]),
    }
    value = {"input_ids": 9, "attention_mask": 0, "labels": -100, "class": -1}
    sizes = {0: [2], 1: [4, 8]}
    padded, mask = bucket(batch, dims=(0, 1), sizes=sizes, value=value)
    assert {name: x.tolist() for name, x in padded.items()} == {
        "input_ids": [[5, 6, 7, 9], [9, 9, 9, 9]],
        "attention_mask": [[1, 1, 0, 0], [0, 0, 0, 0]],
        "labels": [[6, 7, -100, -100], [-100] * 4],
        "class": [3, -1],
    }
    assert mask.tolist() == [[True] * 3 + [False], [False] * 4]
    assert batch["input_ids"].shape == (1, 3)  # the batch itself stays


def test_dimensions_of_each_entry() -> None:
    batch = {"x": torch.ones(2, 5), "y": torch.ones(5, 2), "z": torch.ones(3)}
    padded, mask = bucket(batch, dims={"x": (0, 1), "y": -1}, sizes={0: [4], 1: [8], -1: [3]})
    assert [list(x.shape) for x in padded.values()] == [[4, 8], [5, 3], [3]]
    assert padded["z"] is batch["z"]
    assert mask.shape == (4, 8)
    features = torch.ones(2, 9)  # whose dimension 1 is another
    padded, mask = bucket((features, batch["x"]), dims={0: 0, 1: (0, 1)}, sizes=[4, 8])
    assert [list(x.shape) for x in padded] == [[4, 9], [4, 8]]
    assert mask.shape == (4, 8)


def test_a_mask_is_of_the_first_with_most_dimensions() -> None:
    labels, tokens, scores = torch.ones(2), torch.ones(2, 3), torch.ones(2, 3, 5)
    padded, mask = bucket([labels, tokens, scores], dims=(0, 1), sizes=[4])
    assert [list(x.shape) for x in padded] == [[4], [4, 4], [4, 4, 5]]
    assert mask.shape == (4, 4)


def test_nested_batches() -> None:
    x = torch.ones(2, 3)
    packed = pack_sequence([x[0], x[1, :2]])
    batch = {
        "pair": (x, [x.long(), None, 5]),
        "text": Text(x, torch.ones(2)),
        "sample": Sample(Text(x.bool(), torch.ones(2)), "name"),
        "ordered": OrderedDict(b=x, a="text"),
        "encoded": UserDict(x=x),
        "queue": deque([x]),
        "number": torch.tensor(4.0),
        "packed": packed,
    }
    value = {"pair": {1: {0: -1}}, "text": {"labels": 7}, "encoded": 3, "queue": {0: 4}}
    padded, mask = bucket(batch, dims=(0, 1), sizes={0: [3], 1: [4]}, value=value)

    def filled(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        result = torch.full((3, 4), value, dtype=dtype)
        result[:2, :3] = 1
        return result

    assert isinstance(padded["pair"], tuple)
    same(padded["pair"][0], filled(0))
    same(padded["pair"][1][0], filled(-1, torch.int64))
    assert padded["pair"][1][1:] == [None, 5]
    assert isinstance(padded["text"], Text)
    same(padded["text"].tokens, filled(0))
    assert padded["text"].labels.tolist() == [1, 1, 7]
    assert isinstance(padded["sample"], Sample)
    same(padded["sample"].text.tokens, filled(0, torch.bool))
    assert padded["sample"].name == "name"
    assert batch["sample"].text.tokens.shape == (2, 3)
    assert list(padded["ordered"]) == ["b", "a"]
    assert isinstance(padded["encoded"], UserDict)
    same(padded["encoded"]["x"], filled(3))
    assert batch["encoded"]["x"] is x
    assert isinstance(padded["queue"], deque)
    same(padded["queue"][0], filled(4))
    assert padded["number"] is batch["number"]
    assert isinstance(padded["packed"], PackedSequence)
    assert padded["packed"].data is packed.data
    assert mask.tolist() == [[True] * 3 + [False]] * 2 + [[False] * 4]


def test_the_batches_of_transformers() -> None:
    batch = BatchEncoding({"input_ids": torch.ones(2, 3, dtype=torch.int64)})
    padded, _ = bucket(batch, dims=1, sizes=[4], value={"input_ids": 9})
    assert isinstance(padded, BatchEncoding)
    assert padded["input_ids"].tolist() == [[1, 1, 1, 9]] * 2
    assert padded.input_ids is padded["input_ids"]
    assert batch["input_ids"].shape == (2, 3)


class Entries(MutableMapping[str, Any]):
    """A mapping whose shallow copies share their entries with it."""

    def __init__(self, **entries: Any) -> None:
        self.entries = entries

    def __getitem__(self, key: str) -> Any:
        return self.entries[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.entries[key] = value

    def __delitem__(self, key: str) -> None:
        del self.entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def test_a_mapping_that_is_no_dict_stays_as_it_is() -> None:
    batch = Entries(x=torch.ones(2, 3), name="a")
    padded, _ = bucket(batch, dims=1, sizes=[4])
    assert isinstance(padded, Entries)
    assert padded["name"] == "a"
    same(padded["x"], torch.tensor([[1.0, 1, 1, 0]] * 2))
    same(batch["x"], torch.ones(2, 3))


# --- The loader ----------------------------------------------------------------------------------


def test_the_loader_pads() -> None:
    x, y = torch.arange(30).reshape(10, 3), torch.arange(10.0)
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    buckets = Buckets(dims=(0, 1), sizes=[4], value={0: -1})
    batches = lazyxla.DeviceLoader(loader, buckets=buckets)
    assert len(batches) == 3
    with counted() as n:
        results = list(batches)
    assert (n.nodes_recorded, n.flushes, n.uploads) == (0, 0, 9)
    assert len(results) == 3
    for i, ((tokens, labels), mask) in enumerate(results):
        assert {each.device.type for each in (tokens, labels, mask)} == {DEVICE}
        assert {each.shape for each in (tokens, mask)} == {(4, 4)}
        rows = min(4, 10 - 4 * i)
        expected = torch.full((4, 4), -1)
        expected[:rows, :3] = x[4 * i : 4 * i + rows]
        same(tokens.cpu(), expected)
        same(labels.cpu(), F.pad(y[4 * i : 4 * i + rows], (0, 4 - rows)))
        same(mask.cpu(), expected >= 0)


def test_the_loader_raises_errors_in_their_place() -> None:
    lengths = [3, 4, 5, 2]
    buckets = Buckets(dims=0, sizes=[4])
    batches = iter(lazyxla.DeviceLoader(map(torch.ones, lengths), buckets=buckets, prefetch=5))
    assert [next(batches)[1].sum().item() for _ in range(2)] == [3, 4]
    with pytest.raises(ValueError, match=r"dimension 0 of batch has size 5, more than the great"):
        next(batches)
    assert next(batches, None) is None
    with pytest.raises(TypeError, match=r"buckets must be a lazyxla.Buckets, got list"):
        lazyxla.DeviceLoader([], buckets=[4])  # type: ignore[arg-type]
