"""Random generators as objects: seeds, states, threads."""

from __future__ import annotations

import threading

import pytest
import torch

import lazyxla
from lazyxla import _C


def test_generator_draws_seed_and_ordinal():
    generator = torch.Generator("lazyxla").manual_seed(7)
    assert [_C.draw(generator) for _ in range(3)] == [(7, 0), (7, 1), (7, 2)]
    generator.manual_seed(8)
    assert _C.draw(generator) == (8, 0)
    assert generator.initial_seed() == 8


def test_generator_state():
    generator = torch.Generator("lazyxla:1").manual_seed(2**64 - 1)
    _C.draw(generator)
    state = generator.get_state()
    assert (state.dtype, state.device.type, state.numel()) == (torch.uint8, "cpu", 16)
    _C.draw(generator)
    other = torch.Generator("lazyxla")
    other.set_state(state)
    assert _C.draw(other) == (2**64 - 1, 1)
    assert generator.device == torch.device("lazyxla:1")


def test_generator_offset_is_the_ordinal():
    generator = torch.Generator("lazyxla").manual_seed(3)
    generator.set_offset(40)
    assert _C.draw(generator) == (3, 40)
    assert generator.get_offset() == 41


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        (torch.zeros(8, dtype=torch.uint8), ValueError, "16 bytes .* got 8"),
        (torch.zeros(16), TypeError, "ByteTensor"),
        (torch.zeros(32, dtype=torch.uint8)[::2], RuntimeError, "contiguous"),
    ],
)
def test_bad_generator_state(state, error, message):
    with pytest.raises(error, match=message):
        torch.Generator("lazyxla").set_state(state)


@pytest.mark.filterwarnings("ignore:.*runs on the host")
def test_an_operator_on_the_host_draws_from_the_given_generator() -> None:
    with torch.library._scoped_library("lazyxla_noise", "DEF") as library:
        library.define("noise(Tensor x, Generator? generator=None) -> Tensor")
        library.impl("noise", lambda x, generator=None: torch.rand(3, generator=generator), "CPU")
        x = torch.ones(3, device="lazyxla")
        generator = torch.Generator("lazyxla").manual_seed(5)

        def noise() -> list[float]:
            return torch.ops.lazyxla_noise.noise(x, generator=generator).tolist()

        before = torch.get_rng_state()
        first, second = noise(), noise()
        assert first != second
        generator.manual_seed(5)
        assert [noise(), noise()] == [first, second]
        assert torch.equal(torch.get_rng_state(), before)


def test_random_seed():
    generator = torch.Generator("lazyxla")
    assert generator.seed() != generator.seed()
    assert generator.initial_seed() == _C.draw(generator)[0]


@pytest.mark.usefixtures("keep_random_state")
def test_torch_manual_seed_reaches_all_devices():
    torch.manual_seed(11)
    assert [_C.draw(_C.default_generator(i)) for i in range(2)] == [(11, 0), (11, 0)]
    lazyxla.manual_seed(-1)
    assert _C.draw(_C.default_generator(1)) == (2**64 - 1, 0)
    with pytest.raises(RuntimeError, match="64-bit"):
        lazyxla.manual_seed(2**64)


@pytest.mark.usefixtures("keep_random_state")
def test_default_generator_state():
    lazyxla.manual_seed(5)
    state = lazyxla.get_rng_state("lazyxla:1")
    drawn = _C.draw(_C.default_generator(1))
    lazyxla.set_rng_state(state, torch.device("lazyxla:1"))
    assert _C.draw(_C.default_generator(1)) == drawn


@pytest.mark.usefixtures("keep_random_state")
@pytest.mark.filterwarnings("ignore:LAZYXLA reports that you have 2 available devices")
def test_fork_rng():
    torch.manual_seed(1)
    with torch.random.fork_rng(device_type="lazyxla"):
        torch.manual_seed(2)
        _C.draw(_C.default_generator(0))
    assert _C.draw(_C.default_generator(0)) == (1, 0)


def test_threads_draw_distinct_ordinals():
    generator = torch.Generator("lazyxla").manual_seed(0)
    drawn: list[tuple[int, int]] = []

    def body():
        drawn.extend(_C.draw(generator) for _ in range(500))

    threads = [threading.Thread(target=body) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ordinal for _, ordinal in drawn) == list(range(2000))
