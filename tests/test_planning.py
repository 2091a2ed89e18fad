"""How new graphs become programs: the algorithms of lazyxla/planning by themselves.

What follows from them is in test_cuts.py, test_rounds.py and test_recompilations.py."""

import itertools
import random

import pytest

from lazyxla.planning.alignment import align
from lazyxla.planning.collectives import arrange
from lazyxla.planning.history import History
from lazyxla.planning.outline import Operator, Outline


def fewest_edits(a: list[int], b: list[int]) -> int:
    """By dynamic programming: elements that only one of both has."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a):
        new = [i + 1]
        for j, y in enumerate(b):
            new.append(row[j] if x == y else min(row[j + 1], new[j]) + 1)
        row = new
    return row[-1]


@pytest.mark.parametrize("seed", range(8))
def test_alignments_are_the_shortest(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        symbols = range(rng.randint(1, 8))
        a, b = ([rng.choice(symbols) for _ in range(rng.randint(0, 30))] for _ in range(2))
        edits = fewest_edits(a, b)
        assert align(a, b, edits - 1) is None
        indices = align(a, b, edits + rng.randint(0, 3))
        assert indices is not None
        kept = [(i, j) for i, j in enumerate(indices) if j >= 0]
        assert all(a[i] == b[j] for i, j in kept)
        assert [j for _, j in kept] == sorted({j for _, j in kept})
        assert len(a) + len(b) - 2 * len(kept) == edits


def test_long_sequences_that_hardly_differ() -> None:
    a = list(range(20_000))
    b = a[:100] + a[103:9_000] + [-1] + a[9_000:]
    indices = align(b, a, 8)
    assert indices is not None
    assert [i for i, j in enumerate(indices) if j < 0] == [8_997]


def chain(names: list[str], shape: str) -> Outline:
    """Each operator takes the result of the one before. Their ids depend on the shape."""
    operators = [Operator(n, hash((n, shape)), 1, 1, False, False) for n in names]
    operands = [[i] for i in range(len(names))]
    return Outline([shape], operators, operands, [[] for _ in names], [len(names)], [], [-1])


@pytest.mark.parametrize("others_first", [False, True])
def test_a_graph_of_other_shapes_is_not_what_a_new_one_is_compared_with(others_first: bool) -> None:
    """Where one of the same shapes differs in one operator."""
    history = History()
    layers = ["matmul", "gelu"] * 10
    before = [chain(["roll", *layers, "mul"], "Float[8]"), chain(["flip", *layers], "Float[4]")]
    for graph in before if others_first else reversed(before):
        history.plan(graph, may_cut=True)
    plan = history.plan(chain(["roll", *layers], "Float[4]"), may_cut=True)
    assert plan.reason == "a new graph: like one before, but for roll (operator 0)"
    assert plan.stages == [0] + [1] * len(layers)


@pytest.mark.parametrize("seed", range(8))
def test_other_sizes_are_named_beside_other_operators(seed: int) -> None:
    """What depends on data has other sizes in each step, and a few other operators, anywhere."""
    rng = random.Random(seed)
    layers = [rng.choice(["matmul", "gelu", "add"]) for _ in range(rng.randint(20, 200))]
    history = History()
    history.plan(chain(layers, "Float[0]"), may_cut=False)
    for size in range(1, 20):
        names = list(layers)
        for _ in range(rng.randint(0, 2)):
            names.insert(rng.randint(0, len(names)), rng.choice(["view", "index_put"]))
            del names[rng.randint(0, len(names) - 1)]
        plan = history.plan(chain(names, f"Float[{size}]"), may_cut=False)
        assert plan.reason.startswith(
            f"a new graph: like one before, but input 0 is Float[{size}], not Float["
        )


def test_another_computation_is_compared_with_none() -> None:
    history = History()
    history.plan(chain(["matmul", "gelu"] * 20, "Float[8]"), may_cut=False)
    plan = history.plan(chain(["sort", "cumsum"] * 20, "Float[4]"), may_cut=False)
    assert plan.reason == "a new graph"


def grid_groups(sizes: list[int], axes: tuple[int, ...]) -> list[list[int]]:
    """All groups along some axes of a grid, the ranks row by row."""
    ranks = range(len(sizes))
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, at in enumerate(itertools.product(*map(range, sizes))):
        groups.setdefault(tuple(at[i] for i in ranks if i not in axes), []).append(rank)
    return list(groups.values())


@pytest.mark.parametrize("seed", range(8))
def test_groups_along_a_grid(seed: int) -> None:
    """Each process finds the same groups, from those that it is in."""
    rng = random.Random(seed)
    for _ in range(20):
        sizes = [rng.randint(2, 4) for _ in range(rng.randint(1, 3))]
        subsets = [(i,) for i in range(len(sizes))]  # and several axes together, if next to another
        subsets += [
            tuple(range(i, j)) for i in range(len(sizes)) for j in range(i + 2, len(sizes) + 1)
        ]
        rng.shuffle(subsets)
        kinds = [grid_groups(sizes, axes) for axes in subsets]
        for rank in range(len(kinds[0]) * len(kinds[0][0])):
            mine = [next(group for group in kind if rank in group) for kind in kinds]
            found = arrange(mine)
            assert found is not None
            assert found.ranks == list(range(len(found.ranks)))
            assert [sorted(rows) for rows in found.rows] == [sorted(kind) for kind in kinds]


@pytest.mark.parametrize(
    "groups",
    [
        [[0, 1], [2, 3]],  # not of one process
        [[0, 1, 3]],
        [[1, 0]],
        [[0, 1], [0, 1, 2]],
        [[0, 2, 4], [0, 3]],  # rows that cross
    ],
)
def test_what_is_no_grid(groups: list[list[int]]) -> None:
    assert arrange(groups) is None
