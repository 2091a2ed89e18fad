"""The fused LSTM and GRU cells against their definition: PyTorch has no CPU kernel of them."""

import pytest
import torch

from lazyxla.lowering import Node, Program, Ref, TensorSpec
from tests.lowering.harness import execute

_BATCH, _HIDDEN = 3, 4


def _run(op, args, outputs):
    """Runs an operator on tensors and other arguments; `outputs` are (dtype, shape) pairs."""
    inputs = [a for a in args if isinstance(a, torch.Tensor)]
    refs = iter(range(len(inputs)))
    bound = tuple(Ref(next(refs)) if isinstance(a, torch.Tensor) else a for a in args)
    specs = [TensorSpec(t.dtype, tuple(t.shape)) for t in inputs]
    node = Node(op, bound, tuple(TensorSpec(*o) for o in outputs), None)
    results = [Ref(len(inputs) + i) for i in range(len(outputs))]
    return execute(Program(specs, [node], results, [], {}), inputs)[0]


def _leaves(gates, biases, states, dtype):
    shapes = [(_BATCH, gates * _HIDDEN)] * 2 + [(_BATCH, _HIDDEN)] * states
    shapes += [(gates * _HIDDEN,)] * 2 if biases else []
    return [torch.randn(s, dtype=dtype, requires_grad=True) for s in shapes]


def _detached(tensors):
    return [t.detach() for t in tensors]


def _lstm(input_gates, hidden_gates, cx, *biases):
    gates = input_gates + hidden_gates + sum(biases)
    i, f, g, o = gates.chunk(4, 1)
    cy = f.sigmoid() * cx + i.sigmoid() * g.tanh()
    return o.sigmoid() * cy.tanh(), cy


def _gru(input_gates, hidden_gates, hx, *biases):
    if biases:
        input_gates, hidden_gates = input_gates + biases[0], hidden_gates + biases[1]
    (ir, iz, inew), (hr, hz, hnew) = input_gates.chunk(3, 1), hidden_gates.chunk(3, 1)
    n = (inew + (ir + hr).sigmoid() * hnew).tanh()
    z = (iz + hz).sigmoid()
    return (1 - z) * n + z * hx


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("wanted", ["hy cy", "hy", "cy"])
def test_lstm_cell(biases, wanted, dtype):
    leaves = _leaves(4, biases, 1, dtype)
    hy, cy = _lstm(*leaves)
    args = _detached(leaves) + [None] * (0 if biases else 2)
    state, gates = (dtype, (_BATCH, _HIDDEN)), (dtype, (_BATCH, 4 * _HIDDEN))
    *results, workspace = _run("aten::_thnn_fused_lstm_cell", args, [state, state, gates])
    torch.testing.assert_close(results, [hy.detach(), cy.detach()])

    grads = {"hy": torch.randn_like(hy), "cy": torch.randn_like(cy)}
    outs = {"hy": hy, "cy": cy}
    names = wanted.split()
    expected = torch.autograd.grad([outs[n] for n in names], leaves, [grads[n] for n in names])
    given = [grads[n] if n in names else None for n in ("hy", "cy")]
    args = [*given, leaves[2].detach(), cy.detach(), workspace, biases]
    bias = [(dtype, (4 * _HIDDEN,))] if biases else []
    got = _run("aten::_thnn_fused_lstm_cell_backward_impl", args, [gates, state, *bias])
    torch.testing.assert_close(got[0], expected[0])
    torch.testing.assert_close(got[0], expected[1])
    torch.testing.assert_close(got[1], expected[2])
    if biases:
        torch.testing.assert_close(got[2], expected[3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("biases", [True, False])
def test_gru_cell(biases, dtype):
    leaves = _leaves(3, biases, 1, dtype)
    hy = _gru(*leaves)
    args = _detached(leaves) + [None] * (0 if biases else 2)
    state, gates = (dtype, (_BATCH, _HIDDEN)), (dtype, (_BATCH, 3 * _HIDDEN))
    space = (dtype, (_BATCH, 5 * _HIDDEN))
    got, workspace = _run("aten::_thnn_fused_gru_cell", args, [state, space])
    torch.testing.assert_close(got, hy.detach())

    grad = torch.randn_like(hy)
    expected = torch.autograd.grad(hy, leaves, grad)
    bias = [(dtype, (3 * _HIDDEN,))] * 2 if biases else []
    op = "aten::_thnn_fused_gru_cell_backward"
    got = _run(op, [grad, workspace, biases], [gates, gates, state, *bias])
    torch.testing.assert_close(got, list(expected))


def test_cells_agree_with_modules():
    """The order of gates is that of torch.nn's cells."""
    x, h, c = torch.randn(3, _BATCH, _HIDDEN)
    for cell, gates in ((torch.nn.LSTMCell, 4), (torch.nn.GRUCell, 3)):
        module = cell(_HIDDEN, _HIDDEN)
        products = [(x @ module.weight_ih.t()).detach(), (h @ module.weight_hh.t()).detach()]
        biases = _detached([module.bias_ih, module.bias_hh])
        state = (torch.float32, (_BATCH, _HIDDEN))
        if gates == 4:
            outputs = [state, state, (torch.float32, (_BATCH, 4 * _HIDDEN))]
            got = _run("aten::_thnn_fused_lstm_cell", [*products, c, *biases], outputs)[:2]
            expected = list(module(x, (h, c)))
        else:
            outputs = [state, (torch.float32, (_BATCH, 5 * _HIDDEN))]
            got = _run("aten::_thnn_fused_gru_cell", [*products, h, *biases], outputs)[:1]
            expected = [module(x, h)]
        torch.testing.assert_close(got, _detached(expected))


def test_narrow_floats():
    leaves = [t.detach().bfloat16() for t in _leaves(4, True, 1, torch.float32)]
    dtype = torch.bfloat16
    state, gates = (dtype, (_BATCH, _HIDDEN)), (dtype, (_BATCH, 4 * _HIDDEN))
    got = _run("aten::_thnn_fused_lstm_cell", leaves, [state, state, gates])
    torch.testing.assert_close(got[:2], [t.bfloat16() for t in _lstm(*(t.float() for t in leaves))])
