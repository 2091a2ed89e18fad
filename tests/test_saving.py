"""Saving and loading: tensors, modules, optimizers, pickles and copies."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import lazyxla
from tests.support import DEVICE, assert_same, counted, numbers, on_device


def save(value: object, **options: object) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file, **options)
    file.seek(0)
    return file


@pytest.mark.parametrize("new_format", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("weights_only", [True, False], ids=["weights_only", "any"])
def test_save_and_load(new_format, weights_only):
    x = numbers(4, 6)
    ours = on_device(x) * 2
    values = {"x": ours, "rows": ours[1:3], "t": ours.t(), "half": ours.half(), "cpu": x, "n": 3}
    file = save(values, _use_new_zipfile_serialization=new_format)
    for location in (None, DEVICE, "cpu", torch.device(DEVICE), {DEVICE + ":0": "cpu"}):
        file.seek(0)
        loaded = torch.load(file, map_location=location, weights_only=weights_only)
        device = "cpu" if location in ("cpu", {DEVICE + ":0": "cpu"}) else DEVICE
        for name in ("x", "rows", "t", "half"):
            assert loaded[name].device.type == device
            assert loaded[name].stride() == values[name].stride()
            assert torch.equal(loaded[name].cpu(), values[name].cpu())
        loaded["x"].zero_()
        assert loaded["rows"].abs().sum().item() == 0  # they share a storage still
        assert torch.equal(loaded["cpu"].cpu(), x)


def test_load_onto_the_device():
    loaded = torch.load(save({"w": numbers(3, 3), "b": numbers(3)}), map_location=DEVICE)
    assert_same(loaded, {"w": numbers(3, 3), "b": numbers(3)})
    second = torch.load(save(numbers(3)), map_location="lazyxla:1")
    assert second.device == torch.device("lazyxla:1")
    loaded = torch.load(save(on_device(numbers(3))), map_location=lambda storage, where: storage)
    assert loaded.tolist() == numbers(3).tolist()


def test_loading_compiles_nothing():
    file = save([numbers(3, 5).to(dtype) for dtype in (torch.float32, torch.int64, torch.bfloat16)])
    with counted() as n:
        loaded = torch.load(file, map_location=DEVICE)
        lazyxla.sync()
    assert n.fallbacks == 0
    assert n.compiles <= 3  # a storage comes as bytes and becomes its tensor once
    with counted() as n:
        for tensor in loaded:
            tensor.cpu()
        lazyxla.sync()
    assert n.compiles == 0


def test_pickle_and_deepcopy():
    x = on_device(numbers(4, 6))
    pair = pickle.loads(pickle.dumps([x, x[1]]))
    assert_same(pair, [numbers(4, 6), numbers(4, 6)[1]])
    copied = copy.deepcopy([x, x[1]])
    copied[1].fill_(5)
    assert copied[0][1].tolist() == [5] * 6
    assert_same(x, numbers(4, 6))
    parameter = nn.Parameter(x.clone())
    copied = copy.deepcopy(parameter)
    assert isinstance(copied, nn.Parameter)
    assert_same(copied, numbers(4, 6))
    assert copied.data_ptr() != parameter.data_ptr()


def model() -> nn.Module:
    torch.manual_seed(0)
    result = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 5))
    result[3].weight = result[0].weight
    result.register_buffer("steps", torch.tensor(3))
    return result


def test_modules_travel():
    theirs = model()
    ours = copy.deepcopy(theirs).to(DEVICE)
    assert ours[3].weight is ours[0].weight
    assert {p.device.type for p in ours.parameters()} == {DEVICE}
    assert_same(dict(ours.state_dict()), dict(theirs.state_dict()))
    back = copy.deepcopy(ours).cpu()
    assert all(torch.equal(a, b) for a, b in zip(back.parameters(), theirs.parameters()))
    assert back[3].weight is back[0].weight
    assert_same(list(ours.double().parameters()), list(copy.deepcopy(theirs).double().parameters()))
    assert_same(list(ours.to(torch.bfloat16).buffers()), list(theirs.buffers()))


def test_state_dicts_go_both_ways():
    theirs, ours = model(), model().to(DEVICE)
    for parameter in theirs.parameters():
        parameter.data.mul_(2)
    ours.load_state_dict(theirs.state_dict())
    assert_same(dict(ours.state_dict()), dict(theirs.state_dict()))
    assert ours[3].weight is ours[0].weight
    for parameter in ours.parameters():
        parameter.data.add_(1)
    theirs.load_state_dict(torch.load(save(ours.state_dict()), map_location="cpu"))
    assert_same(dict(ours.state_dict()), dict(theirs.state_dict()))
    fresh = model().to("meta").to_empty(device=DEVICE)
    fresh.load_state_dict(ours.state_dict(), assign=True)
    assert_same(dict(fresh.state_dict()), dict(theirs.state_dict()))


def test_whole_modules_are_saved():
    ours = model().to(DEVICE)
    loaded = torch.load(save(ours), weights_only=False)
    assert loaded[3].weight is loaded[0].weight
    assert_same(dict(loaded.state_dict()), dict(model().state_dict()))
    x = torch.arange(5, device=DEVICE)
    assert_same(loaded(x), model()(x.cpu()))


def test_optimizer_state_travels():
    def train(module, optimizer, device):
        x = torch.arange(5, device=device)
        for _ in range(2):
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()

    theirs, ours = model(), model().to(DEVICE)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (theirs, ours)]
    train(theirs, optimizers[0], "cpu")
    ours.load_state_dict(theirs.state_dict())
    optimizers[1].load_state_dict(torch.load(save(optimizers[0].state_dict())))
    train(ours, optimizers[1], DEVICE)
    train(theirs, optimizers[0], "cpu")
    assert_same(dict(ours.state_dict()), dict(theirs.state_dict()))
