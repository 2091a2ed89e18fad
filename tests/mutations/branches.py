"""Mistakes in the branches of csrc/: a condition turned around, off by one, "and" for "or".

No parser: clang-format writes each operator with spaces around it and templates without, and a
mistake that does not compile is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.mutations.trials import ROOT, Mutation

ROOMS = ("dispatch", "distributed", "graph", "ir", "program", "record", "steps")

_TESTS: dict[str, list[str]] = {
    "dispatch": ["recorder", "views", "copies", "device_surface", "refused_calls", "errors"],
    "dispatch/attention": ["attention"],
    "dispatch/autocast": ["autograd"],
    "dispatch/batch_norm": ["recorder", "training"],
    "dispatch/checks": ["argument_checks", "refused_calls", "errors", "extreme_input"],
    "dispatch/cross_entropy": ["cross_entropy"],
    "dispatch/dlpack": ["sharing"],
    "dispatch/generator": ["random"],
    "dispatch/guard": ["device_surface", "threads"],
    "dispatch/hooks": ["device_surface"],
    "dispatch/host": ["host_operators", "errors", "strict", "copies"],
    "dispatch/host_call": ["host_operators", "foreign_functions"],
    "dispatch/host_program": ["host_programs", "trials"],
    "dispatch/indexing": ["recorder", "dynamo_parts", "limits"],
    "dispatch/inference_store": ["shape_cache"],
    "dispatch/layouts": ["layouts", "copies"],
    "dispatch/linear": ["linear"],
    "dispatch/lowering_kind": ["explain", "host_operators", "custom_operators"],
    "dispatch/memory": ["memory"],
    "dispatch/overlap": ["refused_calls", "recorder", "views"],
    "dispatch/pinned": ["pinned_memory", "copies"],
    "dispatch/region_inputs": ["region_inputs"],
    "dispatch/settling": ["settling"],
    "dispatch/sharded": ["device_surface", "recorder"],
    "dispatch/traced_graph": ["dynamo", "dynamo_sizes", "dynamo_training"],
    "distributed": ["distributed", "distributed_faults"],
    "graph": ["flush", "transactions", "recorder", "parts", "rounds", "memory", "limits"],
    "graph/devices": ["device_surface"],
    "graph/memory": ["limits", "memory"],
    "graph/one_operator": ["modes", "flush"],
    "graph/transfer": ["copies", "loader", "sharing"],
    "ir": ["views", "recorder", "flush", "random_programs"],
    "ir/sharding": ["spmd"],
    "program": ["flush", "program_cache", "recompilations", "places", "optimizers"],
    "program/cut": ["cuts"],
    "program/host_program": ["host_programs", "trials"],
    "program/partition": ["parts", "cuts"],
    "program/portable_key": ["program_store", "warm_caches"],
    "program/stages": ["parts", "cuts", "rounds"],
    "record": ["modes", "compile", "threads", "flush", "settings", "xla_options"],
    "record/capture": ["captured_steps", "captured_steps_results"],
    "steps": [f"captured_steps{part}" for part in ("", "_arguments", "_python", "_results")],
}
"""The tests to run first, of a room or of one file: tests/test_*.py."""

NEAR = sorted({f"tests/test_{name}.py" for room in ROOMS for name in _TESTS[room]})
NEAR += ["tests/test_autograd.py", "tests/test_calls.py", "tests/test_models.py"]

_COMPARISONS = {
    "&&": "||",
    "||": "&&",
    "==": "!=",
    "!=": "==",
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
}
_OPERATOR = re.compile(r"(?<=\s)(&&|\|\||==|!=|<=|>=|<|>)(?=\s)")
_OFFSET = re.compile(r"(?<=\s[+-] )1\b(?![.'])")
_IF = re.compile(r"\bif \(")
_NO_CODE = re.compile(r'//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'|^#[^\n]*', re.MULTILINE)
# Assertions, which hold whatever a user does, and heads of loops, where one too many is no branch.
_NOT_MEANT = re.compile(r"\b(?:TORCH_INTERNAL_ASSERT\w*|static_assert|for) ?\(|\btemplate <")
_FUNCTION = re.compile(r"^[A-Za-z][\w:<>*&, ]*?(~?\w+)\(", re.MULTILINE)


def places() -> dict[str, list[Mutation]]:
    """All mistakes, one at a time, by the file that they are in."""
    found: dict[str, list[Mutation]] = {}
    for room in ROOMS:
        for path in sorted((ROOT / "csrc" / room).glob("*.cpp")):
            if mistakes := list(mutations(path)):
                found[str(path)] = mistakes
    return found


def tests_of(path: Path) -> list[str]:
    """The tests of a file, or else of its room."""
    room = path.parent.name
    names = _TESTS.get(f"{room}/{path.stem}", _TESTS[room])
    return [f"tests/test_{name}.py" for name in names]


def mutations(path: Path) -> Iterator[Mutation]:
    """All that the file can be broken by, one place at a time."""
    source = path.read_text()
    # As long as the source, so that positions are the same in both.
    code = _NO_CODE.sub(lambda match: " " * len(match[0]), source)
    for match in list(_NOT_MEANT.finditer(code)):
        end = _end(code, match.end()) if match[0].endswith("(") else code.find("\n", match.end())
        code = code[: match.start()] + " " * (end - match.start()) + code[end:]
    lines = source.splitlines()
    for start, end, after in sorted(_broken(code, source)):
        line = source.count("\n", 0, start)
        names = _FUNCTION.findall(code, 0, start)
        before = source[start:end]
        context = lines[line].strip() if end - start <= 2 else ""
        where, place = path.relative_to(ROOT), names[-1] if names else ""
        yield Mutation(where, line + 1, place, before, after, start, context)


def _broken(code: str, source: str) -> Iterator[tuple[int, int, str]]:
    """What to write in the place of which part."""
    for match in _OPERATOR.finditer(code):
        yield match.start(), match.end(), _COMPARISONS[match[0]]
    for match in _OFFSET.finditer(code):
        yield match.start(), match.end(), "0"
    for match in _IF.finditer(code):
        start, end = match.end(), _end(code, match.end()) - 1
        # After what `if (auto x = ...; x > 0)` declares; what else declares has no other side.
        start = max(start, code.rfind(";", start, end) + 1)
        if not re.search(r" = ", code[start:end]):
            yield start, end, f"!({source[start:end].strip()})"


def _end(code: str, start: int) -> int:
    """Behind the parenthesis that closes the one before ``start``."""
    depth = 1
    while depth and start < len(code):
        depth += {"(": 1, ")": -1}.get(code[start], 0)
        start += 1
    return start
