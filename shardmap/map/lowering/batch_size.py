"""Finds how many elements a device can vectorise in its memory."""

import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.extend.core
from jax.sharding import Mesh

from shardmap._jax.stages import is_compile_only
from shardmap._jax.types import AnyMesh, aval_of
from shardmap.arrays.compiled_memory import temporary_bytes
from shardmap.map.lowering.lower_map import block_function
from shardmap.map.lowering.steps import Context
from shardmap.map.primitives.axis import AxisLayout
from shardmap.map.primitives.params import MapParams
from shardmap.units import size

PROBES = 4
"""The most numbers of elements that are compiled besides one and all."""


class Peak(Protocol):
    """What is held at once, and of it the largest value and where it is made."""

    @property
    def bytes(self) -> int: ...

    @property
    def largest(self) -> int: ...

    @property
    def shape(self) -> str: ...

    @property
    def source(self) -> str: ...


def batch_that_fits(
    params: MapParams, memory: int, peak_of: Callable[[Any], Peak]
) -> int | None:
    """The most elements at once whose temporary values fit, None for all.

    Args:
      params: of the map's equation.
      memory: the bytes that a device may hold besides its operands and results.
      peak_of: what is held of a jaxpr, and its largest value.

    Raises:
      ValueError: not even one element fits.
    """
    block = params.axis.block
    traced = functools.cache(lambda count: _traced(params, block, count))
    device = _compile_only(params.mesh)
    took = functools.cache(lambda count: _temporaries(*traced(count), device, peak_of))
    if took(block) <= memory:
        return None
    if took(1) > memory:
        jaxpr, _ = traced(1)
        one = peak_of(jaxpr)
        place = f" made at {one.source}" if one.source else ""
        raise ValueError(
            f"memory={size(memory)} is too little for {params}: one "
            f"element holds {size(took(1))} at once besides its operands and results,"
            f" of it {size(one.largest)} in {one.shape}{place}."
        )
    # About a constant, and as much more for each element.
    each = (took(block) - took(1)) / (block - 1)
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


def _compile_only(mesh: AnyMesh | None) -> jax.Device | None:
    """A device of a mesh that only compiles; None: the map runs on those of JAX."""
    devices = mesh.devices.flat if isinstance(mesh, Mesh) else ()
    return next(filter(is_compile_only, devices), None)


def _traced(params: MapParams, block: int, batch_size: int) -> tuple[Any, list[Any]]:
    """What a device computes with this batch size, and the avals of its operands."""
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
    return jax.make_jaxpr(run)(*operands), operands


def _temporaries(
    jaxpr: Any,
    operands: list[Any],
    device: jax.Device | None,
    peak_of: Callable[[Any], Peak],
) -> int:
    """The bytes that XLA takes besides operands and results."""
    function = jax.extend.core.jaxpr_as_fun(jaxpr)
    told = temporary_bytes(function, operands, device)
    return peak_of(jaxpr).bytes if told is None else told
