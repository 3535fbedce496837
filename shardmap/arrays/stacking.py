"""Putting arrays together: one shard for each device, with no stacked copy."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from shardmap._jax.types import PyTree, Value
from shardmap.arrays import array_likes, placement, processes
from shardmap.arrays.programs.on_device import operand, program
from shardmap.arrays.stacking_checks import (
    check_avals,
    check_structures,
    some_devices,
)
from shardmap.sharding.mesh import positive, too_few_devices
from shardmap.sharding.spec import (
    Chunked,
    Replicated,
    ShardedAxis,
    ShardingSpec,
)


def device_put_sharded(
    shards: Sequence[Any], devices: Sequence[jax.Device], *, axis: int = 0
) -> Any:
    """Puts one shard on each device, and returns them as one array.

    The value is ``stack(shards, axis)``, without a stack on the host. A shard that is
    on its device already is not moved. Like `jax.device_put_sharded` up to JAX 0.9.

    Args:
      shards: an array, or a pytree of arrays, for each device. All have the same
        structure, shapes and dtypes.
      devices: the devices, each once.
      axis: the position of the new axis in the results, negative from the end.

    Returns:
      An array of shape ``(len(devices), *shard.shape)``, or a pytree of such arrays.
      The sharding is a `jax.sharding.NamedSharding` over a mesh of one axis, as
      returned by `pmap_sharding`, which `spmap` accepts without a copy.

    Raises:
      TypeError: ``shards`` is not a sequence, or a leaf of a shard is not an array.
      ValueError: there are no devices, or not as many as shards; a device is given
        twice or belongs to another process; shards differ; or a shard has too few
        dimensions for ``axis``.

    Example:
      >>> y = device_put_sharded([np.arange(3)], jax.local_devices()[:1])
      >>> y
      Array([[0, 1, 2]], dtype=int32)
    """
    if not isinstance(shards, Sequence):
        raise TypeError(
            "device_put_sharded takes a sequence with a shard for each device, got "
            f"{type(shards)}. To cut one array, use jax.device_put with "
            "shardmap.pmap_sharding."
        )
    devices = some_devices("device_put_sharded", devices)
    if processes.several(devices):
        raise ValueError(
            "device_put_sharded puts shards on devices of this process, but devices "
            f"{[d.id for d in devices]} are on several. Put this process's shards on "
            "jax.local_devices()."
        )
    if len(shards) != len(devices):
        raise ValueError(
            f"device_put_sharded needs a shard for each device: len(shards) is "
            f"{len(shards)}, len(devices) is {len(devices)}."
            f"{too_few_devices(len(shards))}"
        )
    flat = [jax.tree.flatten(shard) for shard in shards]
    tree = flat[0][1]
    check_structures(shards, [structure for _, structure in flat])
    check_avals(shards, [leaves for leaves, _ in flat])
    axes = _new_axes("device_put_sharded", "shards[0]", shards[0], axis)
    columns = list(zip(*[leaves for leaves, _ in flat], strict=True))
    layouts = [_Layout(one, len(devices), tuple(devices)) for one in axes]
    return jax.tree.unflatten(tree, _stack(columns, layouts))


def device_put_replicated(
    x: Value,
    devices: Sequence[jax.Device],
    *,
    axis: int | None = 0,
    axis_size: int | None = None,
) -> Any:
    """Puts a copy of an array on each device, and returns them as one array.

    The value is ``stack([x] * len(devices), axis)``, without a stack on the host. Like
    `jax.device_put_replicated` up to JAX 0.9, and `pxla.replicate` before JAX 0.3.

    Args:
      x: an array or a pytree of arrays.
      devices: the devices, each once. If some belong to other processes, each process
        that has some calls this with an equal ``x``.
      axis: the position of the new axis in the results, negative from the end. None:
        there is no new axis, and the results are replicated.
      axis_size: the length of the new axis. Default: the number of devices. If it is
        less, adjacent devices hold copies of the same element, as nested maps expect.

    Returns:
      An array of shape ``(axis_size, *x.shape)``, or a pytree of such arrays, sharded
      as by `device_put_sharded`. If devices hold copies, the mesh has a second axis.

    Raises:
      TypeError: a leaf of ``x`` is not an array.
      ValueError: there are no devices, or one is given twice; ``axis_size`` does not
        divide their number; or an array has too few dimensions for ``axis``.

    Example:
      >>> y = device_put_replicated({"w": np.ones(2)}, jax.local_devices()[:1])
      >>> y["w"].shape
      (1, 2)
      >>> device_put_replicated(np.ones(2), jax.local_devices()[:1], axis=1).shape
      (2, 1)
    """
    devices = some_devices("device_put_replicated", devices)
    size = _elements(axis, axis_size, devices)
    leaves, tree = jax.tree.flatten(x)
    layouts = [
        _Layout(one, size, tuple(devices))
        for one in _new_axes("device_put_replicated", "x", x, axis)
    ]
    on_host = [k for k, leaf in enumerate(leaves) if not isinstance(leaf, jax.Array)]
    arrays = [k for k, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    put = _spread([_on_host(leaves[k]) for k in on_host], [layouts[k] for k in on_host])
    here = layouts[0].here if layouts else ()
    columns = [_copies(leaves[k], here) for k in arrays]
    stacked = _stack(columns, [layouts[k] for k in arrays])
    results = dict(zip([*on_host, *arrays], [*put, *stacked], strict=True))
    return jax.tree.unflatten(tree, [results[k] for k in range(len(leaves))])


@dataclass(frozen=True)
class _Layout:
    """How equally shaped arrays, one for each device, make one."""

    axis: int | None
    """Where the new axis is in the global array; None: each device has all of it."""
    size: int
    """How long it is. If shorter than the devices are many, neighbours have copies."""
    devices: tuple[jax.Device, ...]

    @property
    def sharding(self) -> NamedSharding:
        return _sharding(self)

    @property
    def here(self) -> tuple[jax.Device, ...]:
        """The devices that are this process's."""
        held = self.sharding.addressable_devices
        return tuple(device for device in self.devices if device in held)

    def shape(self, element: Sequence[int]) -> tuple[int, ...]:
        """The shape of the global array."""
        if self.axis is None:
            return tuple(element)
        return (*element[: self.axis], self.size, *element[self.axis :])

    def shard(self, array: Value, expand_dims: Callable[..., Any]) -> Any:
        """The shard of a device: the array with the new axis, of length 1."""
        return array if self.axis is None else expand_dims(array, (self.axis,))


@functools.lru_cache(maxsize=1024)
def _sharding(layout: _Layout) -> NamedSharding:
    """For an array of any rank."""
    if layout.axis is None:
        spec = ShardingSpec((), (Replicated(len(layout.devices)),))
    else:
        entries = [*[None] * layout.axis, Chunked(layout.size)]
        copies = len(layout.devices) // layout.size
        copied = [Replicated(copies)] if copies > 1 else []
        spec = ShardingSpec(entries, [ShardedAxis(0), *copied])
    return spec.named_sharding(layout.devices)


def _spread(arrays: Sequence[np.ndarray], layouts: Sequence[_Layout]) -> Sequence[Any]:
    """Puts NumPy arrays on all devices of their layouts."""
    shardings = [layout.sharding for layout in layouts]
    shards = [w.shard(a, np.expand_dims) for a, w in zip(arrays, layouts, strict=True)]
    shapes = [w.shape(a.shape) for a, w in zip(arrays, layouts, strict=True)]
    if all(sharding.is_fully_addressable for sharding in shardings):
        # A broadcast takes no memory, and JAX cuts each shard from it as a view.
        return jax.device_put(list(map(np.broadcast_to, shards, shapes)), shardings)
    # `jax.device_put` would compare the values of all processes.
    return [
        jax.make_array_from_single_device_arrays(
            shape,
            layout.sharding,
            jax.device_put([shard] * len(layout.here), list(layout.here)),
        )
        for shape, layout, shard in zip(shapes, layouts, shards, strict=True)
    ]


def _copies(array: jax.Array, devices: Sequence[jax.Device]) -> Sequence[jax.Array]:
    """One copy for each device, on it."""
    if isinstance(array, jax.core.Tracer):
        return [array] * len(devices)
    sharding = _Layout(None, 1, tuple(devices)).sharding
    (replicated,) = placement.place([array], [sharding], uncommitted=True)
    held = {shard.device: shard.data for shard in replicated.addressable_shards}
    return [held[device] for device in devices]


def _stack(
    columns: Sequence[Sequence[Any]], layouts: Sequence[_Layout]
) -> list[jax.Array]:
    """One array for each column, whose entry ``k`` goes to the ``k``-th device here."""
    concrete = [k for k, column in enumerate(columns) if not _traced(column)]
    # While a function is traced, arrays that are no tracers are put as ever.
    with jax.ensure_compile_time_eval():
        assembled = _assemble(
            [columns[k] for k in concrete], [layouts[k] for k in concrete]
        )
    made = dict(zip(concrete, assembled, strict=True))
    return [
        made[k] if k in made else _traced_stack(column, layout)
        for k, (column, layout) in enumerate(zip(columns, layouts, strict=True))
    ]


def _traced(column: Sequence[Any]) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in column)


def _traced_stack(column: Sequence[Any], layout: _Layout) -> jax.Array:
    if layout.axis is None:
        return column[0]
    # Copies are one value, and shards as many as there are elements.
    is_copied = len(column) != layout.size
    rows = [column[0]] * layout.size if is_copied else column
    return jnp.stack(rows, layout.axis)


def _assemble(
    columns: Sequence[Sequence[Any]], layouts: Sequence[_Layout]
) -> list[jax.Array]:
    """As `_stack`, of arrays that have values."""
    if not columns:
        return []
    here = layouts[0].here
    rows = [list(row) for row in zip(*columns, strict=True)]
    on_host = [
        (r, c)
        for r, row in enumerate(rows)
        for c, leaf in enumerate(row)
        if not isinstance(leaf, jax.Array)
    ]
    put = jax.device_put(
        [layouts[c].shard(_on_host(rows[r][c]), np.expand_dims) for r, c in on_host],
        [here[r] for r, _ in on_host],
    )
    for row, device in zip(rows, here, strict=True):
        arrays = [c for c, leaf in enumerate(row) if isinstance(leaf, jax.Array)]
        expanded = _with_axes(
            [row[c] for c in arrays], device, [layouts[c] for c in arrays]
        )
        for c, array in zip(arrays, expanded, strict=True):
            row[c] = array
    for (r, c), array in zip(on_host, put, strict=True):
        rows[r][c] = array
    return [
        jax.make_array_from_single_device_arrays(
            layout.shape(np.shape(column[0])), layout.sharding, list(shards)
        )
        for column, shards, layout in zip(
            columns, zip(*rows, strict=True), layouts, strict=True
        )
    ]


def _with_axes(
    arrays: Sequence[jax.Array], device: jax.Device, layouts: Sequence[_Layout]
) -> list[jax.Array]:
    """The shards of a device, of which its arrays are parts."""
    there = [SingleDeviceSharding(device)] * len(arrays)
    moved = placement.place(arrays, there, uncommitted=True)
    axes = tuple(layout.axis for layout in layouts if layout.axis is not None)
    if not axes:
        return moved
    return program(device, _Expand(axes), tuple(map(operand, moved)))(*moved)


@dataclass(frozen=True)
class _Expand:
    """A program that gives each array a new axis of length 1."""

    axes: tuple[int, ...]

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        return [
            jax.lax.expand_dims(array, (axis,))
            for array, axis in zip(arrays, self.axes, strict=True)
        ]


def _on_host(leaf: Value) -> np.ndarray:
    """A scalar or array-like as NumPy array, of the dtype it has on devices."""
    return np.asarray(leaf, array_likes.abstract_value(leaf).dtype)


def _elements(
    axis: int | None, axis_size: int | None, devices: Sequence[jax.Device]
) -> int:
    """How many elements a new axis has."""
    if axis_size is None:
        return len(devices)
    if axis is None:
        raise ValueError(
            f"device_put_replicated: axis_size is {axis_size}, but with axis=None "
            "there is no new axis: leave it out."
        )
    size = positive(axis_size, "device_put_replicated: axis_size")
    if len(devices) % size:
        raise ValueError(
            f"device_put_replicated: axis_size {size} does not divide the "
            f"{len(devices)} devices, so that some elements would be on more devices "
            "than others. Give a divisor, or fewer devices."
        )
    return size


def _new_axes(
    caller: str, name: str, tree: PyTree, axis: int | None
) -> list[int | None]:
    """Where the new axis is in each leaf's result, counted from the front."""
    axes = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        rank = len(array_likes.abstract_value(leaf).shape)
        if axis is not None and not -rank - 1 <= axis <= rank:
            raise ValueError(
                f"{caller}: {name}{jax.tree_util.keystr(path)} has {rank} dimensions, "
                f"and no place for a new axis {axis}: give an axis from {-rank - 1} to "
                f"{rank}"
            )
        axes.append(None if axis is None else axis % (rank + 1))
    return axes
