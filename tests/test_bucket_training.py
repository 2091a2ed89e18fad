"""Training on padded batches compiles a few programs, computes what unpadded batches do, and then
compiles nothing any more."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import lazyxla
from lazyxla import Buckets, bucket
from tests.support import DEVICE, counted, programs


def on_both(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """A model on the host and its copy on the device."""
    return model, copy.deepcopy(model).to(DEVICE)


class Counting:
    """Calls a training step and counts its programs, by the sizes of the batches.

    The first step makes the optimizer's state besides, by programs of one operator each.
    """

    def __init__(self, step: Callable[..., torch.Tensor]) -> None:
        self.compiles: Counter[Any] = Counter()
        self._step = step
        self._first = True

    def __call__(self, size: Any, *args: Any) -> torch.Tensor:
        with programs() as compiled, counted() as n:
            loss = self._step(*args)
            lazyxla.sync()
        self.compiles[size] += len(compiled.large(2))
        assert n.compiles == len(compiled.sizes)
        if not self._first:
            assert n.executions == 1
            assert n.compiles == len(compiled.large(2))
        self._first = False
        return loss.cpu()


# --- Texts ---------------------------------------------------------------------------------------

LENGTHS = [8, 16, 32, 64]
BATCH = 6


class Classifier(nn.Module):
    """Takes tokens [B, T] and where they are data, bool [B, T], to scores [B, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.hidden = nn.Linear(16, 16)
        self.output = nn.Linear(16, 5)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        features = self.hidden(self.embedding(tokens)).tanh() * mask.unsqueeze(2)
        return self.output(features.sum(1) / mask.sum(1, keepdim=True).clamp(min=1))


def text_step(model: nn.Module) -> Callable[..., torch.Tensor]:
    optimizer = torch.optim.Adam(model.parameters(), 0.01)

    def step(tokens: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens, mask), labels, ignore_index=-100)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def texts(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Texts of 1 to 64 tokens, of every length class; neighbours are of similar length."""
    choice = random.Random(0)
    result = []
    while len(result) < count:
        longest = choice.randint(1, 64)
        for _ in range(BATCH):
            tokens = torch.randint(50, (choice.randint(1, longest),))
            result.append((tokens, tokens.sum() % 5))
    return result[:count]


def collate(
    samples: list[tuple[torch.Tensor, torch.Tensor]],
) -> dict[str, torch.Tensor]:
    tokens, labels = zip(*samples)
    return {
        "tokens": pad_sequence(list(tokens), batch_first=True),
        "present": pad_sequence([torch.ones(len(t)) > 0 for t in tokens], batch_first=True),
        "labels": torch.stack(labels),
    }


def test_texts_of_many_lengths() -> None:
    theirs, ours = on_both(Classifier())
    their_step, our_step = text_step(theirs), Counting(lazyxla.compile(text_step(ours)))
    loader = DataLoader(texts(25 * BATCH + 2), batch_size=BATCH, collate_fn=collate)
    buckets = Buckets(
        dims=(0, 1), sizes={0: [BATCH], 1: LENGTHS}, value={"tokens": 3, "labels": -100}
    )
    lengths = {batch["tokens"].shape[1] for batch in loader}
    assert len(lengths) > 15
    for _ in range(2):
        batches = lazyxla.DeviceLoader(loader, buckets=buckets)
        for host, (batch, mask) in zip(loader, batches, strict=True):
            assert batch["tokens"].shape == mask.shape
            loss = our_step(mask.shape, batch["tokens"], batch["labels"], batch["present"])
            expected = their_step(host["tokens"], host["labels"], host["present"])
            torch.testing.assert_close(loss, expected)
        # One for each size, and none in the second epoch.
        assert our_step.compiles == {(BATCH, length): 1 for length in LENGTHS}


def test_the_mask_alone_tells_where_data_are() -> None:
    """Batches of one length each, lazily, with a sync per step."""
    theirs, ours = on_both(Classifier())
    their_step, our_step = text_step(theirs), Counting(text_step(ours))
    batches = [
        (torch.randint(50, (rows, length)), torch.randint(5, (rows,)))
        for rows, length in zip([5] * 19 + [2], torch.randint(1, 65, (20,)).tolist())
    ]
    buckets = Buckets(dims=(0, 1), sizes={0: [5], 1: LENGTHS}, value={1: -100})
    for _ in range(2):
        padded = lazyxla.DeviceLoader(batches, buckets=buckets)
        for host, ((tokens, labels), mask) in zip(batches, padded, strict=True):
            loss = our_step(mask.shape, tokens, labels, mask)
            expected = their_step(*host, torch.ones(host[0].shape) > 0)
            torch.testing.assert_close(loss, expected)
        assert our_step.compiles == {(5, length): 1 for length in LENGTHS}


# --- Policy gradients ----------------------------------------------------------------------------

DISCOUNT = 0.95


class Episode(NamedTuple):
    """Observations [T, 3], actions [T], rewards [T]."""

    observations: torch.Tensor
    actions: torch.Tensor
    rewards: torch.Tensor


def play(policy: nn.Module, choice: torch.Generator) -> Episode:
    """A walk on a line, from near 0, that ends at 2, at -2, or after 60 actions."""
    place, speed, taken = 2 * torch.rand((), generator=choice).item() - 1, 0.0, []
    while abs(place) < 2 and len(taken) < 60:
        seen = torch.tensor([place, speed, 1.0])
        with torch.no_grad():
            scores = policy(seen.to(DEVICE)).cpu()
        action = torch.multinomial(scores.softmax(0), 1, generator=choice).squeeze(0)
        speed = 0.5 * speed + (0.2 if action else -0.2)
        place += speed
        taken.append((seen, action, torch.tensor(place)))
    return Episode(*map(torch.stack, zip(*taken)))


def policy_step(policy: nn.Module) -> Callable[..., torch.Tensor]:
    optimizer = torch.optim.Adam(policy.parameters(), 0.02)

    def step(episode: Episode, mask: torch.Tensor) -> torch.Tensor:
        """REINFORCE (Williams 1992): the gradient of the mean of log pi(a_t) G_t."""
        at = torch.arange(len(mask), device=mask.device)
        ahead = (at - at.unsqueeze(1)).clamp(min=0)
        discounts = (DISCOUNT**ahead).triu()  # [t, s]: of the reward of s, seen from t
        returns = discounts @ episode.rewards
        chosen = policy(episode.observations).log_softmax(1)
        chosen = chosen.gather(1, episode.actions.unsqueeze(1)).squeeze(1)
        loss = -(chosen * returns * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def test_episodes_of_varying_length() -> None:
    theirs, ours = on_both(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)))
    their_step, our_step = policy_step(theirs), Counting(lazyxla.compile(policy_step(ours)))
    buckets = Buckets(dims=0, sizes=[6, 12, 24, 60])
    choice = torch.Generator().manual_seed(0)
    lengths = set()
    for _ in range(30):
        episode = play(ours, choice)
        padded, mask = buckets(episode)
        assert isinstance(padded, Episode)
        padded, mask = Episode(*(x.to(DEVICE) for x in padded)), mask.to(DEVICE)
        loss = our_step(len(mask), padded, mask)
        length = len(episode.rewards)
        torch.testing.assert_close(loss, their_step(episode, torch.ones(length)))
        lengths.add(length)
    assert len(lengths) > 8
    assert len(our_step.compiles) >= 3
    assert set(our_step.compiles.values()) == {1}


# --- Graphs --------------------------------------------------------------------------------------


class Graph(NamedTuple):
    """Features of the nodes [N, 4], edges [2, E] from and to nodes, a target [N]."""

    nodes: torch.Tensor
    edges: torch.Tensor
    target: torch.Tensor


def graphs(count: int) -> Iterator[Graph]:
    choice = random.Random(0)
    for _ in range(count):
        nodes, edges = choice.randint(2, 31), choice.randint(1, 64)
        features = torch.randn(nodes, 4, dtype=torch.float64)
        yield Graph(features, torch.randint(nodes, (2, edges)), features.sum(1))


class MessagePassing(nn.Module):
    """Adds to each node what its neighbours send, twice; nodes [N, 4] and edges [2, E] to [N]."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 8)
        self.messages = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.leave = nn.Linear(8, 1)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        x = self.enter(nodes)
        for message in self.messages:
            sent = message(x).tanh().index_select(0, source)
            x = x.index_add(0, target, sent)
        return self.leave(x).squeeze(1)


def graph_step(model: nn.Module) -> Callable[..., torch.Tensor]:
    optimizer = torch.optim.Adam(model.parameters(), 0.01)

    def step(graph: Graph, mask: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        errors = (model(graph.nodes, graph.edges) - graph.target) ** 2
        loss = (errors * mask).sum() / mask.sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def pad_graph(graph: Graph) -> tuple[Graph, torch.Tensor]:
    """Edges that are added join a node that is added: there is always one."""
    count = len(graph.nodes)
    with_one_more = F.pad(graph.nodes, (0, 0, 0, 1)), F.pad(graph.target, (0, 1))
    (nodes, target), _ = bucket(with_one_more, dims=0, sizes=[16, 32])
    edges, _ = bucket(graph.edges, dims=1, sizes=[32, 64], value=count)
    return Graph(nodes, edges, target), torch.arange(len(nodes)) < count


def test_graphs_of_varying_size() -> None:
    theirs, ours = on_both(MessagePassing().double())
    their_step, our_step = graph_step(theirs), Counting(lazyxla.compile(graph_step(ours)))
    data = list(graphs(20))
    for _ in range(2):
        batches = lazyxla.DeviceLoader(data, buckets=pad_graph)
        for host, (graph, mask) in zip(data, batches, strict=True):
            loss = our_step((len(mask), graph.edges.shape[1]), graph, mask)
            expected = their_step(host, torch.ones(len(host.nodes)))
            torch.testing.assert_close(loss, expected)
        assert our_step.compiles == {(16, 32): 1, (16, 64): 1, (32, 32): 1, (32, 64): 1}


def test_one_padding_for_nodes_and_edges() -> None:
    """Dimension 0 counts nodes and dimension 1 edges; node 39 is kept free for added edges."""
    buckets = Buckets(
        dims={"nodes": 0, "edges": 1, "target": 0},
        sizes={0: [40], 1: [32, 64]},
        value={"edges": 39},
    )
    theirs, ours = on_both(MessagePassing().double())
    their_step, our_step = graph_step(theirs), Counting(lazyxla.compile(graph_step(ours)))
    data = list(graphs(10))
    for host, (graph, mask) in zip(data, lazyxla.DeviceLoader(data, buckets=buckets)):
        loss = our_step(graph.edges.shape[1], graph, mask)
        expected = their_step(host, torch.ones(len(host.nodes)))
        torch.testing.assert_close(loss, expected)
    assert our_step.compiles == {32: 1, 64: 1}
