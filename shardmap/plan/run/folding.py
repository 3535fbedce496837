"""Tasks that put the partial results of a stage's shards together.

Sixteen partial results make one, sixteen of those the next, and so on, in the order of
the shards: whoever runs the tasks, the bytes are the same.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from shardmap.arrays.combining import identity
from shardmap.plan.engine.keys import data_aval
from shardmap.plan.engine.nodes import Value
from shardmap.plan.engine.slices import Box, shape_of
from shardmap.plan.engine.stages import Stage
from shardmap.plan.run.buffers import FOLDED, Fold, fold
from shardmap.plan.run.cut_program import CutProgram


class ShardResult(NamedTuple):
    """One of the results of a shard.

    Attributes:
      stage, number: which shard.
      place: which of its results.
    """

    stage: Stage
    number: int
    place: int

    @property
    def key(self) -> tuple[int, int]:
        """What it is known by in its stage."""
        return self.number, self.place


class FoldTask(NamedTuple):
    """A task that combines at most 16 partial results, or what such tasks give.

    Attributes:
      name: its name, of which there is one in a plan.
      stage, number: the last shard that has a part in it.
      value, box: of what.
      combiner: how.
      needs: what is combined.
      is_top: whether this is all of the box.
    """

    name: str
    stage: Stage
    number: int
    value: Value
    box: Box
    combiner: str
    needs: "list[Node]"
    is_top: bool

    @property
    def key(self) -> str:
        """What it is known by in its stage."""
        return self.name

    def run(self, parts: Iterator[np.ndarray] | Sequence[np.ndarray]) -> np.ndarray:
        """The result, from those of ``needs``."""
        return fold_all(self.combiner, self.start(), parts)

    def start(self) -> np.ndarray | None:
        """What the parts of a whole box are combined with first."""
        if not self.is_top:
            return None
        shape, dtype = stored_as(self.value, self.box)
        return np.full(shape, identity(self.combiner, dtype), dtype)


Node: TypeAlias = ShardResult | FoldTask


def fold_all(
    combiner: str,
    start: np.ndarray | None,
    parts: Iterator[np.ndarray] | Sequence[np.ndarray],
) -> np.ndarray:
    """Combines arrays, from the first to the last; None is no start."""
    return fold(combiner, parts if start is None else itertools.chain([start], parts))


def stored_as(value: Value, box: Box) -> tuple[tuple[int, ...], np.dtype]:
    """The shape and dtype of a box of a value as it is stored."""
    aval = data_aval(value.aval)
    return shape_of(box) + tuple(aval.shape[len(box) :]), aval.dtype


Written: TypeAlias = tuple[int, Box, str, Value]
"""A result of a shard: its place, where it goes, how it is combined there, of what."""


def written(stage: Stage, number: int) -> Iterator[Written]:
    """What a shard writes, without looking at how it computes it."""
    family, index = stage.index(number)
    pieces = {k: stage.loops[k].pieces[piece] for k, piece in index.items()}
    flags = stage.written(family, index)
    own = [result for result, flag in zip(stage.results, flags, strict=True) if flag]
    for place, result in enumerate(own):
        lengths = zip(result.axes, result.value.shape, strict=True)
        box = tuple(
            (0, length) if k is None else pieces.get(k, (0, length))
            for k, length in lengths
        )
        yield place, box, result.combiner, result.value


class FoldTasks:
    """The fold tasks of a stage, which follow from the results of its shards.

    Args:
      cut_program: the plan.
      stage: the stage.
    """

    def __init__(self, cut_program: CutProgram, stage: Stage) -> None:
        self._cut_program, self._stage = cut_program, stage
        self._trees: dict[tuple[Value, Box], _Tree] = {}

    def after(self, number: int) -> list[FoldTask]:
        """The tasks that can run after a shard, if those before it have been."""
        found: list[FoldTask] = []
        for place, box, combiner, value in written(self._stage, number):
            if combiner != "insert":
                if (value, box) not in self._trees:
                    name = f"{value.number}-{len(self._trees)}"
                    count = self._cut_program.parts[value]
                    self._trees[value, box] = _Tree(name, value, box, combiner, count)
                node = ShardResult(self._stage, number, place)
                found += self._trees[value, box].add(node)
        return found


class _Tree:
    """The fold tasks of one box."""

    def __init__(
        self, name: str, value: Value, box: Box, combiner: str, count: int
    ) -> None:
        self._name, self._about = name, (value, box, combiner)
        self._numbers = itertools.count()
        self._made: list[FoldTask] = []
        self._tops: list[Node] = []
        self._fold = Fold(combiner, count, combine=self._combine, at_once=FOLDED)

    def add(self, node: Node) -> list[FoldTask]:
        """Takes the next partial result, and gives the tasks that can run now."""
        self._made = []
        top = self._fold.add(node)
        if top is not None:
            self._tops.append(top)
        if not self._fold.left:
            self._combine("", self._tops, is_top=True)
        return self._made

    def _combine(
        self, combiner: str, nodes: list[Node], own: bool = False, is_top: bool = False
    ) -> FoldTask:
        last = nodes[-1]
        name = f"{self._name}-{next(self._numbers)}.fold"
        made = FoldTask(name, last.stage, last.number, *self._about, nodes, is_top)
        self._made.append(made)
        return made
