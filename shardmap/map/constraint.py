"""The constraint that cuts a value into partitions, as an equation of a jaxpr.

Outside of maps the equation names its devices. Inside a map it says only into how many
pieces each dimension is cut: the outermost map makes mesh axes for partitions, behind
those for its elements, which no map walks and which are left to the partitioner.
"""

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, AxisType, Mesh

from shardmap._jax.context import LoweringContext, device_count, nothing_is_traced
from shardmap._jax.types import (
    AnyMesh,
    Equation,
    Jaxpr,
    Param,
    Value,
    without_sharding,
)
from shardmap._jax.walk import equations
from shardmap.arrays import placement
from shardmap.map import agreement, contexts, tracing
from shardmap.map.partition_axes import (
    AXIS_PREFIX,
    Parts,
    partition_axes,
    partition_sharding,
    prime_factors,
    total_partitions,
)
from shardmap.map.primitives import typed
from shardmap.map.primitives.axis import UNNAMED
from shardmap.map.primitives.map_primitive import mesh_jaxpr
from shardmap.map.primitives.rewriting import rewrite_jaxpr
from shardmap.sharding.mesh import auto_mesh, too_few_devices

"""A count for each dimension; None: the partitioner may cut it as it likes."""


# Meshes


def _devices_for(total: int, what: str) -> list[list[jax.Device]]:
    """The devices for partitions outside of maps, of each process that has some.

    They are this process's, if it has as many as there are partitions; else those of
    all processes, of each equally many.

    Raises:
      ValueError: names ``what``, the devices it needs and those that there are.
    """
    devices = jax.local_devices()
    if total <= len(devices):
        return [devices]
    count = jax.process_count()
    if count == 1:
        raise ValueError(
            f"{what} computation requires {total} devices, but only {len(devices)} "
            f"devices are available. Ask for fewer parts.{too_few_devices(total)}"
        )
    by_process = [jax.local_devices(process) for process in range(count)]
    fewest = min(map(len, by_process))
    if total > fewest * count or total % count:
        raise ValueError(
            f"{what} computation requires {total} devices, which are more than the "
            f"{len(devices)} of this process, and so equally many of each of {count} "
            f"processes. They have {[len(each) for each in by_process]}. Ask for a "
            f"multiple of {count} partitions, {fewest * count} at most."
        )
    return [each[:fewest] for each in by_process]


def partition_mesh(
    parts: Parts,
    total: int,
    what: str = "with_sharding_constraint",
    alone: bool = True,
) -> Mesh:
    """The mesh of a value outside of maps.

    Alone, partition k is on device k, of the local ones or, if these are too few, of
    those of all processes. In a program that has more of the devices, each has as many
    of them, where the number of devices divides.

    Raises:
      ValueError: names ``what``, the devices it needs and those that there are.
    """
    groups = _devices_for(total, what)
    available = len(groups) * len(groups[0])
    axes = partition_axes([parts], total)
    if not alone and available % total == 0:
        # The same mesh for all parts: JAX describes all results on the first one.
        total = available
        axes = partition_axes([tuple(prime_factors(total))], total)
    axes = axes or {f"{AXIS_PREFIX}0": 1}
    devices = [device for each in groups for device in each[: total // len(groups)]]
    grid = np.asarray(devices, dtype=object).reshape(tuple(axes.values()))
    return Mesh(grid, tuple(axes))


# What a jaxpr asks for


def constraints_in(jaxpr: Jaxpr) -> list[Any]:
    """The constraint equations, at every level, in order."""
    return [e for e in equations(jaxpr) if e.primitive is constrain_p]


def axes_for_partitions(
    jaxpr: Jaxpr, axis_name: Hashable, axis_size: int, available: int
) -> dict[str, int]:
    """The mesh axes that the constraints in a map's function need, and their sizes.

    Args:
      jaxpr: what one element computes.
      axis_name: the map's, for errors.
      axis_size: the same.
      available: how many devices there are.

    Raises:
      ValueError: constraints that ask for different totals, or too many devices.
    """
    where = "spmap" if axis_name == UNNAMED else f"spmap over {axis_name!r}"
    constraints = constraints_in(jaxpr)
    totals = dict.fromkeys(equation.params["total"] for equation in constraints)
    totals.pop(None, None)
    if len(totals) > 1:
        first, second, *_ = totals
        raise ValueError(
            f"inside {where}, one sharded_jit or "
            f"with_sharding_constraint has {second} total partitions but {first} are "
            "expected, as another one has: all of them must agree."
        )
    total = next(iter(totals), 1)
    if total > available:
        raise ValueError(
            f"{where} with {total} partitions inside requires at "
            f"least {total} devices ({axis_size} elements x {total} partitions = "
            f"{axis_size * total} for one element at a time on each), but only "
            f"{available} devices are available."
        )
    return partition_axes([equation.params["parts"] for equation in constraints], total)


# The primitive


def constrain(
    x: Value,
    parts: Parts | None,
    total: int | None = None,
    what: str = "with_sharding_constraint",
    alone: bool = False,
    agreed_on: str = "",
) -> Any:
    """Cuts a value into partitions.

    Args:
      x: an array.
      parts: the counts; None: every device has the whole value.
      total: how many devices; needed where ``parts`` does not tell.
      what, alone: see `partition_mesh`.
      agreed_on: what other processes have to run as well, if they do not tell by this
        value.
    """
    if parts is None:
        parts = (1,) * jax.typeof(x).ndim
    else:
        total = total_partitions(parts)
    mesh = None
    if total is not None and not _is_inside_map():
        alone = alone or nothing_is_traced()
        mesh = partition_mesh(parts, total, what, alone)
        if isinstance(x, jax.core.Tracer):
            _check_devices(mesh, what)
    x = typed.untyped(x)
    return _bind(x, parts=parts, total=total, mesh=mesh, what=what, agreed_on=agreed_on)


def _is_inside_map() -> bool:
    return bool(tracing.inside_map() or jax.sharding.get_abstract_mesh().manual_axes)


def alone(jaxpr: Jaxpr) -> Any:
    """``jaxpr`` whose constraints are those of a program of its own."""

    def change(equation: Equation, shadowed: bool) -> Any:
        params = equation.params
        if equation.primitive is not constrain_p or params["mesh"] is None:
            return equation
        mesh = partition_mesh(params["parts"], params["total"])
        changed = {"mesh": mesh, "mesh_jaxpr": mesh_jaxpr(mesh)}
        return equation.replace(params=params | changed)

    return rewrite_jaxpr(jaxpr, None, change, into_maps=False)


def _check_devices(mesh: Mesh, what: str) -> None:
    """Refuses other devices than those of the program, if `jax.set_mesh` says them."""
    wanted = list(mesh.devices.flat)
    if contexts.has_mesh() and (there := contexts.mesh_devices()) != wanted:
        raise ValueError(
            f"{what} runs on the devices {[device.id for device in wanted]}, but the "
            "program that it is a part of runs on those of jax.set_mesh, "
            f"{[device.id for device in there]}. Ask for as many parts, or set a mesh "
            "of as many devices."
        )


def _bind(x: Value, *, mesh: Mesh | None, **params: Param) -> Any:
    return constrain_p.bind(x, mesh=mesh, mesh_jaxpr=mesh_jaxpr(mesh), **params)


constrain_p = jex_core.Primitive("partitions")


def _implementation(
    x: Value, *, parts: Parts, total: int | None, mesh: Mesh | None, **params: Param
) -> Any:
    if mesh is None:
        return jnp.asarray(x)
    if contexts.has_mesh() and list(mesh.devices.flat) == contexts.mesh_devices():
        (x,) = contexts.place([x])
        return _program_under_mesh(parts=parts, total=total, mesh=mesh, **params)(x)
    wanted = tuple(count or 1 for count in parts)
    if total is not None and isinstance(x, jax.Array) and x.committed:
        # It is to meet others that were made outside of any program.
        needed = partition_mesh(wanted, total)
        if x.sharding.device_set == set(needed.devices.flat):
            mesh = needed
    (placed,) = placement.place([x], [partition_sharding(wanted, mesh)], True)
    return placed


@functools.lru_cache(maxsize=1024)
def _program_under_mesh(**params: Param) -> Any:
    """The constraint under `jax.set_mesh`, where results are on that mesh."""
    return jax.jit(lambda x: constrain_p.bind(typed.untyped(x), **params))


def _transpose(cotangent: Value, _: object, **params: Param) -> list[Any]:
    return [constrain_p.bind(cotangent, **params)]


def _batch(
    args: Sequence[Any], dims: Sequence[int], *, parts: Parts, **params: Param
) -> tuple[Any, int]:
    (x,), (dim,) = args, dims
    parts = (*parts[:dim], None, *parts[dim:])
    typed.check_batch("a sharding constraint", args, dims)
    return constrain_p.bind(typed.untyped(x), parts=parts, **params), dim


def _lowering(
    ctx: LoweringContext,
    x: Value,
    *,
    parts: Parts,
    total: int | None,
    mesh: AnyMesh,
    what: str,
    agreed_on: str,
    **_: object,
) -> Any:
    (aval,) = ctx.avals_in
    agreement.agree_to_lower(
        mesh,
        what,
        lambda: agreed_on or f"{what} of {aval.str_short()}, parts {parts}",
    )
    if mesh is None:
        mesh = auto_mesh(jax.sharding.get_abstract_mesh())
    if mesh.empty:
        if total is not None:
            return [x]  # A map that runs on one device.
        devices = device_count(ctx)
        mesh = AbstractMesh((devices,), (f"{AXIS_PREFIX}0",))
    if any(name.startswith(AXIS_PREFIX) for name in mesh.manual_axes):
        return [x]  # A map that calls the host: each device runs a program of its own.
    sharding = partition_sharding(parts, mesh)
    run = mlir.lower_fun(
        lambda x: jax.lax.with_sharding_constraint(x, sharding), multiple_results=False
    )
    avals = list(map(without_sharding, ctx.avals_in))
    untyped = ctx.replace(avals_in=avals)
    if AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
        return run(untyped, x)
    # On a mesh with Explicit axes a constraint would be a check of types.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return run(untyped, x)


constrain_p.def_abstract_eval(lambda x, **_: without_sharding(x))
constrain_p.def_impl(_implementation)
ad.deflinear2(constrain_p, _transpose)
batching.primitive_batchers[constrain_p] = _batch
mlir.register_lowering(constrain_p, _lowering)
