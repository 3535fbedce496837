"""What a rule made more of than it was asked for, cut down to what was asked.

The places are positions, which a compiled function gets as arguments; the shapes are
static.
"""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import jax
from jax import lax

from shardmap.plan.engine.slices import Box, shape_of

Crops: TypeAlias = tuple[tuple[int, ...] | None, ...]
"""Per result the shape that was asked for, None where it was made as it was asked."""


def crops(
    asked: Iterable[Box | None], made: Iterable[Box | None]
) -> tuple[Crops, list[int]]:
    """The crops of boxes that were made, and where they start in those boxes.

    >>> crops([((2, 4),), ((0, 3),)], [((1, 6),), ((0, 3),)])
    (((2,), None), [1])
    """
    shapes: list[tuple[int, ...] | None] = []
    starts: list[int] = []
    for inner, outer in zip(asked, made, strict=True):
        if inner is None or outer is None or inner == outer:
            shapes.append(None)
        else:
            shapes.append(shape_of(inner))
            starts += [a[0] - b[0] for a, b in zip(inner, outer, strict=True)]
    return tuple(shapes), starts


def crop(
    results: Iterable[Any], shapes: Crops, starts: Sequence[jax.Array]
) -> list[Any]:
    """The results, cropped as `crops` said."""
    rest = iter(starts)
    return [
        result
        if shape is None
        else lax.dynamic_slice(result, [next(rest) for _ in shape], shape)
        for result, shape in zip(results, shapes, strict=True)
    ]
