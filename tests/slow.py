"""Which tests are slow, so that most runs can leave them out.

`slow_tests.txt` lists them as measured: `python -m tests.slow REPORT.xml` rewrites it from what
`pytest tests --junitxml=REPORT.xml` wrote; what did not run keeps its time. A test that is not
listed counts as fast, and so does one marked `generated_file`: such a file is out of date after
many a change, and every run is to find that.
"""

from __future__ import annotations

import sys
import zlib
from pathlib import Path
from xml.etree import ElementTree

import pytest

LIST = Path(__file__).with_name("slow_tests.txt")
SECONDS = 0.6
"""A test that took longer is slow. The others take ten minutes on two cores."""


def add_options(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow",
        metavar="K/N",
        help="of the slow tests, run the K-th of N parts only, or none (0/1), and with K > 0 none "
        "of the fast ones; by default all tests run",
    )


def deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what `--slow` says."""
    wanted = config.getoption("--slow")
    if wanted is None:
        return
    part, parts = (int(number) for number in wanted.split("/"))
    if not 0 <= part <= parts:
        raise pytest.UsageError(f"--slow {wanted}: the part is none of 0 to {parts}")
    slow = {line.split(maxsplit=1)[1] for line in LIST.read_text().splitlines()}

    def runs(item: pytest.Item) -> bool:
        name = _name(item.nodeid)
        if name not in slow or item.get_closest_marker("generated_file"):
            return part == 0
        return part > 0 and zlib.crc32(name.encode()) % parts == part - 1

    kept = [item for item in items if runs(item)]
    config.hook.pytest_deselected(items=[item for item in items if not runs(item)])
    items[:] = kept


def _name(nodeid: str) -> str:
    """A test as a report has it: tests.lowering.test_matmul::test_products[float32]."""
    address, bracket, parameters = nodeid.partition("[")
    path, *classes, name = address.split("::")
    module = path.removesuffix(".py").replace("/", ".")
    return f"{'.'.join([module, *classes])}::{name}{bracket}{parameters}"


def main(report: str) -> None:
    lines = LIST.read_text().splitlines() if LIST.exists() else []
    times = {name: float(time) for time, name in (line.split(maxsplit=1) for line in lines)}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.attrib['classname']}::{case.attrib['name']}"
        times[name] = float(case.attrib["time"])
    slow = sorted((-time, name) for name, time in times.items() if time > SECONDS)
    LIST.write_text("".join(f"{-time:.1f} {name}\n" for time, name in slow))
    print(f"{len(slow)} tests are slow, {-sum(time for time, _ in slow):.0f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
