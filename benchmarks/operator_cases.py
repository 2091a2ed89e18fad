"""Calls of operators at sizes that users have, for operators.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Sizes = tuple[int, ...]


class Indices(NamedTuple):
    """Random integers below a limit."""

    limit: int
    sizes: Sizes


class Case(NamedTuple):
    """A function, and what it is called with: normal numbers of these sizes, or indices."""

    function: Callable[..., Tensor]
    inputs: tuple[Sizes | Indices, ...]
    differentiable: bool = True

    def make_inputs(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """On the CPU, the same ones each time."""
        generator = torch.Generator().manual_seed(0)
        return [
            torch.randint(each.limit, each.sizes, generator=generator)
            if isinstance(each, Indices)
            else torch.randn(each, generator=generator, dtype=dtype)
            for each in self.inputs
        ]


CaseTable = dict[str, Case]

_ROWS, _LONG, _IMAGES = (1024, 1024), (1 << 20,), (8, 32, 56, 56)
_ODD_ROWS, _ODD_IMAGES = (1001, 1003), (8, 32, 57, 59)  # which no vector and no block divides
_NODES, _EDGES, _ENDS = (5000, 64), (50_000, 64), Indices(5000, (50_000,))


def _values(**functions: Callable[..., Tensor]) -> CaseTable:
    """Functions of each of 2**20 numbers."""
    return {name: Case(function, (_LONG,)) for name, function in functions.items()}


def _also_odd(functions: dict[str, Callable[..., Tensor]], sizes: Sizes, odd: Sizes) -> CaseTable:
    cases = {name: Case(function, (sizes,)) for name, function in functions.items()}
    return cases | {f"{name}_odd": Case(function, (odd,)) for name, function in functions.items()}


def _of_rows(**functions: Callable[..., Tensor]) -> CaseTable:
    return _also_odd(functions, _ROWS, _ODD_ROWS)


def _of_images(**functions: Callable[..., Tensor]) -> CaseTable:
    return _also_odd(functions, _IMAGES, _ODD_IMAGES)


def _of_edges(**functions: Callable[..., Tensor]) -> CaseTable:
    """What graph networks do: nodes, edges, and the nodes that these end at."""
    inputs = (_NODES, _EDGES, _ENDS)
    return {name: Case(function, inputs) for name, function in functions.items()}


def _convolution(x: Sizes, weight: Sizes, **options: int) -> Case:
    function = (F.conv1d, F.conv2d, F.conv3d)[len(x) - 3]
    return Case(lambda x, w: function(x, w, **options), (x, weight))


def _spread(ends: Tensor, like: Tensor) -> Tensor:
    return ends[:, None].expand(-1, like.shape[1])


def _scattered(nodes: Tensor, edges: Tensor, ends: Tensor, kind: str) -> Tensor:
    zeros = torch.zeros_like(nodes)
    return zeros.scatter_reduce(0, _spread(ends, edges), edges, kind, include_self=False)


def _segments(nodes: Tensor, edges: Tensor, ends: Tensor) -> Tensor:
    lengths = torch.full((nodes.shape[0],), edges.shape[0] // nodes.shape[0], device=nodes.device)
    return torch.segment_reduce(edges, "sum", lengths=lengths)


def _ones_counted(x: Tensor) -> Tensor:
    """As position ids are made of a mask."""
    return x * torch.ones(x.shape, device=x.device).cumsum(-1)


def _stft(x: Tensor) -> Tensor:
    window = torch.hann_window(400, dtype=x.dtype, device=x.device)
    return torch.stft(x, 400, 160, window=window, return_complex=True).abs()


def _causal(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


CASES: CaseTable = {
    **_values(
        exp=torch.exp,
        log1p=lambda x: torch.log1p(x.abs()),
        sin=torch.sin,
        tan=torch.tan,
        asin=lambda x: torch.asin(x.tanh()),
        atan2=lambda x: torch.atan2(x, x + 1),
        tanh=torch.tanh,
        erf=torch.erf,
        erfinv=lambda x: torch.erfinv(x.tanh()),
        lgamma=lambda x: torch.lgamma(x.abs() + 1),
        digamma=lambda x: torch.digamma(x.abs() + 1),
        power=lambda x: x.abs() ** 2.3,
        exp2=torch.exp2,
        remainder=lambda x: x % 0.7,
        gelu=F.gelu,
        mish=F.mish,
        dropout=lambda x: F.dropout(x, 0.1),
        running_sum_of_a_vector=lambda x: x.cumsum(0),
        dot=lambda x: x @ (x + 1),
        minimum=lambda x: x.min(),
    ),
    **_of_rows(
        sort=lambda x: x.sort(-1)[0],
        sort_along_0=lambda x: x.sort(0)[0],
        topk_10=lambda x: x.topk(10)[0],
        topk_200=lambda x: x.topk(200)[0],
        kthvalue=lambda x: x.kthvalue(10)[0],
        median=lambda x: x.median(-1)[0],
        quantile=lambda x: x.quantile(0.3, -1),
        cumsum=lambda x: x.cumsum(-1),
        cumsum_of_ones=_ones_counted,
        cumprod=lambda x: (1 + x * 0.01).cumprod(-1),
        cummax=lambda x: x.cummax(-1)[0],
        logcumsumexp=lambda x: x.logcumsumexp(-1),
        softmax=lambda x: x.softmax(-1),
        layer_norm=lambda x: F.layer_norm(x, x.shape[-1:]),
        sum_along_0=lambda x: x.sum(0),
        variance=lambda x: x.var(0),
        maximum_along_1=lambda x: x.max(1)[0],
        norm=lambda x: x.norm(),
        roll=lambda x: x.roll((3, 5), (0, 1)),
        flip=lambda x: x.flip(-1),
        transpose=lambda x: x.t().contiguous(),
        masked_fill=lambda x: x.masked_fill(x > 0, 0.0),
        masked_scatter=lambda x: x.masked_scatter(x > 0, x * 2),
        normal_numbers=lambda x: torch.randn_like(x) + x,
    ),
    **_of_images(
        max_pool=lambda x: F.max_pool2d(x, 3, 2, 1),
        avg_pool=lambda x: F.avg_pool2d(x, 3, 2, 1),
        adaptive_avg_pool=lambda x: F.adaptive_avg_pool2d(x, 20),
        adaptive_max_pool=lambda x: F.adaptive_max_pool2d(x, 5),
        bilinear=lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        bicubic=lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
        nearest=lambda x: F.interpolate(x, size=(100, 100)),
        batch_norm=lambda x: F.batch_norm(x, None, None, training=True),
        group_norm=lambda x: F.group_norm(x, 8),
        unfold=lambda x: F.unfold(x, 3, padding=1),
        reflection=lambda x: F.pad(x, (3, 3, 3, 3), mode="reflect"),
        pixel_shuffle=lambda x: F.pixel_shuffle(x, 2),
        channels_last=lambda x: x.permute(0, 2, 3, 1).contiguous(),
    ),
    "linear_1d": Case(lambda x: F.interpolate(x, size=2000, mode="linear"), ((8, 64, 500),)),
    "bilinear_down": Case(
        lambda x: F.interpolate(x, size=(224, 224), mode="bilinear"), ((2, 3, 512, 512),)
    ),
    "grid_sample": Case(
        lambda x, grid: F.grid_sample(x, grid.tanh(), align_corners=False),
        (_IMAGES, (8, 56, 56, 2)),
    ),
    "conv_1x1": _convolution(_IMAGES, (64, 32, 1, 1)),
    "conv_3x3": _convolution(_IMAGES, (64, 32, 3, 3), padding=1),
    "conv_depthwise": _convolution(_IMAGES, (32, 1, 7, 7), padding=3, groups=32),
    "conv_4_groups": _convolution(_IMAGES, (64, 8, 3, 3), padding=1, groups=4),
    "conv_of_1_channel": _convolution((64, 1, 28, 28), (32, 1, 3, 3)),
    "conv_1d": _convolution((8, 64, 512), (64, 64, 3), padding=1),
    "conv_1d_strided": _convolution((4, 1, 16_000), (80, 1, 400), stride=160),
    "conv_3d": _convolution((2, 8, 16, 28, 28), (16, 8, 3, 3, 3), padding=1),
    "conv_3d_of_1_channel": _convolution((4, 1, 16, 32, 32), (8, 1, 3, 3, 3), padding=1),
    "matmul": Case(torch.matmul, ((512, 512), (512, 512))),
    "matmul_small_batch": Case(torch.matmul, ((4096, 8, 8), (4096, 8, 8))),
    "linear_of_3_features": Case(F.linear, ((65_536, 3), (64, 3))),
    "matmul_of_4x4": Case(lambda x, y: x @ y, ((16_384, 4, 4), (16_384, 4, 4))),
    "attention": Case(_causal, ((4, 8, 256, 32),)),
    "embedding": Case(lambda w, i: F.embedding(i, w), ((32_000, 256), Indices(32_000, (4096,)))),
    "embedding_bag": Case(
        lambda w, i: F.embedding_bag(i, w), ((5000, 64), Indices(5000, (1000, 50)))
    ),
    "relative_positions": Case(
        lambda w, i: F.embedding(i, w).permute(2, 0, 1), ((32, 8), Indices(32, (256, 256)))
    ),
    "experts_of_8": Case(lambda x, i: x.gather(1, i), ((4096, 8), Indices(8, (4096, 2)))),
    "gather": Case(lambda x, i: x.gather(1, i), (_ROWS, Indices(1024, _ROWS))),
    "scatter_add": Case(
        lambda x, i: torch.zeros_like(x).scatter_add(1, i, x), (_ROWS, Indices(1024, _ROWS))
    ),
    "index_select": Case(lambda x, i: x.index_select(1, i), (_ROWS, Indices(1024, (512,)))),
    "index_add_columns": Case(
        lambda x, i: torch.zeros_like(x).index_add(1, i, x), (_ROWS, Indices(1024, (1024,)))
    ),
    "index_add_in_the_middle": Case(
        lambda x, i, y: x.index_add(2, i, y),
        ((4, 8, 512, 64), Indices(512, (32,)), (4, 8, 32, 64)),
    ),
    **_of_edges(
        graph_sum=lambda n, e, i: torch.zeros_like(n).scatter_add(0, _spread(i, e), e),
        graph_mean=lambda n, e, i: _scattered(n, e, i, "mean"),
        graph_maximum=lambda n, e, i: _scattered(n, e, i, "amax"),
        graph_gather=lambda n, e, i: n[i],
        segment_sum=_segments,
    ),
    "cross_entropy": Case(F.cross_entropy, ((512, 32_000), Indices(32_000, (512,)))),
    "fft": Case(lambda x: torch.fft.fft(x).abs(), ((256, 1024),)),
    "stft": Case(_stft, ((8, 16_000),)),
    "windows": Case(lambda x: x.unfold(-1, 16, 1).mean(-1), ((64, 4000),)),
    "cdist": Case(torch.cdist, ((256, 64), (200, 64))),
    "pdist": Case(torch.pdist, ((256, 64),)),
    "solve": Case(lambda x: torch.linalg.solve(x, x.mT), ((8, 64, 64),)),
    "svd": Case(torch.linalg.svdvals, ((8, 64, 64),)),
    "unique": Case(lambda x: (x * 100).long().unique(), (_ROWS,), differentiable=False),
    "nonzero": Case(lambda x: (x > 2).nonzero(), (_ROWS,), differentiable=False),
    "bucketize": Case(
        lambda x: torch.bucketize(x, torch.arange(-50, 50, device=x.device) / 16),
        (_LONG,),
        differentiable=False,
    ),
    "floor_divide": Case(lambda x: x // 0.7, (_LONG,), differentiable=False),
    "integer_remainder": Case(lambda i: i % 7, (Indices(1000, _LONG),), differentiable=False),
}
