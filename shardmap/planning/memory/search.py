"""Finds along which axes, and into how many pieces, a function fits into memory.

The function as it is comes first. Then one class of axes is cut: an axis of an image,
say, is one class in all layers, see `joined_classes`, and the classes that the most
bytes carry come first. An estimate of real shards gives the number of pieces. XLA,
which compiles the largest shard, is the judge; if it takes more, the number of pieces
is corrected once by what it says. If no class fits, the one that leaves the least is
cut along a further class. Arrays that lie in chunks are cut along their chunks as long
as any such cut fits.
"""

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardmap.planning.engine.analysis import AxisKey, joined_classes
from shardmap.planning.engine.nodes import Graph, Node, Value, nbytes
from shardmap.planning.engine.rules import Rule
from shardmap.planning.engine.stages import Stage
from shardmap.planning.in_slices import Asked, Points, cut_points
from shardmap.planning.lax.reduce import COMBINERS
from shardmap.planning.memory.chunks import Chunks
from shardmap.planning.memory.compiled import Estimate, estimated
from shardmap.planning.run.cut_program import IN_MEMORY, CutProgram
from shardmap.units import AUTO, Auto, size

CLASSES = 3
"""The classes that are tried, and the most that are cut together. The first one was
right in 15 of 17 programs, the second one in the others."""

TRIES = 4
"""The most numbers of pieces of a cut, as each is analysed."""

VERDICTS = 3
"""The most verdicts of XLA against cuts: each takes longer than an analysis. A refusal
asks twice more."""

NEAR = 1.5
"""An estimate may be so far from what XLA takes. It is asked up to there."""

ROOMY = 0.6
"""Shards that take less than this part of the memory are made larger."""

ALMOST = 5 / 4
"""Where nothing fits, pieces take about so many times the least that they can."""

BETTER = 1.03
"""Where nothing fits, XLA is asked of what seems so many times less than it said."""

GROWTH = 2
"""If XLA refuses a cut twice, there are at least so many times the pieces."""

AGAIN = 1.5
"""Other cuts are looked for if all read chunks more often than this."""

READ_OFTEN = 5
"""Cuts of which a stage moves more than so many times the bytes of the function whole
are compared with others."""

QUICK = 256
"""A function of at most so many equations is compiled whole to see if it fits."""

MOST_FUNCTIONS = 64
"""Cuts whose shards compute more different things, which compile long, are not made."""

MOST_PIECES = 2**16
"""The most pieces of an axis, which are listed."""

MOST_SHARDS = 2**20
"""The most shards, which may be more: those of ``x @ x.T`` are pairs of pieces."""

Axes = frozenset[tuple[int, int]]
"""Axes that are cut, as (number of the value in `Problem.values`, axis)."""


@dataclass(frozen=True)
class Problem:
    """A function that is to fit into memory.

    Attributes:
      make: cuts the function. Takes points, whether axes that are summed over are cut,
        and whether values may be kept for later stages.
      graph: the function before it is cut.
      rules: the rules of its nodes.
      values: the values at which cuts can begin: its arguments, then values inside.
      asked: the cuts of its arguments; `AUTO` for those whose number is sought.
      finds: whether the axes are sought too.
      partial: whether axes that are summed over may be cut.
      memory: the bytes that shards may take.
      in_loops: whether shards are bodies of loops, whose arguments and results exist.
      took: compiles shards, and returns the bytes that they take. It need not go on
        when these are more than a limit.
      chunks: where chunks of the arguments and results begin.
    """

    make: Callable[[Asked, bool, bool], CutProgram]
    graph: Graph
    rules: Mapping[Node, Rule]
    values: Sequence[Value]
    asked: Asked
    finds: bool
    partial: bool
    memory: int
    in_loops: bool
    took: Callable[[CutProgram, float], int]
    chunks: Chunks

    def classes(self) -> list[Axes]:
        """The axes of each class that can be cut, the most bytes first."""
        find = joined_classes(self.graph, self.rules).find
        used = {x for node in self.graph.nodes for x in node.ins}
        returned = {*self.graph.outputs} - used

        def root(value: Value, axis: int) -> AxisKey:
            # Arguments that are only returned are cut alike.
            is_kept = value.producer is None and value in returned
            return find((-1 if is_kept else value.number, axis))

        axes: dict[AxisKey, set[tuple[int, int]]] = {}
        for k, value in enumerate(self.values):
            is_sought = self.finds or k >= len(self.asked)
            for axis, length in enumerate(value.shape):
                if length > 1 and is_sought and value in used | returned:
                    axes.setdefault(root(value, axis), set()).add((k, axis))
        carried = dict.fromkeys(axes, 0)
        results = (v for node in self.graph.nodes for v in node.outs)
        given = (v for v in self.graph.inputs if v in used | returned)
        for value in [*given, *results]:
            for key in {root(value, axis) for axis in range(value.aval.ndim)}:
                if key in carried:
                    carried[key] += nbytes(value)
        ranked = sorted(carried, key=lambda key: -carried[key])
        return [frozenset(axes[key]) for key in ranked]

    def most(self, axes: Axes, along_chunks: bool) -> int:
        """The most pieces of some axes."""
        borders = [self.chunks.of(k, axis) for k, axis in axes]
        chunks = [len(each) + 1 for each in borders if each is not None]
        lengths = [self.values[k].shape[axis] for k, axis in axes]
        most = max((along_chunks and chunks) or lengths, default=1)
        return min(most, MOST_PIECES)

    def points(self, way: "Way") -> Asked:
        """The cuts that were asked for, and those of a way."""
        rows: list[list[Points]] = [
            [() if isinstance(points, Auto) else points for points in row]
            for row in self.asked
        ]
        if any(k >= len(rows) for axes, n in way.cuts if n > 1 for k, _ in axes):
            rows += [[()] * len(value.shape) for value in self.values[len(rows) :]]
        for axes, pieces in (cut for cut in way.cuts if cut[1] > 1):
            for k, axis in axes:
                length, borders = self.values[k].shape[axis], self.chunks.of(k, axis)
                most = max(length, 1) if borders is None else len(borders) + 1
                once = self.chunks.read_once(k, axis)
                if borders and pieces <= len(once) + 1:
                    borders = once
                if pieces > most and borders is not None and not way.along_chunks:
                    rows[k][axis] = _within(borders, length, pieces)
                else:
                    rows[k][axis] = cut_points(min(pieces, most), length, borders)
        return tuple(map(tuple, rows))


def _within(borders: tuple[int, ...], length: int, count: int) -> tuple[int, ...]:
    """About ``count`` pieces of an axis, as many in each of its chunks.

    >>> _within((4,), 8, 3)
    (2, 4, 6)
    """
    edges = [0, *borders, length]
    each = math.ceil(count / (len(borders) + 1))
    points = {
        start + k * (stop - start) // each
        for start, stop in itertools.pairwise(edges)
        for k in range(each)
    }
    return tuple(sorted(points - {0}))


class Way(NamedTuple):
    """A way to cut a function.

    Attributes:
      cuts: axes, and the number of their pieces. That of the last ones is sought.
      along_chunks: whether arrays that lie in chunks are cut between chunks only.
      partial: whether axes that are summed over are cut.
      keeps: whether what costs time is kept for later stages.
    """

    cuts: tuple[tuple[Axes, int], ...]
    along_chunks: bool
    partial: bool
    keeps: bool = True

    @property
    def pieces(self) -> int:
        return self.cuts[-1][1] if self.cuts else 1

    def in_pieces(self, count: int) -> "Way":
        *others, (axes, _) = self.cuts
        return self._replace(cuts=(*others, (axes, count)))


class Attempt(NamedTuple):
    """A cut function, and what it takes.

    Attributes:
      way: how it is cut.
      program: the cut function.
      estimate: about what it takes.
      scale: what XLA takes of the estimate, or took in other pieces.
      is_judged: whether it was compiled, so that ``bytes`` is what XLA says.
    """

    way: Way
    program: CutProgram
    estimate: Estimate
    scale: float = 1.0
    is_judged: bool = False

    @property
    def bytes(self) -> int:
        return round(max(self.estimate.held.bytes, 1) * self.scale)

    def is_like(self, other: "Attempt") -> bool:
        """Whether it is the same cut, as that of a further class reaches nothing."""
        ours, theirs = self.estimate, other.estimate
        return (
            {*self.way.cuts} >= {*other.way.cuts}
            and ours[1:] == theirs[1:]
            and ours.held[:2] == theirs.held[:2]
        )

    @property
    def uncut(self) -> float:
        """About what it would take in any number of pieces.

        What XLA takes beyond the estimate is of pieces, such as copies of them.
        """
        return self.estimate.held.whole * min(self.scale, 1)


def program_within(problem: Problem) -> CutProgram:
    """The function, cut so that its shards fit; a ValueError says what would do."""
    attempt = _Search(problem).run()
    if attempt.bytes > problem.memory:
        raise ValueError(_refusal(problem, attempt))
    return attempt.program


class _Search:
    """The attempts to cut a function so that it fits."""

    def __init__(self, problem: Problem) -> None:
        self._attempts: dict[tuple[Asked, bool, bool], Attempt] = {}
        self._long: dict[CutProgram, bool] = {}
        self._problem, self._memory = problem, problem.memory
        self._refused, self._near = 0, NEAR

    def run(self) -> Attempt:
        """The first attempt that fits, as XLA says, or else the least one."""
        problem = self._problem
        whole = self._attempt(Way((), False, problem.partial))
        if self._may_fit(whole) and self._fits(whole := self._judge(whole)):
            return whole
        if whole.estimate.shards > 1 and whole.program.analysis.costly:
            fits = self._judge(self._attempt(whole.way._replace(keeps=False)))
            if self._fits(fits):
                return fits
        for attempt, often in self._ways(whole):
            if self._may_ask(attempt) and (judged := self._judged(attempt, often)):
                return judged
        return self._least(whole)

    def _may_fit(self, whole: Attempt) -> bool:
        """Whether a function with the cuts that are given is compiled to see."""
        if whole.bytes <= self._memory or whole.estimate.shards > 1:
            return True
        graph, rules = whole.program.graph, whole.program.analysis.rules
        room = self._memory
        if self._problem.in_loops:
            # A large result is made in the memory of the function's results.
            room += sum(nbytes(v) for v in graph.outputs if isinstance(v, Value))
        elif whole.estimate.moved > room:
            return False
        # XLA does not tell what some kernels of CPU hold, such as those of attention.
        stored = (
            nbytes(value)
            for node in graph.nodes
            if not (rules[node].cheap or node.primitive in COMBINERS)
            for value in node.outs
            if value not in graph.outputs
        )
        return len(graph.nodes) <= QUICK and max(stored, default=0) <= room

    def _ways(self, whole: Attempt) -> Iterator[tuple[Attempt, float]]:
        """The cuts that seem to fit, one after the other: of one class, then of two.

        A cut that moves little comes at once, with the most that it may move in more
        pieces; others when all classes were looked at, and along chunks and across.
        """
        problem, once = self._problem, whole.estimate.moved
        given = frozenset(
            (k, axis)
            for k, row in enumerate(problem.asked)
            for axis, points in enumerate(row)
            if isinstance(points, Auto)
        )
        classes = [given] if given else problem.classes()
        is_chunked = any(
            problem.chunks.of(*each) is not None for axes in classes for each in axes
        )
        along = (True,) if problem.chunks.out else (True, False)
        far = list[Attempt]()
        for along_chunks in along if is_chunked else (False,):
            way = whole.way._replace(along_chunks=along_chunks)
            least, others = whole._replace(way=way), classes
            for _ in range(CLASSES):
                tried, later = list[Attempt](), list[Attempt]()
                for attempt in self._further(least, others):
                    tried.append(attempt)
                    often = READ_OFTEN * len(attempt.program.stages) * once
                    again = AGAIN * attempt.estimate.moved
                    fits = attempt.bytes <= self._memory
                    if fits and self._moved(attempt) <= min(often, again):
                        yield attempt, often
                        attempt = self._finer(self._attempt(attempt.way))
                        if self._moved(attempt) <= often:
                            continue
                    is_far = along_chunks and self._moved(attempt) > often
                    (far if is_far else later).append(attempt)
                if not tried:
                    break
                if least.way == way and min(map(self._moved, tried)) > AGAIN * once:
                    later += self._along_both(way, classes)
                if along_chunks == along[-1]:
                    later, far = [*later, *far], []
                later.sort(key=lambda x: (x.bytes > self._memory, self._moved(x)))
                yield from ((each, math.inf) for each in later if self._is_near(each))
                # What XLA said of them meanwhile counts.
                tried = [self._attempt(each.way) for each in tried]
                least = min(tried, key=lambda each: each.bytes)
                others = problem.classes()
        yield from ((each, math.inf) for each in far if self._is_near(each))

    def _further(self, least: Attempt, classes: Sequence[Axes]) -> Iterator[Attempt]:
        """The cuts that help of one class more, of those that carry the most."""
        way = least.way
        cut = frozenset().union(*(axes for axes, _ in way.cuts))
        others = (axes - cut for axes in classes)
        others = (x for x in others if self._problem.most(x, way.along_chunks) > 1)
        for axes in itertools.islice(others, CLASSES):
            further = way._replace(cuts=(*way.cuts, (axes, 1)))
            attempt = self._fewest(least._replace(way=further))
            most = max(least.bytes, least.estimate.held.bytes)
            if attempt.bytes < most and attempt.way.pieces > 1:
                yield attempt

    def _along_both(self, way: Way, classes: Sequence[Axes]) -> Iterator[Attempt]:
        """The cuts of one class, after those for which no chunk is read again."""
        read_once = self._problem.chunks.read_once
        pieces = [1 + max(len(read_once(*each)) for each in axes) for axes in classes]
        cuts = tuple(x for x in zip(classes, pieces, strict=True) if x[1] > 1)
        if cuts:
            yield from self._further(self._attempt(way._replace(cuts=cuts)), classes)

    def _moved(self, attempt: Attempt) -> float:
        """About the bytes that all shards read, with the rest of chunks, and return."""
        points = self._problem.points(attempt.way)
        return attempt.estimate.moved * self._problem.chunks.times_read(points)

    def _fewest(self, few: Attempt) -> Attempt:
        """A way in about the fewest pieces that fit, as estimated; ``few`` do not."""
        tried = [best := self._sized(few)]
        if best.bytes > self._memory or 2 * best.estimate.kept > self._memory:
            way = few.way
            alike = [
                each
                for each in self._attempts.values()
                if each.way.cuts and each.way.in_pieces(1) == way.in_pieces(1)
            ]
            kept = max((each.estimate.kept for each in alike), default=0)
            if way.keeps and any(each.program.analysis.costly for each in alike):
                way = way._replace(keeps=False)
                tried.append(self._sized(few._replace(way=way)))
            # In self-attention, say, sums over the keys keep the product for later.
            if way.partial and 2 * kept > self._memory:
                way = way._replace(partial=False, keeps=False)
                tried.append(self._sized(few._replace(way=way)))
        if fits := [each for each in tried if each.bytes <= self._memory]:
            return min(fits, key=lambda each: each.way.pieces)
        return min(tried, key=lambda each: each.bytes)

    def _sized(self, few: Attempt, many: Attempt | None = None) -> Attempt:
        """A way in about the fewest pieces that take as much as there is room for.

        If nothing fits, that is little more than what is not cut. The bytes of pieces
        are about a power of their length. ``few`` pieces take more, ``many`` take less.
        """
        way, shortest, tried = few.way, 0, list[Attempt]()
        most = self._problem.most(way.cuts[-1][0], way.along_chunks)
        for _ in range(TRIES):
            last = many or few
            is_first = last.way.pieces == 1
            uncut = 0.0 if is_first else last.uncut
            room = max(self._memory, ALMOST * uncut) - uncut
            longest, cut = math.ceil(most / few.way.pieces), max(few.bytes - uncut, 1)
            power = 1.0
            if many is not None:
                shortest = math.ceil(most / many.way.pieces)
                left = max(many.bytes - uncut, 1)
                if left >= ROOMY * room or left >= cut:
                    break
                power = math.log(shortest / longest) / math.log(left / cut)
            length = math.floor(longest * (room / cut) ** power)
            length = min(max(length, shortest + 1), longest - 1)
            if length <= shortest:
                break
            way = way.in_pieces(math.ceil(most / length))
            attempt = self._attempt(way, 1.0 if is_first else last.scale)
            shards, before = attempt.estimate.shards, few.estimate.shards
            if few.way.pieces == 1 and shards <= before:
                break
            if shards > MOST_SHARDS:
                shortest = math.ceil(length * math.sqrt(shards / MOST_SHARDS))
                continue
            tried.append(attempt)
            if attempt.bytes <= max(self._memory, ALMOST * attempt.uncut):
                many = attempt
            elif len(tried) > 1 and shards > before and attempt.bytes >= few.bytes:
                break
            else:
                few = attempt
        if many is not None and many.bytes <= self._memory:
            return many
        least = min((each.bytes for each in tried), default=0)
        return next((x for x in tried if x.bytes <= ALMOST * least), few)

    def _finer(self, attempt: Attempt) -> Attempt:
        """The same axes in more pieces, one class after the other, until it fits."""
        for _ in attempt.way.cuts:
            if attempt.bytes > self._memory:
                attempt = self._sized(attempt)
                *others, last = attempt.way.cuts
                way = attempt.way._replace(cuts=(last, *others))
                attempt = attempt._replace(way=way)
        return attempt

    def _judged(self, attempt: Attempt, often: float) -> Attempt | None:
        """A cut that fits, as XLA says, in about the fewest pieces.

        None also if these would move more bytes than ``often``.
        """
        for is_first in (True, *[False] * (VERDICTS - 1)):
            attempt = self._judge(attempt)
            if self._fits(attempt):
                few = self._attempt(attempt.way.in_pieces(1))
                fewer = self._sized(few, attempt)
                if 2 * fewer.way.pieces <= attempt.way.pieces and self._may_ask(fewer):
                    fewer = self._judge(fewer)
                return fewer if self._fits(fewer) else attempt
            finer = self._finer(attempt)
            if not is_first:
                pieces = GROWTH * attempt.way.pieces
                more = self._attempt(attempt.way.in_pieces(pieces), attempt.scale)
                finer = min(finer, more, key=lambda each: each.bytes)
            if finer.is_judged or not self._is_near(finer) or not self._may_ask(finer):
                break
            if self._moved(finer) > often:
                break
            attempt = finer
        return None

    def _may_ask(self, attempt: Attempt) -> bool:
        """Whether XLA may be asked once more."""
        return self._refused < VERDICTS and not self._compiles_long(attempt)

    def _is_near(self, attempt: Attempt) -> bool:
        """Whether XLA is asked whether it fits."""
        return attempt.bytes <= self._near * self._memory

    def _fits(self, attempt: Attempt) -> bool:
        """Whether XLA says that it fits."""
        return attempt.is_judged and attempt.bytes <= self._memory

    def _attempt(self, way: Way, scale: float = 1.0) -> Attempt:
        """The function, cut in a way, and about what it takes."""
        key = self._key(way)
        if (known := self._attempts.get(key)) is None:
            program = self._problem.make(*key)
            estimate = estimated(program, self._problem.in_loops)
            known = Attempt(way, program, estimate, scale)
            for other in self._attempts.values():
                if known.is_like(other):
                    known = other
        elif not known.is_judged:
            known = known._replace(scale=max(scale, known.scale))
        self._attempts[key] = known
        return known._replace(way=way)

    def _judge(self, attempt: Attempt) -> Attempt:
        """The attempt with what XLA says that it takes."""
        if not attempt.is_judged:
            memory = self._problem.memory
            took = self._problem.took(attempt.program, memory)
            self._refused += bool(attempt.way.cuts) and took > memory
            scale = took / max(attempt.estimate.held.bytes, 1)
            attempt = attempt._replace(scale=scale, is_judged=True)
            for key, each in self._attempts.items():
                if each.program is attempt.program:
                    self._attempts[key] = each._replace(scale=scale, is_judged=True)
            if attempt.way.cuts and scale > 1:
                self._near = 1.0
        return attempt

    def _key(self, way: Way) -> tuple[Asked, bool, bool]:
        return self._problem.points(way), way.partial, way.keeps

    def _compiles_long(self, attempt: Attempt) -> bool:
        """Whether there are very many shards, or they compute many different things."""
        if attempt.estimate.shards > MOST_SHARDS:
            return True
        program = attempt.program
        if program not in self._long:
            self._long[program] = any(map(self._differs, program.stages))
        return self._long[program]

    def _differs(self, stage: Stage) -> bool:
        """Whether the shards of a stage compute very many different things."""
        different = set[Hashable]()
        # To find a group takes long, too: no more are looked at than tell.
        groups = itertools.islice(stage.members(), 2 * MOST_FUNCTIONS)
        for number, group in enumerate(groups):
            # In a plan, shards that only lie elsewhere are alike.
            alike = group.pattern.recipe.static
            different.add(number if self._problem.in_loops else alike)
            if len(different) > MOST_FUNCTIONS:
                return True
        return False

    def _least(self, whole: Attempt) -> Attempt:
        """What takes the least, compiled: what is told is enough, not an estimate."""
        least = self._judge(self._lowest())
        if not self._fits(least):
            self._memory = 1  # It is the same whatever too little memory is given.
            for _ in self._ways(whole):
                pass
            self._judge(self._lowest())
        judged = [each for each in self._attempts.values() if each.is_judged]
        least = min(judged, key=lambda each: each.bytes)
        if self._problem.in_loops:
            return least
        # A verdict ends at the first shard that is too large.
        held = max(least.estimate.held.bytes, 1)
        took = self._problem.took(least.program, max(held, least.bytes))
        return least._replace(scale=took / held)

    def _lowest(self) -> Attempt:
        """The attempt that takes about the least, as far as is known."""
        ranked = sorted(self._attempts.values(), key=lambda each: each.bytes)
        judged = next((each for each in ranked if each.is_judged), ranked[-1])
        for each in ranked:
            while BETTER * each.bytes < judged.bytes:
                is_whole = all(pieces == 1 for _, pieces in each.way.cuts)
                if is_whole or not self._compiles_long(each):
                    return each
                halves = ((axes, -(-n // 2)) for axes, n in each.way.cuts)
                each = self._attempt(each.way._replace(cuts=tuple(halves)))
        return judged


def _refusal(problem: Problem, refused: Attempt) -> str:
    """Names the least that any way takes, and what would help."""
    held = refused.estimate.held
    count = math.prod(pieces for _, pieces in refused.way.cuts)
    pieces, remedy = "as a whole", "" if problem.finds else ", or cut other axes"
    if count > 1:
        pieces = f"in {count:,} pieces"
    elif any(each and each != AUTO for row in problem.asked for each in row):
        pieces = "in the pieces that in_slices gives"
        remedy = ", or cut into more pieces, or use AUTO"
    value = ""
    if refused.bytes > 2 * held.bytes:
        scratch = size(refused.bytes - held.bytes)
        value = f", of it {scratch} in scratch memory of XLA's kernels"
    elif (part := held.largest) is not None:
        value = f", of it {size(part.bytes)} in "
        value += part.value.aval.update(shape=part.shape).str_short()
        if part.value.producer and part.value.producer.source:
            value += f" made at {part.value.producer.source}"
        if any(part.value in kept for kept in refused.program.kept):
            value += ", kept for later stages"
            if part.bytes > IN_MEMORY and not problem.in_loops:
                remedy += ", or a folder as scratch"
    exact = f" ({refused.bytes:,} bytes)" if refused.bytes >= 1024 else ""
    enough = math.ceil(1.05 * refused.bytes)  # Other pieces may take a little more.
    return (
        f"memory={size(problem.memory)} is too little: {pieces} the function still "
        f"holds {size(refused.bytes)}{exact} at once{value}. "
        f"Pass memory={enough} or more{remedy}."
    )
