"""How many mistakes in the lowering rules the fast tests notice.

    python -m tests.mutations --count 30

breaks the rules one at a time (another operator, a number off by one, a condition turned around),
runs the tests of the broken file's family, then all fast tests if those pass, and tells which
mistakes nobody noticed. The sources are put back after each. It takes minutes for each mistake that
is not noticed at once, so it is not one of the tests.
"""

from __future__ import annotations

import argparse
import ast
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDERS = ("rules", "cpu", "builder")
"""Of lazyxla/lowering; what is for TPUs and GPUs only, the slow tests compile."""

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

_FAMILIES = {
    "attention_blocks": ["tests/lowering/test_attention.py", "tests/test_attention_blocks.py"],
    "losses": ["tests/lowering/test_activations.py", "tests/lowering/test_classification.py"],
    "windows": ["tests/lowering/test_pooling.py", "tests/lowering/test_convolution.py"],
}
"""The tests to run first, where they are not called as the file."""


class Mutation(NamedTuple):
    path: Path
    line: int
    function: str
    before: str
    after: str
    source: str
    """The whole file, broken."""

    def __str__(self) -> str:
        where = f"{self.path.relative_to(ROOT)}:{self.line} {self.function}"
        return f"{where}: {self.before}  ->  {self.after}"


def mutations(path: Path) -> Iterator[Mutation]:
    """All that the file can be broken by, one place at a time."""
    source = path.read_text()
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef):
            for statement in function.body:
                yield from _of_statement(path, source, function.name, statement)


def _of_statement(
    path: Path, source: str, function: str, statement: ast.stmt
) -> Iterator[Mutation]:
    if isinstance(statement, (ast.FunctionDef, ast.Raise, ast.Assert)):
        return
    for node in ast.walk(statement):
        broken = _broken(node)
        if broken is not None and isinstance(node, ast.expr):
            before = ast.get_source_segment(source, node)
            if before and "\n" not in before:
                start = _offset(source, node.lineno, node.col_offset)
                text = source[:start] + f"({broken})" + source[start + len(before) :]
                yield Mutation(path, node.lineno, function, before, broken, text)


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


def _offset(source: str, line: int, column: int) -> int:
    lines = source.splitlines(keepends=True)
    before = lines[line - 1].encode()[:column].decode()
    return sum(map(len, lines[: line - 1])) + len(before)


def notices(mutation: Mutation, whole: bool, processes: int) -> str:
    """Which tests fail with it: "family", "all", or "" for none."""
    original = mutation.path.read_text()
    try:
        mutation.path.write_text(mutation.source)
        family = _FAMILIES.get(mutation.path.stem) or [
            str(ROOT / "tests" / "lowering" / f"test_{mutation.path.stem}.py")
        ]
        family = [f for f in family if (ROOT / f).exists()] or ["tests/lowering/test_builder.py"]
        if _fails(["--slow", "0/1", *family], processes):
            return "family"
        if whole and _fails(["--slow", "0/1", "tests"], processes):
            return "all"
        return ""
    finally:
        mutation.path.write_text(original)


def _fails(arguments: list[str], processes: int) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["-n", str(processes), *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if result.returncode not in (0, 1, 2):
        raise SystemExit(f"{' '.join(command)} could not run:\n{result.stdout}{result.stderr}")
    return result.returncode != 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=30, help="how many mistakes (default: 30)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (default: 0)")
    parser.add_argument("--family-only", action="store_true", help="do not run all fast tests")
    parser.add_argument("--processes", type=int, default=2, help="of pytest (default: 2)")
    options = parser.parse_args()
    lowering = ROOT / "lazyxla" / "lowering"
    files = [path for folder in FOLDERS for path in sorted((lowering / folder).glob("*.py"))]
    choices = random.Random(options.seed)
    by_function: dict[tuple[Path, str], list[Mutation]] = {}
    for path in files:
        for mutation in mutations(path):
            by_function.setdefault((path, mutation.function), []).append(mutation)
    functions = choices.sample(sorted(by_function), options.count)
    missed = 0
    for function in functions:
        mutation = choices.choice(by_function[function])
        found = notices(mutation, not options.family_only, options.processes)
        missed += not found
        print(f"{found or 'NOT NOTICED':12}{mutation}", flush=True)
    print(f"{options.count - missed} of {options.count} noticed")


if __name__ == "__main__":
    main()
