"""What is around the maps of a random program, and where its arguments lie."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import shardmap as sm

MESH_AXES = ("a", "b", "c")

AROUND = st.sampled_from([None] * 5 + ["partitions", "chunked", "plan"])
"""What takes the whole function: `sharded_jit`, `chunked` or `plan`."""

PLACES = st.sampled_from([None] * 3 + ["elements", "features", "whole"])
"""How arguments are sharded before a call, if they are."""

MESH_TYPES = st.sampled_from(["auto", "explicit", "set"])
"""Of a mesh that maps are given: its axes, and whether `jax.set_mesh` has it, too."""


def mesh_of(mesh_type: str) -> Mesh:
    """The mesh that maps are given."""
    kind = AxisType.Auto if mesh_type == "auto" else AxisType.Explicit
    return jax.make_mesh((2, 2, 2), MESH_AXES, axis_types=(kind,) * 3)


def taken(
    fun: Callable[..., Any], around: str | None, args: Sequence[Any], count: int
) -> Callable[..., Any]:
    """The function as something around it takes it.

    Args:
      around: of `AROUND`.
      args: the arguments, the first of which is cut.
      count: on how many devices the maps in it are.
    """
    shape = args[0].shape
    if around == "partitions":
        cut = [k for k, size in enumerate(shape) if size % count == 0]
        parts = None
        if cut:
            parts = tuple(count if k == cut[-1] else 1 for k in range(len(shape)))
        return sm.sharded_jit(fun, (parts, *[None] * (len(args) - 1)), None, count)
    pieces = {0: min(2, shape[0])}
    if around == "chunked":
        return sm.chunked(fun, pieces)
    if around == "plan":
        return lambda *args: sm.plan(fun, *args, in_slices=pieces).run(*args)
    return fun


def placed(
    args: Sequence[Any], where: str | None, mesh: Mesh, in_axis: int
) -> list[Any]:
    """The arguments, of which the first has its elements at ``in_axis``."""
    if where is None:
        return list(args)
    x, *rest = args
    dimension = in_axis % 2 if where == "elements" else 1 - in_axis % 2
    spec = PartitionSpec()
    if where != "whole" and x.shape[dimension] % mesh.shape[mesh.axis_names[0]] == 0:
        spec = PartitionSpec(*[None] * dimension, mesh.axis_names[0])
    everywhere = NamedSharding(mesh, PartitionSpec())
    return [
        jax.device_put(x, NamedSharding(mesh, spec)),
        *(jax.device_put(np.asarray(each), everywhere) for each in rest),
    ]
