"""nn.LSTM, nn.GRU and nn.RNN as loops: values, gradients of any order, and what compiles."""

import copy
import logging
import random

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import lazyxla
from tests.support import DEVICE, assert_same, counted, error_of, on_device

KINDS = ["LSTM", "GRU", "tanh", "relu"]
_SIZE, _HIDDEN, _STEPS, _BATCH = 4, 3, 5, 3


@pytest.fixture(autouse=True)
def definition():
    """PyTorch's own implementation on the CPU: oneDNN's has neither the gradients of gradients nor
    the narrow types on every processor."""
    torch.manual_seed(0)
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(True)


def make(kind, **options):
    if kind in ("tanh", "relu"):
        return nn.RNN(_SIZE, _HIDDEN, nonlinearity=kind, **options)
    return getattr(nn, kind)(_SIZE, _HIDDEN, **options)


def states_of(module, batch=_BATCH):
    layers = module.num_layers * (2 if module.bidirectional else 1)
    h = torch.randn(layers, batch, module.proj_size or module.hidden_size)
    if module.mode != "LSTM":
        return (h,)
    return h, torch.randn(layers, batch, module.hidden_size)


def run(module, x, states, lengths=None):
    """Output, last states, and the gradients of everything."""
    x, *states = (t.detach().requires_grad_() for t in (x, *states))
    given = x
    if lengths is not None:
        options = {"batch_first": module.batch_first, "enforce_sorted": False}
        given = pack_padded_sequence(x, lengths, **options)
    output, last = module(given, tuple(states) if module.mode == "LSTM" else states[0])
    if isinstance(output, PackedSequence):
        output, sizes = pad_packed_sequence(output, batch_first=module.batch_first)
        assert sizes.tolist() == lengths
    outputs = [output, *(last if isinstance(last, tuple) else [last])]
    torch.manual_seed(1)
    weights = [torch.randn(o.shape).to(o.device, o.dtype) for o in outputs]
    loss = sum((o * w).sum() for o, w in zip(outputs, weights, strict=True))
    return outputs, torch.autograd.grad(loss, [x, *states, *module.parameters()])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_layers(kind, seed):
    choose = random.Random(f"{kind}{seed}")
    options = {
        "num_layers": choose.choice([1, 2]),
        "bidirectional": choose.random() < 0.5,
        "batch_first": choose.random() < 0.5,
        "bias": choose.random() < 0.7,
    }
    if kind == "LSTM" and choose.random() < 0.5:
        options["proj_size"] = 2
    lengths = choose.choice([None, [3, 5, 2]])
    dtype = choose.choice([torch.float32, torch.float64])
    module = make(kind, **options).to(dtype)
    shape = [_BATCH, _STEPS] if module.batch_first else [_STEPS, _BATCH]
    inputs = torch.randn(*shape, _SIZE, dtype=dtype), [s.to(dtype) for s in states_of(module)]
    ours = run(copy.deepcopy(module).to(DEVICE), *on_device(inputs), lengths)
    assert_same(ours, run(module, *inputs, lengths))
    assert lazyxla.fallbacks() == {}


@pytest.mark.parametrize("kind", KINDS)
def test_narrow_floats_and_autocast(kind):
    """Within the rounding of bfloat16, which has 8 bits, in each of five steps."""
    module, x = make(kind), torch.randn(_STEPS, _BATCH, _SIZE)
    expected = module(x)[0].detach()
    ours, x = copy.deepcopy(module).to(DEVICE), on_device(x).requires_grad_()
    with torch.autocast(DEVICE):
        result = ours(x)[0]
    result.float().sum().backward()
    assert result.dtype == torch.bfloat16
    assert x.grad.dtype == ours.weight_hh_l0.grad.dtype == torch.float32
    narrow = ours.bfloat16()(x.bfloat16())[0]
    assert narrow.dtype == torch.bfloat16
    for each in (result, narrow):
        torch.testing.assert_close(each.detach().cpu().float(), expected, atol=0.02, rtol=0.02)


def program(kind, steps, packed):
    module, x = make(kind).to(DEVICE), torch.randn(steps, _BATCH, _SIZE)
    lengths = [steps, steps - 3, 2]

    def step(x):
        x = x.requires_grad_()
        given = pack_padded_sequence(x, lengths) if packed else x
        output = module(given)[0]
        output = pad_packed_sequence(output)[0] if packed else output
        return torch.autograd.grad(output.square().sum(), [x, *module.parameters()])

    return lazyxla.stablehlo(step, x)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_programs_do_not_grow_with_the_sequence(kind, packed):
    short, long = (program(kind, steps, packed).count("stablehlo.") for steps in (8, 64))
    assert short == long


def test_other_lengths_compile_nothing():
    """A program of packed sequences depends on the sum of their lengths."""
    module = make("LSTM")
    ours = copy.deepcopy(module).to(DEVICE)
    x, states = torch.randn(6, 4, _SIZE), states_of(module, 4)

    def compiles(lengths):
        given = on_device((x, states))
        with counted() as n:
            found = run(ours, *given, lengths)
            lazyxla.sync()
        assert_same(found, run(module, x, states, lengths))
        return n.compiles

    compiles([6, 4, 3, 1])
    assert compiles([6, 3, 3, 2]) == 0
    assert compiles([6, 5, 2, 1]) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_gradients(kind):
    module, x = make(kind, num_layers=2), torch.randn(_STEPS, _BATCH, _SIZE)

    def second(module, x):
        x = x.detach().requires_grad_()
        (first,) = torch.autograd.grad(module(x)[0].square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [x, *module.parameters()])

    assert_same(second(copy.deepcopy(module).to(DEVICE), on_device(x)), second(module, x))


@pytest.mark.parametrize("kind", KINDS)
def test_transforms_and_forward_mode(kind):
    module, x = make(kind), torch.randn(_STEPS, _BATCH, _SIZE)

    def derivatives(module, x):
        def of_parameters(parameters):
            return torch.func.functional_call(module, parameters, (x,))[0].square().sum()

        with forward_ad.dual_level():
            dual = module(forward_ad.make_dual(x, x / 2))[0]
            tangent = forward_ad.unpack_dual(dual).tangent
        pushed = torch.func.jvp(lambda x: module(x)[0], (x,), (x / 2,))
        return tangent, pushed, torch.func.grad(of_parameters)(dict(module.named_parameters()))

    ours = derivatives(copy.deepcopy(module).to(DEVICE), on_device(x))
    assert_same(ours, derivatives(module, x), strides=False)  # of tangents they are PyTorch's


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_gradients(kind):
    module = make(kind).double()
    x = torch.randn(_STEPS, _BATCH, _SIZE, dtype=torch.float64)
    batch = torch.randn(2, _STEPS, _BATCH, _HIDDEN, dtype=torch.float64)

    def gradients(module, x, batch):
        x = x.detach().requires_grad_()
        inputs = (x, *module.parameters())
        return torch.autograd.grad(module(x)[0], inputs, batch, is_grads_batched=True)

    expected = gradients(module, x, batch)
    found = gradients(copy.deepcopy(module).to(DEVICE), *on_device((x, batch)))
    assert_same(found, expected)
    assert lazyxla.fallbacks() == {}


def test_without_gradients_nothing_is_kept_for_them():
    module, x = make("LSTM").to(DEVICE), torch.randn(_STEPS, _BATCH, _SIZE)

    def stacks(call):
        text = lazyxla.stablehlo(call, x)
        return text.count("dynamic_update_slice")

    with torch.no_grad():
        assert stacks(module) == 1
    assert stacks(module) == 3  # outputs, cells and workspaces


def test_modes_that_see_operators_see_pytorchs():
    """As FlopCounterMode: cells, whose matmuls it counts."""
    from torch.utils.flop_counter import FlopCounterMode

    module, x = make("LSTM"), torch.randn(_STEPS, _BATCH, _SIZE)
    counts = []
    for device in ("cpu", DEVICE):
        with FlopCounterMode(display=False) as counter:
            module.to(device)(x.to(device))
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def _lstm(x, states, parameters, layers=1):
    return torch.lstm(x, states, parameters, True, layers, 0.0, False, False, False)


@pytest.mark.parametrize(
    "change",
    [
        lambda x, s, p: _lstm(x[:0], s, p),
        lambda x, s, p: _lstm(x, s[:1], p),
        lambda x, s, p: _lstm(x, s, p[:3]),
        lambda x, s, p: _lstm(x, s, p, layers=2),
        lambda x, s, p: _lstm(x[..., :3], s, p),
        lambda x, s, p: pack_padded_sequence(x, [5, 4]),
        lambda x, s, p: pack_padded_sequence(x, [5, 0, -1]),
        lambda x, s, p: pack_padded_sequence(x, [3, 4, 5]),
        lambda x, s, p: pack_padded_sequence(x[0, 0], [4]),
        lambda x, s, p: pack_padded_sequence(x[:, :0], []),
        lambda x, s, p: pad_packed_sequence(pack_padded_sequence(x, [5, 4, 1]), total_length=3),
    ],
)
def test_errors_are_pytorchs(change):
    module = make("LSTM")
    states = tuple(torch.zeros(1, _BATCH, _HIDDEN) for _ in range(2))
    args = torch.randn(_STEPS, _BATCH, _SIZE), states, [p.detach() for p in module.parameters()]
    ours, theirs = error_of(change, *on_device(args)), error_of(change, *args)
    # From torch 2.15 on, the CPU adds the bias after the matmul.
    assert (ours[0], ours[1].removeprefix("add")) == (theirs[0], theirs[1].removeprefix("add"))
    assert theirs[0] is not type(None)


@pytest.mark.parametrize("on_host", [False, True], ids=["data on the device", "data on the host"])
@pytest.mark.parametrize("lengths", [[5, 4, 2], []])
def test_lengths_on_the_device_are_refused(lengths, on_host):
    x = torch.randn(_STEPS, len(lengths), _SIZE, device="cpu" if on_host else DEVICE)
    lengths = torch.tensor(lengths, dtype=torch.int64, device=DEVICE)
    refused = "'lengths' argument should be a 1D CPU int64 tensor, but got 1D lazyxla:0 Long tensor"
    with pytest.raises(RuntimeError, match=refused):
        pack_padded_sequence(x, lengths)
    with pytest.raises(RuntimeError, match=refused):
        torch._pad_packed_sequence(x.flatten(0, 1), lengths, False, 0.0, _STEPS)


def test_captured_steps(caplog):
    """The module holds weak references to its weights, which a step can compare."""
    caplog.set_level(logging.INFO, "lazyxla")
    module, x = make("GRU").double(), torch.randn(_STEPS, _BATCH, _SIZE).double()
    ours = copy.deepcopy(module).to(DEVICE)

    def stepped(module):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

        def step(x):
            optimizer.zero_grad()
            loss = module(x)[0].square().sum()
            loss.backward()
            optimizer.step()
            return loss

        return step

    plain, captured = stepped(module), lazyxla.compile(stepped(ours), capture=True)
    with counted() as n:
        for i in range(8):
            assert_same(captured(on_device(x + i)), plain(x + i))
    assert n["captured_steps"] >= 4, caplog.text
    ours.weight_hh_l0 = nn.Parameter(torch.zeros_like(ours.weight_hh_l0))
    module.weight_hh_l0 = nn.Parameter(torch.zeros_like(module.weight_hh_l0))
    assert_same(captured(on_device(x)), plain(x))
