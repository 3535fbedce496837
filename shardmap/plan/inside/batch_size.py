"""Finds how many elements a device can vectorise in its memory."""

import functools
from typing import Any

import jax

from shardmap._jax.types import aval_of
from shardmap.map.lowering.lower_map import block_function
from shardmap.map.lowering.steps import Context
from shardmap.map.primitives.axis import AxisLayout
from shardmap.map.primitives.params import MapParams
from shardmap.plan.memory.liveness import Peak, peak
from shardmap.units import size


def batch_that_fits(params: MapParams, memory: int) -> int | None:
    """The most elements at once whose temporary values fit, None for all.

    Args:
      params: of the map's equation.
      memory: the bytes that a device may hold besides its operands and results.

    Raises:
      ValueError: not even one element fits.
    """
    block = params.axis.block
    model = functools.cache(lambda count: _peak(params, block, count))
    if model(block).bytes <= memory:
        return None
    if (one := model(1)).bytes > memory:
        place = f" made at {one.source}" if one.source else ""
        raise ValueError(
            f"memory={size(memory)} is too little for {params}: one "
            f"element holds {size(one.bytes)} at once besides its operands and results,"
            f" of it {size(one.largest)} in {one.shape}{place}."
        )
    fits, too_many = 1, block
    while too_many - fits > max(1, fits // 16):
        middle = (fits + too_many) // 2
        if model(middle).bytes <= memory:
            fits = middle
        else:
            too_many = middle
    return fits


def _peak(params: MapParams, block: int, batch_size: int) -> Peak:
    """What a device holds at once with this batch size."""
    jaxpr, in_axes = params.call_jaxpr, params.in_axes
    axis = AxisLayout(params.axis_name, block, batch_size=batch_size)
    context = Context.outermost(axis)
    run = block_function(jaxpr, in_axes, params.out_axes, context)
    operands: list[Any] = []
    for var, in_axis in zip(jaxpr.invars, in_axes, strict=True):
        aval = aval_of(var)
        shape = list(aval.shape)
        if in_axis is not None:
            shape.insert(in_axis, block)
        operands.append(jax.ShapeDtypeStruct(shape, aval.dtype))
    return peak(jax.make_jaxpr(run)(*operands).jaxpr)
