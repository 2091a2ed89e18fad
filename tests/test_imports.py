"""No module of the package imports, at its top or within a function, what imports it."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "lazyxla"
FILES = {
    ".".join((PACKAGE.name, *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in PACKAGE.rglob("*.py")
}


def imported(node: ast.AST) -> Iterator[str]:
    """The package's modules that a syntax tree imports, but for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names if alias.name in FILES)
        elif isinstance(child, ast.ImportFrom) and child.module is not None:
            for alias in child.names:
                name = f"{child.module}.{alias.name}"
                # The extension module stands in the package without importing its __init__.py's.
                if alias.name not in ("_C", "_build_info"):
                    yield name if name in FILES else child.module
        yield from imported(child)


def test_no_circles() -> None:
    graph = {
        name: {m for m in imported(ast.parse(path.read_text())) if m in FILES and m != name}
        for name, path in FILES.items()
    }
    assert len(graph["lazyxla"]) > 20  # it looks at something
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert order.index("lazyxla.lowering.registry") < order.index("lazyxla.lowering.apply")
