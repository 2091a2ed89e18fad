"""The list of slow tests and what `--slow` makes of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import slow

pytest_plugins = ["pytester"]

SUITE = """
    import pytest

    @pytest.mark.parametrize("x", ["a[b]", "c::d"])
    def test_one(x):
        pass

    class TestAll:
        def test_two(self):
            pass
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    pytester.makeconftest("""
        from tests import slow
        pytest_addoption = slow.add_options
        pytest_collection_modifyitems = slow.deselect
    """)
    pytester.makepyfile(test_suite=SUITE)
    monkeypatch.setattr(slow, "LIST", pytester.path / "slow_tests.txt")
    return pytester


def test_each_test_runs_in_one_part(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite.inline_run("--junitxml=report.xml").assertoutcome(passed=3)
    monkeypatch.setattr(slow, "SECONDS", -1.0)
    slow.main("report.xml")
    assert len(slow.LIST.read_text().splitlines()) == 3
    suite.inline_run("--slow", "0/1").assertoutcome()
    ran = [len(suite.inline_run("--slow", f"{part}/3").listoutcomes()[0]) for part in (1, 2, 3)]
    assert sum(ran) == 3
    slow.LIST.write_text("9.0 test_suite.TestAll::test_two\n")
    suite.inline_run("--slow", "0/1").assertoutcome(passed=2)
    suite.inline_run("--slow", "1/1").assertoutcome(passed=1)
    suite.inline_run().assertoutcome(passed=3)


def test_listed_tests_exist() -> None:
    """A list of tests that are gone leaves nothing out."""
    listed = [line.split(maxsplit=1)[1] for line in slow.LIST.read_text().splitlines()]
    assert len(listed) == len(set(listed))
    for name in listed:
        module = name.partition("::")[0]
        parts = module.split(".")
        if parts[-1][:1].isupper():  # a class
            parts.pop()
        assert slow.LIST.parent.parent.joinpath(*parts).with_suffix(".py").exists(), name


def test_no_file_of_tests_is_two_modules() -> None:
    """What one defines, such as an operator, would be defined twice, and the first one be gone."""
    names: dict[str, list[str]] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is not None and Path(file).is_relative_to(slow.LIST.parent):
            names.setdefault(file, []).append(name)
    assert names
    assert not {file: found for file, found in names.items() if len(found) > 1}
