"""Finds how many elements a device can vectorise in its memory."""

import functools
import math

from shardmap._jax.stages import is_compile_only
from shardmap._jax.types import aval_of
from shardmap.arrays.compiled_memory import temporary_bytes
from shardmap.map.lowering.lower_map import block_function
from shardmap.map.lowering.steps import Scope
from shardmap.map.primitives.axis import AxisLayout
from shardmap.map.primitives.map_primitive import MapParams, insert_axis
from shardmap.sharding.mesh import mesh_devices
from shardmap.units import size

PROBES = 4
"""The most numbers of elements that are compiled besides one, two and all."""


def batch_that_fits(params: MapParams, memory: int) -> int | None:
    """The most elements at once whose temporary values fit, None for all."""
    block = params.axis.block
    took = functools.cache(lambda count: _temporaries(params, block, count))
    if took(block) <= memory:
        return None
    if took(1) > memory:
        needed = "more than the device has"
        if took(1) < math.inf:
            needed = size(int(took(1)))
        raise ValueError(
            f"memory={size(memory)} is too little for {params}: one element holds "
            f"{needed} at once besides its operands and results. Give more, or map "
            "smaller elements."
        )
    # About a constant, and as much more for each element.
    count = block if took(block) < math.inf else 2
    each = (took(count) - took(1)) / (count - 1)
    count = int(1 + (memory - took(1)) / max(each, 1))
    fits, below = 1, block
    for _ in range(PROBES):
        if below - fits <= 1:
            break
        count = min(max(count, fits + 1), below - 1)
        if took(count) <= memory:
            fits = count
        else:
            below = count
        count = (fits + below) // 2
    return fits


def _temporaries(params: MapParams, block: int, batch_size: int) -> float:
    """The temporary bytes with this batch size; infinity if XLA refuses the program."""
    axis = AxisLayout(params.axis_name, block, batch_size=batch_size)
    scope = Scope.of_map(axis)
    jaxpr, in_axes = params.call_jaxpr, params.in_axes
    operands = [
        insert_axis(aval_of(var), block, in_axis)
        for var, in_axis in zip(jaxpr.invars, in_axes, strict=True)
    ]
    device = next(filter(is_compile_only, mesh_devices(params.mesh)), None)
    run = block_function(jaxpr, in_axes, params.out_axes, scope)
    taken = temporary_bytes(run, operands, device)
    return math.inf if taken is None else taken
