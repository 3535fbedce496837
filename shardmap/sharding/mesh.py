"""Meshes of devices: JAX's `Mesh`, and functions that make one or a part of one."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
import math
import operator
from collections.abc import (
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import TypeGuard, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardmap._jax.context import traced_apart
from shardmap.units import integer_of, is_integer, shown

# The devices of maps and meshes that name none

_current: contextvars.ContextVar[tuple[jax.Device, ...]] = contextvars.ContextVar(
    "default_devices", default=()
)


@dataclasses.dataclass(frozen=True)
class _DefaultsMarker:
    devices: tuple[jax.Device, ...]


@contextlib.contextmanager
def set_default_devices(devices: Sequence[jax.Device]) -> Iterator[None]:
    """A context with these default devices, to trace in."""
    token = _current.set(tuple(devices))
    try:
        with traced_apart(_DefaultsMarker(tuple(devices))):
            yield
    finally:
        _current.reset(token)


def default_devices(backend: str | None = None) -> list[jax.Device]:
    """The default devices of this platform that are set here; none: those of JAX."""
    devices = list(_current.get())
    return devices if devices and backend in (None, devices[0].platform) else []


def local_devices() -> list[jax.Device]:
    """The default devices, or else those of this process."""
    return default_devices() or jax.local_devices()


# Checks

_MOST_VIRTUAL_DEVICES = 1024
"""More are no help on one CPU."""


def virtual_devices(count: int, platform: str = "cpu") -> str:
    """The code that gives a program this many devices on any machine.

    >>> virtual_devices(8)
    'jax.config.update("jax_num_cpu_devices", 8)'
    """
    code = f'jax.config.update("jax_num_cpu_devices", {count})'
    if platform == "cpu":
        return code
    return f'jax.config.update("jax_platforms", "cpu") and {code}'


def too_few_devices(needed: int) -> str:
    """The end of an error: how many devices there are, how to get more; or nothing."""
    available = jax.local_devices()
    if needed <= len(available) or needed > _MOST_VIRTUAL_DEVICES:
        return ""
    there = "is 1 device" if len(available) == 1 else f"are {len(available)} devices"
    return (
        f" There {there} here; for {needed} virtual ones on CPU, call "
        f"{virtual_devices(needed, available[0].platform)} before any other use of JAX."
    )


def check_devices(
    caller: str, devices: Iterable[jax.Device], what: str = "devices"
) -> tuple[jax.Device, ...]:
    """``devices`` as a tuple; raises an error if one is no device, or is given twice.

    >>> check_devices("spmap", 4)
    Traceback (most recent call last):
    TypeError: spmap devices must be a sequence of jax.Device, such as \
jax.devices()[:4], but got 4.
    """
    if isinstance(devices, str) or not isinstance(devices, Iterable):
        count = devices if isinstance(devices, int) and devices > 0 else 2
        raise TypeError(
            f"{caller} {what} must be a sequence of jax.Device, such as "
            f"jax.devices()[:{count}], but got {shown(devices)}."
            f"{too_few_devices(count)}"
        )
    given = tuple(devices)
    for k, device in enumerate(given):
        if not isinstance(device, jax.Device):
            raise TypeError(
                f"{caller} {what} must be a sequence of jax.Device, such as "
                f"jax.devices()[:{len(given)}], but {what}[{k}] is {shown(device)}."
            )
    if len(set(given)) < len(given):
        twice = min(d.id for d in given if given.count(d) > 1)
        raise ValueError(
            f"{caller} needs different devices, but device {twice} is there more than "
            f"once in {[d.id for d in given]}.{too_few_devices(len(given))}"
        )
    return given


def group_counts(sizes: Iterable[int]) -> set[int]:
    """The numbers of groups into which the first mesh axes, none to all, cut devices.

    >>> sorted(group_counts((2, 3)))
    [1, 2, 6]
    """
    return set(itertools.accumulate(sizes, operator.mul, initial=1))


def sizes_of_groups(counts: set[int]) -> tuple[int, ...] | None:
    """The axis sizes of a mesh with these `group_counts`; None: there is none.

    >>> sizes_of_groups({1, 2, 4, 8}), sizes_of_groups({1, 2, 3, 6})
    ((2, 2, 2), None)
    """
    steps = list(itertools.pairwise(sorted(counts)))
    if any(end % start for start, end in steps):
        return None
    return tuple(end // start for start, end in steps)


def is_mesh_axis_name(name: object) -> TypeGuard[str]:
    """Whether XLA can read this name; else it ends the process, or finds no axis.

    >>> is_mesh_axis_name("data"), is_mesh_axis_name("\u03bb"), is_mesh_axis_name("")
    (True, False, False)
    """
    if not isinstance(name, str) or not name:
        return False
    return name.isascii() and not {"'", "\\"} & set(name)


def check_axis_names(caller: str, names: Iterable[object]) -> None:
    """Raises an error for names of mesh axes that XLA cannot read."""
    for name in names:
        if isinstance(name, str) and not is_mesh_axis_name(name):
            raise ValueError(
                f"{caller}: XLA cannot read the name of the mesh axis {name!r}. Use "
                "ASCII characters other than ' and \\, such as 'data'."
            )


def make_mesh(
    axis_sizes: Mapping[str, int] | None = None,
    devices: Sequence[jax.Device] | np.ndarray | None = None,
    **axes: int,
) -> Mesh:
    """Makes a mesh of devices with the given axes.

    Unlike `jax.make_mesh`, it keeps the order of the devices, uses the devices of this
    process by default, and makes Auto axes.

    Args:
      axis_sizes: a dict from axis names to sizes, in the order of the mesh. One size
        may be -1: as many devices as there are.
      devices: the devices, of which the first ``prod(sizes)`` are used in row-major
        order. Default: `jax.local_devices()`.
      **axes: the axes as keyword arguments, instead of ``axis_sizes``.

    Raises:
      TypeError: `axis_sizes` is not a dict, a name is a number, a size is not an
        integer, or an entry of `devices` is not a device.
      ValueError: a size is below 1, there are too few devices, or one is given twice.

    >>> make_mesh({"data": 1, "model": 1}).axis_names
    ('data', 'model')
    >>> make_mesh(data=1, model=1) == make_mesh({"data": 1, "model": 1})
    True
    """
    if axes and axis_sizes is None:
        axis_sizes = axes
    elif axes:
        raise TypeError(
            "make_mesh takes axes as a dict or as keyword arguments, but got "
            f"{shown(axis_sizes)} and {axes}."
        )
    if not isinstance(axis_sizes, Mapping):
        raise TypeError(
            "make_mesh takes a dict from the names of axes to their sizes, such as "
            f"{{'data': 4, 'model': 2}}, but got {shown(axis_sizes)}."
        )
    check_axis_names("make_mesh", axis_sizes)
    numbers = [name for name in axis_sizes if isinstance(name, int)]
    if numbers:
        raise TypeError(
            f"the name of a mesh axis must be a string, got {shown(numbers[0])} in "
            f"{dict(axis_sizes)}"
        )
    available = local_devices() if devices is None else devices
    flat = np.asarray(available, dtype=object).reshape(-1)
    sizes = _filled(axis_sizes, flat.size)
    needed = math.prod(sizes)
    if flat.size < needed:
        raise ValueError(
            f"a mesh of {dict(axis_sizes)} needs {needed} devices, but got {flat.size}."
            f"{too_few_devices(needed)}"
        )
    check_devices("make_mesh", flat[:needed])
    return Mesh(flat[:needed].reshape(sizes), tuple(axis_sizes))


def _filled(axis_sizes: Mapping[str, int], count: int) -> list[int]:
    """The sizes of axes, with the one that is -1 filled up to all ``count`` devices."""
    rest = [
        name for name, size in axis_sizes.items() if is_integer(size) and size == -1
    ]
    sizes = {
        name: 1
        if name in rest[:1]
        else integer_of(f"the size of mesh axis {name!r}", size, 1)
        for name, size in axis_sizes.items()
    }
    if rest:
        others = math.prod(sizes.values())
        if count % others or not count:
            raise ValueError(
                f"the axis {rest[0]!r} of {dict(axis_sizes)} cannot have all the rest: "
                f"{others} do not divide {count} devices"
            )
        sizes[rest[0]] = count // others
    return list(sizes.values())


def mesh_devices(mesh: Mesh | AbstractMesh | None) -> list[jax.Device]:
    """The devices of a mesh; none of an abstract one."""
    return list(mesh.devices.flat) if isinstance(mesh, Mesh) else []


OneMesh = TypeVar("OneMesh", bound=Mesh | AbstractMesh)


def auto_mesh(mesh: OneMesh) -> OneMesh:
    """The mesh with Auto axes instead of Explicit ones, which are part of types.

    >>> auto_mesh(jax.make_mesh((1,), ("data",))).axis_types
    (Auto,)
    """
    if AxisType.Explicit not in mesh.axis_types:
        return mesh
    types = tuple(
        AxisType.Auto if axis_type == AxisType.Explicit else axis_type
        for axis_type in mesh.axis_types
    )
    return mesh.update(axis_types=types)


def with_manual_axes(mesh: OneMesh, names: Collection[str]) -> OneMesh:
    """The mesh inside a program that is manual along some axes.

    >>> with_manual_axes(make_mesh({"data": 1, "model": 1}), ["model"]).axis_types
    (Auto, Manual)
    """
    types = tuple(
        AxisType.Manual if name in names else axis_type
        for name, axis_type in zip(mesh.axis_names, mesh.axis_types, strict=True)
    )
    return mesh.update(axis_types=types)


def submesh(mesh: Mesh, axis_names: Sequence[str]) -> Mesh:
    """Returns the slice of `mesh` at index 0 of every axis that is not named.

    Args:
      mesh: the mesh.
      axis_names: the axes to keep, in the order of the result.

    Raises:
      TypeError: `axis_names` are not names.
      ValueError: a name is not an axis of the mesh, or is given twice.

    >>> submesh(make_mesh({"data": 1, "model": 1}), ("model",)).axis_names
    ('model',)
    """
    _check_mesh(mesh, "submesh")
    names = names_of("submesh axis_names", axis_names)
    if len(set(names)) != len(names) or not set(names) <= set(mesh.axis_names):
        raise ValueError(
            f"submesh takes different axes of {mesh.axis_names}, got {shown(names)}"
        )
    kept = [name for name in mesh.axis_names if name in names]
    devices = mesh.devices[
        tuple(slice(None) if name in names else 0 for name in mesh.axis_names)
    ]
    # Indexing all axes away gives a bare device, no array.
    devices = np.asarray(devices, dtype=object).transpose(
        [kept.index(n) for n in names]
    )
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return Mesh(devices, names, axis_types=tuple(types[name] for name in names))


def names_of(what: str, names: str | Collection[str]) -> tuple[str, ...]:
    """Names of mesh axes: one, or several."""
    if isinstance(names, str):
        return (names,)
    if not isinstance(names, Iterable) or any(
        not isinstance(name, Hashable) for name in names
    ):
        raise TypeError(
            f"{what} must be the name of a mesh axis or a sequence of them, but got "
            f"{shown(names)}."
        )
    return tuple(names)


def _check_mesh(mesh: Mesh, caller: str) -> None:
    if not isinstance(mesh, Mesh):
        raise TypeError(f"{caller} takes a jax.sharding.Mesh, got {shown(mesh)}")


def local_mesh(mesh: Mesh) -> Mesh:
    """Returns the part of `mesh` that belongs to this process.

    As `Mesh.local_mesh`, with the types of the axes.

    Raises:
      ValueError: the mesh has no device of this process; or, by JAX, they are not a
        contiguous range along every axis.

    >>> dict(local_mesh(make_mesh({"data": 1})).shape)
    {'data': 1}
    """
    _check_mesh(mesh, "local_mesh")
    here = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    if not here:
        raise ValueError(
            f"none of the {mesh.size} devices of the mesh is on this process"
        )
    return mesh.local_mesh.update(axis_types=mesh.axis_types)


def pmap_sharding(
    shape: Sequence[int],
    sharded_dim: int | None = 0,
    devices: Sequence[jax.Device] | np.ndarray | None = None,
) -> NamedSharding:
    """Returns the sharding of a mapped axis: one index of a dimension on each device.

    Replaces `jax.sharding.PmapSharding.default`. The result is a `NamedSharding`, which
    shards the dimension into parts of length 1.

    Args:
      shape: the shape of the array.
      sharded_dim: the dimension to shard; negative counts from the end. None: every
        device holds the whole array.
      devices: one device for each index of the dimension. Default: the first of
        `jax.local_devices()`; all of them with `sharded_dim=None`.

    Raises:
      ValueError: `sharded_dim` is out of range, or the number of devices is not the
        size of the dimension.

    >>> pmap_sharding((1, 5)).shard_shape((1, 5))
    (1, 5)
    """
    if hasattr(shape, "shape") or not isinstance(shape, Iterable):
        raise TypeError(
            "pmap_sharding shape must be a tuple of ints, such as (8,) or x.shape, but "
            f"got {shown(shape) if isinstance(shape, int) else type(shape)}"
        )
    shape = tuple(shape)
    names: list[str | None] = [None] * len(shape)
    size = None
    if sharded_dim is not None:
        if not -len(shape) <= sharded_dim < len(shape):
            raise ValueError(
                f"sharded_dim {sharded_dim} is out of range for shape {shape} of "
                f"{len(shape)} dimensions"
            )
        what = f"dimension {sharded_dim} of shape {shown(shape)}"
        size = integer_of(what, shape[sharded_dim], least=1)
        names[sharded_dim] = "axis0"
    if devices is None:
        devices = local_devices()[:size]
    used = check_devices("pmap_sharding", np.asarray(devices, dtype=object).flat)
    if size is not None and len(used) != size:
        raise ValueError(
            f"dimension {sharded_dim} of shape {shape} has size {size} and needs as "
            f"many devices, got {len(used)} devices. Cut it into longer shards with a "
            f"ShardingSpec and Chunked.{too_few_devices(size)}"
        )
    return NamedSharding(Mesh(np.array(used), "axis0"), PartitionSpec(*names))
