"""JAX functions of sharded tensors: what they return and their gradients are spread, too."""

from __future__ import annotations

import pytest
import torch

import lazyxla
from tests.support import DEVICE, counted


def test_jax_functions_keep_shardings() -> None:
    import jax.numpy as jnp

    mesh = lazyxla.Mesh((4, 2), ("data", "model"))
    x, w = torch.randn(16, 8), torch.randn(8, 4)
    ours, weight = x.to(DEVICE), w.to(DEVICE).requires_grad_()
    lazyxla.shard(ours, mesh, ("data", None))
    lazyxla.shard(weight, mesh, (None, "model"))
    lazyxla.sync(wait=True)
    with counted() as n:
        y = lazyxla.call_jax(lambda a, b: jnp.tanh(a @ b), ours, weight)
        y.square().sum().backward()
        lazyxla.sync(wait=True)
    assert n.executions == 1
    assert lazyxla.sharding(y).spec == ("data", "model")
    assert weight.grad is not None
    assert lazyxla.sharding(weight.grad).spec == (None, "model")
    theirs = w.requires_grad_()
    (x @ theirs).tanh().square().sum().backward()
    torch.testing.assert_close(weight.grad.cpu(), theirs.grad)


def test_shard_map_in_jax_functions() -> None:
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    mesh = lazyxla.Mesh((4, 2), ("data", "model"))
    product = jax.shard_map(
        lambda a, b: jax.lax.psum(a @ b, "model"),
        mesh=mesh.jax_mesh,
        in_specs=(PartitionSpec("data", "model"), PartitionSpec("model")),
        out_specs=PartitionSpec("data"),
    )
    function = lazyxla.jax_function(lambda a, b: jnp.tanh(product(a * 2, b)))
    inputs = [torch.randn(8, 4, requires_grad=True), torch.randn(4, 6, requires_grad=True)]
    specs = [("data", "model"), ("model", None)]
    ours = [
        lazyxla.shard(x.detach().to(DEVICE), mesh, spec).requires_grad_()
        for x, spec in zip(inputs, specs)
    ]
    before = lazyxla.counters()
    result = function(*ours)
    result.sum().backward()
    lazyxla.sync(wait=True)
    after = lazyxla.counters()
    assert after["executions"] == before["executions"] + 1
    assert lazyxla.sharding(result).spec == ("data", None)
    expected = (inputs[0] * 2 @ inputs[1]).tanh()
    expected.sum().backward()
    torch.testing.assert_close(result.detach().cpu(), expected.detach())
    for x, theirs, spec in zip(ours, inputs, specs):
        assert lazyxla.sharding(x.grad).spec == spec
        torch.testing.assert_close(x.grad.cpu(), theirs.grad)

    alone = [x.detach().to(DEVICE) for x in inputs]
    with pytest.raises(NotImplementedError, match="was given tensors of one device"):
        function(*alone).cpu()
    other = lazyxla.Mesh((2, 4), ("data", "model"))
    with pytest.raises(NotImplementedError, match="was given tensors of another one"):
        function(*(lazyxla.replicate(x, other) for x in alone)).cpu()
