"""Several elements on one device: vectorised, or in a loop of vectorised parts."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from shardmap._jax.types import Jaxpr, Value
from shardmap.map.collectives.split import split_collectives
from shardmap.map.lowering.effects import call_for_each
from shardmap.map.lowering.host_calls import one_at_a_time
from shardmap.map.lowering.loops import loop
from shardmap.map.primitives.axis import AxisLayout
from shardmap.map.primitives.custom_partitioning import without_custom_partitioning
from shardmap.map.tracing import Batch


def block_function(
    jaxpr: Jaxpr,
    axis: AxisLayout,
    in_axes: Sequence[int | None],
    out_axes: Sequence[int | None],
) -> Callable[..., list[Any]]:
    """The function of one device's block of elements.

    Args:
      jaxpr: what one element computes.
      axis: the mapped axis.
      in_axes: where operands have the block of elements; None: one for all.
      out_axes: the same for results.
    """
    jaxpr = one_at_a_time(without_custom_partitioning(jaxpr))
    if axis.steps > 1:
        return loop(jaxpr, axis, in_axes, out_axes)
    split = call_for_each(split_collectives(jaxpr, axis), axis)
    mapped = Batch(axis.vectorized_name, axis.block).vectorize(
        split,
        in_axes,
        [0 if out_axis is None else out_axis for out_axis in out_axes],
    )

    def run(*blocks: Value) -> list[Any]:
        return [
            result[0] if out_axis is None else result
            for result, out_axis in zip(mapped(*blocks), out_axes, strict=True)
        ]

    return run


def on_one_device(
    *,
    axis_name: Hashable,
    axis_size: int,
    in_axes: Sequence[int | None],
    out_axes: Sequence[int | None],
    call_jaxpr: Jaxpr,
    batch_size: int | None,
    **_: object,
) -> Callable[..., list[Any]]:
    """A map without devices of its own: one block has all elements."""
    axis = AxisLayout(axis_name, axis_size, batch_size=batch_size)
    return block_function(call_jaxpr, axis, in_axes, out_axes)
