"""A stage: the results it makes, the loops it runs over, and one shard of it."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from shardmap.plan.engine.nodes import Node, Value
from shardmap.plan.engine.propagate import Analysis
from shardmap.plan.engine.recipe import Recipe, relevant_nodes, trace_back
from shardmap.plan.engine.rules import Cut, Factor, Origins, meet
from shardmap.plan.engine.slices import Box, Interval, pieces
from shardmap.plan.engine.work import Key


class Loop:
    """Something a stage runs over, piece by piece."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.members: list[Cut] = []
        self.pieces: list[Interval] = []

    @property
    def origins(self) -> Origins:
        return frozenset().union(*(cut.origins for cut in self.members))


class Result(NamedTuple):
    """A value that a stage makes.

    Attributes:
      value: which.
      axes: the loop of each axis, None where it is whole.
      partial: the loops whose shards have parts of it.
      combiner: how the parts combine; "insert" if there is nothing to combine.
    """

    value: Value
    axes: tuple[int | None, ...]
    partial: tuple[int, ...]
    combiner: str


class Family(NamedTuple):
    """Results that the same shards make.

    Attributes:
      results: their numbers.
      loops: the loops to run over; the last one runs fastest.
      size: the number of shards.
    """

    results: frozenset[int]
    loops: tuple[int, ...]
    size: int


class Stage:
    """Results of one level, and the loops they are made in.

    Attributes:
      number: the level.
      results: what is made.
      reads: arguments, constants, and what earlier stages made.
      loops: what the results run over.
      families: which results are made together.
      num_shards: the number of shards.
    """

    def __init__(
        self,
        number: int,
        analysis: Analysis,
        values: Sequence[Value],
        stops: frozenset[Value],
    ) -> None:
        self.number = number
        self.analysis = analysis
        self.stops = stops
        self.backwards: list[Node] = relevant_nodes(
            analysis.program.nodes, values, stops
        )
        self.reads: frozenset[Value] = frozenset(
            v
            for v in [*values, *(v for node in self.backwards for v in node.ins)]
            if isinstance(v, Value) and v in stops
        )
        self._loop_of: dict[int, int] = {}
        self.loops: list[Loop] = []
        self._numbers: dict[tuple[Key, int], int] = {}
        partial = {
            value: [
                analysis.one_reduction(k) for k in analysis.pending[value].reductions
            ]
            for value in values
            if value in analysis.pending
        }
        self._loops_of_reductions(list(partial.values()))
        drafts = [
            (value, self._loops_of_axes(value, partial.get(value, ())))
            for value in values
        ]
        self._cut_loops()
        order = self._order([axes for _, axes in drafts])
        self.loops = [self.loops[k] for k in order]
        place = {old: new for new, old in enumerate(order)}
        self._loop_of = {
            number: place[k] for number, k in self._loop_of.items() if k in place
        }
        self.results = [
            Result(
                value,
                tuple(place.get(k) for k in axes),
                tuple(
                    dict.fromkeys(
                        self._loop_of[k]
                        for k in partial.get(value, ())
                        if k in self._loop_of
                    )
                ),
                analysis.pending[value].combiner if value in partial else "insert",
            )
            for value, axes in drafts
        ]
        self.families = self._families()
        self.num_shards = sum(family.size for family in self.families)
        self._contracted: list[tuple[int, Factor, int]] = [
            (reduction.node, reduction.factor, self._loop_of[one])
            for k, reduction in enumerate(analysis.reductions)
            if (one := analysis.one_reduction(k)) in self._loop_of
        ]

    def _number(self, key: Key, repeat: int, size: int) -> int:
        name = self.analysis.classes.find(key), repeat
        if name not in self._numbers:
            self._numbers[name] = len(self.loops)
            self.loops.append(Loop(size))
        return self._numbers[name]

    def _loops_of_reductions(self, together: Sequence[Sequence[int]]) -> None:
        """Gives every reduction a loop; those of one result get different ones."""
        analysis = self.analysis
        for number in sorted({k for numbers in together for k in numbers}):
            reduction = analysis.reductions[number]
            taken = {
                self._loop_of[other]
                for numbers in together
                if number in numbers
                for other in numbers
                if other in self._loop_of
            }
            self._loop_of[number] = self._free_loop(
                reduction.key, reduction.size, taken
            )
        for k, reduction in enumerate(analysis.reductions):
            one = analysis.one_reduction(k)
            if one in self._loop_of:
                self.loops[self._loop_of[one]].members.append(reduction.cut)

    def _loops_of_axes(self, value: Value, reductions: Sequence[int]) -> list[int]:
        taken = {self._loop_of[number] for number in reductions}
        found = []
        for axis, (size, cut) in enumerate(
            zip(value.shape, self.analysis.cuts[value], strict=True)
        ):
            number = self._free_loop((value.number, axis), size, taken)
            taken.add(number)
            self.loops[number].members.append(cut)
            found.append(number)
        return found

    def _free_loop(self, key: Key, size: int, taken: set[int]) -> int:
        """A loop for an axis: the same one for the same axis, but for those taken.

        ``x @ x.T`` has one axis of ``x`` twice in its result, which takes two loops.
        """
        for repeat in itertools.count():
            number = self._number(key, repeat, size)
            if number not in taken:
                return number
        raise AssertionError

    def _cut_loops(self) -> None:
        for loop in self.loops:
            loop.pieces = pieces(meet(loop.members).at, loop.size)

    def _order(self, axes: Sequence[Sequence[int]]) -> list[int]:
        """Loops of more than one piece: those of the results' axes, then the rest."""
        mentioned = [k for row in axes for k in row]
        every = dict.fromkeys([*mentioned, *range(len(self.loops))])
        return [k for k in every if len(self.loops[k].pieces) > 1]

    def _families(self) -> list["Family"]:
        """Results whose loops are among those of another one are made with it.

        Of ``x * 2, x.sum(0)`` both are made by the same shards; of two results that
        share no loop, each has shards of its own, as theirs would multiply.
        """
        own = [{*r.axes, *r.partial} - {None} for r in self.results]
        largest = [s for s in own if not any(s < other for other in own)]
        found = []
        left = set(range(len(own)))
        for loops in dict.fromkeys(map(frozenset, largest)):
            members = frozenset(k for k in left if own[k] <= loops)
            left -= members
            numbers = tuple(k for k in range(len(self.loops)) if k in loops)
            size = math.prod(len(self.loops[k].pieces) for k in numbers)
            found.append(Family(members, numbers, size))
        return found

    def index(self, number: int) -> tuple["Family", dict[int, int]]:
        """A shard's family, and which piece of each of its loops it is."""
        for family in self.families:
            if number < family.size:
                break
            number -= family.size
        found = {}
        for k in reversed(family.loops):
            number, found[k] = divmod(number, len(self.loops[k].pieces))
        return family, found

    def boxes(self, family: "Family", index: Mapping[int, int]) -> list[Box | None]:
        """What a shard writes, per result; None for what another shard makes."""
        found: list[Box | None] = []
        for number, result in enumerate(self.results):
            own = {*result.axes, *result.partial}
            # What does not depend on a loop is written by the first of its shards.
            if number not in family.results or any(
                piece and k not in own for k, piece in index.items()
            ):
                found.append(None)
                continue
            found.append(
                tuple(
                    (0, size) if k is None else self.loops[k].pieces[index[k]]
                    for k, size in zip(result.axes, result.value.shape, strict=True)
                )
            )
        return found

    def recipe(self, number: int) -> tuple[list[Box | None], Recipe]:
        """What a shard writes, and how."""
        family, index = self.index(number)
        boxes = self.boxes(family, index)
        contracted: dict[int, dict[Factor, Interval]] = {}
        for node, factor, loop in self._contracted:
            if loop not in index:
                continue
            contracted.setdefault(node, {})[factor] = self.loops[loop].pieces[
                index[loop]
            ]
        demands = [
            None if box is None else (result.value, box)
            for result, box in zip(self.results, boxes, strict=True)
        ]
        recipe = trace_back(
            self.backwards, self.analysis.rules, demands, self.stops, contracted
        )
        return boxes, recipe


def stages_of(analysis: Analysis) -> list[Stage]:
    """The stages that make a program's outputs, in order."""
    outputs = [v for v in analysis.program.outputs if isinstance(v, Value)]
    inputs = {v for v in outputs if v.producer is None}
    last = max([analysis.level[v] for v in outputs], default=0)
    stops = frozenset([*analysis.program.inputs, *analysis.program.constants])
    found = []
    for level in range(last + 1):
        made = [v for v in analysis.kept if analysis.level[v] == level]
        finals = [v for v in outputs if analysis.level[v] == level]
        values = list(dict.fromkeys([*finals, *made]))
        if values:
            found.append(Stage(level, analysis, values, stops))
        stops |= frozenset(made) - inputs
    return found


SAMPLED = 64
"""From how many shards of each family the size of the largest is taken."""


def sample(stage: Stage) -> Iterator[int]:
    """Shards that the largest is among: the ends and the longest piece of each loop."""
    first = 0
    for family in stage.families:
        sizes = [len(stage.loops[k].pieces) for k in family.loops]
        choices = []
        for k in family.loops:
            lengths = [stop - start for start, stop in stage.loops[k].pieces]
            last, longest = len(lengths) - 1, lengths.index(max(lengths))
            choices.append(sorted({0, 1, longest, last // 2, last}))
        if family.size <= SAMPLED:
            choices = [list(range(size)) for size in sizes]
        for index in itertools.islice(itertools.product(*choices), SAMPLED):
            number = 0
            for size, piece in zip(sizes, index, strict=True):
                number = number * size + piece
            yield first + number
        first += family.size
