"""Which devices a program runs on, and how its inputs and outputs are sharded."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from shardmap._jax.primitives import argument_names
from shardmap._jax.types import Aval, Jaxpr, PyTree
from shardmap._jax.walk import equations
from shardmap.arrays import trees
from shardmap.explain.read.abstract import shardings_of
from shardmap.explain.report import ArrayLayout
from shardmap.sharding.spec import ShardingSpec

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
    found = [
        here.get(tuple(mesh.shape.items()), mesh)
        if isinstance(mesh, AbstractMesh)
        else mesh
        for mesh in named
        if isinstance(mesh, Mesh | AbstractMesh) and not mesh.empty
    ]
    return sorted(found, key=lambda mesh: -mesh.size)


def devices_of(layouts: Sequence[Any], meshes: Sequence[Any]) -> list[jax.Device]:
    """The devices of a program."""
    for mesh in meshes:
        return list(mesh.devices.flat)
    for sharding in layouts:
        if isinstance(sharding, Sharding):
            return list(sharding.device_set)
    return jax.local_devices()[:1]


def array_layouts(
    traced: jax.stages.Traced, compiled: jax.stages.Compiled | None
) -> tuple[tuple[ArrayLayout, ...], list[Any]]:
    """How each argument and each result is sharded.

    Args:
      traced: the program's trace.
      compiled: the program; None over an abstract mesh, where the maps determine it.

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
        ins, outs = shardings_of(jaxpr)
    else:
        # An argument that is not used has None, which is no leaf.
        ins = [
            each or UNUSED for each in tree_in.flatten_up_to(compiled.input_shardings)
        ]
        outs = jax.tree.leaves(compiled.output_shardings)
    shardings = [*ins, *outs]
    avals = jax.tree.leaves((traced.args_info, traced.out_info))
    found = [
        _array_layout("input" if k < tree_in.num_leaves else "output", *each)
        for k, each in enumerate(zip(names, avals, shardings, strict=True))
    ]
    return tuple(found), shardings


def _array_layout(
    role: Literal["input", "output"], path: str, aval: Aval, layout: Any
) -> ArrayLayout:
    """The layout of an array.

    Args:
      role: "input" or "output".
      path: its key path.
      aval: its shape and dtype.
      layout: its sharding, or `UNKNOWN` or `UNUSED`.
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
            if not isinstance(getattr(layout, "mesh", None), AbstractMesh):
                places: Any = layout.devices_indices_map(shape)
                devices = tuple(device.id for device in places)
            layout = describe(spec)
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
        devices=() if devices == tuple(range(len(devices))) else devices,
    )


def describe(spec: ShardingSpec) -> str:
    """How an array is cut, in a few words.

    >>> from shardmap import Chunked, Replicated, ShardedAxis
    >>> describe(ShardingSpec((Chunked(2), None), (ShardedAxis(0), Replicated(4))))
    'dimension 0 in 2 shards, each on 4 devices'
    >>> describe(ShardingSpec((None,), (Replicated(4),)))
    'replicated on 4 devices'
    """
    if spec.num_shards == 1:
        return "on one device"
    cuts = [
        f"dimension {dimension} in {count:,} shards"
        for dimension, count in enumerate(spec.tile_counts)
        if count > 1
    ]
    copies = spec.num_shards // math.prod(spec.tile_counts)
    if not cuts:
        return f"replicated on {copies:,} devices"
    return ", ".join(cuts) + (f", each on {copies:,} devices" if copies > 1 else "")
