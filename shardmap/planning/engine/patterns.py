"""Traces shards that are alike only once.

Shards of a stage whose pieces have equal lengths differ in where these start. One of
them is walked from results back to inputs, with `Affine` starts. Its recipe, with other
numbers, is that of all shards that satisfy the guards of the walk: mostly all shards
except those at the edges. The next shard that does not satisfy them is walked again.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardmap.planning.engine.affine import AffineMap, Guards, concrete, variables
from shardmap.planning.engine.recipe import Recipe
from shardmap.planning.engine.slices import Box

Boxes = list[Box | None]

ALONE = 8
"""Affine walks stop when patterns outnumber the shards that they served by this."""


class Pattern(NamedTuple):
    """Shards that are alike.

    Attributes:
      guards: the conditions that their starts satisfy.
      affine_map: gives the numbers of one shard: those of the boxes that it writes,
        those of the boxes that it reads, and the starts of its recipe.
      boxes: the boxes that they write; ``affine_map`` replaces the numbers.
      recipe: their recipe; ``affine_map`` replaces the numbers.
    """

    guards: Guards
    affine_map: AffineMap
    boxes: Boxes
    recipe: Recipe

    def at(self, starts: Sequence[int]) -> tuple[Boxes, Recipe]:
        """The boxes that the shard with these starts writes, and its recipe."""
        numbers = self.affine_map.at(starts)
        boxes = [box and _filled(box, numbers) for box in self.boxes]
        reads = [(value, _filled(box, numbers)) for value, box in self.recipe.reads]
        return boxes, self.recipe._replace(reads=tuple(reads), starts=tuple(numbers))


class Members(NamedTuple):
    """Shards of one pattern: their numbers, ascending, and their starts, row by row."""

    pattern: Pattern
    numbers: np.ndarray
    starts: np.ndarray


def _filled(box: Box, numbers: Iterator[int]) -> Box:
    return tuple((next(numbers), next(numbers)) for _ in box)


class Patterns:
    """The patterns of a stage, found on demand.

    ``walk`` returns what a shard with a key and starts writes, and its recipe.
    """

    def __init__(
        self, walk: Callable[[Any, Sequence[int]], tuple[Boxes, Recipe]]
    ) -> None:
        self._walk = walk
        self._known: defaultdict[Hashable, list[Pattern]] = defaultdict(list)
        # By key, the number of shards that known patterns served.
        self._served: Counter[Hashable] = Counter()

    def recipe(self, key: Hashable, starts: Sequence[int]) -> tuple[Boxes, Recipe]:
        """The boxes that one shard writes, and its recipe."""
        for pattern in self._known[key]:
            if pattern.guards.match(starts):
                self._served[key] += 1
                return pattern.at(starts)
        return self._pattern(key, starts).at(starts)

    def members(
        self, key: Hashable, numbers: np.ndarray, starts: np.ndarray
    ) -> Iterator[Members]:
        """Groups shards that have one key by their patterns; ``starts`` has rows."""
        known, tried = self._known[key], 0
        while len(numbers):
            is_new = tried == len(known)
            if is_new:
                pattern = self._pattern(key, starts[0].tolist())
                if tried == len(known):  # It holds for this shard only.
                    yield Members(pattern, numbers[:1], starts[:1])
                    numbers, starts = numbers[1:], starts[1:]
                    continue
            pattern = known[tried]
            tried += 1
            fits = np.broadcast_to(pattern.guards.match(starts.T), len(starts))
            self._served[key] += int(fits.sum()) - is_new
            if fits.any():
                yield Members(pattern, numbers[fits], starts[fits])
                numbers, starts = numbers[~fits], starts[~fits]

    def _pattern(self, key: Hashable, starts: Sequence[int]) -> Pattern:
        """Makes the pattern of a shard that matches no known pattern.

        If patterns do not help, it holds for this shard only, and is not known.
        """
        known, guards = self._known[key], Guards()
        places = variables(guards, starts)
        helps = len(known) < self._served[key] + ALONE
        # `int` of a variable adds the guard that it keeps its value.
        boxes, recipe = self._walk(key, places if helps else list(map(int, places)))
        every = [box for box in boxes if box is not None]
        every += [box for _, box in recipe.reads]
        numbers = [n for box in every for interval in box for n in interval]
        affine_map = AffineMap([*numbers, *recipe.starts], len(starts))
        if helps:
            recipe = recipe._replace(static=concrete(recipe.static))
        pattern = Pattern(guards, affine_map, boxes, recipe)
        if helps:
            known.append(pattern)
        return pattern
