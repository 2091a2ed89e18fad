"""Whatever befalls the files of the cache directory, results are right and programs come back.

``pytest tests/test_cache_damage.py --cache-rounds 2000`` tries more than the ordinary run.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import lazyxla
from lazyxla.cache import shape_store
from tests.cache_damage import DAMAGES, Bytes, is_good, is_in_the_way, repair
from tests.conftest import RunPython
from tests.support import counted

# Graphs of inputs of so many columns; no two of them share a program.
WORK: list[tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = [
    (31, lambda x: x.sin() + 1),
    (32, lambda x: x.sin() + 1),
    (32, lambda x: x.cos() + 1),
    (33, lambda x: (x @ x.t()).sum(0)),
    (34, lambda x: x.exp().mean(1)),
    (35, lambda x: x.sigmoid() * 2),
]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of programs, an empty one; next to nothing is kept in memory."""
    settings = lazyxla.settings
    before = settings.cache_dir, settings.cache_size, settings.max_programs
    settings.cache_dir, settings.cache_size = str(tmp_path / "cache"), 100
    settings.max_programs = 1
    for columns in range(100, 200):  # every new graph drops a quarter of what other tests left
        if lazyxla._C.cached_programs() <= 1:
            break
        torch.ones(columns).to("lazyxla").neg().cpu()
    yield tmp_path / "cache" / "programs"
    settings.cache_dir, settings.cache_size, settings.max_programs = before


def entries(programs: Path) -> set[Path]:
    return {path for path in programs.iterdir() if not path.name.startswith("environment")}


def run(index: int) -> None:
    """Runs one of WORK, which is not in memory, and compares its result with the CPU's."""
    columns, function = WORK[index]
    x = torch.linspace(-1, 1, 2 * columns).view(2, columns)
    torch.testing.assert_close(function(x.to("lazyxla")).cpu(), function(x))


def check(files: list[tuple[Path, Path]], bad: set[Path], told: str) -> None:
    """Runs all WORK: what has a bad file is lowered, what has no good program compiled."""
    with counted() as n:
        for index in range(len(WORK)):
            run(index)
    assert n.compiles == sum(program in bad for _, program in files), told
    assert n.lowerings == sum(not bad.isdisjoint(pair) for pair in files), told
    assert n.programs_loaded == len(WORK) - n.compiles, told


def test_damage_is_noticed(programs: Path, pytestconfig: pytest.Config) -> None:
    """Of the files of each graph some are damaged, in every round others: exactly those programs
    are compiled again that have no good file, and all results are right."""
    torch.ones(99).to("lazyxla").neg().cpu()
    files: list[tuple[Path, Path]] = []  # of each of WORK: the graph's, the program's
    for index in range(len(WORK)):
        before = entries(programs)
        run(index)
        graph, program = sorted(entries(programs) - before)
        files.append((graph, program))
    good: Bytes = {path: path.read_bytes() for pair in files for path in pair}
    rng = random.Random(0)
    for round_ in range(pytestconfig.getoption("--cache-rounds")):
        done = []
        for path in rng.sample(sorted(good), rng.randint(1, 4)):
            if is_good(path, good):  # not yet the victim of another's damage
                damage = rng.choice(DAMAGES)
                damage(path, good, rng)
                done.append((damage.__name__, path.name[:12]))
        bad = {path for path in good if not is_good(path, good)}
        blocked = {path for path in good if is_in_the_way(path)}
        told = f"round {round_}: {done}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # each path is warned of once
            check(files, bad, told)
            # Each program is there again, but where something that is no file is still in the way.
            check(files, blocked, told)
        assert {path for path in good if is_in_the_way(path)} == blocked, told
        repair(good)
    check(files, set(), "at the end")


def cut_off(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content))]


def one_bit_changed(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]


def noise_inside(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content) - 100)
    return content[:at] + rng.randbytes(100) + content[at + 100 :]


def parts_exchanged(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content))
    return content[at:] + content[:at]


def noise_behind(content: bytes, rng: random.Random) -> bytes:
    return content + rng.randbytes(50)


def another_version(content: bytes, rng: random.Random) -> bytes:
    return content  # under another name


CHANGES = (cut_off, one_bit_changed, noise_inside, parts_exchanged, noise_behind, another_version)

ASK = """
import torch, lazyxla
for n in range({first}, {last}):
    x = torch.empty(3, n, device="lazyxla")
    x.t().softmax(0).sum(1, keepdim=True)
"""


def test_damaged_answers_are_asked_anew(
    run_python: RunPython, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """The file of shapes: whatever is changed in it, no tensor gets a wrong shape."""
    rounds = max(pytestconfig.getoption("--cache-rounds"), 100)
    first = 7001  # nobody else asks about such sizes in this process
    last = first + 2 * rounds
    run_python(ASK.format(first=first, last=last), LAZYXLA_CACHE_DIR=str(tmp_path))
    (file,) = tmp_path.glob("shapes-*.bin")
    content = file.read_bytes()
    rng = random.Random(1)
    asked = []
    for n in range(first, last):
        damage = rng.choice(CHANGES) if n % 2 else None
        path = file.with_name("shapes-0.bin") if damage is another_version else file
        path.write_bytes(damage(content, rng) if damage else content)
        shape_store.use(str(path))
        with counted() as c:
            x = torch.empty(3, n, device="lazyxla")
            y = x.t().softmax(0).sum(1, keepdim=True)
        assert (x.t().shape, x.t().stride()) == ((n, 3), (1, n))
        assert (y.shape, y.stride(), y.dtype) == ((n, 1), (1, 1), torch.float32)
        asked.append(c.shape_inferences)
        if damage is None:
            assert c.shape_inferences == 0
        if damage is another_version:
            assert c.shape_inferences == 2
    # What is behind the damage is not read, what is before it is.
    assert 0 < sum(count > 0 for count in asked) < len(asked) / 2
    lazyxla.settings.cache_dir = lazyxla.settings.cache_dir  # this process's own file again
