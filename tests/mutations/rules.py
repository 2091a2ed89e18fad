"""Mistakes in the lowering rules: another operator, a number off by one, a condition inverted."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

from tests.mutations.trials import ROOT, Mutation

FOLDERS = ("rules", "cpu", "builder")
"""Of lazyxla/lowering; what is for TPUs and GPUs only, the slow tests compile."""

NEAR = ["tests/lowering", "tests/opinfo", "tests/generic", "tests/test_calls.py"]
NEAR += ["tests/test_autograd.py", "tests/test_models.py", "tests/test_training.py"]

_TESTS: dict[str, list[str]] = {
    "activations": [
        "lowering/test_activations",
        "lowering/test_pointwise",
        "lowering/test_pointwise_special_values",
    ],
    "apart": ["lowering/test_convolution", "lowering/test_in_place"],
    "arithmetic": ["lowering/test_pointwise", "lowering/test_pointwise_special_values"],
    "attention": ["lowering/test_attention", "test_attention", "test_attention_calls"],
    "attention_blocks": ["lowering/test_attention", "test_attention_blocks"],
    "attention_layers": ["lowering/test_attention", "generic/test_modules"],
    "average_pooling": ["lowering/test_pooling"],
    "bessel": ["lowering/test_special_functions"],
    "builder": ["lowering/test_builder", "lowering/test_builder_products", "lowering/test_random"],
    "collectives": ["lowering/test_collectives", "test_distributed"],
    "complex": ["lowering/test_pointwise", "lowering/test_pointwise_special_values"],
    "contract": ["lowering/test_matmul", "lowering/test_linalg"],
    "convolution_kernels": ["test_convolution_kernels", "test_kernel_calls"],
    "copies": ["lowering/test_factories", "lowering/test_geometry"],
    "ctc": ["lowering/test_classification"],
    "distances": ["lowering/test_matmul"],
    "elements": [
        "lowering/test_pointwise",
        "lowering/test_pointwise_special_values",
        "lowering/test_value",
        "lowering/test_builder",
        "lowering/test_builder_products",
    ],
    "foreach": ["generic/test_foreach", "lowering/test_optimizers"],
    "formula": ["lowering/test_pointwise", "lowering/test_pointwise_special_values"],
    "fractional_pooling": ["lowering/test_segments"],
    "grid_sampling": ["lowering/test_resampling"],
    "grouped_matmul": ["lowering/test_grouped_matmul_kernels", "lowering/test_matmul"],
    "im2col": ["lowering/test_resampling"],
    "internal": ["lowering/test_geometry", "test_control_flow", "test_dynamo", "test_spmd"],
    "interpolation": ["lowering/test_resampling"],
    "kernel_limits": ["test_kernel_limits"],
    "kernels": ["test_operator_kernels"],
    "linear": ["test_matmul_kernels", "lowering/test_matmul"],
    "logarithms": ["lowering/test_pointwise", "lowering/test_pointwise_special_values"],
    "losses": ["lowering/test_activations", "lowering/test_classification"],
    "margin_losses": ["lowering/test_classification"],
    "matmul_kernels": ["test_matmul_kernels"],
    "max_pooling": ["lowering/test_pooling", "test_kernel_calls", "test_operator_kernels"],
    "moves": ["lowering/test_narrow_floats"],
    "order": ["lowering/test_sorting", "lowering/test_reductions"],
    "polynomials": ["lowering/test_special_functions"],
    "samplers": ["lowering/test_random", "test_random"],
    "scaled_matmul": ["lowering/test_float8"],
    "quantization": ["test_fake_quantization"],
    "recurrent_layers": ["test_recurrent_layers"],
    "reduced": ["test_many_dimensions"],
    "separable": ["lowering/test_resampling"],
    "shapes": ["lowering/test_geometry", "lowering/test_builder", "lowering/test_builder_products"],
    "shaping": ["lowering/test_geometry", "lowering/test_indexing"],
    "special": ["lowering/test_special_functions"],
    "sums": ["lowering/test_parts", "lowering/test_reductions"],
    "triangular": ["lowering/test_matmul", "lowering/test_linalg"],
    "windows": ["lowering/test_pooling", "lowering/test_convolution"],
}
"""The tests to run first, where they are not called as the file; from tests/."""

_OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


def places() -> dict[str, list[Mutation]]:
    """All mistakes, one at a time, by the function that they are in."""
    found: dict[str, list[Mutation]] = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / "lazyxla" / "lowering" / folder).glob("*.py")):
            for mutation in mutations(path):
                found.setdefault(f"{path} {mutation.place}", []).append(mutation)
    return found


def tests_of(path: Path) -> list[str]:
    """The tests of the file's family."""
    return [f"tests/{name}.py" for name in _TESTS.get(path.stem, [f"lowering/test_{path.stem}"])]


def mutations(path: Path) -> Iterator[Mutation]:
    """All that the file can be broken by, one place at a time."""
    source = path.read_text()
    lines = source.splitlines(keepends=True)
    starts = [0, *itertools.accumulate(map(len, lines))]

    def offset(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in itertools.chain.from_iterable(map(_expressions, function.body)):
            after = _broken(node)
            if after is None or node.lineno != node.end_lineno:
                continue
            start = offset(node.lineno, node.col_offset)
            before = source[start : offset(node.end_lineno, node.end_col_offset or 0)]
            where = path.relative_to(ROOT)
            yield Mutation(where, node.lineno, function.name, before, f"({after})", start)


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    """What may be broken; functions within have turns of their own, and errors are for others."""
    if isinstance(node, (ast.FunctionDef, ast.Raise, ast.Assert)):
        return
    if isinstance(node, ast.expr):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from _expressions(child)


def _broken(node: ast.AST) -> str | None:
    """Another expression in the place of one; None if it is to stay."""
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        other = ast.BinOp(node.left, _OPERATORS[type(node.op)](), node.right)  # type: ignore[arg-type]
        return ast.unparse(other)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OPERATORS:
        op = _OPERATORS[type(node.ops[0])]()
        return ast.unparse(ast.Compare(node.left, [op], node.comparators))  # type: ignore[list-item]
    if isinstance(node, ast.BoolOp):
        return ast.unparse(ast.BoolOp(_OPERATORS[type(node.op)](), node.values))  # type: ignore[arg-type]
    if isinstance(node, ast.IfExp):
        return ast.unparse(ast.IfExp(node.test, node.orelse, node.body))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub, ast.Invert)):
        return ast.unparse(node.operand)
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return str(node.value + 1)
    return None
