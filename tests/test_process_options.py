"""What plugins are told when several processes start a client together."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from lazyxla import platforms
from lazyxla.platforms import Platform


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process of torchrun's, and nobody else's options."""
    monkeypatch.setattr(platforms, "_processes", None)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ |= before


def use(monkeypatch: pytest.MonkeyPatch, platform: Platform, chips: int = 0) -> None:
    monkeypatch.setattr(platforms, "_resolve", lambda config: platform)
    monkeypatch.setattr(platforms, "tpu_chips", lambda: chips)


def local(rank: int, size: int) -> None:
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}


def test_one_process_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Platform("cuda", "plugin.so", 8))
    assert platforms.resolve().create_options == {}


@pytest.mark.parametrize(
    ("rank", "here", "gpus"),
    [(0, 1, [0, 1, 2, 3]), (1, 2, [2, 3]), (3, 4, [3]), (4, 5, [4])],
)
def test_gpus_are_shared_out(
    rank: int, here: int, gpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fifth process of four GPUs asks for a fifth one; the plugin says that there is none."""
    use(monkeypatch, Platform("cuda", "plugin.so", 4))
    local(rank, here)
    platforms.set_processes(8 + rank, 16)
    options = platforms.resolve().create_options
    assert options == {"node_id": 8 + rank, "num_nodes": 16, "visible_devices": gpus}


def test_chips_of_one_host_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Platform("tpu", "libtpu.so", 4), chips=4)
    local(2, 4)
    platforms.set_processes(2, 4)
    assert platforms.resolve().create_options == {}  # libtpu reads the environment
    assert os.environ["TPU_VISIBLE_CHIPS"] == os.environ["CLOUD_TPU_TASK_ID"] == "2"
    assert os.environ["TPU_PROCESS_BOUNDS"] == "2,2,1"
    addresses = os.environ["TPU_PROCESS_ADDRESSES"].split(",")
    assert len(set(addresses)) == 4
    assert addresses[2] == f"localhost:{os.environ['TPU_PROCESS_PORT']}"


def test_a_process_of_each_host_has_all_its_chips(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Platform("tpu", "libtpu.so", 4), chips=4)
    local(0, 1)
    platforms.set_processes(3, 16)
    assert not {"TPU_VISIBLE_CHIPS", "TPU_PROCESS_BOUNDS", "CLOUD_TPU_TASK_ID"} & os.environ.keys()


@pytest.mark.parametrize(("here", "all_"), [(4, 8), (2, 2), (3, 3)])
def test_chips_that_cannot_be_shared_out(
    here: int, all_: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, Platform("tpu", "libtpu.so", 4), chips=4)
    local(1, here)
    with pytest.raises(RuntimeError, match="start one process on each host"):
        platforms.set_processes(1, all_)
    os.environ["TPU_PROCESS_BOUNDS"] = "1,1,1"  # what the user has set stays
    platforms.set_processes(1, all_)
    assert "TPU_VISIBLE_CHIPS" not in os.environ
