"""A program as it is written, traced and lowered for other devices than it runs on."""

import contextlib
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from shardmap._jax.stages import argument_names, with_params
from shardmap._jax.types import Equation, Value
from shardmap._jax.walk import rewrite_jaxpr
from shardmap.arrays import array_likes
from shardmap.explaining.report import Remark
from shardmap.sharding import compile_only
from shardmap.sharding.default_devices import default_devices
from shardmap.sharding.mesh import check_devices


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
        return tuple(compile_only.devices(given))
    devices = check_devices("explain", given)
    if not devices:
        raise ValueError(
            "explain devices must not be empty: give the name of a machine, such as "
            "'v5e:16x16', devices, or None for those on which the program runs."
        )
    return devices


@contextlib.contextmanager
def traced_for(devices: Sequence[jax.Device]) -> Iterator[None]:
    """A context in which maps and meshes that name no devices are on these."""
    if not devices:
        yield
        return
    if not jax.sharding.get_mesh().empty:
        raise ValueError(
            "explain devices= is given inside jax.set_mesh, which says on which "
            "devices a program runs. Leave one of them out."
        )
    with default_devices(devices):
        yield


def moved(traced: jax.stages.Traced, devices: Sequence[jax.Device]) -> Any:
    """A trace whose meshes of other devices, if they are as many, are of these.

    Raises:
      ValueError: it names other devices, and not as many.
    """

    def change(value: Any) -> Any:
        if isinstance(value, Mesh):
            if value.empty or set(value.devices.flat) <= set(devices):
                return value
            if value.size != len(devices):
                raise ValueError(
                    f"the program names a mesh of {value.size} devices, "
                    f"{dict(value.shape)}, but explain is asked for {len(devices)}. "
                    "Make the mesh in the function, with shardmap.make_mesh, or of "
                    "shardmap.devices; leave devices= out of maps."
                )
            return moved_mesh(value, devices)
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
        if all(params[name] is equation.params[name] for name in params):
            return equation
        return equation.replace(params=params)

    def change_params(params: Mapping[str, Any]) -> dict[str, Any]:
        changed = {name: change(value) for name, value in params.items()}
        return changed | {"jaxpr": rewrite_jaxpr(params["jaxpr"], change_equation)}

    return with_params(traced, change_params, change)


def lowered_for(devices: Sequence[jax.Device], traced: Any) -> Any:
    """Lowers a trace that names no devices for the first of these."""
    with jax.default_device(devices[0]):
        return traced.lower()


def unplaced(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    devices: Sequence[jax.Device],
) -> Any:
    """Arguments as shapes, which are on no device or on these.

    An array that is sharded over as many devices is sharded alike over these.

    Args:
      fun: the function, whose parameters errors name.
      args, kwargs: its arguments.
      devices: the devices.

    Raises:
      ValueError: one is sharded over another number of devices.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    new = [_unplaced(leaf, devices) for leaf in leaves]
    bad = [k for k, leaf in enumerate(new) if leaf is None]
    if bad:
        k = bad[0]
        raise ValueError(
            f"{argument_names(fun, args, kwargs)[k]} is sharded over "
            f"{leaves[k].sharding.num_devices} devices, but explain is asked for "
            f"{len(devices)}. Give a jax.ShapeDtypeStruct, with a sharding over these "
            "devices or with none."
        )
    return jax.tree.unflatten(tree, new)


def _unplaced(leaf: Value, devices: Sequence[jax.Device]) -> Any:
    """The leaf; a shape for an array; None for one over too many or few devices."""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return leaf
    aval = array_likes.abstract_value(leaf)
    given = getattr(leaf, "sharding", None)
    sharding: Sharding | None = None
    if isinstance(given, Sharding) and given.device_set <= set(devices):
        sharding = given
    elif isinstance(given, NamedSharding) and given.num_devices > 1:
        if given.num_devices != len(devices):
            return None
        sharding = NamedSharding(moved_mesh(given.mesh, devices), given.spec)
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding
    )


def moved_mesh(mesh: Any, devices: Sequence[jax.Device]) -> Mesh:
    """A mesh of as many devices, with these in its place, in this order."""
    grid = np.asarray(devices, dtype=object).reshape(tuple(mesh.shape.values()))
    return Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types)


def remarks(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    used: Collection[jax.Device],
) -> list[Remark]:
    """A remark on arguments that are on other devices than the program.

    Args:
      fun: the function.
      args, kwargs: its arguments.
      used: the devices of the program.
    """
    placed = [
        (name, leaf.sharding.device_set)
        for name, leaf in zip(
            argument_names(fun, args, kwargs),
            jax.tree.leaves((args, kwargs)),
            strict=True,
        )
        if isinstance(getattr(leaf, "sharding", None), Sharding)
        and getattr(leaf, "committed", True)
    ]
    apart = [(name, devices) for name, devices in placed if devices.isdisjoint(used)]
    if not apart or not used:
        return []
    name, devices = apart[0]
    others = f" and {len(apart) - 1} more" if len(apart) > 1 else ""
    text = (
        f"{name}{others} is on {_count(devices)}, but the program runs on "
        f"{_count(used)}: a map does not follow its arguments"
    )
    advice = "Give maps the devices that are meant, or give explain devices=."
    return [Remark(text, advice, None)]


def _count(devices: Collection[jax.Device]) -> str:
    kind = next(iter(devices)).device_kind
    return f"{len(devices):,} {kind} device{'s' * (len(devices) != 1)}"
