"""One element-wise operator as a program of its own, in as few dimensions as its operands allow.

XLA's CPU backend computes with vectors along the last dimension only, and a short one costs: to
negate 4096 x 32 elements takes twice as long as to negate 131,072. Programs of several operators
keep their shapes, for their operators read each other's results in them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from lazyxla.lowering import registry
from lazyxla.lowering.operators import find_op
from lazyxla.lowering.program import Program, TensorSpec

Shape = tuple[int, ...]

_SHORT, _MANY = 64, 4096
"""A last dimension of fewer elements is short; fewer elements in all take no time in any form."""


def flatten(program: Program) -> Program | None:
    """The same program on the same elements in fewer dimensions, or None where that is no use."""
    if len(program.nodes) != 1 or not _is_elementwise(program.nodes[0].op):
        return None
    (node,) = program.nodes
    shape = node.outputs[0].shape
    if not shape or shape[-1] >= _SHORT or math.prod(shape) < _MANY:
        return None
    groups = group_dimensions(shape, [spec.shape for spec in program.inputs])
    if len(groups[-1]) == 1:
        return None

    def merged(spec: TensorSpec) -> TensorSpec:
        return spec._replace(shape=merge(spec.shape, groups))

    outputs = tuple(map(merged, node.outputs))
    return program._replace(
        inputs=list(map(merged, program.inputs)), nodes=[node._replace(outputs=outputs)]
    )


def group_dimensions(shape: Shape, operands: Sequence[Shape]) -> list[list[int]]:
    """The dimensions of `shape`, counted from the last (-1), in groups that can be one each.

    Neighbours are of one group unless one of the operands, which broadcast to `shape`, is repeated
    along one of them only.
    """
    groups: list[list[int]] = []
    before = None
    for dim in range(-len(shape), 0):
        repeated = [len(operand) < -dim or operand[dim] != shape[dim] for operand in operands]
        if groups and (shape[dim] == 1 or before in (None, repeated)):
            groups[-1].append(dim)
        else:
            groups.append([dim])
        if shape[dim] != 1:
            before = repeated
    return groups


def merge(shape: Shape, groups: Sequence[Sequence[int]]) -> Shape:
    """A tensor without dimensions remains one: it counts less in type promotion."""
    if not shape:
        return shape
    return tuple(math.prod(shape[d] for d in group if len(shape) >= -d) for group in groups)


def _is_elementwise(name: str) -> bool:
    """Whether PyTorch tags the operator as pointwise and its rule is ours: a user's may depend on
    the shape."""
    op = find_op(name)
    return op is not None and torch.Tag.pointwise in op.tags and registry.has_own_rule(name)
