"""A program as it is written, traced and lowered for other devices than it runs on."""

import contextlib
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core.primitives import sharding_constraint_p
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from shardmap._jax.stages import argument_names, with_params
from shardmap._jax.types import Equation
from shardmap._jax.walk import rewrite_jaxpr
from shardmap.arrays import array_likes
from shardmap.explaining import machines
from shardmap.sharding.mesh import check_devices, set_default_devices


def devices_of(given: str | Sequence[jax.Device] | None) -> tuple[jax.Device, ...]:
    """The devices that a program is explained for; none: those that it runs on.

    Raises:
      TypeError: they are no devices.
      ValueError: there is no such machine, or there are none.
      ImportError: the compiler of a machine is not installed.
    """
    if given is None:
        return ()
    if isinstance(given, str):
        return tuple(machines.devices(given))
    devices = check_devices("explain", given)
    if not devices:
        raise ValueError(
            "explain devices must not be empty: give the name of a machine, such as "
            "'v5e:16x16', devices, or None for those on which the program runs."
        )
    return devices


def traced_for(devices: Sequence[jax.Device]) -> Any:
    """A context in which maps and meshes that name no devices are on these.

    Raises:
      ValueError: a mesh is set that has another number of devices.
    """
    mesh = jax.sharding.get_mesh()
    if devices and not mesh.empty and not _is_of(mesh, devices):
        _check_size(mesh, devices, "jax.set_mesh sets a mesh")
    return set_default_devices(devices) if devices else contextlib.nullcontext()


def _check_size(mesh: Any, devices: Sequence[jax.Device], what: str) -> None:
    if mesh.size != len(devices):
        raise ValueError(
            f"{what} of {mesh.size} devices, {dict(mesh.shape)}, but explain is asked "
            f"for {len(devices)}. Make the mesh in the function, with "
            "shardmap.make_mesh, or of shardmap.devices; leave devices= out of maps."
        )


def moved(traced: jax.stages.Traced, devices: Sequence[jax.Device]) -> Any:
    """A trace whose meshes of other devices, if they are as many, are of these.

    Raises:
      ValueError: it names other devices, and not as many.
    """

    def change_mesh(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
        if mesh.empty or (isinstance(mesh, Mesh) and _is_of(mesh, devices)):
            return mesh
        _check_size(mesh, devices, "the program names a mesh")
        return moved_mesh(mesh, devices)

    def change(value: Any) -> Any:
        if isinstance(value, Mesh):
            return change_mesh(value)
        if isinstance(value, NamedSharding):
            mesh = change(value.mesh)
            if mesh is value.mesh:
                return value
            return NamedSharding(mesh, value.spec, memory_kind=value.memory_kind)
        if isinstance(value, tuple | list):
            items = [change(item) for item in value]
            if all(map(operator.is_, items, value)):
                return value
            fields = hasattr(value, "_fields")
            return type(value)(*items) if fields else type(value)(items)
        return value

    def change_equation(equation: Equation) -> Any:
        params = {name: change(value) for name, value in equation.params.items()}
        # Inside of a program for one device, a mesh stays abstract.
        mesh: Any = params.get("mesh")
        if _is_abstract(mesh):
            params["mesh"] = change_mesh(mesh)
        asked: Any = params.get("sharding")
        asks = equation.primitive is sharding_constraint_p
        if asks and _is_abstract(getattr(asked, "mesh", None)):
            params["sharding"] = NamedSharding(change_mesh(asked.mesh), asked.spec)
        if all(params[name] is equation.params[name] for name in params):
            return equation
        return equation.replace(params=params)

    def change_params(params: Mapping[str, Any]) -> dict[str, Any]:
        changed = {name: change(value) for name, value in params.items()}
        return changed | {"jaxpr": rewrite_jaxpr(params["jaxpr"], change_equation)}

    return with_params(traced, change_params, change)


def _is_of(mesh: Any, devices: Sequence[jax.Device]) -> bool:
    return set(mesh.devices.flat) <= set(devices)


def _is_abstract(mesh: Any) -> bool:
    return isinstance(mesh, AbstractMesh) and not (mesh.manual_axes or mesh.empty)


def lowered_for(devices: Sequence[jax.Device], traced: Any) -> Any:
    """Lowers a trace that names no devices for the first of these.

    A mesh that is set is of as many devices, and stands for one of these.
    """
    mesh = jax.sharding.get_mesh()
    around: Any = jax.default_device(devices[0])
    if not (mesh.empty or _is_of(mesh, devices)):
        around = jax.set_mesh(moved_mesh(mesh, devices))
    with around:
        return traced.lower()


def unplaced(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    devices: Sequence[jax.Device],
) -> Any:
    """Arguments as shapes, which are on no device or on these.

    An array that is sharded over as many devices is sharded alike over these.

    Raises:
      ValueError: one is sharded over another number of devices.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    for k, leaf in enumerate(leaves):
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            continue
        aval = array_likes.abstract_value(leaf)
        given: Any = getattr(leaf, "sharding", None)
        sharding: Sharding | None = None
        is_placed = not isinstance(getattr(given, "mesh", None), AbstractMesh)
        is_placed = is_placed and isinstance(given, Sharding)
        if is_placed and given.device_set <= set(devices):
            sharding = given
        elif isinstance(given, NamedSharding) and given.num_devices > 1:
            if given.num_devices != len(devices):
                raise ValueError(
                    f"{argument_names(fun, args, kwargs)[k]} is sharded over "
                    f"{given.num_devices} devices, but explain is asked for "
                    f"{len(devices)}. Give a jax.ShapeDtypeStruct, with a sharding "
                    "over these devices or with none."
                )
            # Under a mesh that is set, the trace is moved with its arguments.
            sharding = given
            if jax.sharding.get_mesh().empty:
                sharding = NamedSharding(moved_mesh(given.mesh, devices), given.spec)
        leaves[k] = jax.ShapeDtypeStruct(
            aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding
        )
    return jax.tree.unflatten(tree, leaves)


def moved_mesh(mesh: Any, devices: Sequence[jax.Device]) -> Mesh:
    """A mesh of as many devices, with these in its place, in this order."""
    grid = np.asarray(devices, dtype=object).reshape(tuple(mesh.shape.values()))
    return Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types)
