"""Loops over graphs of varying size: padded, they stop compiling."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import lazyxla
from tests import vision  # noqa: F401 - transformers wants a torchvision that can be imported
from tests.support import DEVICE, counted, programs


def graphs() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Nodes [N, 4], edges [2, 3N], a number for each node."""
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(n, 4, generator=generator, dtype=torch.float64),
            torch.randint(n, (2, 3 * n), generator=generator),
            torch.randn(n, 1, generator=generator, dtype=torch.float64),
        )
        for n in (10, 20, 30, 12, 50, 60, 25, 40)
    ]


def pad_graph(graph: tuple[torch.Tensor, ...]) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Edges that are added join a node that is added."""
    nodes, edges, numbers = graph
    count = len(nodes)
    nodes, numbers = (F.pad(each, (0, 0, 0, 1)) for each in (nodes, numbers))
    (nodes, numbers), mask = lazyxla.bucket((nodes, numbers), dims=0, sizes=[32, 64])
    edges, _ = lazyxla.bucket(edges, dims=1, sizes=[96, 192], value=count)
    mask[count] = False
    return (nodes, edges, numbers), mask


@pytest.mark.parametrize("kind", ["SAGEConv", "GCNConv", "GATConv", "GraphConv"])
def test_graphs_of_varying_size(kind: str) -> None:
    import torch_geometric.nn

    layer = getattr(torch_geometric.nn, kind)
    # With loops that it adds itself a layer first removes what there are: how many, the data say.
    options = {"add_self_loops": False} if kind in ("GCNConv", "GATConv") else {}
    torch.manual_seed(0)
    first, second = layer(4, 8, **options), layer(8, 1, **options)
    # Adam makes steps of rounding errors where a gradient is zero, as some of attention's are.
    model = torch.nn.ModuleList([first, second]).double()
    ours = copy.deepcopy(model).to(DEVICE)
    optimizers = [torch.optim.Adam(each.parameters(), 1e-2) for each in (model, ours)]
    losses: dict[str, list[float]] = {"cpu": [], DEVICE: []}

    def epoch() -> None:
        for nodes, edges, numbers in graphs():
            optimizers[0].zero_grad()
            loss = F.mse_loss(model[1](model[0](nodes, edges).relu(), edges), numbers)
            loss.backward()
            optimizers[0].step()
            losses["cpu"].append(loss.item())
        for (nodes, edges, numbers), mask in lazyxla.DeviceLoader(graphs(), buckets=pad_graph):
            optimizers[1].zero_grad()
            found = ours[1](ours[0](nodes, edges).relu(), edges)
            loss = ((found - numbers).square().squeeze(1) * mask).sum() / mask.sum()
            loss.backward()
            optimizers[1].step()
            lazyxla.sync()
            losses[DEVICE].append(loss.item())

    with programs() as found:
        epoch()
    assert len(found.large(10)) <= 2 * 2, found.sizes  # two for each of the sizes
    with counted() as n:
        epoch()
    assert (n.compiles, n.data_dependent) == (0, 0)
    torch.testing.assert_close(losses[DEVICE], losses["cpu"])
