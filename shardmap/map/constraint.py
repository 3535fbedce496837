"""The sharding constraint of `sharded_jit`, in partitions of each dimension.

Outside maps, it is JAX's on a mesh of its own. Inside a map, it is an equation without
a mesh: the outermost map adds mesh axes for partitions behind its own, and leaves them
to the partitioner.
"""

import math
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardmap._jax.context import (
    LoweringContext,
    device_count,
    nothing_is_traced,
    without_mesh,
)
from shardmap._jax.types import AnyMesh, Equation, Param, Value, without_sharding
from shardmap.arrays import placement
from shardmap.map import set_mesh, tracing
from shardmap.map.primitives.axis import UNNAMED
from shardmap.sharding.conversions import cut_spec
from shardmap.sharding.mesh import (
    auto_mesh,
    default_devices,
    group_counts,
    local_devices,
    sizes_of_groups,
    too_few_devices,
)

Parts = tuple[int | None, ...]
"""A count for each dimension; None: the partitioner may cut it as it likes."""

CONSTRAINT = "with_sharding_constraint"

_AXIS_PREFIX = "_partitions"


def total_partitions(parts: Parts) -> int:
    """How many partitions there are."""
    return math.prod(count or 1 for count in parts)


# Outside maps


def partition_devices(total: int, what: str = CONSTRAINT) -> list[jax.Device]:
    """The first devices of `jax.set_mesh`, or of this process, or of all."""
    there = set_mesh.current_mesh_devices()
    devices = there or local_devices()
    if total > len(devices) and not there:
        devices = default_devices() or jax.devices()
    if total > len(devices):
        are = "device is" if len(devices) == 1 else "devices are"
        raise ValueError(
            f"{what} computation requires {total} devices, but only {len(devices)} "
            f"{are} available. Ask for fewer parts.{too_few_devices(total)}"
        )
    return devices[:total]


def partition_mesh(sizes: Sequence[int], devices: Sequence[jax.Device]) -> Mesh:
    """The mesh of a value outside maps: axes of these sizes, or one of all devices."""
    grid = np.asarray(devices, dtype=object).reshape(sizes or -1)
    return Mesh(grid, [f"{_AXIS_PREFIX}{k}" for k in range(grid.ndim)])


def partition_sharding(parts: Parts, mesh: AnyMesh) -> NamedSharding:
    """The sharding of a value with these parts."""
    dims: dict[int, tuple[Any, ...]] = {
        dimension: (PartitionSpec.UNCONSTRAINED,) if count is None else ()
        for dimension, count in enumerate(parts)
    }
    return NamedSharding(mesh, cut_spec(dims | partition_dims(parts, mesh)))


def in_order(parts: Sequence[int], devices: Sequence[jax.Device]) -> NamedSharding:
    """The sharding of a value with partition k on device k."""
    cut = [dimension for dimension, count in enumerate(parts) if count > 1]
    mesh = partition_mesh([parts[dimension] for dimension in cut], devices)
    names = {dimension: (mesh.axis_names[k],) for k, dimension in enumerate(cut)}
    return NamedSharding(mesh, cut_spec(names))


def constrain(
    x: Value,
    parts: Sequence[int] | None,
    total: int | None = None,
    what: str = CONSTRAINT,
) -> Any:
    """Cuts a value into partitions; None: every device has the whole value.

    Then ``total`` is the number of devices.
    """
    if parts is None:
        parts = (1,) * jax.typeof(x).ndim
    else:
        total = total_partitions(tuple(parts))
    inside = tracing.inside_map() or jax.sharding.get_abstract_mesh().manual_axes
    if total is None or inside:
        return constrain_p.bind(x, parts=tuple(parts), total=total)
    devices = partition_devices(total, what)
    if nothing_is_traced():
        with without_mesh():
            return placement.place([x], [in_order(parts, devices)], True)[0]
    # One mesh for all parts: JAX describes all results on the first one.
    mesh = partition_mesh(_prime_factors(total), devices)
    return jax.lax.with_sharding_constraint(x, partition_sharding(tuple(parts), mesh))


# Inside maps


def is_partition_axis(name: Hashable) -> bool:
    """Whether a mesh axis is one for partitions."""
    return isinstance(name, str) and name.startswith(_AXIS_PREFIX)


def axes_in_map(
    constraints: Sequence[Equation],
    axis_name: Hashable,
    axis_size: int,
    available: int,
) -> dict[str, int]:
    """The mesh axes that the constraints in a map's function need, and their sizes."""
    where = "spmap" if axis_name == UNNAMED else f"spmap over {axis_name!r}"
    totals = dict.fromkeys(equation.params["total"] for equation in constraints)
    totals.pop(None, None)
    if len(totals) > 1:
        first, second, *_ = totals
        raise ValueError(
            f"inside {where}, one sharded_jit or {CONSTRAINT} has {second} total "
            f"partitions but {first} are expected, as another one has: all of them "
            "must agree."
        )
    total = next(iter(totals), 1)
    if total > available:
        raise ValueError(
            f"{where} with {total} partitions inside requires at least {total} devices "
            f"({axis_size * total} for all {axis_size} elements at a time), but there "
            f"are {available}.{too_few_devices(total)}"
        )
    layouts = [equation.params["parts"] for equation in constraints]
    counts = {1, total}.union(*(group_counts(n or 1 for n in p) for p in layouts))
    # The fewest axes that can express all of them: one of 4 for (4, 1) alone, two of 2
    # for (4, 1) and (2, 2).
    sizes = sizes_of_groups(counts) or _prime_factors(total)
    return {f"{_AXIS_PREFIX}{k}": size for k, size in enumerate(sizes)}


def _prime_factors(number: int) -> tuple[int, ...]:
    factors = []
    divisor = 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return tuple(factors)


def partition_dims(parts: Parts, mesh: AnyMesh) -> dict[int, tuple[str, ...]]:
    """The mesh axes of each dimension that is cut."""
    unused = [name for name in mesh.axis_names if is_partition_axis(name)]
    dims = {}
    for dimension, count in enumerate(parts):
        names: list[str] = []
        left = count or 1
        for name in unused:
            if left > 1 and left % mesh.shape[name] == 0:
                names.append(name)
                left //= mesh.shape[name]
        if left > 1:
            raise ValueError(
                f"parts {parts} need {total_partitions(parts)} devices for each "
                f"element, but the mesh {dict(mesh.shape)} has no axes for them. Leave "
                "mesh out of the outermost spmap, or use with_sharding_constraint."
            )
        if names:
            dims[dimension] = tuple(names)
            unused = [name for name in unused if name not in names]
    return dims


constrain_p = jex_core.Primitive("partitions")


def _transpose(cotangent: Value, _: object, **params: Param) -> list[Any]:
    return [constrain_p.bind(cotangent, **params)]


def _batch(
    args: Sequence[Any], dims: Sequence[int], *, parts: Parts, **params: Param
) -> tuple[Any, int]:
    (x,), (dim,) = args, dims
    parts = (*parts[:dim], None, *parts[dim:])
    return constrain_p.bind(x, parts=parts, **params), dim


def _lowering(
    ctx: LoweringContext, x: Value, *, parts: Parts, total: int | None
) -> Any:
    mesh: AnyMesh = auto_mesh(jax.sharding.get_abstract_mesh())
    if mesh.empty and total is None:  # Every device of the program has the value.
        mesh = AbstractMesh((device_count(ctx),), (f"{_AXIS_PREFIX}0",))
    if mesh.empty or any(map(is_partition_axis, mesh.manual_axes)):
        # In a map on one device, or that calls the host: manual along all axes.
        return [x]
    sharding = partition_sharding(parts, mesh)
    run = mlir.lower_fun(
        lambda x: jax.lax.with_sharding_constraint(x, sharding), multiple_results=False
    )
    return run(ctx.replace(avals_in=list(map(without_sharding, ctx.avals_in))), x)


constrain_p.def_abstract_eval(lambda x, **_: without_sharding(x))
constrain_p.def_impl(lambda x, **_: jnp.asarray(x))
ad.deflinear2(constrain_p, _transpose)
batching.primitive_batchers[constrain_p] = _batch
mlir.register_lowering(constrain_p, _lowering)
