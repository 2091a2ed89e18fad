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
    "dispatch/factorizations": ["lowering/host_call_errors"],
    "dispatch/generator": ["random"],
    "dispatch/guard": ["device_surface", "streams", "threads"],
    "dispatch/hooks": ["device_surface"],
    "dispatch/host": ["host_operators", "errors", "strict", "copies"],
    "dispatch/host_call": ["host_operators", "foreign_functions"],
    "dispatch/host_kernels": ["recurrence"],
    "dispatch/host_arguments": ["host_programs", "trials", "recurrence"],
    "dispatch/host_random": ["host_random"],
    "dispatch/host_program": ["host_programs", "trials", "recurrence"],
    "dispatch/indexing": ["recorder", "dynamo_parts", "limits"],
    "dispatch/inference_store": ["shape_cache"],
    "dispatch/layouts": ["layouts", "copies"],
    "dispatch/sparse": ["sparse"],
    "dispatch/sparse_intersection": ["sparse"],
    "dispatch/linear": ["linear"],
    "dispatch/lowering_kind": ["explain", "host_operators", "custom_operators"],
    "dispatch/memory": ["memory"],
    "dispatch/memory_readers": ["memory_readers"],
    "dispatch/overlap": ["refused_calls", "recorder", "views"],
    "dispatch/pinned": ["pinned_memory", "copies"],
    "dispatch/recurrent_cells": ["recurrent_cells"],
    "dispatch/region_inputs": ["region_inputs"],
    "dispatch/settling": ["settling"],
    "dispatch/sharded": ["spmd/sharding", "spmd/values", "spmd/modes"],
    "dispatch/traced_graph": ["dynamo", "dynamo_sizes", "dynamo_training"],
    "distributed": [
        "distributed::test_as_on_the_cpu[arguments-2]",
        "distributed::test_as_on_the_cpu[collectives-2]",
        "distributed_faults",
        "distributed_faults::test_messages_that_are_not_what_is_expected",
        "distributed_faults::test_what_is_recorded_is_compared_at_once",
        "distributed_spanning::test_as_on_the_cpu[collectives-2]",
    ],
    "distributed/heartbeat": ["spanning::test_failures"],
    "distributed/launches": ["spanning::test_failures"],
    "distributed/step_timer": ["distributed::test_a_training_warns_of_nothing"],
    "graph": ["flush", "transactions", "recorder", "parts", "rounds", "memory", "limits"],
    "graph/devices": ["device_surface"],
    "graph/memory": ["limits", "memory"],
    "graph/one_operator": ["modes", "flush"],
    "graph/partitioned_run": [
        "spmd/values",
        "spmd/meshes",
        "spmd::test_on_eight_devices[cases_failures.py]",
    ],
    "graph/transfer": ["copies", "loader", "sharing", "spmd/values", "spmd/sharding"],
    "ir": ["views", "recorder", "flush", "random_programs"],
    "ir/sharding": ["spmd/sharding", "spmd/meshes", "spmd/values"],
    "program": ["flush", "program_cache", "recompilations", "places", "optimizers"],
    "program/cut": ["cuts"],
    "program/host_program": ["host_programs", "trials", "recurrence"],
    "program/partition": ["spmd/meshes", "spmd/sharding", "spmd/values"],
    "program/portable_key": ["program_store", "warm_caches"],
    "program/recurrence": ["recurrence"],
    "program/replicas": [
        "distributed_spanning::test_as_on_the_cpu[collectives-2]",
        "distributed_spanning::test_each_collective_is_a_program_of_all",
        "distributed_spanning::test_groups_of_a_program_are_rows_of_a_grid",
    ],
    "program/stages": ["parts", "cuts", "rounds"],
    "program/trial": ["trials", "recurrence"],
    "record": ["modes", "compile", "threads", "flush", "settings", "xla_options"],
    "record/capture": ["captured_steps", "captured_steps_results"],
    "steps": [f"captured_steps{part}" for part in ("", "_arguments", "_python", "_results")],
}
"""The tests to run first, of a room or of one file: tests/test_*.py, or one test of it, which may
be slow; in spmd/, tests/spmd/cases_*.py; in another folder, tests/FOLDER/test_*.py."""

_OF_FILES = re.compile(r"\w+")

NEAR = sorted(
    {
        f"tests/test_{name}.py"
        for room in ROOMS
        for name in _TESTS[room]
        if _OF_FILES.fullmatch(name)
    }
)
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
    return [_test(name) for name in _TESTS.get(f"{room}/{path.stem}", _TESTS[room])]


def _test(name: str) -> str:
    """What pytest takes, of a name in the table."""
    file, separator, test = name.partition("::")
    folder, _, topic = file.rpartition("/")
    kind = "cases" if folder == "spmd" else "test"
    return f"tests/{folder}/{kind}_{topic}.py{separator}{test}".replace("//", "/")


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
