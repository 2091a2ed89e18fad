"""Ways to spread a module: data parallel, fully sharded, tensor parallel, and combined."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from models import BATCH, MESH, WIDTH, Mlp, Transformer, batches
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import parallel as torch_parallel
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._pytree import tree_map

import lazyxla
from tests.support import DEVICE, counted

TENSOR_PARALLEL: dict[str, Any] = {
    "blocks.*.[qkv]": lazyxla.ColwiseParallel("model"),
    "blocks.*.o": lazyxla.RowwiseParallel("model"),
    "blocks.*.mlp.up": lazyxla.ColwiseParallel("model"),
    "blocks.*.mlp.down": lazyxla.RowwiseParallel("model"),
    "blocks.*.norm*": lazyxla.SequenceParallel("model"),
    "tokens": lazyxla.RowwiseParallel("model"),
    "head": lazyxla.ColwiseParallel("model"),
}

# As written for torch.distributed.tensor.parallel.parallelize_module, with sequences split between
# the linear layers.
TORCH_PLAN: dict[str, Any] = {
    "tokens": torch_parallel.RowwiseParallel(
        input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
    ),
    "blocks.*.norm*": torch_parallel.SequenceParallel(),
    "blocks.*.[qkv]": torch_parallel.ColwiseParallel(input_layouts=Shard(1)),
    "blocks.*.o": torch_parallel.RowwiseParallel(output_layouts=Shard(1)),
    "blocks.*.mlp": torch_parallel.PrepareModuleInputOutput(
        input_layouts=Shard(1),
        desired_input_layouts=Replicate(),
        output_layouts=Replicate(),
        desired_output_layouts=Shard(1),
    ),
    "blocks.*.mlp.up": torch_parallel.ColwiseParallel(),
    "blocks.*.mlp.down": torch_parallel.RowwiseParallel(),
    "norm": torch_parallel.SequenceParallel(),
    "head": torch_parallel.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def torch_plan(model: nn.Module) -> nn.Module:
    lazyxla.parallelize(model, MESH, TORCH_PLAN)
    return lazyxla.fully_shard(model, MESH, "data")


def tensor_parallel(model: nn.Module) -> nn.Module:
    lazyxla.parallelize(model, MESH, TENSOR_PARALLEL)
    return lazyxla.data_parallel(model, MESH)


def combined(model: nn.Module) -> nn.Module:
    return lazyxla.fully_shard(lazyxla.parallelize(model, MESH, TENSOR_PARALLEL), MESH, "data")


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "data": lambda model: lazyxla.data_parallel(model, MESH),
    "data over all": lambda model: lazyxla.data_parallel(model, MESH, ("data", "model")),
    "fsdp": lambda model: lazyxla.fully_shard(model, MESH),
    "fsdp over all": lambda model: lazyxla.fully_shard(model, MESH, ("data", "model")),
    "tensor": tensor_parallel,
    "fsdp x tensor": combined,
    "fsdp x PyTorch's plan": torch_plan,
}


def train(way: Callable[[nn.Module], nn.Module] | None) -> tuple[list[Any], list[int], nn.Module]:
    torch.manual_seed(0)
    # AdamW divides a gradient by its own size: one that is 0 but for its rounding, as float32's,
    # would move a parameter this way or that.
    model = Transformer().double()
    model = model.to(DEVICE) if way is None else way(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, compiles = [], []
    for x, y in batches(Transformer, 5):
        x, y = x.to(DEVICE), y.to(DEVICE)
        with counted() as n:
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            lazyxla.sync()
        compiles.append(n.compiles)
        losses.append(loss.detach())
    parameters = {name: p.detach().cpu() for name, p in model.named_parameters()}
    return [[loss.cpu() for loss in losses], parameters], compiles, model


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    return train(None)[0]


@pytest.mark.parametrize("way", WAYS)
def test_training(way: str, alone: list[Any]) -> None:
    found, compiles, model = train(WAYS[way])
    torch.testing.assert_close(found, alone)
    assert compiles[2:] == [0, 0, 0]
    assert all(lazyxla.sharding(p) is not None for p in model.parameters())


@pytest.mark.parametrize("way", ["data", "fsdp over all"])
@pytest.mark.parametrize("lengths", [None, [12, 11, 9, 9, 7, 5, 3, 2]])
def test_recurrent_layers(way: str, lengths: list[int] | None) -> None:
    torch.manual_seed(0)
    model = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True).double()
    x = torch.randn(8, 12, WIDTH, dtype=torch.float64)

    def run(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        packed = None if lengths is None else pack_padded_sequence(x, lengths, batch_first=True)
        output = model(x if packed is None else packed)[0]
        output = output if packed is None else output.data
        output.square().mean().backward()
        return [output.detach().cpu(), *(p.grad.cpu() for p in model.parameters())]

    spread = WAYS[way](copy.deepcopy(model).to(DEVICE))
    found = run(spread, lazyxla.shard(x.to(DEVICE), MESH, ("data",)))
    torch.testing.assert_close(found, run(model, x))


def specs(model: nn.Module) -> dict[str, Any]:
    return {name: lazyxla.sharding(p).spec for name, p in model.named_parameters()}


def test_how_parameters_lie() -> None:
    found = specs(combined(Transformer()))
    assert found["blocks.0.q.weight"] == ("model", "data")
    assert found["blocks.0.q.bias"] == ("model",)
    assert found["blocks.0.o.weight"] == ("data", "model")
    assert found["blocks.0.o.bias"] == ("data",)
    assert found["blocks.0.mlp.up.weight"] == ("model", "data")
    assert found["blocks.0.norm.weight"] == ("data",)
    assert found["tokens.weight"] == ("model", "data")
    assert found["places"] == (None, "data")  # the largest dimension
    both = specs(lazyxla.fully_shard(nn.Linear(16, 3), MESH, ("data", "model")))
    assert both == {"weight": (None, ("data", "model")), "bias": (None,)}  # 3 does not divide


def test_weights_lie_by_pytorchs_plans_as_by_ours() -> None:
    theirs = lazyxla.parallelize(Transformer(), MESH, TORCH_PLAN)
    assert specs(lazyxla.data_parallel(theirs, MESH)) == specs(tensor_parallel(Transformer()))


def split_in(function: Callable[[], torch.Tensor]) -> tuple[Any, ...]:
    """How a result is spread."""
    return lazyxla.sharding(function()).spec


def test_placements_are_constraints() -> None:
    x = lazyxla.shard(torch.ones(8, 16, WIDTH), MESH, ("data",))
    values = torch_parallel.PrepareModuleInput(
        input_layouts=(Replicate(), None), desired_input_layouts=(Shard(1), None)
    )
    names = torch_parallel.PrepareModuleInput(
        input_kwarg_layouts={"y": Shard(1)}, desired_input_kwarg_layouts={"y": Replicate()}
    )
    results = torch_parallel.PrepareModuleOutput(
        output_layouts=Replicate(), desired_output_layouts=Shard(-1)
    )

    class Sum(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    by_position = lazyxla.parallelize(Sum(), MESH, {"": values})
    assert split_in(lambda: by_position(x, x)) == ("data", "model", None)
    by_name = lazyxla.parallelize(Sum(), MESH, {"": names})
    split = lazyxla.shard(torch.ones(8, 16, WIDTH), MESH, ("data", "model"))
    assert split_in(lambda: by_name(x, y=split)) == ("data", None, None)
    of_result = lazyxla.parallelize(Sum(), MESH, {"": results})
    assert split_in(lambda: of_result(x, x)) == ("data", None, "model")
    with pytest.raises(ValueError, match=r"splits dimension 1 of a tensor of shape \(8,\)"):
        by_position(x[:, 0, 0], x[:, 0, 0])


def test_the_axis_of_pytorchs_plans() -> None:
    plan = {"up": torch_parallel.ColwiseParallel()}
    weight_split = lambda model: lazyxla.sharding(model.up.weight).spec  # noqa: E731
    rows = lazyxla.Mesh((8,), ("rows",))
    assert weight_split(lazyxla.parallelize(Mlp(), rows, plan)) == ("rows", None)
    grid = lazyxla.Mesh((4, 2), ("rows", "columns"))
    model = lazyxla.parallelize(Mlp(), grid, plan, axis="columns")
    assert weight_split(model) == ("columns", None)
    with pytest.raises(ValueError, match=r'\(\'rows\', \'columns\'\): give it as .*axis="..."'):
        lazyxla.parallelize(Mlp(), grid, plan)
    with pytest.raises(ValueError, match="no axis 'x', but"):
        lazyxla.parallelize(Mlp(), grid, plan, axis="x")


def test_buffers_are_on_every_device() -> None:
    model = lazyxla.fully_shard(nn.BatchNorm1d(8), MESH)
    x = torch.randn(16, 8)
    expected = nn.BatchNorm1d(8)
    torch.testing.assert_close(model(x.to(DEVICE)).cpu(), expected(x))
    torch.testing.assert_close(model.running_mean.cpu(), expected.running_mean)
    assert lazyxla.sharding(model.running_mean).spec == (None,)


def test_dropout_draws_as_on_one_device() -> None:
    x = torch.ones(BATCH, WIDTH)
    results = []
    for way in (None, WAYS["data"]):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
        torch.manual_seed(1)
        nn.init.ones_(model[0].weight)
        nn.init.zeros_(model[0].bias)
        model = model.to(DEVICE) if way is None else way(model)
        results.append(model(x.to(DEVICE)).cpu())
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: lazyxla.data_parallel(Mlp(), MESH, "rows"), ValueError, "no axis 'rows'"),
        (
            lambda: lazyxla.parallelize(Mlp(), MESH, {"nothing": lazyxla.ColwiseParallel()}),
            ValueError,
            r"no part of the module fits \['nothing'\]",
        ),
        (
            lambda: lazyxla.parallelize(
                nn.Sequential(nn.ReLU()), MESH, {"0": lazyxla.RowwiseParallel()}
            ),
            TypeError,
            "RowwiseParallel is for Linear and Embedding, not for ReLU",
        ),
        (
            lambda: lazyxla.parallelize(
                nn.Sequential(nn.ReLU()), MESH, {"0": torch_parallel.ColwiseParallel()}
            ),
            TypeError,
            "ColwiseParallel is for Linear and Embedding, not for ReLU",
        ),
        (
            lambda: lazyxla.parallelize(
                Mlp(), MESH, {"up": torch_parallel.ColwiseParallel(output_layouts=Partial())}
            ),
            ValueError,
            r"placements are Shard and Replicate, not Partial\(sum\)",
        ),
        (
            lambda: lazyxla.parallelize(Mlp(), MESH, {"up": "columns"}),
            TypeError,
            "a plan says how parts are split, not 'columns'",
        ),
        (
            lambda: lazyxla.parallelize(Mlp(), MESH, {"up": lazyxla.ColwiseParallel("x")}),
            ValueError,
            "no axis 'x', but",
        ),
        (
            lambda: lazyxla.parallelize(Mlp(), MESH, {"up": lazyxla.SequenceParallel("data")}),
            ValueError,
            "two dimensions along the same axis",
        ),
        (lambda: lazyxla.parallelize(Mlp(), MESH, [1]), TypeError, "it is no list"),
        (lambda: lazyxla.data_parallel(Mlp(), (4, 2)), TypeError, r"expected a lazyxla\.Mesh"),
        (lambda: lazyxla.fully_shard(torch.ones(2), MESH), TypeError, "expected a module"),
        (lambda: lazyxla.fully_shard(Mlp(), MESH, ("data", "data")), ValueError, "different ones"),
        (lambda: lazyxla.data_parallel(Mlp(), MESH, ()), ValueError, "expected one axis"),
    ],
)
def test_errors(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


NO_DEVICE = nn.Linear(4, 4, device="meta")


@pytest.mark.parametrize(
    "plan",
    [
        {"up": lazyxla.ColwiseParallel(), "down": lazyxla.RowwiseParallel("x")},
        {"up": lazyxla.ColwiseParallel(), "": lazyxla.RowwiseParallel()},
        {"up": lazyxla.ColwiseParallel(), "misspelt": lazyxla.RowwiseParallel()},
        {"up": torch_parallel.ColwiseParallel(), "": torch_parallel.RowwiseParallel()},
        {
            "up": torch_parallel.ColwiseParallel(),
            "down": torch_parallel.RowwiseParallel(output_layouts=Partial()),
        },
    ],
)
def test_a_plan_that_is_wrong_changes_nothing(plan: dict[str, Any]) -> None:
    model = Mlp()
    with pytest.raises((ValueError, TypeError)):
        lazyxla.parallelize(model, MESH, plan)
    assert all(p.device.type == "cpu" for p in model.parameters())
    assert not model.up._forward_hooks
    assert not model.up._forward_pre_hooks


@pytest.mark.parametrize(
    "spread",
    [
        lambda model: lazyxla.shard(model, MESH, (None, "model")),  # but biases have one dimension
        lambda model: lazyxla.data_parallel(model.append(NO_DEVICE), MESH),
        lambda model: lazyxla.fully_shard(model.append(NO_DEVICE), MESH),
    ],
)
def test_a_module_that_cannot_be_spread_stays_as_it_is(spread: Callable[[Any], Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"dimensions|cannot be sharded"):
        spread(model)
    assert all(p.device.type == "cpu" for p in model[0].parameters())
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(
    ("dim", "shape", "spec"),
    [
        (0, (8, 4, 8), ("model", None, None)),
        (-2, (8, 4, 8), ("data", "model", None)),
        (-2, (4, 8), ("model", None)),
        (-2, (8,), None),
    ],
)
def test_the_dimension_of_sequences(dim: int, shape: tuple[int, ...], spec: Any) -> None:
    style = lazyxla.SequenceParallel(dim=dim)
    norm = lazyxla.parallelize(nn.LayerNorm(8), MESH, {"": style})
    with torch.no_grad():
        result = norm(torch.ones(shape, device=DEVICE))
    assert spec is None or lazyxla.sharding(result).spec == spec


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@pytest.mark.parametrize(
    "pack",
    [lambda x: Pair(x, -x), lambda x: [x, -x], lambda x: {"first": x}],
    ids=["named", "list", "dict"],
)
def test_results_of_other_kinds_under_pytorchs_plans(pack: Callable[[Any], Any]) -> None:
    class Packs(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return pack(x)

    layouts = (Shard(0), Replicate())
    plan = {
        "": torch_parallel.PrepareModuleOutput(
            output_layouts=layouts, desired_output_layouts=layouts[::-1]
        )
    }
    x = torch.arange(64.0).reshape(8, 8)
    result = lazyxla.parallelize(Packs(), MESH, plan)(x.to(DEVICE))
    assert type(result) is type(pack(x))
    torch.testing.assert_close(tree_map(torch.Tensor.cpu, result), pack(x))


def test_whole_modules_can_be_saved(tmp_path: Path) -> None:
    model = combined(Transformer())
    tokens = batches(Transformer, 1)[0][0].to(DEVICE)
    expected = model(tokens).detach().cpu()
    torch.save(model, tmp_path / "model")
    again = torch.load(tmp_path / "model", weights_only=False)
    torch.testing.assert_close(again(tokens).detach().cpu(), expected)


def test_a_compiled_module(fresh_dynamo: None) -> None:
    model = combined(Transformer())
    tokens = batches(Transformer, 1)[0][0].to(DEVICE)
    expected = model(tokens)
    compiled = torch.compile(model, backend="lazyxla", fullgraph=True)
    result = compiled(tokens)
    torch.testing.assert_close(result.cpu(), expected.cpu())
    result.sum().backward()
    for p in model.parameters():
        assert lazyxla.sharding(p.grad) == lazyxla.sharding(p)


def test_parameters_of_another_type_stay_spread() -> None:
    model = lazyxla.fully_shard(Mlp(), MESH).to(torch.bfloat16)
    x = torch.ones(BATCH, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(x).float().square().sum().backward()
        optimizer.step()
        lazyxla.sync()
    assert specs(model)["up.weight"] == ("data", None)
    for p in model.parameters():
        for tensor in (p.grad, optimizer.state[p]["exp_avg"]):
            assert lazyxla.sharding(tensor) == lazyxla.sharding(p)
