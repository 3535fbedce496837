"""Which devices a program runs on, and how its inputs and outputs are sharded."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from shardmap._jax.types import Aval, Jaxpr, PyTree
from shardmap._jax.walk import equations
from shardmap.arrays import trees
from shardmap.explain.report import ArrayLayout
from shardmap.map.primitives.axis import REPLICAS
from shardmap.sharding.spec import ShardingSpec

UNUSED = "not used by the program"


def meshes_of(jaxpr: Jaxpr, args: PyTree = ()) -> list[Any]:
    """The meshes that a program's equations name, the largest first.

    These are the meshes of maps, and of constraints on how arrays are sharded. Where
    axes are explicit an equation names the abstract mesh of the one that is set, that
    its arguments are on, or that another equation names: it is that one.

    Args:
      jaxpr: the program.
      args: what it is called with.
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


def largest_mesh(meshes: Sequence[Any], layouts: Sequence[Any]) -> Any:
    """The largest mesh, of inputs and outputs first; None without one."""
    named = [s.mesh for s in layouts if isinstance(s, NamedSharding)]
    return max([*named, *meshes], key=lambda mesh: mesh.size, default=None)


def axes_of(mesh: Any) -> tuple[tuple[str, int], ...]:
    """The names and sizes of the axes of a mesh; () without one."""
    sizes = {} if mesh is None else mesh.shape
    # A map without replicas of its elements has that axis nevertheless.
    return tuple(item for item in sizes.items() if item != (REPLICAS, 1))


def devices_of(mesh: Any) -> tuple[int, ...]:
    """The ids of the devices of a mesh, in its order; () if it has none."""
    if not isinstance(mesh, Mesh):
        return ()
    return tuple(device.id for device in mesh.devices.flat)


def if_unusual(devices: Sequence[int]) -> tuple[int, ...]:
    """The ids of devices; () for 0, 1, 2 and so on."""
    return () if [*devices] == [*range(len(devices))] else tuple(devices)


def device_of(layouts: Sequence[Any], meshes: Sequence[Any]) -> Any:
    """One of the devices of a program."""
    for mesh in meshes:
        return mesh.devices.flat[0]
    for sharding in layouts:
        if isinstance(sharding, Sharding):
            return next(iter(sharding.device_set))
    return jax.local_devices()[0]


def array_layouts(
    fun: Callable[..., Any],
    args: Sequence[Any],
    traced: jax.stages.Traced,
    layouts_in: Sequence[Any],
    layouts_out: Sequence[Any],
) -> tuple[ArrayLayout, ...]:
    """How each argument and each result is sharded.

    Args:
      fun: the function.
      args: its positional arguments.
      traced: its trace.
      layouts_in, layouts_out: the shardings, as `compiled_layouts` gives them.
    """
    infos, out_infos = traced.args_info, traced.out_info
    static = getattr(fun, "static_argnums", None) or ()
    static = (static,) if isinstance(static, int) else static
    argnums = [k for k in range(len(args)) if k not in static]
    names_in = _input_names(fun, infos, argnums)
    names_out = trees.result_names(jax.tree.structure(out_infos))
    ins = zip(names_in, jax.tree.leaves(infos), layouts_in, strict=True)
    outs = zip(names_out, jax.tree.leaves(out_infos), layouts_out, strict=True)
    return (
        *(_array_layout("input", *each) for each in ins),
        *(_array_layout("output", *each) for each in outs),
    )


def _input_names(
    fun: Callable[..., Any], info: PyTree, argnums: Sequence[int]
) -> list[str]:
    """The key path of each input.

    Args:
      fun: the function.
      info: positional and keyword arguments, as trees.
      argnums: the positions of the positional ones, if that is known.
    """
    args, kwargs = info
    if len(args) != len(argnums):
        paths = jax.tree_util.tree_leaves_with_path(args)
        names = [f"args{jax.tree_util.keystr(path)}" for path, _ in paths]
        return names + trees.leaf_names(fun, (), (), kwargs)
    return trees.leaf_names(fun, argnums, args, kwargs)


def _array_layout(
    role: Literal["input", "output"], path: str, aval: Aval, layout: Any
) -> ArrayLayout:
    """The layout of an array.

    Args:
      role: what it is.
      path: its key path.
      aval: its shape and dtype.
      layout: its sharding, or a word that there is none.
    """
    shape, itemsize = tuple(aval.shape), aval.dtype.itemsize
    spec = shard_shape = None
    devices: tuple[int, ...] = ()
    if isinstance(layout, Sharding):
        shard_shape = tuple(layout.shard_shape(shape))
        try:
            spec = ShardingSpec.from_sharding(layout, shape)
            devices = if_unusual(_ids(layout, shape))
            layout = describe(spec)
        except ValueError:
            layout = str(layout)
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
        devices=devices,
    )


def compiled_layouts(
    traced: jax.stages.Traced, compiled: jax.stages.Compiled
) -> tuple[list[Any], list[Any]]:
    """How the compiler shards inputs and outputs."""
    tree_in: Any = jax.tree.structure(traced.args_info)
    # An argument that is not used has None, which is no leaf.
    found = tree_in.flatten_up_to(compiled.input_shardings)
    return (
        [UNUSED if sharding is None else sharding for sharding in found],
        jax.tree.leaves(compiled.output_shardings),
    )


def _ids(sharding: Sharding, shape: tuple[int, ...]) -> list[int]:
    """The ids of its devices, in the order of its spec; [] without devices."""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        return []
    devices: list[Any] = [*sharding.devices_indices_map(shape)]
    return [device.id for device in devices]


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
