"""Sparse tensors: PyTorch's results, errors and gradients; what is recorded and what runs on the
host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchgen
import yaml

import lazyxla
from tests.support import DEVICE, assert_same, counted

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
    pytest.mark.filterwarnings("ignore:.*has no kernel for sparse tensors on this device"),
]

# Row 1 has the same element twice.
INDICES = [[0, 1, 1, 2, 0], [2, 0, 0, 1, 0]]
VALUES = [0.5, -1.25, 2.0, 3.5, -0.75]


def coo(d: str) -> torch.Tensor:
    return torch.sparse_coo_tensor(INDICES, VALUES, (3, 4), device=d)


def unique(d: str) -> torch.Tensor:
    return coo(d).coalesce()


def other(d: str) -> torch.Tensor:
    """Shares an element with the others, and has one that they have not."""
    return torch.sparse_coo_tensor([[2, 0], [3, 2]], [4.0, -2.0], (3, 4), device=d).coalesce()


def csr(d: str) -> torch.Tensor:
    return torch.sparse_csr_tensor([0, 2, 2, 3], [0, 3, 1], [1.0, -2.0, 0.5], (3, 4), device=d)


def hybrid(d: str) -> torch.Tensor:
    return torch.sparse_coo_tensor([[2, 0, 2]], torch.arange(6.0).reshape(3, 2), (3, 2), device=d)


def dense(d: str, *shape: int) -> torch.Tensor:
    shape = shape or (4, 5)
    return torch.linspace(-1, 2, torch.Size(shape).numel()).reshape(shape).to(d)


Call = Callable[[str], Any]
RECORDED: dict[str, Call] = {
    "made": coo,
    "moved": lambda d: coo("cpu").to(d),
    "of inferred size": lambda d: torch.sparse_coo_tensor(INDICES, VALUES, device=d),
    "empty": lambda d: torch.sparse_coo_tensor((3, 4), device=d),
    "zeros": lambda d: torch.zeros(2, 2, layout=torch.sparse_csr, device=d),
    "to_sparse": lambda d: torch.eye(3, device=d).to_sparse(),
    "to_sparse_csr": lambda d: torch.eye(3, device=d).to_sparse_csr(),
    "to_sparse_csc": lambda d: torch.eye(3, device=d).to_sparse_csc(),
    "to_sparse_bsr": lambda d: torch.eye(4, device=d).to_sparse_bsr((2, 2)),
    "COO to CSR": lambda d: coo(d).to_sparse_csr(),
    "CSR to COO": lambda d: csr(d).to_sparse(),
    "to_dense": lambda d: coo(d).to_dense(),
    "to_dense of CSR": lambda d: csr(d).to_dense(),
    "to_dense of hybrid": lambda d: hybrid(d).to_dense(),
    "coalesce": unique,
    "coalesce hybrid": lambda d: hybrid(d).coalesce(),
    "double": lambda d: coo(d).double(),
    "clone": lambda d: coo(d).clone(),
    "transposed": lambda d: coo(d).t(),
    "row": lambda d: coo(d)[1],
    "cat": lambda d: torch.cat([coo(d), coo(d)], 1),
    "stack": lambda d: torch.stack([coo(d), coo(d)]),
    "abs": lambda d: coo(d).abs(),
    "tanh": lambda d: unique(d).tanh(),
    "sqrt_": lambda d: unique(d).abs().sqrt_(),
    "relu of CSR": lambda d: csr(d).relu(),
    "times number": lambda d: coo(d) * 2,
    "number times": lambda d: 0.5 * coo(d),
    "mul_": lambda d: coo(d).mul_(3),
    "times scalar tensor": lambda d: coo(d) * torch.tensor(2.0, device=d),
    "times dense": lambda d: coo(d) * dense(d, 3, 4),
    "times row": lambda d: coo(d) * dense(d, 4),
    "times batch": lambda d: dense(d, 2, 3, 4) * coo(d),
    "times dense in place": lambda d: coo(d).mul_(dense(d, 3, 4)),
    "product of coalesced": lambda d: unique(d) * unique(d).mul(2),
    "product of what differs": lambda d: unique(d) * other(d),
    "product with repeated elements": lambda d: coo(d) * unique(d),
    "product of repeated elements": lambda d: coo(d) * coo(d),
    "product of hybrids": lambda d: (
        hybrid(d) * torch.sparse_coo_tensor([[2, 1]], [[1.5], [2.0]], (3, 1), device=d)
    ),
    "CSR times number": lambda d: csr(d) * 2,
    "divided": lambda d: coo(d) / 4,
    "pow": lambda d: coo(d).pow(2),
    "dense + sparse": lambda d: dense(d, 3, 4) + coo(d),
    "dense - sparse": lambda d: dense(d, 3, 4) - coo(d),
    "add_ to dense": lambda d: dense(d, 3, 4).add_(coo(d), alpha=0.5),
    "add_ hybrid to dense": lambda d: dense(d, 3, 2).add_(hybrid(d), alpha=2),
    "dense + CSR": lambda d: dense(d, 3, 4) + csr(d),
    "sum of coalesced": lambda d: unique(d) + unique(d),
    "difference of coalesced": lambda d: unique(d).sub(unique(d), alpha=2),
    "mm": lambda d: torch.mm(coo(d), dense(d)),
    "mm of dense and sparse": lambda d: dense(d, 2, 3) @ coo(d),
    "sparse.mm": lambda d: torch.sparse.mm(coo(d), dense(d)),
    "mv": lambda d: coo(d) @ dense(d, 4),
    "bmm": lambda d: torch.bmm(torch.stack([coo(d), coo(d)]), dense(d, 2, 4, 5)),
    "linear": lambda d: torch.nn.functional.linear(coo(d), dense(d, 5, 4)),
    "addmm": lambda d: torch.addmm(dense(d, 3, 5), coo(d), dense(d), beta=0.5, alpha=2),
    "addmm of a row": lambda d: torch.sparse.addmm(dense(d, 1, 5), coo(d), dense(d)),
    "addmm_": lambda d: dense(d, 3, 5).addmm_(coo(d), dense(d), alpha=-1),
    "CSR @ matrix": lambda d: csr(d) @ dense(d),
    "CSR @ vector": lambda d: csr(d) @ dense(d, 4),
    "CSC @ matrix": lambda d: csr(d).t() @ dense(d, 3, 2),
    "matrix @ CSR": lambda d: dense(d, 2, 3) @ csr(d),
    "sum": lambda d: coo(d).sum(),
    "sparse.sum": lambda d: torch.sparse.sum(coo(d), 1),
    "norm": lambda d: unique(d).norm(),
    "sparse_mask": lambda d: dense(d, 3, 4).sparse_mask(unique(d)),
    "sparse_mask of sparse": lambda d: unique(d).sparse_mask(other(d)),
    "sparse_mask of repeated elements": lambda d: coo(d).sparse_mask(other(d)),
    "sparse_mask by repeated elements": lambda d: other(d).sparse_mask(coo(d)),
    "sparse_mask of hybrid": lambda d: hybrid(d).sparse_mask(hybrid(d).coalesce()),
    "projection": lambda d: coo(d)._sparse_mask_projection(other(d)),
    "projection by repeated": lambda d: other(d)._sparse_mask_projection(coo(d), True),
    "narrow_copy": lambda d: unique(d).narrow_copy(0, 1, 2),
    "validated": lambda d: torch.sparse_coo_tensor(
        [[0, 1], [1, 0]], [1.0, 2.0], (2, 2), device=d, is_coalesced=True, check_invariants=True
    ),
}
ON_HOST: dict[str, Call] = {
    "integers times a fraction": lambda d: torch.addmm(
        torch.ones(3, 5, device=d).int(), coo(d).int(), dense(d).int(), alpha=1.5
    ),
    "softmax": lambda d: torch.sparse.softmax(coo(d), 1),
    "sparse @ sparse": lambda d: torch.sparse.mm(coo(d), coo(d).t()),
    "CSR + CSR": lambda d: csr(d) + csr(d),
    "CSR @ CSR": lambda d: csr(d) @ torch.eye(4, device=d).to_sparse_csr(),
    "BSR @ matrix": lambda d: torch.eye(4, device=d).to_sparse_bsr((2, 2)) @ dense(d),
    "index_select": lambda d: coo(d).index_select(0, torch.tensor([1], device=d)),
    "reduction": lambda d: torch.sparse.mm(csr(d), dense(d), "mean"),
    "sampled": lambda d: torch.sparse.sampled_addmm(csr(d), dense(d, 3, 2), dense(d, 2, 4)),
}


def assert_same_sparse(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert (ours.device.type, ours.layout, ours.dtype, ours.shape) == (
        "lazyxla",
        theirs.layout,
        theirs.dtype,
        theirs.shape,
    )
    if theirs.layout == torch.sparse_coo:
        assert ours.is_coalesced() == theirs.is_coalesced()
        # The CPU's coalesced ones are parts of larger memory, with its strides.
        torch.testing.assert_close(ours._indices().cpu(), theirs._indices())
        torch.testing.assert_close(ours._values().cpu(), theirs._values())
    else:
        torch.testing.assert_close(ours.cpu(), theirs)


@pytest.mark.parametrize("name", RECORDED)
def test_recorded(name: str) -> None:
    with counted() as n:
        ours = RECORDED[name](DEVICE)
    assert n.fallbacks == 0
    assert_same_sparse(ours, RECORDED[name]("cpu"))


@pytest.mark.parametrize("name", ON_HOST)
def test_on_host(name: str) -> None:
    with counted() as n:
        ours = ON_HOST[name](DEVICE)
    assert n.fallbacks > 0
    assert_same_sparse(ours, ON_HOST[name]("cpu"))


ERRORS: list[Call] = [
    lambda d: coo(d) @ dense(d, 5, 4),
    lambda d: dense(d, 3, 5) + coo(d),
    lambda d: coo(d) + dense(d, 3, 4),
    lambda d: coo(d) + 1,
    lambda d: coo(d).sub_(1.5),
    lambda d: coo(d) * dense(d, 5, 4),
    lambda d: coo(d).int().mul_(dense(d, 3, 4)),
    lambda d: coo(d).int().mul_(coo(d)),
    lambda d: unique(d).int().mul_(unique(d)),
    lambda d: coo(d) * hybrid(d),
    lambda d: coo(d).sparse_mask(hybrid(d)),
    lambda d: torch.addmm(dense(d, 2, 5), coo(d), dense(d)),
    lambda d: coo(d) @ dense(d).double(),
    lambda d: torch.ones(3, 4, dtype=torch.int64, device=d).add_(coo(d)),
    lambda d: coo(d).tanh_(),
    lambda d: coo(d).to_dense(torch.float64),
    lambda d: torch.sparse_coo_tensor([[5]], [1.0], (3,), device=d, check_invariants=True),
    lambda d: torch.sparse_coo_tensor(
        INDICES, VALUES, device=d, is_coalesced=True, check_invariants=True
    ),
]


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize("call", ERRORS)
def test_errors_are_pytorchs_and_no_fallbacks(
    call: Call, is_strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lazyxla.settings, "strict_fallback", is_strict)
    with pytest.raises(RuntimeError) as theirs:
        call("cpu")
    with counted() as n, pytest.raises(type(theirs.value)) as ours:
        call(DEVICE)
    assert n.fallbacks == 0
    assert str(ours.value).splitlines()[0] == str(theirs.value).splitlines()[0]


def test_strict_mode_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazyxla.settings, "strict_fallback", True)
    matrix = torch.sparse_coo_tensor(INDICES, VALUES, (3, 4), device=DEVICE).coalesce()
    out = torch.zeros(3, 3, device=DEVICE).to_sparse()
    with pytest.raises(NotImplementedError, match="strict mode"):
        torch.hspmm(matrix, dense(DEVICE), out=out)
    assert_same_sparse(out, torch.zeros(3, 3).to_sparse())


def test_what_is_coalesced_is_not_sorted() -> None:
    x, mask = unique(DEVICE), other(DEVICE)
    text = lazyxla.stablehlo(lambda: x.sparse_mask(mask).to_dense())
    assert "stablehlo.sort" not in text
    assert "stablehlo.sort" in lazyxla.stablehlo(lambda: coo(DEVICE).sparse_mask(mask).to_dense())


def test_operators_without_a_kernel_say_so() -> None:
    pattern = r"^lazyxla: PyTorch has no kernel for sparse tensors of aten::exp: .*to_dense"
    with counted() as n, pytest.raises(NotImplementedError, match=pattern):
        coo(DEVICE).exp()
    assert n.fallbacks == 0
    with pytest.raises(NotImplementedError):
        coo("cpu").exp()


def test_graph_network_trains_without_compiling_again() -> None:
    def trained(d: str, steps: int, adjacency: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        layer, x = torch.nn.Linear(8, 4).to(d), torch.randn(20, 8).to(d)
        adjacency = adjacency.to(d).requires_grad_()
        optimizer = torch.optim.Adam(layer.parameters(), 0.01)
        for _ in range(steps):
            optimizer.zero_grad()
            torch.sparse.mm(adjacency, layer(x)).relu().square().mean().backward()
            optimizer.step()
            lazyxla.sync()
        assert adjacency.grad is not None
        return layer.weight.detach(), adjacency.grad.to_dense()

    torch.manual_seed(1)
    adjacency = (torch.rand(20, 20) < 0.2).float().to_sparse()
    trained(DEVICE, 3, adjacency)
    with counted() as n:
        ours = trained(DEVICE, 3, adjacency)
    assert n.compiles == n.fallbacks == 0
    for found, expected in zip(ours, trained("cpu", 3, adjacency), strict=True):
        assert_same(found, expected)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "Adagrad": torch.optim.Adagrad,
    "SparseAdam": lambda p: torch.optim.SparseAdam(list(p)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("module", "options"),
    [
        (torch.nn.Embedding, {}),
        (torch.nn.Embedding, {"padding_idx": 3}),
        (torch.nn.EmbeddingBag, {"mode": "sum"}),
        (torch.nn.EmbeddingBag, {"mode": "mean"}),
    ],
)
def test_sparse_gradients_of_embeddings(name: str, module: Any, options: dict[str, Any]) -> None:
    def trained(d: str) -> torch.Tensor:
        torch.manual_seed(0)
        embedding = module(10, 3, sparse=True, **options).to(d)
        optimizer = OPTIMIZERS[name](embedding.parameters())
        for step in range(3):
            optimizer.zero_grad()
            index = (torch.tensor([[0, 3], [3, 1]]) + step).to(d)
            embedding(index).square().sum().backward()
            assert embedding.weight.grad.is_sparse
            optimizer.step()
        return embedding.weight.detach()

    with counted() as n:
        ours = trained(DEVICE)
    assert n.fallbacks == 0
    assert_same(ours, trained("cpu"))


@pytest.mark.parametrize("module", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_sparse_gradients_of_compiled_models(module: Any, fresh_dynamo: None) -> None:
    def trained(d: str) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Sequential(module(10, 3, sparse=True), torch.nn.Linear(3, 2)).to(d)
        call = torch.compile(model, backend="lazyxla") if d == DEVICE else model
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            optimizer.zero_grad()
            index = (torch.tensor([[0, 3], [3, 1]]) + step).to(d)
            call(index).square().sum().backward()
            weight: Any = model[0].weight
            assert weight.grad.is_sparse
            optimizer.step()
        return weight.detach()

    with counted() as n:
        ours = trained(DEVICE)
    assert n.fallbacks == 0
    assert_same(ours, trained("cpu"))


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")  # the constructor
def test_sparse_operands_of_compiled_functions(fresh_dynamo: None) -> None:
    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        adjacency = torch.sparse_coo_tensor(x.new_tensor(INDICES).long(), x, (3, 4))
        return (adjacency @ weight.relu()).relu().sum() + adjacency.to_dense().square().sum()

    compiled: Any = torch.compile(step, backend="lazyxla")
    for factor in (1, 2):
        x = torch.tensor(VALUES) * factor
        assert_same(compiled(x.to(DEVICE), dense(DEVICE)), step(x, dense("cpu")))


@pytest.mark.parametrize("mode", ["eager", "compile", "torch.compile"])
def test_modes(mode: str, fresh_dynamo: None) -> None:
    def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a @ b).relu().sum()

    call: Any = step
    if mode == "compile":
        call = lazyxla.compile(step)
    elif mode == "torch.compile":
        call = torch.compile(step, backend="lazyxla")
    lazyxla.eager_mode(mode == "eager")
    try:
        for factor in (1, 2, 3):  # never a former value
            ours = call(coo(DEVICE) * factor, dense(DEVICE))
            assert_same(ours, step(coo("cpu") * factor, dense("cpu")))
    finally:
        lazyxla.eager_mode(False)


def test_kernels_for_every_device_are_those_that_cuda_shares() -> None:
    """PyTorch's CPU kernels that we call are CUDA's, too: they read no memory themselves."""
    own = {"Sparse": {"_copy_from_and_resize", "mul.out"}, "SparseCsr": {"_copy_from_and_resize"}}
    path = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    functions = yaml.load(path.read_text(), Loader=yaml.CSafeLoader)
    shared: dict[str, set[str]] = {"Sparse": set(), "SparseCsr": set()}
    for function in functions:
        kernels = {
            key.strip(): kernel
            for keys, kernel in (function.get("dispatch") or {}).items()
            for key in keys.split(",")
        }
        for layout, names in shared.items():
            kernel = kernels.get(f"{layout}CPU")
            if kernel is not None and kernel == kernels.get(f"{layout}CUDA"):
                names.add(function["func"].partition("(")[0])
    for layout, names in shared.items():
        ours = {
            name.removeprefix("aten::")
            for name in torch._C._dispatch_get_all_op_names()
            if name.startswith("aten::") and "sparse.cpp" in _origin(name, f"{layout}PrivateUse1")
        }
        assert own[layout] <= ours
        assert ours - own[layout] <= names


def _origin(name: str, key: str) -> str:
    for line in torch._C._dispatch_dump(name).splitlines():
        if line.startswith(f"{key}:"):
            return line
    return ""
