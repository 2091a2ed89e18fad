"""How many mistakes in the lowering rules, or in C++, the fast tests notice.

    python -m tests.mutations --count 30
    python -m tests.mutations --cpp --count 15

breaks a copy of the sources in one place at a time: another operator, a number off by one, a
condition turned around. The tests of the broken file run first, then all that are near it, then all
fast ones, until one fails; what none noticed is tried with the slow tests of the file. It takes
minutes for each mistake that is not noticed at once, so it is not one of the tests.
"""

from __future__ import annotations

import argparse
import itertools
import random
import signal
import sys
from collections.abc import Iterator

from tests.mutations import branches, rules
from tests.mutations.trials import CannotBuild, Copy, Mutation

STAGES = ("family", "near", "all")


def chosen(places: dict[str, list[Mutation]], seed: int) -> Iterator[Mutation]:
    """One mistake of each function or file, in random order: the same for the same seed."""
    choices = random.Random(seed)
    for place in choices.sample(sorted(places), len(places)):
        yield choices.choice(places[place])


def trial(copy: Copy, mutation: Mutation, tests: dict[str, list[str]]) -> tuple[str, str]:
    """Which tests notice a mistake, "slow" if only slow ones do, "" for none; and the first."""
    with copy.broken(mutation):
        for stage, paths in tests.items():
            if (outcome := copy.outcome(paths)).failed:
                return stage, outcome.reason
        outcome = copy.outcome(tests["family"], slow=True)
        return ("slow" if outcome.failed else ""), outcome.reason


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutations",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cpp", action="store_true", help="break csrc/, not the lowering rules")
    parser.add_argument("--count", type=int, default=30, help="how many mistakes (default: 30)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (default: 0)")
    parser.add_argument("--skip", type=int, default=0, help="the first so many are known already")
    parser.add_argument("--last", choices=STAGES, default="all", help="the last tests to run")
    parser.add_argument("--processes", type=int, default=2, help="of pytest (default: 2)")
    options = parser.parse_args()
    # As Ctrl-C does: what runs is ended first.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    kind = branches if options.cpp else rules
    stages = STAGES[: STAGES.index(options.last) + 1]
    copy = Copy(options.cpp, options.processes)
    mutations = list(
        itertools.islice(
            chosen(kind.places(), options.seed), options.skip, options.skip + options.count
        )
    )
    tests = [
        {
            s: {"family": kind.tests_of(m.path), "near": kind.NEAR, "all": ["tests"]}[s]
            for s in stages
        }
        for m in mutations
    ]
    copy.check(sorted({path for each in tests for paths in each.values() for path in paths}))
    tried = noticed = 0
    for number, (mutation, each) in enumerate(zip(mutations, tests), options.skip):
        try:
            stage, reason = trial(copy, mutation, each)
        except CannotBuild:
            stage, reason = "no C++", ""
        else:
            tried += 1
            noticed += stage in stages
        print(f"{number:3} {stage or 'NOT NOTICED':12}{mutation}  {reason}", flush=True)
    print(f"{noticed} of {tried} noticed")


if __name__ == "__main__":
    main()
