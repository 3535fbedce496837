"""Shards that are alike: one walk for all of them.

The shards of a stage whose pieces are equally long differ in where these start. The
walk from results back to inputs is done for one of them, with `Affine` starts; its
recipe holds, with other numbers, for all shards that satisfy the guards of that walk:
mostly all but those at the edges. For the next shard that does not, it is done again.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from shardmap.plan.engine.affine import Guards, Law, settled, variables
from shardmap.plan.engine.recipe import Recipe
from shardmap.plan.engine.slices import Box

Boxes = list[Box | None]
Walk = Callable[[Sequence[int]], tuple[Boxes, Recipe]]
"""What a shard whose pieces start there writes, and how."""

FEW = 2
"""So few shards of equal lengths are walked one by one: an affine walk is slower."""

ALONE = 8
"""Affine walks end after so many that did not serve a second shard."""


class Pattern(NamedTuple):
    """Shards that are alike.

    Attributes:
      guards: what their starts satisfy.
      law: the numbers in their recipes: of the boxes that are written, of those that
        are read, and the starts that are handed over.
      boxes: what they write, but for the numbers.
      recipe: how, but for the numbers.
    """

    guards: Guards
    law: Law
    boxes: Boxes
    recipe: Recipe

    def at(self, starts: Sequence[int]) -> tuple[Boxes, Recipe]:
        """What one of the shards writes, and how."""
        numbers = self.law.at(starts)
        boxes = [box and _filled(box, numbers) for box in self.boxes]
        reads = [(value, _filled(box, numbers)) for value, box in self.recipe.reads]
        return boxes, self.recipe._replace(reads=tuple(reads), starts=tuple(numbers))


class Alike(NamedTuple):
    """Shards of one pattern: their numbers, ascending, and their starts, row by row."""

    pattern: Pattern
    numbers: np.ndarray
    starts: np.ndarray


def _filled(box: Box, numbers: Iterator[int]) -> Box:
    return tuple((next(numbers), next(numbers)) for _ in box)


def _pattern(walk: Walk, starts: Sequence[int]) -> Pattern:
    """Of the shards that are like the one with these starts."""
    guards = Guards()
    boxes, recipe = walk(variables(guards, starts))
    recipe = recipe._replace(static=settled(recipe.static))
    return Pattern(guards, _law(boxes, recipe, len(starts)), boxes, recipe)


def _law(boxes: Boxes, recipe: Recipe, count: int) -> Law:
    every = [box for box in boxes if box is not None]
    every += [box for _, box in recipe.reads]
    numbers = [n for box in every for interval in box for n in interval]
    return Law([*numbers, *recipe.starts], count)


class Classes:
    """The patterns of a stage, found as its shards are asked for."""

    def __init__(self) -> None:
        self._known: dict[Hashable, list[Pattern]] = {}
        # How often a pattern that was known served another shard.
        self._served: Counter[Hashable] = Counter()

    def recipe(
        self, key: Hashable, count: int, starts: Sequence[int], walk: Walk
    ) -> tuple[Boxes, Recipe]:
        """What one shard writes, and how. See `alike`."""
        number, row = np.zeros(1, np.int64), np.asarray([starts], np.int64)
        [found] = self.alike(key, count, number, row, walk)
        return found.pattern.at(starts)

    def alike(
        self,
        key: Hashable,
        count: int,
        numbers: np.ndarray,
        starts: np.ndarray,
        walk: Walk,
    ) -> Iterator[Alike]:
        """All shards that have a key in common, those together that are alike.

        Args:
          key: what they have in common.
          count: how many shards have that in common, at least.
          numbers: their numbers.
          starts: where their pieces start, a row each.
          walk: the walk, of shards that have that in common.
        """
        patterns = self._known.setdefault(key, [])
        known = iter(patterns[:])
        while len(numbers):
            pattern = next(known, None)
            is_new = pattern is None
            if pattern is None:
                first = starts[0].tolist()
                if count > FEW and (self._served[key] or len(patterns) < ALONE):
                    pattern = _pattern(walk, first)
                    patterns.append(pattern)
                else:
                    boxes, recipe = walk(first)
                    law = _law(boxes, recipe, len(first))
                    pattern = Pattern(_only(first), law, boxes, recipe)
            found = pattern.guards.match(starts)
            self._served[key] += int(found.sum()) - is_new
            if found.any():
                yield Alike(pattern, numbers[found], starts[found])
            numbers, starts = numbers[~found], starts[~found]


def _only(starts: Sequence[int]) -> Guards:
    """That the starts are these."""
    guards = Guards()
    for variable in variables(guards, starts):
        int(variable)
    return guards
