"""What a call of `spmap` is refused for, once one element is traced."""

from shardmap._jax.types import Axes
from shardmap.arrays import trees
from shardmap.map import tracing


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
