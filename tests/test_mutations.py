"""tests/mutations: what it breaks, which tests it runs, and that nothing stays broken."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutations import branches, rules, trials
from tests.mutations.__main__ import chosen
from tests.mutations.trials import Copy, Mutation

RULE = """
def rule(x, n):
    if n < 2 and not x:
        raise ValueError(n + 1)
    return -x if n == 1 else x * n
"""

FUNCTION = """\
#include "a && b"
bool function(int a, int b) {
  if (a > 1 &&
      b == 2) return true;  // a < b
  if (const auto* c = find(a)) return *c;
  if (const auto c = find(b); c != b) {
    return "a < b" == name(c - 1);
  }
  for (int i = 0; i < a; ++i) call(i);
  TORCH_INTERNAL_ASSERT(a < b);
  std::vector<int> d = a || b;
}
"""


def test_mistakes_in_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "ROOT", tmp_path)
    (tmp_path / "file.py").write_text(RULE)
    found = list(rules.mutations(tmp_path / "file.py"))
    after = ["(n < 2 or not x)", "(n >= 2)", "(3)", "(x)"]
    after += ["(x * n if n == 1 else -x)", "(n != 1)", "(2)", "(x)", "(x + n)"]
    assert sorted(m.after for m in found) == sorted(after)
    for mutation in found:
        ast.parse(mutation.of(RULE))


def test_mistakes_in_branches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branches, "ROOT", tmp_path)
    (tmp_path / "file.cpp").write_text(FUNCTION)
    found = list(branches.mutations(tmp_path / "file.cpp"))
    assert {mutation.place for mutation in found} == {"function"}
    lines = FUNCTION.splitlines()
    changed = {}
    for mutation in found:
        now = mutation.of(FUNCTION).splitlines()
        differ = [i for i, line in enumerate(lines) if i >= len(now) or now[i] != line]
        changed[mutation.line, mutation.after] = now[differ[0]].strip()
    assert changed == {
        (3, "!(a > 1 &&\n      b == 2)"): "if (!(a > 1 &&",
        (3, ">="): "if (a >= 1 &&",
        (3, "||"): "if (a > 1 ||",
        (4, "!="): "b != 2) return true;  // a < b",
        (6, "!(c != b)"): "if (const auto c = find(b);!(c != b)) {",
        (6, "=="): "if (const auto c = find(b); c == b) {",
        (7, "!="): 'return "a < b" != name(c - 1);',
        (7, "0"): 'return "a < b" == name(c - 0);',
        (11, "&&"): "std::vector<int> d = a && b;",
    }


@pytest.mark.parametrize("kind", [rules, branches])
def test_each_file_has_tests(kind: object) -> None:
    files = {mutations[0].path for mutations in kind.places().values()}
    named = {test for path in files for test in kind.tests_of(path)} | set(kind.NEAR)
    for name in named:
        path, _, test = name.partition("::")
        source = trials.ROOT / path
        assert source.exists(), name
        assert not test or f"\ndef {test.partition('[')[0]}(" in source.read_text(), name


def test_no_tests_are_named_for_what_is_gone() -> None:
    lowering = trials.ROOT / "lazyxla" / "lowering"
    assert set(rules._TESTS) <= {
        path.stem for f in rules.FOLDERS for path in (lowering / f).iterdir()
    }
    csrc = trials.ROOT / "csrc"
    files = {f"{room}/{path.stem}" for room in branches.ROOMS for path in (csrc / room).iterdir()}
    assert set(branches._TESTS) <= files | set(branches.ROOMS)


def test_a_seed_chooses_the_same_again() -> None:
    places = {
        name: [Mutation(Path(name), line, "", "", "", 0) for line in range(5)]
        for name in "abcdefgh"
    }
    first, again, other = ([*chosen(places, seed)] for seed in (3, 3, 4))
    assert first == again != other
    assert sorted(str(m.path) for m in first) == [*places]


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Copy:
    monkeypatch.setattr(trials, "COPY", tmp_path)
    copy = object.__new__(Copy)  # of no sources but those of the test
    copy.compiled, copy.processes, copy.failing = False, 0, []
    return copy


def test_an_interruption_leaves_nothing_broken(copy: Copy) -> None:
    path = trials.COPY / "file.py"
    path.write_text("right")
    mutation = Mutation(Path("file.py"), 1, "", "right", "wrong", 0)

    def interrupted() -> None:
        with copy.broken(mutation):
            assert path.read_text() == "wrong"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "right"


def test_what_runs_by_itself() -> None:
    tests = ["tests/test_a.py", "tests/spmd/cases_b.py", "tests/test_c.py::test_d[1]"]
    fast, sharded, named = trials._runs(tests, slow=False)
    assert fast == (["--slow", "0/1"], ["tests/test_a.py"], {})
    assert sharded[:2] == ([], ["tests/spmd/cases_b.py"])
    assert sharded[2]["LAZYXLA_CPU_DEVICES"] == "8"
    assert named == ([], ["tests/test_c.py::test_d[1]"], {})
    assert trials._runs(["tests"], slow=True) == [([], ["tests"], {})]


def test_what_tests_say(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    (trials.COPY / "test_all.py").write_text(
        "import os, time\n"
        "def test_right(): pass\n"
        "def test_wrong(): assert 0, 'a - b'\n"
        "def test_ends(): os._exit(3)\n"
        "def test_hangs(): time.sleep(600)\n"
    )

    def outcome(name: str) -> tuple[bool, str]:
        return copy.outcome([f"test_all.py::{name}"], slow=True)

    assert outcome("test_right") == (False, "")
    assert outcome("test_wrong") == (True, "test_all.py::test_wrong")
    assert outcome("test_ends") == (True, "no test can run")
    copy.failing = ["test_all.py::test_wrong"]
    assert outcome("test_wrong") == (False, "")
    monkeypatch.setattr(trials, "SECONDS", 2)
    assert outcome("test_hangs") == (True, "no end in 2 s")
