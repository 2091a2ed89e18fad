"""Environments: what is made in a block is on the device, and nothing is left behind."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

import lazyxla
from lazyxla.environment import EnvironmentConfig

DEVICE = torch.device("lazyxla", 0)
CPU = torch.device("cpu")

CONSTRUCTORS: dict[str, Callable[[], Any]] = {
    "randn": lambda: torch.randn(2),
    "tensor": lambda: torch.tensor([1.0]),
    "zeros out of a list": lambda: torch.zeros([2, 3]),
    "arange": lambda: torch.arange(3),
    "eye": lambda: torch.eye(2),
    "a module": lambda: nn.Linear(2, 2).weight,
    "a buffer": lambda: nn.BatchNorm1d(2).running_mean,
    "as_tensor of a list": lambda: torch.as_tensor([1, 2]),
    "randint": lambda: torch.randint(3, (2,)),
    "randperm": lambda: torch.randperm(3),
}


@pytest.mark.parametrize("make", CONSTRUCTORS.values(), ids=CONSTRUCTORS)
def test_what_is_made_is_on_the_device(make: Callable[[], Tensor]) -> None:
    with lazyxla.default_env():
        assert make().device == DEVICE
    assert make().device == CPU


def write() -> bytes:
    file = io.BytesIO()
    torch.save({"model": nn.Linear(2, 3).state_dict(), "step": torch.tensor(3)}, file)
    return file.getvalue()


FROM_THE_CPU = write()


def saved() -> io.BytesIO:
    return io.BytesIO(FROM_THE_CPU)


def devices(tree: Any) -> set[torch.device]:
    return {x.device for x in torch.utils._pytree.tree_leaves(tree)}


def test_loaded() -> None:
    with lazyxla.default_env() as env:
        assert devices(torch.load(saved())) == {DEVICE}
        assert devices(torch.load(saved(), map_location="cpu")) == {CPU}
        assert devices(torch.load(saved(), map_location=lambda storage, _: storage)) == {CPU}
        with torch.device("cpu"):
            assert devices(torch.load(saved())) == {CPU}
            with env:
                assert devices(torch.load(saved())) == {DEVICE}
    assert devices(torch.load(saved())) == {CPU}
    with torch.device(DEVICE):  # PyTorch's own block does not load there
        assert devices(torch.load(saved())) == {CPU}


def test_blocks_in_blocks() -> None:
    env = lazyxla.default_env()
    with env, env:
        with torch.device("cpu"):
            assert torch.ones(2).device == CPU
        with pytest.raises(ZeroDivisionError), lazyxla.Environment():
            torch.ones(1 // 0)
        assert torch.ones(2).device == DEVICE
        assert torch.ones(2, device="cpu").device == CPU
    assert torch.ones(2).device == CPU
    assert not torch.overrides._get_current_function_mode_stack()


def test_a_block_belongs_to_its_thread() -> None:
    found: list[torch.device] = []
    with lazyxla.default_env():
        thread = threading.Thread(target=lambda: found.append(torch.ones(2).device))
        thread.start()
        thread.join()
    assert found == [CPU]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("seeded", [False, True])
def test_loaders(workers: int, seeded: bool) -> None:
    data = TensorDataset(torch.arange(10.0))

    def order() -> list[float]:
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(1) if seeded else None
        loader: Any = DataLoader(
            data, batch_size=5, shuffle=True, generator=generator, num_workers=workers
        )
        return [float(x) for (batch,) in loader for x in batch]

    with lazyxla.default_env():
        within = order()
    assert sorted(within) == list(range(10))
    if seeded:
        assert within == order()


class MakesTensors(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


@pytest.mark.parametrize(("workers", "where"), [(0, DEVICE), (2, CPU)])
def test_workers_have_no_device(workers: int, where: torch.device) -> None:
    with lazyxla.default_env():
        loader: Any = DataLoader(MakesTensors(), batch_size=2, num_workers=workers)
        assert [batch.device for batch in loader] == [where, where]


def test_globally() -> None:
    try:
        lazyxla.enable_globally()
        lazyxla.enable_globally()
        assert torch.ones(2).device == DEVICE
        with lazyxla.default_env():
            assert torch.ones(2).device == DEVICE
        assert torch.ones(2).device == DEVICE
    finally:
        lazyxla.disable_globally()
    assert torch.ones(2).device == CPU
    lazyxla.disable_globally()
    assert not torch.overrides._get_current_function_mode_stack()


def test_trees() -> None:
    there = torch.ones(2, device=DEVICE)
    tree = {"a": [torch.ones(2), 1, "x"], "b": (there, nn.Linear(2, 2))}
    moved = lazyxla.default_env().to_xla(tree)
    assert moved["a"][0].device == DEVICE
    assert moved["a"][1:] == [1, "x"]
    assert moved["b"][0] is there
    assert moved["b"][1].weight.device == DEVICE
    assert lazyxla.to_device(torch.ones(2), "lazyxla:1").device.index == 1
    packed = lazyxla.to_device([pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])])[0]
    assert packed.data.device == DEVICE
    assert packed.batch_sizes.tolist() == [2, 2, 1]


def test_seeds() -> None:
    env = lazyxla.default_env()
    with env:
        env.manual_seed(3)
        first = torch.randn(3)
        env.manual_seed(3)
        assert torch.randn(3).equal(first)


def test_cuda_may_mean_the_device() -> None:
    env = lazyxla.Environment(EnvironmentConfig(treat_cuda_as_device=True))
    with env:
        assert torch.ones(2, device="cuda").device == DEVICE
        assert torch.ones(2, device="cuda:1").device.index == 1
        host = torch.ones(2, device="cpu")
        assert host.cuda().device == DEVICE
        assert host.cuda(None, True).device == DEVICE
        places = (host.cuda(1), host.cuda("cuda:1"), host.cuda(device=1, non_blocking=True))
        assert [x.device.index for x in places] == [1, 1, 1]
        assert nn.Linear(2, 2, device="cpu").cuda(1).weight.device.index == 1
        assert torch.ones(2, device="cpu").to(torch.device("cuda")).device == DEVICE
        assert nn.Linear(2, 2, device="cpu").to("cuda").weight.device == DEVICE
        env.config.treat_cuda_as_device = False
        refused = "not compiled with CUDA|no NVIDIA driver"  # the latter by a torch with CUDA
        with pytest.raises((AssertionError, RuntimeError), match=refused):
            torch.ones(2, device="cuda")


def test_training_in_a_block_is_as_outside() -> None:
    def train(x: Tensor, labels: Tensor, layer: nn.Linear) -> Tensor:
        optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(layer(x), labels).backward()
            optimizer.step()
        return layer.weight.detach().cpu()

    x, labels, layer = torch.randn(4, 3), torch.tensor([0, 1, 1, 0]), nn.Linear(3, 2)
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    expected = train(x, labels, layer)
    with lazyxla.default_env() as env:
        ours = nn.Linear(3, 2)
        ours.load_state_dict(state)
        lazyxla.reset_counters()
        found = train(*env.to_xla((x, labels)), ours)
        assert lazyxla.counters()["fallbacks"] == 0
    torch.testing.assert_close(found, expected)
