"""Which devices a program runs on, and how its inputs and outputs are sharded."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from shardmap._jax.primitives import argument_names
from shardmap._jax.types import Aval, Jaxpr, PyTree
from shardmap._jax.walk import equations
from shardmap.arrays import trees
from shardmap.explaining.read.constraints import axis_sizes
from shardmap.explaining.read.too_large import shardings_of
from shardmap.explaining.report import ArrayLayout
from shardmap.sharding.spec import Chunked, ShardedAxis, ShardingSpec

UNUSED = "not used by the program"


def meshes_of(jaxpr: Jaxpr, args: PyTree = ()) -> list[Any]:
    """The meshes that a program's equations name, the largest first.

    These are the meshes of maps and of sharding constraints. With Explicit axes, an
    equation names an abstract mesh. It stands for the mesh of devices with the same
    axes that is set, that an argument is on, or that another equation names.

    Args:
      jaxpr: the program.
      args: the arguments.
    """
    named: list[Any] = []
    for equation in equations(jaxpr):
        constrained = equation.params.get("sharding")
        named.append(equation.params.get("mesh"))
        if isinstance(constrained, NamedSharding) and constrained.num_devices > 1:
            named += [constrained.mesh] if isinstance(constrained.mesh, Mesh) else []
    around = [*named, jax.sharding.get_mesh()]
    around += [
        leaf.sharding.mesh
        for leaf in jax.tree.leaves(args)
        if isinstance(getattr(leaf, "sharding", None), NamedSharding)
    ]
    here = {
        tuple(mesh.shape.items()): mesh for mesh in around if isinstance(mesh, Mesh)
    }
    meshes = [
        here.get(tuple(mesh.shape.items()), mesh)
        if isinstance(mesh, AbstractMesh)
        else mesh
        for mesh in named
        if isinstance(mesh, Mesh | AbstractMesh) and not mesh.empty
    ]
    return sorted(meshes, key=lambda mesh: -mesh.size)


def devices_of(
    layouts: Sequence[Any], meshes: Sequence[Any], there: Sequence[jax.Device] = ()
) -> list[jax.Device]:
    """The devices of a program.

    Args:
      layouts: the shardings of its arrays.
      meshes: those that it names.
      there: the devices that it is compiled for, if it names none.
    """
    for mesh in meshes:
        return list(mesh.devices.flat)
    for sharding in layouts:
        if isinstance(sharding, Sharding):
            return sorted(sharding.device_set, key=lambda device: device.id)
    return list(there[:1]) or jax.local_devices()[:1]


def array_layouts(
    traced: jax.stages.Traced,
    compiled: jax.stages.Compiled | None,
    meshes: Sequence[Any] = (),
) -> tuple[tuple[ArrayLayout, ...], list[Any]]:
    """How each argument and each result is sharded.

    Args:
      traced: the program's trace.
      compiled: the program; None if the compiler refuses it.
      meshes: the meshes of the program, the largest first.

    Returns:
      The layouts, and the sharding of each; `UNUSED` for an argument that is not used.
    """
    jaxpr = traced.jaxpr.jaxpr
    tree_in: Any = jax.tree.structure(traced.args_info)
    names = [
        *argument_names(jaxpr),
        *trees.result_names(jax.tree.structure(traced.out_info)),
    ]
    if compiled is None:
        ins, outs = shardings_of(traced)
    else:
        # An argument that is not used has None, which is no leaf.
        ins = [
            each or UNUSED for each in tree_in.flatten_up_to(compiled.input_shardings)
        ]
        outs = jax.tree.leaves(compiled.output_shardings)
    shardings = [*ins, *outs]
    avals = jax.tree.leaves((traced.args_info, traced.out_info))
    mesh = next(iter(meshes), None)
    layouts = [
        _array_layout("input" if k < tree_in.num_leaves else "output", *each, mesh)
        for k, each in enumerate(zip(names, avals, shardings, strict=True))
    ]
    return tuple(layouts), shardings


def _array_layout(
    role: Literal["input", "output"], path: str, aval: Aval, layout: Any, mesh: Any
) -> ArrayLayout:
    """The layout of an array.

    Args:
      role: "input" or "output".
      path: its key path.
      aval: its shape and dtype.
      layout: its sharding, or `UNKNOWN` or `UNUSED`.
      mesh: the mesh of the program, or None.
    """
    shape, itemsize = tuple(aval.shape), aval.dtype.itemsize
    spec = shard_shape = None
    devices: tuple[int, ...] = ()
    if isinstance(layout, Sharding):
        shard_shape = tuple(layout.shard_shape(shape))
        try:
            spec = ShardingSpec.from_sharding(layout, shape)
        except ValueError:
            layout = str(layout)
        else:
            places: Any = layout.devices_indices_map(shape)
            devices = tuple(device.id for device in places)
            if [*places] != _devices_of(mesh):
                mesh = None
            layout = describe(spec, _names(layout, spec, mesh))
    return ArrayLayout(
        role=role,
        path=path,
        shape=shape,
        dtype=str(aval.dtype),
        spec=spec,
        shard_shape=shard_shape,
        bytes=math.prod(shape) * itemsize,
        shard_bytes=None if shard_shape is None else math.prod(shard_shape) * itemsize,
        layout=layout,
        devices=_unless_counted(devices),
    )


def ids_of(mesh: Any) -> tuple[int, ...]:
    """The ids of the devices of a mesh; () for 0, 1, 2 and so on, or unknown ones."""
    return _unless_counted(tuple(device.id for device in _devices_of(mesh)))


def _unless_counted(ids: tuple[int, ...]) -> tuple[int, ...]:
    return () if ids == tuple(range(len(ids))) else ids


def _devices_of(mesh: Any) -> list[jax.Device]:
    return list(mesh.devices.flat) if isinstance(mesh, Mesh) else []


def _names(layout: Sharding, spec: ShardingSpec, mesh: Any) -> list[list[str]]:
    """The mesh axes of each dimension; [] without names.

    Args:
      layout: the sharding.
      spec: how it cuts the array.
      mesh: the mesh of the program, whose axes a sharding without names may be along.
    """
    if isinstance(layout, NamedSharding):
        return [
            [name for name, size in sizes.items() if size > 1]
            for sizes in axis_sizes(layout)
        ]
    if mesh is None or mesh.size != spec.num_shards:
        return []
    axes = [(name, size) for name, size in mesh.shape.items() if size > 1]
    along: dict[int, list[str]] = {}
    for part, size in zip(spec.mesh_mapping, spec.mesh_shape, strict=True):
        names = []
        while size > 1 and axes and size % axes[0][1] == 0:
            name, length = axes.pop(0)
            names.append(name)
            size //= length
        if size > 1:
            return []
        if isinstance(part, ShardedAxis):
            along[part.axis] = names
    # The sharded axes are numbered in the order of the dimensions.
    numbers = iter(range(len(along)))
    return [
        [name for number in itertools.islice(numbers, count) for name in along[number]]
        for count in map(_sharded_axes, spec.sharding)
    ]


def _sharded_axes(entry: Any) -> int:
    return len(entry.chunks) if isinstance(entry, Chunked) else int(entry is not None)


def describe(spec: ShardingSpec, names: Sequence[Sequence[str]] = ()) -> str:
    """How an array is cut, in a few words.

    Args:
      spec: how it is cut.
      names: the mesh axes of each dimension, if they have names.

    >>> from shardmap import Chunked, Replicated, ShardedAxis
    >>> rows = ShardingSpec((Chunked(2), None), (ShardedAxis(0), Replicated(4)))
    >>> describe(rows)
    'dimension 0 in 2 shards, each on 4 devices'
    >>> describe(rows, [["data"]])
    "dimension 0 over 'data' in 2 shards, each on 4 devices"
    >>> describe(ShardingSpec((None,), (Replicated(4),)))
    'replicated on 4 devices'
    """
    if spec.num_shards == 1:
        return "on one device"
    cuts = []
    for dimension, count in enumerate(spec.tile_counts):
        along = " and ".join(map(repr, names[dimension])) if names[dimension:] else ""
        over = f" over {along}" if along else ""
        if count > 1:
            cuts.append(f"dimension {dimension}{over} in {count:,} shards")
    copies = spec.num_shards // math.prod(spec.tile_counts)
    if not cuts:
        return f"replicated on {copies:,} devices"
    return ", ".join(cuts) + (f", each on {copies:,} devices" if copies > 1 else "")
