"""Arrays and tensors change hands: values, types, memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import lazyxla

jax.config.update("jax_platforms", "cpu")

DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.bool),
    *(torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]
SHAPES = [(), (3,), (4, 0), (2, 3, 4), (64, 64)]


def example(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    numbers = torch.arange(torch.Size(shape).numel()) % 5
    return numbers.reshape(shape).to(torch.float32).to(dtype)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_there_and_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = example(dtype, shape)
    for given in (x, x.to("lazyxla")):
        array = lazyxla.to_jax(given)
        assert isinstance(array, jax.Array)
        assert (str(array.dtype), array.shape) == (str(dtype).removeprefix("torch."), shape)
        back = lazyxla.from_jax(array)
        assert (back.dtype, back.shape, back.device.type) == (dtype, x.shape, "lazyxla")
        assert as_bytes(back).equal(as_bytes(x))


def test_trees_and_views() -> None:
    x = torch.arange(24.0).reshape(4, 6).to("lazyxla")
    tree = {"transposed": x.T, "row": [x[1]], "steps": 3, "name": "x"}
    arrays = lazyxla.to_jax(tree)
    assert (arrays["steps"], arrays["name"]) == (3, "x")
    np.testing.assert_array_equal(arrays["transposed"], x.cpu().numpy().T)
    np.testing.assert_array_equal(arrays["row"][0], x.cpu().numpy()[1])
    back = lazyxla.from_jax({**arrays, "numpy": np.ones(2, np.float32)})
    assert back["transposed"].equal(x.T)
    assert back["numpy"].device.type == "lazyxla"


def test_nothing_is_copied() -> None:
    x = torch.randn(64, 64, device="lazyxla")
    y = x * 2
    array = lazyxla.to_jax(y)
    assert array.unsafe_buffer_pointer() == lazyxla.host_view(y).data_ptr()
    made = jnp.cos(array)
    before = lazyxla.counters()
    tensor = lazyxla.from_jax(made)
    assert lazyxla.host_view(tensor).data_ptr() == made.unsafe_buffer_pointer()
    after = lazyxla.counters()
    assert [after[name] - before[name] for name in ("uploads", "downloads")] == [0, 0]


def test_neither_sees_what_the_other_writes() -> None:
    x = torch.ones(64, 64).to("lazyxla")
    array = lazyxla.to_jax(x)
    x.add_(1)
    lazyxla.sync(wait=True)
    assert float(array.sum()) == 64 * 64
    tensor = lazyxla.from_jax(array)
    tensor.mul_(3)
    lazyxla.sync(wait=True)
    assert float(array.sum()) == 64 * 64
    assert tensor.sum().item() == 3 * 64 * 64
    host = torch.ones(64, 64)
    array = lazyxla.to_jax(host)
    host.zero_()
    assert float(array.sum()) == 64 * 64


def test_memory_lives_as_long_as_its_last_user() -> None:
    expected = torch.arange(64.0 * 64).reshape(64, 64)
    arrays = [lazyxla.to_jax(expected.to("lazyxla") + i) for i in range(20)]
    tensors = [lazyxla.from_jax(jnp.asarray(expected.numpy()) + i) for i in range(20)]
    for _ in range(5):  # what was freed would be used for these
        torch.full((64, 64), -1.0, device="lazyxla").cpu()
        jnp.full((64, 64), -1.0).block_until_ready()
    for i in range(20):
        np.testing.assert_array_equal(arrays[i], expected.numpy() + i)
        assert tensors[i].cpu().equal(expected + i)


def test_types_that_one_of_them_has_not() -> None:
    assert lazyxla.to_jax(torch.arange(3)).dtype == jnp.int32
    with pytest.raises(TypeError, match="jax_enable_x64"):
        lazyxla.to_jax(torch.ones(2, dtype=torch.float64))
    with jax.enable_x64(True):
        for dtype in (torch.int64, torch.float64, torch.complex128):
            back = lazyxla.from_jax(lazyxla.to_jax(torch.ones(2, dtype=dtype).to("lazyxla")))
            assert back.dtype == dtype
    with pytest.raises(TypeError, match="PyTorch has no dtype"):
        lazyxla.from_jax(jnp.ones(2, jnp.float4_e2m1fn))


def test_keys_arrive_as_their_data() -> None:
    key: Any = jax.random.key(3)
    assert lazyxla.from_jax(key).tolist() == [0, 3]
