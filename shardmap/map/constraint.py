"""The sharding constraint of `sharded_jit`, in partitions of each dimension.

Outside maps, its equation has a mesh of its own. Inside a map it has none: the
outermost map adds mesh axes for partitions behind its own, and leaves them to the
partitioner.
"""

import math
from collections.abc import Collection, Hashable, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardmap._jax.context import (
    LoweringContext,
    device_count,
    nothing_is_traced,
    without_mesh,
)
from shardmap._jax.types import (
    AnyMesh,
    Equation,
    Jaxpr,
    Param,
    Value,
    without_sharding,
)
from shardmap._jax.walk import rewrite_jaxpr
from shardmap.arrays import placement
from shardmap.map import set_mesh, tracing
from shardmap.map.primitives import explicit_sharding
from shardmap.map.primitives.axis import UNNAMED
from shardmap.map.primitives.map_primitive import is_no_map, mesh_jaxpr
from shardmap.sharding.conversions import cut_spec
from shardmap.sharding.default_devices import default_devices, local_devices
from shardmap.sharding.mesh import (
    auto_mesh,
    group_counts,
    sizes_of_groups,
    too_few_devices,
)

Parts = tuple[int | None, ...]
"""A count for each dimension; None: the partitioner may cut it as it likes."""

CONSTRAINT = "with_sharding_constraint"

_AXIS_PREFIX = "_partitions"


# Mesh axes


def is_partition_axis(name: Hashable) -> bool:
    """Whether a mesh axis is one for partitions."""
    return isinstance(name, str) and name.startswith(_AXIS_PREFIX)


def total_partitions(parts: Parts) -> int:
    """How many partitions there are."""
    return math.prod(count or 1 for count in parts)


def partition_axes(layouts: Collection[Parts], total: int) -> dict[str, int]:
    """The fewest mesh axes, and their sizes, that can express all of these parts.

    For (4, 1) alone it is one axis of 4; for (4, 1) and (2, 2) it is two of 2.
    """
    counts = {1, total}.union(*(group_counts(n or 1 for n in p) for p in layouts))
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
    """The mesh axes of each dimension that is cut.

    Raises:
      ValueError: the mesh has no axes for these parts.
    """
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


def partition_sharding(parts: Parts, mesh: AnyMesh) -> NamedSharding:
    """The sharding of a value with these parts."""
    dims: dict[int, tuple[Any, ...]] = {
        dimension: (PartitionSpec.UNCONSTRAINED,) if count is None else ()
        for dimension, count in enumerate(parts)
    }
    return NamedSharding(mesh, cut_spec(dims | partition_dims(parts, mesh)))


def axes_in_map(
    constraints: Sequence[Equation],
    axis_name: Hashable,
    axis_size: int,
    available: int,
) -> dict[str, int]:
    """The mesh axes that the constraints in a map's function need, and their sizes.

    Raises:
      ValueError: constraints that ask for different totals, or too many devices.
    """
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
    return partition_axes([equation.params["parts"] for equation in constraints], total)


# Meshes


def partition_devices(total: int, what: str = CONSTRAINT) -> list[jax.Device]:
    """The devices of values outside maps: this process's if it has enough, or all.

    Raises:
      ValueError: names ``what``, the devices that it needs and those that there are.
    """
    devices = local_devices()
    if total > len(devices):
        devices = default_devices() or jax.devices()
    if total > len(devices):
        are = "device is" if len(devices) == 1 else "devices are"
        raise ValueError(
            f"{what} computation requires {total} devices, but only {len(devices)} "
            f"{are} available. Ask for fewer parts.{too_few_devices(total)}"
        )
    return devices


def partition_mesh(parts: Parts, devices: Sequence[jax.Device]) -> Mesh:
    """The mesh of a value outside maps, with partition k on device k."""
    axes = partition_axes([parts], len(devices)) or {f"{_AXIS_PREFIX}0": 1}
    grid = np.asarray(devices, dtype=object).reshape(tuple(axes.values()))
    return Mesh(grid, tuple(axes))


def on_devices(jaxpr: Jaxpr, devices: Sequence[jax.Device]) -> Any:
    """``jaxpr`` with constraints on these devices, one for each partition."""

    def change(equation: Equation) -> Any:
        params = equation.params
        if equation.primitive is not constrain_p or params["mesh"] is None:
            return equation
        mesh = partition_mesh(params["parts"], devices)
        changed = {"mesh": mesh, "mesh_jaxpr": mesh_jaxpr(mesh)}
        return equation.replace(params=params | changed)

    return rewrite_jaxpr(jaxpr, change, is_no_map)


# The primitive


def constrain(
    x: Value,
    parts: Parts | None,
    total: int | None = None,
    what: str = CONSTRAINT,
) -> Any:
    """Cuts a value into partitions.

    Args:
      x: an array.
      parts: the counts; None: every device has the whole value.
      total: the number of devices, if ``parts`` does not tell.
      what: see `partition_devices`.
    """
    if parts is None:
        parts = (1,) * jax.typeof(x).ndim
    else:
        total = total_partitions(parts)
    mesh = None
    inside = tracing.inside_map() or jax.sharding.get_abstract_mesh().manual_axes
    if total is not None and not inside:
        devices = partition_devices(total, what)
        if not nothing_is_traced() and len(devices) % total == 0:
            # One mesh for all parts: JAX describes all results on the first one.
            mesh = partition_mesh(_prime_factors(len(devices)), devices)
        else:
            mesh = partition_mesh(parts, devices[:total])
        if isinstance(x, jax.core.Tracer):
            set_mesh.check_devices(what, list(mesh.devices.flat))
    x = explicit_sharding.drop_sharding(x)
    return constrain_p.bind(
        x, parts=parts, total=total, mesh=mesh, mesh_jaxpr=mesh_jaxpr(mesh)
    )


constrain_p = jex_core.Primitive("partitions")


def _implementation(
    x: Value, *, parts: Parts, total: int, mesh: Mesh | None, **_: object
) -> Any:
    if mesh is None:
        return jnp.asarray(x)
    wanted = tuple(count or 1 for count in parts)
    if isinstance(x, jax.Array) and x.committed:
        # It was made outside of a program, as the arrays that it will meet.
        needed = partition_devices(total)[:total]
        if x.sharding.device_set == set(needed):
            mesh = partition_mesh(wanted, needed)
    with without_mesh():
        results = placement.place([x], [partition_sharding(wanted, mesh)], True)
    if set_mesh.has_mesh() and set_mesh.is_on_mesh(list(mesh.devices.flat)):
        results = set_mesh.device_put(results)
    return results[0]


def _transpose(cotangent: Value, _: object, **params: Param) -> list[Any]:
    return [constrain_p.bind(cotangent, **params)]


def _batch(
    args: Sequence[Any], dims: Sequence[int], *, parts: Parts, **params: Param
) -> tuple[Any, int]:
    (x,), (dim,) = args, dims
    parts = (*parts[:dim], None, *parts[dim:])
    explicit_sharding.check_batch("a sharding constraint", args, dims)
    return constrain_p.bind(
        explicit_sharding.drop_sharding(x), parts=parts, **params
    ), dim


def _lowering(
    ctx: LoweringContext,
    x: Value,
    *,
    parts: Parts,
    total: int | None,
    mesh: AnyMesh | None,
    **_: object,
) -> Any:
    if mesh is None:
        mesh = auto_mesh(jax.sharding.get_abstract_mesh())
    if mesh.empty:
        if total is not None:
            return [x]  # In a map on one device.
        mesh = AbstractMesh((device_count(ctx),), (f"{_AXIS_PREFIX}0",))
    if any(map(is_partition_axis, mesh.manual_axes)):
        return [x]  # In a map that calls the host, which is manual along all axes.
    sharding = partition_sharding(parts, mesh)
    run = mlir.lower_fun(
        lambda x: jax.lax.with_sharding_constraint(x, sharding), multiple_results=False
    )
    drop_sharding = ctx.replace(avals_in=list(map(without_sharding, ctx.avals_in)))
    if AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
        return run(drop_sharding, x)
    # On a mesh with Explicit axes a constraint would only check types.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return run(drop_sharding, x)


constrain_p.def_abstract_eval(lambda x, **_: without_sharding(x))
constrain_p.def_impl(_implementation)
ad.deflinear2(constrain_p, _transpose)
batching.primitive_batchers[constrain_p] = _batch
mlir.register_lowering(constrain_p, _lowering)
