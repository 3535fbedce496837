"""A few shards of a stage that stand for all of them."""

import itertools
from collections.abc import Iterator

from shardmap.plan.engine.stages import Stage

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
