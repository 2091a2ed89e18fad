"""Why a graph is new, and how it is best cut: it is compared with those before.

"A new graph" explains nothing to a user whose loop compiles in every iteration. So the last graphs
are remembered in outline, and a new one is compared with the most similar of them:

    a new graph: like one before, but input 0 is Float[8, 3], not Float[4, 3]
    a new graph: like one before up to operator 12, aten::mul.Tensor, which was aten::add.Tensor
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from lazyxla.planning.alignment import align
from lazyxla.planning.made import find_made
from lazyxla.planning.outline import Outline
from lazyxla.planning.reasons import common_operators, compare, compare_by_names, list_names
from lazyxla.planning.rounds import MANY, find_rounds
from lazyxla.planning.sizes import find_alternate_stages
from lazyxla.planning.stages import BEFORE, find_stages
from lazyxla.planning.training_steps import find_training_steps

_REMEMBERED = 32
_REMEMBERED_OPERATORS = 100_000  # of all of them
_MOST_EDITS = 512  # between graphs that are worth cutting

_STEPS_BEFORE = 2
"""How many graphs of several steps of a training are compiled whole, unless they are large: more
are likely to follow, with other steps in them."""

_LEAST_ALIKE = 0.75
_LEAST_ALIKE_IN_ALL = 0.5
"""The least part of a graph that must be the same as in another one for a cut, and as in all
similar ones: where more differs it is another computation, which would run in pieces from then on.
"""


class Plan(NamedTuple):
    """How a new graph becomes programs.

    Args:
        reason: why it is new, in words.
        stages: of each operator the program that it is part of; empty if the graph is better whole.
        even_are_new: even stages are of what no graph before had.
        is_certain: else it is cut only if the largest of its programs that is not new is known: it
            may recur unchanged, and is better compiled whole then.
        varying: per slot, whether it should be an input at once; or empty.
        otherwise: the stages if it is not cut into those; or empty.
    """

    reason: str
    stages: list[int]
    even_are_new: bool
    is_certain: bool
    varying: list[bool]
    otherwise: Sequence[int] = ()


class History:
    """What was compiled lately. Any thread may use it."""

    def __init__(self) -> None:
        self._outlines: deque[Outline] = deque()  # the newest first
        self._of_several_steps = 0  # graphs
        self._lock = threading.Lock()

    def plan(
        self, graph: Outline, may_cut: bool, may_share: bool = True, may_alternate: bool = True
    ) -> Plan:
        """Compares a new graph with those before, and remembers it.

        Args:
            may_cut: whether its program may be several.
            may_share: whether to look for the parts that it has in common with them; with many
                operators that takes a tenth of a second and more.
            may_alternate: whether such parts may be several, with parts between them that are
                compiled again for each size of the data.
        """
        rounds = find_rounds(graph) if may_cut else None
        steps = find_training_steps(graph) if may_cut and not rounds else []
        with self._lock:
            self._of_several_steps += bool(steps)
            varies = self._of_several_steps > _STEPS_BEFORE or len(graph) >= MANY
            if steps and varies:  # finding differences would take a hundred times as long
                reason = self._explain(graph, ())
                plan = Plan(reason + ", of several training steps", steps, False, True, [])
            elif not may_share:
                plan = Plan(self._explain(graph, ()), [], False, False, [])
            else:
                plan = self._compare(graph, may_alternate)
                if may_cut and not plan.is_certain:
                    plan = plan._replace(otherwise=find_made(graph))
            self._remember(graph)
        if rounds is None:
            return plan
        again = f", in which {rounds.operators} operators come {rounds.times} times"
        return Plan(plan.reason + again, rounds.stages, False, True, plan.varying)

    def _compare(self, graph: Outline, may_alternate: bool) -> Plan:
        differences = self._differences(graph)
        reason = self._explain(graph, differences)
        stages: list[int] = []
        varying: list[bool] = []
        goes_on_changing = False
        alike = 0
        for difference in differences:
            if not varying and difference.is_mostly_kept():
                varying = _varying_slots(graph, difference)
            if difference.in_optimizer:
                continue
            differs = [a or b for a, b in zip(difference.differs, graph.varies, strict=True)]
            found = find_stages(graph, differs, _LEAST_ALIKE_IN_ALL if stages else _LEAST_ALIKE)
            if not found:
                continue
            alike += 1
            goes_on_changing = goes_on_changing or difference.in_sizes or alike > 1
            stages = found
            graph.varies = [
                each or stage == BEFORE for each, stage in zip(differs, stages, strict=True)
            ]
        if not stages and may_alternate:
            stages = _alternate_stages(graph, differences)
            goes_on_changing = bool(stages)
        return Plan(reason, stages, True, goes_on_changing, varying)

    def _remember(self, graph: Outline) -> None:
        self._outlines.appendleft(graph)
        operators = sum(map(len, self._outlines))
        while len(self._outlines) > 1 and (
            len(self._outlines) > _REMEMBERED or operators > _REMEMBERED_OPERATORS
        ):
            operators -= len(self._outlines.pop())

    def _explain(self, graph: Outline, differences: Sequence[_Difference]) -> str:
        """What is different from the most similar graph, the newest if several are."""
        like = self._most_similar(graph)
        # One of other shapes has the same operators in name only.
        in_name_only = like and like.names != graph.names and not set(like.ids) & set(graph.ids)
        if differences and (not like or in_name_only):
            different = list_names(graph, differences[0].differs)
            return f"a new graph: like one before, but for {different}"
        if in_name_only or not like:
            named = compare_by_names(graph, self._outlines)
            return "a new graph" + (named or (compare(graph, like) if like else ""))
        return "a new graph" + compare(graph, like)

    def _most_similar(self, graph: Outline) -> Outline | None:
        """That which begins with the same operators; None if none has half of them."""
        like, most = None, (False, False, False, 0)
        for before in self._outlines:
            common = common_operators(graph, before)
            same = common == len(graph) == len(before)
            likeness = (
                same,
                same and graph.ids == before.ids,
                graph.inputs == before.inputs,
                common,
            )
            if likeness > most and common * 2 >= len(graph):
                like, most = before, likeness
        return like

    def _differences(self, graph: Outline) -> list[_Difference]:
        """From each graph that is similar, the smallest first."""
        most = min(sum(operator.size for operator in graph.operators) // 2, _MOST_EDITS)
        found = (_Difference.between(graph, before, most) for before in self._outlines)
        return sorted(filter(None, found), key=lambda difference: difference.edits)


def _alternate_stages(graph: Outline, differences: Sequence[_Difference]) -> list[int]:
    """If two graphs before had the same operators on data of other sizes: these go on changing
    then, and what does not depend on them should not be compiled again for each."""
    of_data = [d.differs for d in differences if d.in_sizes and _is_same_state(graph, d.before)]
    if len(of_data) < 2:
        return []
    most_alike = sorted(of_data, key=sum)[:2]
    cut = find_alternate_stages(graph, [a or b for a, b in zip(*most_alike, strict=True)])
    if not cut:
        return []
    graph.varies = cut.differs
    return cut.stages


def _is_same_state(now: Outline, before: Outline) -> bool:
    """Whether all inputs that are updated in place are the same: else it is another model."""
    inputs = zip(now.inputs, before.inputs, now.aliases, strict=False)
    return len(now.inputs) == len(before.inputs) and all(
        alias < 0 or ours == theirs for ours, theirs, alias in inputs
    )


class _Difference(NamedTuple):
    """Which operators differ from those of another graph, or from where graphs have differed.

    Args:
        indices: of the same operators in `before`, or -1.
        edits: operators that only one of both has.
        in_sizes: the same operators, on an input of another size.
        in_optimizer: some of them are an optimizer's, whose first step is another one: once.
    """

    before: Outline
    differs: list[bool]
    indices: list[int]
    edits: int
    in_sizes: bool
    in_optimizer: bool

    @classmethod
    def between(cls, now: Outline, before: Outline, most: int) -> _Difference | None:
        """None if more than `most` operators are only in one of both, unless all have the same
        names."""
        indices = align(now.ids, before.ids, most)
        if indices is None and now.names == before.names:
            pairs = enumerate(zip(now.ids, before.ids, strict=True))
            indices = [i if id == other else -1 for i, (id, other) in pairs]
        if indices is None:
            return None
        kept = {index for index in indices if index >= 0}
        dropped = [i for i in range(len(before)) if i not in kept]
        added = [i for i, index in enumerate(indices) if index < 0]
        return cls(
            before,
            _differing(now, before, indices, kept),
            indices,
            len(added) + len(dropped),
            now.names == before.names and now.inputs != before.inputs,
            any(now.operators[i].in_optimizer for i in added)
            or any(before.operators[i].in_optimizer for i in dropped),
        )

    def is_mostly_kept(self) -> bool:
        return sum(index >= 0 for index in self.indices) >= _LEAST_ALIKE * len(self.indices)


def _differing(now: Outline, before: Outline, indices: Sequence[int], kept: set[int]) -> list[bool]:
    differs: list[bool] = []
    for index, sources in zip(indices, now.sources, strict=True):
        if index < 0 or before.varies[index]:
            differs.append(True)
            continue
        # It differs, too, if it takes other operators' results; one that differs itself does not
        # count, as the cut separates it.
        differs.append(
            any(
                not (source >= 0 and differs[source])
                and not (source < 0 <= other and (other not in kept or before.varies[other]))
                and (indices[source] if source >= 0 else -1) != other
                for source, other in zip(sources, before.sources[index], strict=True)
            )
        )
    return differs


def _varying_slots(graph: Outline, difference: _Difference) -> list[bool]:
    """Which slots will have other values, judged by a similar graph: indices that differ there, and
    the numbers of operators that it lacks, which may be those of a schedule's next step."""
    varying = []
    for slots, index in zip(graph.slots, difference.indices, strict=True):
        if index < 0:
            varying += [not slot.is_index and not slot.optional for slot in slots]
        else:
            others = difference.before.slots[index]
            varying += [
                slot.is_index and slot.word != other.word
                for slot, other in zip(slots, others, strict=True)
            ]
    return varying


plan = History().plan
"""That of the process. For C++."""
