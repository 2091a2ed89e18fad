"""JAX on the device's client: one client, and arrays that pass without a copy."""

from __future__ import annotations

import pytest

from tests.conftest import RunPython

PREPARE = """
import jax, jax.numpy as jnp, numpy as np, torch, lazyxla
lazyxla.share_with_jax()
def close(ours, theirs):
    torch.testing.assert_close(*(torch.from_numpy(np.array(x)) for x in (ours, theirs)))
"""


def run(run_python: RunPython, code: str, **environment: str) -> str:
    return run_python(PREPARE + code, **environment).stdout


def test_nothing_is_copied(run_python: RunPython) -> None:
    code = """
lazyxla.share_with_jax()  # once more changes nothing
assert jax.config.jax_platforms == "lazyxla,cpu"
assert len(jax.devices()) == lazyxla.device_count() and jax.devices()[0].client.platform == "cpu"
x = torch.arange(24.0).to("lazyxla").reshape(4, 6)
y = x.T * 2
lazyxla.sync(wait=True)
before = lazyxla.counters()
array = lazyxla.to_jax(y)
assert array.devices() == {jax.devices()[0]}
made = jnp.sin(array)
tensor = lazyxla.from_jax(made) + 1
lazyxla.sync(wait=True)
after = lazyxla.counters()
assert [after[n] - before[n] for n in ("uploads", "downloads", "fallbacks")] == [0, 0, 0]
assert lazyxla.host_view(y).data_ptr() == array.unsafe_buffer_pointer()
assert lazyxla.host_view(lazyxla.from_jax(made)).data_ptr() == made.unsafe_buffer_pointer()
torch.testing.assert_close(tensor.cpu(), (torch.arange(24.0).reshape(4, 6).T * 2).sin() + 1)
"""
    run(run_python, code)


def test_types_and_shapes(run_python: RunPython) -> None:
    code = """
dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.bool, torch.int8,
          torch.int32, torch.uint8, torch.uint32, torch.float8_e4m3fn]
for dtype in dtypes:
    for shape in [(), (3,), (4, 0), (2, 3, 4)]:
        x = (torch.arange(torch.Size(shape).numel()) % 2).reshape(shape).to(dtype)
        array = lazyxla.to_jax(x.to("lazyxla"))
        assert array.shape == shape and str(array.dtype) == str(dtype)[6:], (dtype, array.dtype)
        back = lazyxla.from_jax(array)
        assert back.dtype == dtype and back.shape == shape
        assert back.cpu().view(-1).view(torch.uint8).equal(x.view(-1).view(torch.uint8))
assert lazyxla.to_jax(torch.arange(3).to("lazyxla")).dtype == jnp.int32
views = torch.arange(12.0).to("lazyxla").reshape(3, 4)
for view in (views[1], views[:, 1:3], views.T, views.expand(2, 3, 4), torch.view_as_complex(
        views.view(6, 2)).conj()):
    np.testing.assert_array_equal(lazyxla.to_jax(view), view.cpu().resolve_conj().numpy())
np.testing.assert_array_equal(lazyxla.to_jax(torch.empty(2, device="lazyxla").fill_(3)), [3, 3])
"""
    run(run_python, code)


def test_linear_algebra_and_views(run_python: RunPython) -> None:
    code = """
a = jnp.array([[4.0, 1.0], [1.0, 3.0]])
close(jnp.linalg.inv(a) @ a, np.eye(2, dtype=np.float32))
model = torch.nn.Linear(2, 2)
view = lazyxla.jax_view(model.to("lazyxla"))
ours = view(view.parameters, a)
close(ours, model.cpu()(torch.tensor(np.array(a))).detach())
"""
    run(run_python, code)


WALK = """
import gc, random
choose = random.Random(SEED)
twice = jax.jit(lambda v: v * 2 + 1)
consuming = jax.jit(lambda v: v * 0.5 - 1, donate_argnums=0)
pool = []  # what there is, and its value
for _ in range(250):
    while len(pool) < 3:
        value = np.full((64, 64), choose.uniform(-1, 1), np.float32)
        made = torch.tensor(value).to("lazyxla") if choose.random() < 0.5 else jnp.asarray(value)
        pool.append((made, value))
    what = choose.randrange(9)
    i = choose.randrange(len(pool))
    thing, value = pool[i]
    is_tensor = isinstance(thing, torch.Tensor)
    if what == 0:
        pool.append(((lazyxla.to_jax if is_tensor else lazyxla.from_jax)(thing), value))
    elif what == 1:
        pool.append((thing * 2 + 1 if is_tensor else twice(thing), value * 2 + 1))
    elif what == 2 and is_tensor:
        thing.mul_(0.5).sub_(1)
        pool[i] = (thing, value * 0.5 - 1)
    elif what == 2:
        pool[i] = (consuming(thing), value * 0.5 - 1)
    elif what == 3 and is_tensor:
        thing[1:3].zero_()
        value = value.copy()
        value[1:3] = 0
        pool[i] = (thing, value)
    elif what == 4:
        lazyxla.sync(wait=choose.random() < 0.5)
    elif what == 5:
        close(thing.cpu() if is_tensor else thing, value)
    elif what == 6:
        del thing, pool[i]
        gc.collect()
    elif what == 7 and not is_tensor:
        thing.delete()
        del pool[i]
    elif what == 8 and is_tensor:
        j = choose.randrange(len(pool))
        other, its = pool[j]
        other = other if isinstance(other, torch.Tensor) else lazyxla.from_jax(other)
        pool.append(((thing + other) / 2, (value + its) / 2))
for thing, value in pool:
    is_tensor = isinstance(thing, torch.Tensor)
    close(thing.cpu() if is_tensor else thing, value)
assert lazyxla.counters()["fallbacks"] == 0
"""


@pytest.mark.parametrize("seed", range(4))
def test_neither_spoils_what_the_other_holds(run_python: RunPython, seed: int) -> None:
    """Writes in place, donations, deletions and conversions, in any order."""
    run(run_python, WALK.replace("SEED", str(seed)))


def test_memory_is_freed(run_python: RunPython) -> None:
    code = """
import gc
def use():
    x = torch.ones(1024, 1024, device="lazyxla") * 3
    array = lazyxla.to_jax(x)
    tensor = lazyxla.from_jax(array * 2)
    return float(array[0, 0]) + tensor[0, 0].item()
assert use() == 9
gc.collect()
before = lazyxla.memory_allocated()
for _ in range(20):
    use()
gc.collect()
lazyxla.sync(wait=True)
assert lazyxla.memory_allocated() <= before + 4096
"""
    run(run_python, code)


def test_threads(run_python: RunPython) -> None:
    code = """
from concurrent.futures import ThreadPoolExecutor
def work(number):
    for i in range(20):
        x = torch.full((32, 32), float(number)).to("lazyxla") + i
        array = jnp.cos(lazyxla.to_jax(x)) ** 2 + jnp.sin(lazyxla.to_jax(x)) ** 2
        y = lazyxla.from_jax(array) * number
        torch.testing.assert_close(y.cpu(), torch.full((32, 32), float(number)))
with ThreadPoolExecutor(4) as pool:
    list(pool.map(work, range(4)))
"""
    run(run_python, code)


def test_several_devices(run_python: RunPython) -> None:
    code = """
assert len(jax.devices()) == 4
x = torch.arange(6.0).to("lazyxla:2")
array = lazyxla.to_jax(x)
assert array.devices() == {jax.devices()[2]}
assert lazyxla.from_jax(array).device == x.device
assert lazyxla.from_jax(array, "lazyxla:1").device.index == 1
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
split = jax.device_put(np.arange(8.0, dtype=np.float32),
                       jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))
assert lazyxla.from_jax(split).tolist() == list(range(8))
assert float(jax.jit(lambda v: v.sum())(split)) == 28
spread = lazyxla.shard(torch.arange(8.0).to("lazyxla"), lazyxla.Mesh((4,), ("x",)), ("x",))
assert lazyxla.to_jax(spread * 2).tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
"""
    run(run_python, code, LAZYXLA_CPU_DEVICES="4")


def test_it_comes_too_late(run_python: RunPython) -> None:
    code = """
import jax, lazyxla, pytest
jax.devices("cpu")
with pytest.raises(RuntimeError, match="uses its own devices already"):
    lazyxla.share_with_jax()
"""
    run_python(code, JAX_PLATFORMS="cpu")


def test_a_platform_that_is_set_stays(run_python: RunPython) -> None:
    code = """
import jax, lazyxla, pytest
with pytest.raises(RuntimeError, match="jax_platforms is 'cpu'"):
    lazyxla.share_with_jax()
jax.config.update("jax_platforms", "cpu,lazyxla")
lazyxla.share_with_jax()
assert jax.devices()[0].client is not jax.devices("lazyxla")[0].client
array = jax.numpy.ones(3)
assert lazyxla.from_jax(array).tolist() == [1, 1, 1]
"""
    run_python(code, JAX_PLATFORMS="cpu")
