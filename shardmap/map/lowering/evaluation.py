"""The evaluation of a map: it runs at once, as a program of its own."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from shardmap._jax.context import config_value
from shardmap._jax.stages import is_compile_only
from shardmap._jax.types import Jaxpr, Param, Value
from shardmap._jax.walk import inline_calls, per_jaxpr
from shardmap.arrays import placement
from shardmap.arrays.running import map_jit
from shardmap.map import set_mesh
from shardmap.map.layout import map_shardings
from shardmap.map.lowering.lower_map import block_function
from shardmap.map.lowering.steps import Scope
from shardmap.map.primitives.map_primitive import MapParams, spmap_p

_DEBUGGING = ("jax_disable_jit", "jax_debug_nans", "jax_debug_infs")
"""Settings with which a map runs operation by operation, on one device."""


def evaluate_map(*args: Value, **params: Param) -> list[Any]:
    """The results of a map's equation, of arrays; on the mesh of `jax.set_mesh`."""
    of_map = MapParams(**params)
    mesh = of_map.mesh
    spans_processes = isinstance(mesh, Mesh) and mesh.is_multi_process
    # That nothing runs on devices that only compile is said below.
    if spans_processes and not is_compile_only(cast(Mesh, mesh).devices.flat[0]):
        raise ValueError(
            f"{of_map} runs on several processes, and is transformed outside of "
            "jax.jit. Write jax.jit(jax.grad(loss)), and pass global arrays, as of "
            "jax.make_array_from_process_local_data."
        )
    under_mesh = of_map.mesh is not None and set_mesh.has_mesh()
    if any(map(config_value, _DEBUGGING)):
        return _evaluate_by_operations(args, of_map.on(None) if under_mesh else of_map)
    if under_mesh:
        args = set_mesh.device_put(args)
    others = dataclasses.replace(of_map, call_jaxpr=cast(Any, None))
    jitted, shardings = _program(of_map.call_jaxpr, others, under_mesh)
    return jitted(*placement.place(args, shardings))


def _evaluate_by_operations(args: Sequence[Value], params: MapParams) -> list[Any]:
    """Runs a map on one device; its results are sharded as those of its program."""
    # A jitted function that finds a NaN raises what only `jax.jit` itself understands.
    axis = params.on(None).axis
    run = block_function(
        _inlined(params.call_jaxpr),
        params.in_axes,
        params.out_axes,
        Scope.of_map(axis),
    )
    mesh = params.mesh
    if not isinstance(mesh, Mesh):
        return list(map(_as_array, run(*args)))
    # A map inside is evaluated on its own devices.
    here = SingleDeviceSharding(mesh.devices.flat[0])
    results = map(_as_array, run(*(_put(arg, here) for arg in args)))
    return list(map(_put, results, map_shardings(params).results))


_inlined = per_jaxpr(inline_calls)


def _put(value: Value, sharding: Sharding) -> Any:
    """A `jax.Array` sharded so; NumPy's and scalars stay."""
    is_jax = isinstance(value, jax.Array)
    return jax.device_put(value, sharding) if is_jax else value


def _as_array(value: Value) -> Any:
    """A `jax.Array`: a function may return a NumPy argument as it is."""
    is_jax = isinstance(value, jax.Array) or value.dtype == jax.dtypes.float0
    return value if is_jax else jnp.asarray(value)


@per_jaxpr
def _program(
    jaxpr: Jaxpr, params: MapParams, under_mesh: bool
) -> tuple[Any, tuple[Any, ...] | None]:
    """The program of an equation, which is freed with its jaxpr; shardings of operands.

    Under `jax.set_mesh` operands have theirs.
    """
    # What refers to the jaxpr itself would keep it alive.
    params = dataclasses.replace(params, call_jaxpr=jaxpr.replace())
    run = functools.partial(spmap_p.bind, **params.as_dict())
    mesh = cast(Mesh | None, params.mesh)
    if mesh is None:
        return jax.jit(run), None
    devices = list(mesh.devices.flat)
    if under_mesh:
        return map_jit(run, devices), None
    operands, results = map_shardings(params)
    options = {"in_shardings": operands, "out_shardings": list(results)}
    return map_jit(run, devices, **options), operands


spmap_p.def_impl(evaluate_map)
