"""What a call of `spmap` is refused for, once one element is traced."""

from collections.abc import Sequence

from shardmap._jax.types import Axes
from shardmap.arrays import trees
from shardmap.map import tracing


class UnmappedResultsDiffer(ValueError):
    """A result differs between elements, though its ``out_axes`` is None."""


def unmapped_that_differ(
    out_axes: Axes,
    body: tracing.Body,
    in_axes: Axes,
    batch: tracing.Batch,
) -> list[int]:
    """Which results differ between elements, though ``out_axes`` is None for them.

    Args:
      out_axes: where each result has the mapped axis.
      body: what one element computes.
      in_axes: the same of the operands behind the body's constants.
      batch: the mapped axis.
    """
    dims = (None,) * len(body.constants) + tuple(
        None if axis is None else 0 for axis in in_axes
    )
    differs = tracing.batched_results(body.jaxpr, batch, dims)
    return [
        k
        for k, (axis, differ) in enumerate(zip(out_axes, differs, strict=True))
        if axis is None and differ
    ]


def unmapped(name: str, results: Sequence[str]) -> UnmappedResultsDiffer:
    """The error for such results of a function, by their key paths."""
    return UnmappedResultsDiffer(
        "spmap has mapped output but out_axes is None: these results of "
        f"{name} can differ between the elements of the axis:{trees.bullets(results)}"
        "\nCombine them with a collective over the axis, such as jax.lax.pmean, or "
        "give out_axes a position for the mapped axis."
    )
