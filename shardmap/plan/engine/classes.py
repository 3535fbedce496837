"""Shards that are alike: one walk for all of them.

The shards of a stage whose pieces are equally long differ in where these start. The
walk from results back to inputs is done for one of them, with `Affine` starts; its
recipe holds, with other numbers, for all shards that satisfy the guards of that walk:
mostly all but those at the edges. For the next shard that does not, it is done again.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from shardmap.plan.engine.affine import Guards, Law, settled, variables
from shardmap.plan.engine.recipe import Recipe
from shardmap.plan.engine.slices import Box

Boxes = list[Box | None]
K = TypeVar("K", bound=Hashable)

FEW = 2
"""So few shards of equal lengths are walked one by one: an affine walk is slower."""

ALONE = 8
"""Affine walks end when there are so many more than shards that they served."""


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


class Classes(Generic[K]):
    """The patterns of a stage, found as its shards are asked for.

    Args:
      walk: says of the shards that have a key in common what they write, and how, from
        where their pieces start.
      count: how many shards have a key in common, at least.
    """

    def __init__(
        self,
        walk: Callable[[K, Sequence[int]], tuple[Boxes, Recipe]],
        count: Callable[[K], int],
    ) -> None:
        self._walk, self._count = walk, count
        self._known: dict[K, list[Pattern]] = {}
        # How often a pattern that was known served another shard.
        self._served: Counter[K] = Counter()

    def recipe(self, key: K, starts: Sequence[int]) -> tuple[Boxes, Recipe]:
        """What one shard writes, and how."""
        for pattern in self._known.get(key, ()):
            if pattern.guards.match(starts):
                self._served[key] += 1
                return pattern.at(starts)
        return self._pattern(key, starts).at(starts)

    def alike(self, key: K, numbers: np.ndarray, starts: np.ndarray) -> Iterator[Alike]:
        """All shards that have a key in common, those together that are alike.

        Args:
          key: what they have in common.
          numbers: their numbers.
          starts: where their pieces start, a row each.
        """
        known = iter([*self._known.get(key, ())])
        while len(numbers):
            pattern = next(known, None)
            is_new = pattern is None
            if pattern is None:
                pattern = self._pattern(key, starts[0].tolist())
            found = np.broadcast_to(pattern.guards.match(starts.T), len(starts))
            self._served[key] += int(found.sum()) - is_new
            if found.any():
                yield Alike(pattern, numbers[found], starts[found])
            numbers, starts = numbers[~found], starts[~found]

    def _pattern(self, key: K, starts: Sequence[int]) -> Pattern:
        """Makes the pattern of a shard that matches no known pattern.

        Where patterns do not help it is of this shard alone, and is not kept.
        """
        known, guards = self._known.setdefault(key, []), Guards()
        places = variables(guards, starts)
        helps = self._count(key) > FEW and len(known) < self._served[key] + ALONE
        # A variable that becomes an integer stays what it is now.
        boxes, recipe = self._walk(key, places if helps else list(map(int, places)))
        every = [box for box in boxes if box is not None]
        every += [box for _, box in recipe.reads]
        numbers = [n for box in every for interval in box for n in interval]
        law = Law([*numbers, *recipe.starts], len(starts))
        recipe = recipe._replace(static=settled(recipe.static))
        pattern = Pattern(guards, law, boxes, recipe)
        if helps:
            known.append(pattern)
        return pattern
