"""Models whose batch or sequence has bounds: training steps are those of the exact sizes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lazyxla
from lazyxla.dynamo import backend
from lazyxla.dynamo.padding import calls
from tests.support import DEVICE
from tests.test_dynamo_padding import bounded, graphs_made, refusals, train

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever looks at padding finds nan."""
    monkeypatch.setattr(calls, "PADDING", float("nan"))


LENGTHS = [(6, 7), (6, 9), (6, 17), (6, 12), (6, 16)]
BOTH = [(6, 7), (5, 9), (9, 17), (11, 12), (7, 6), (10, 31)]


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(20, 16), nn.Linear(16, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.tokens(tokens).mean(1))


class Encoder(nn.Module):
    """A layer of PyTorch's, with a key padding mask, and a mean over what the mask leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(20, 16), nn.Linear(16, 5)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.tokens(tokens), src_key_padding_mask=hidden)
        kept = ~hidden.unsqueeze(2)
        return self.head((x * kept).sum(1) / kept.sum(1))


class Decoder(nn.Module):
    """A block with positions and attention, causal or not."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(20, 16), nn.Embedding(40, 16)
        self.norm, self.all, self.head = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 20)
        self.causal = causal

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows, length = tokens.shape
        x = self.tokens(tokens) + self.places(torch.arange(length, device=tokens.device))
        parts = self.all(self.norm(x)).view(rows, length, 3, 2, 8).permute(2, 0, 3, 1, 4)
        query, key, value = parts
        y = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.head(x + y.transpose(1, 2).reshape(rows, length, 16))


def _tokens(rows: int, length: int) -> tuple[torch.Tensor, ...]:
    return torch.randint(0, 20, (rows, length)), torch.randint(0, 5, (rows,))


def _hidden(rows: int, length: int) -> tuple[torch.Tensor, ...]:
    tokens, classes = _tokens(rows, length)
    hidden = torch.arange(length) >= length - torch.arange(rows).unsqueeze(1) % 3
    return tokens, hidden, classes


def _classes_loss(net: nn.Module, *args: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(net(*args[:-1]), args[-1])


def _next_token_loss(net: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = net(tokens)[:, :-1]
    return F.cross_entropy(logits.reshape(-1, 20), tokens[:, 1:].reshape(-1))


def _last_token_loss(net: nn.Module, tokens: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(net(tokens)[:, -1], classes)


def test_mean_over_a_sequence() -> None:
    torch.manual_seed(0)
    steps = train(Classifier(), _classes_loss, _tokens, [(0, 1)], LENGTHS)
    assert [large for large, _ in steps] == [1, 1, 1, 0, 0]


@pytest.mark.parametrize("dims", [[(0, 1)], [(0, 0), (0, 1)]])
def test_encoder_layer_with_a_mask(dims: list[tuple[int, int]]) -> None:
    torch.manual_seed(0)
    sizes = LENGTHS if len(dims) == 1 else BOTH
    steps = train(Encoder(), _classes_loss, _hidden, dims, sizes)
    if len(dims) == 1:
        assert [large for large, _ in steps] == [1, 1, 1, 0, 0]
    else:  # the buckets: 8 x 8, 8 x 16, 16 x 32, 16 x 16, 8 x 8, 16 x 32
        assert [large for large, _ in steps] == [1, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("causal", [False, True])
def test_next_tokens(causal: bool) -> None:
    torch.manual_seed(0)

    def make(rows: int, length: int) -> tuple[torch.Tensor, ...]:
        return (torch.randint(0, 20, (rows, length)),)

    steps = train(Decoder(causal), _next_token_loss, make, [(0, 0), (0, 1)], BOTH, 32)
    assert [large for large, _ in steps] == [1, 1, 1, 1, 0, 0]


def test_the_last_token() -> None:
    torch.manual_seed(0)
    steps = train(Decoder(), _last_token_loss, _tokens, [(0, 1)], LENGTHS, 32)
    assert [large for large, _ in steps] == [1, 1, 1, 0, 0]


def _images(rows: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(rows, 3, 11, 11), torch.randint(0, 5, (rows,))


@pytest.mark.parametrize("trains_norm", [False, True])
def test_convolutions_and_batch_norm(trains_norm: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(8, 5)),
    ).train(trains_norm)
    sizes = [(7,), (9,), (12,), (20,), (6,)]
    steps = train(model, _classes_loss, _images, [(0, 0)], sizes, 32)
    assert [large for large, _ in steps] == [1, 1, 0, 1, 0]


def test_a_loss_outside_of_the_compiled_function() -> None:
    torch.manual_seed(0)
    reference = Classifier()
    model = copy.deepcopy(reference).to(DEVICE)
    compiled = torch.compile(model, backend=backend, dynamic=True)
    made: list[int] = []
    with refusals() as refused:
        for rows in (7, 9, 12, 6, 16):
            tokens, classes = _tokens(rows, 5)
            reference.zero_grad()
            F.cross_entropy(reference(tokens), classes).backward()
            model.zero_grad()
            (ours,) = bounded((tokens,), [(0, 0)])
            with graphs_made(made):
                F.cross_entropy(compiled(ours), classes.to(DEVICE)).backward()
                lazyxla.sync()
            for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(mine.grad.cpu(), theirs.grad)
    assert refused == []
    assert made == [2, 2, 0, 0, 0]


def test_gradients_of_arguments_are_cut() -> None:
    reference = nn.Linear(8, 3)
    model = copy.deepcopy(reference).to(DEVICE)
    compiled = torch.compile(lambda x: model(x).softmax(0), backend=backend, dynamic=True)
    for rows in (5, 6, 7):
        x = torch.randn(rows, 8, requires_grad=True)
        (ours,) = bounded((x,), [(0, 0)])
        gradient = torch.randn(rows, 3)
        reference(x).softmax(0).backward(gradient)
        compiled(ours).backward(gradient.to(DEVICE))
        torch.testing.assert_close(ours.grad.cpu(), x.grad)
