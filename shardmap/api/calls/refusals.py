"""What a call of a mapped function is refused for, and by whom.

A user's mistake is a ValueError or a TypeError, for the user. A program that is not for
calls like this one is `NeedsAnotherProgram`, for whoever looks up another.
"""

import traceback
from collections.abc import Callable, Sequence
from typing import Any

from shardmap._jax.types import Axes
from shardmap.api.calls.arguments import Static
from shardmap.arrays import trees
from shardmap.map import tracing


class NeedsAnotherProgram(Exception):
    """A call is refused by a program that is not for calls of its kind."""


def has_entered(error: Exception, fun: Callable[..., Any]) -> bool:
    """Whether an error comes from ``fun``, or from what it has called."""
    code = fun.__code__
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code is code for frame, _ in frames)


def check_unmapped(
    name: str,
    out_axes: Axes,
    body: tracing.Body,
    in_axes: Axes,
    batch: tracing.Batch,
) -> None:
    """Refuses ``out_axes=None`` for a result that differs between elements.

    Args:
      name: the function's.
      out_axes: where each result has the mapped axis.
      body: what one element computes.
      in_axes: the same of the operands behind the body's constants.
      batch: the mapped axis.
    """
    dims = (None,) * len(body.constants) + tuple(
        None if axis is None else 0 for axis in in_axes
    )
    differs = tracing.batched_results(body.jaxpr, batch, dims)
    names = trees.result_names(body.out_tree)
    bad = [
        f"\n  * {result}"
        for result, axis, differ in zip(names, out_axes, differs, strict=True)
        if axis is None and differ
    ]
    if bad:
        raise ValueError(
            "spmap has mapped output but out_axes is None: these results of "
            f"{name} can differ between the elements of the axis:"
            f"{''.join(bad)}\nCombine them with a collective over the axis, such "
            "as jax.lax.pmean, or give out_axes a position for the mapped axis."
        )


def check_hashable(
    what: str, parameter: str, statics: Sequence[tuple[int, Static]]
) -> None:
    """Refuses static arguments that cannot be part of a key.

    Args:
      what: the map, for the error.
      parameter: which names static arguments, for the error.
      statics: the arguments, by position.
    """
    bad = [
        f"argument {argnum} of type {type(static.value)}"
        for argnum, static in statics
        if not _is_hashable(static)
    ]
    if bad:
        raise ValueError(
            f"Non-hashable static arguments are used in {what}: {', '.join(bad)}. What "
            f"{parameter} names needs __hash__ and __eq__."
        )


def _is_hashable(value: Static) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
