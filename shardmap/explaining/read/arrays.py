"""Which devices a program runs on, and how its inputs and outputs are sharded.

So are intermediate values where it uses `jax.lax.with_sharding_constraint`.
"""

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import jax
from jax.extend.core import Literal as Constant
from jax.extend.core.primitives import jit_p
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from shardmap._jax.primitives import SHARD_MAP, argument_names
from shardmap._jax.stages import given_shardings
from shardmap._jax.types import Atom, Aval, Equation, Jaxpr, PyTree
from shardmap._jax.walk import equations, jaxprs_in
from shardmap.arrays import trees
from shardmap.explaining.read.visitor import VmapAxis
from shardmap.explaining.report import ArrayLayout, Axis, describe
from shardmap.map.layout import map_shardings
from shardmap.map.primitives.map_primitive import MapParams, spmap_p
from shardmap.sharding.conversions import axes_in
from shardmap.sharding.spec import ShardingSpec

UNUSED = "not used by the program"
UNKNOWN = "as the compiler decides"


def meshes_of(jaxpr: Jaxpr, args: PyTree = ()) -> list[Any]:
    """The meshes that a program's equations name, the largest first.

    These are the meshes of maps and of sharding constraints. With Explicit axes, an
    equation names an abstract mesh. It stands for the mesh of devices with the same
    axes that is set, that an argument is on, or that another equation names.
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
    """The devices of a program: of a mesh, of an array, or the first one there."""
    for mesh in meshes:
        return list(mesh.devices.flat)
    for sharding in layouts:
        if isinstance(sharding, Sharding):
            return sorted(sharding.device_set, key=lambda device: device.id)
    return list(there[:1]) or jax.local_devices()[:1]


def array_layouts(
    traced: jax.stages.Traced,
    compiled: jax.stages.Compiled | None,
) -> tuple[tuple[ArrayLayout, ...], list[Any]]:
    """How each argument and each result is sharded, if the compiler takes the program.

    Returns:
      The layouts, and the sharding of each; `UNUSED` for an argument that is not used.
    """
    jaxpr = traced.jaxpr.jaxpr
    tree_in: Any = jax.tree.structure(traced.args_info)
    names = [
        *argument_names(jaxpr),
        *trees.result_names(jax.tree.structure(traced.out_info)),
    ]
    ins, outs = shardings_of(traced)
    shardings = [*ins, *outs]
    avals = jax.tree.leaves((traced.args_info, traced.out_info))
    if compiled is not None:
        # An argument that is not used has None, which is no leaf.
        ins = tree_in.flatten_up_to(compiled.input_shardings)
        outs = jax.tree.leaves(compiled.output_shardings)
        shardings = [
            _named(*each) for each in zip([*ins, *outs], shardings, avals, strict=True)
        ]
    layouts = [
        _array_layout("input" if k < tree_in.num_leaves else "output", *each)
        for k, each in enumerate(zip(names, avals, shardings, strict=True))
    ]
    return tuple(layouts), shardings


def _named(compiled: Any, known: Any, aval: Aval) -> Any:
    """The sharding by the compiler, with the names of the program where it has none."""
    if isinstance(compiled, NamedSharding) or not isinstance(known, NamedSharding):
        return compiled or UNUSED
    is_same = compiled and compiled.is_equivalent_to(known, len(aval.shape))
    return known if is_same else compiled or UNUSED


def _array_layout(
    role: Literal["input", "output"], path: str, aval: Aval, layout: Any
) -> ArrayLayout:
    """The layout of an array, by its sharding, or by `UNKNOWN` or `UNUSED`."""
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
            devices = ids_of(layout.devices_indices_map(shape))
            layout = describe(spec, [*map(list, axis_sizes(layout))])
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


def ids_of(devices: Iterable[Any]) -> tuple[int, ...]:
    """The ids of devices; () for 0, 1, 2 and so on."""
    ids = tuple(device.id for device in devices)
    return () if ids == tuple(range(len(ids))) else ids


def axis_sizes(layout: Any) -> list[dict[str, int]]:
    """The mesh axes that cut each dimension, with their sizes; [] without names."""
    if not isinstance(layout, NamedSharding):
        return []
    names = [axes_in(entry) for entry in layout.spec.partitions]
    shape = layout.mesh.shape
    return [{k: shape[k] for k in those if shape.get(k, 1) > 1} for those in names]


def shardings_of(traced: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """The shardings of inputs and outputs that are known before a program is compiled.

    These are the ones that are given, and those that the maps of the program fix; for
    inputs and for outputs, each a sharding or `UNKNOWN`.
    """
    given = given_shardings(traced)
    fixed = _fixed(traced.jaxpr.jaxpr)
    ins, outs = (
        [known or each for known, each in zip(*pair, strict=True)]
        for pair in zip(given, fixed, strict=True)
    )
    return ins, outs


def _fixed(jaxpr: Jaxpr) -> tuple[Sequence[Any], Sequence[Any]]:
    known: dict[Any, Any] = {}
    for equation in jaxpr.eqns:
        ins, outs = _shardings(equation)
        known.update(zip(equation.outvars, outs, strict=True))
        for atom, sharding in zip(equation.invars, ins, strict=True):
            if not isinstance(atom, Constant) and sharding != UNKNOWN:
                known.setdefault(atom, sharding)

    def of(atom: Atom) -> Any:
        is_literal = isinstance(atom, Constant)
        return UNKNOWN if is_literal else known.get(atom, UNKNOWN)

    return [*map(of, jaxpr.invars)], [*map(of, jaxpr.outvars)]


def _shardings(equation: Equation) -> tuple[Sequence[Any], Sequence[Any]]:
    params = equation.params
    if equation.primitive is spmap_p and params["mesh"] is not None:
        return map_shardings(MapParams.of(equation))
    if equation.primitive is SHARD_MAP:
        return (
            [NamedSharding(params["mesh"], spec) for spec in params["in_specs"]],
            [NamedSharding(params["mesh"], spec) for spec in params["out_specs"]],
        )
    if equation.primitive is jit_p:
        asked = params["in_shardings"], params["out_shardings"]
        ins, outs = (
            [
                each if isinstance(each, NamedSharding) else inner
                for each, inner in zip(*pair, strict=True)
            ]
            for pair in zip(asked, _fixed(*jaxprs_in(params)), strict=True)
        )
        return ins, outs
    return [UNKNOWN] * len(equation.invars), [UNKNOWN] * len(equation.outvars)


Cuts = Sequence[dict[str, int]]
"""For each dimension of an array, the mesh axes that shard it and their sizes."""


class ShardedArgument(NamedTuple):
    """An argument that is sharded.

    Attributes:
      axes: the mesh axes that shard it.
      comes_back: whether a result is like it, as of weights that are trained.
    """

    axes: frozenset[str]
    comes_back: bool


def sharded_arguments(
    arrays: Sequence[ArrayLayout], cuts: Iterable[Cuts]
) -> dict[str, ShardedArgument]:
    """The arguments that are sharded, by key path."""
    results = {(a.shape, a.dtype, a.layout) for a in arrays if a.role == "output"}
    return {
        array.path: ShardedArgument(
            frozenset(itertools.chain(*those)),
            (array.shape, array.dtype, array.layout) in results,
        )
        for array, those in zip(arrays, cuts, strict=True)
        if array.role == "input" and any(those)
    }


def with_devices(
    axes: Sequence[Axis],
    vmaps: Sequence[VmapAxis],
    cuts: Sequence[Cuts],
    asked: Collection[NamedSharding],
    mesh: Sequence[tuple[str, int]],
) -> tuple[Axis, ...]:
    """Combines the axes of a program with the shardings of arrays.

    A vmap over a sharded dimension runs on the devices that have the shards. Other mesh
    axes with a sharded dimension, or along which a program asks for shards, are axes of
    their own, in the order of the mesh.
    """
    used = {axis.name for axis in axes if axis.kind in ("shard_map", "pmap")}
    batched = []
    for axis, over in vmaps:
        sizes = next(
            filter(None, (dict(enumerate(cuts[k])).get(d) for k, d in over)), {}
        )
        used.update(sizes)
        # Otherwise the partitioner decides what a device has of constrained values.
        if sizes or not asked:
            count = math.prod(sizes.values())
            each = -(-axis.vectorised // count)
            batched.append(dataclasses.replace(axis, devices=count, vectorised=each))
    sizes = {}
    # An spmap has the mesh axes.
    if not any(axis.kind == "spmap" for axis in axes):
        for cut in itertools.chain(*cuts, *map(axis_sizes, asked)):
            sizes = cut | sizes  # Two meshes may name different axes alike.
    names = [name for name, _ in mesh if name in sizes]
    names += [name for name in sizes if name not in names]
    of_devices = [
        Axis(name, sizes[name], "sharding", sizes[name], 1, 1)
        for name in names
        if name not in used
    ]
    before = (*of_devices, *batched)
    moved = [
        dataclasses.replace(
            axis, inside=None if axis.inside is None else axis.inside + len(before)
        )
        for axis in axes
    ]
    return (*before, *moved)


def idle_mesh_axes(
    mesh: Sequence[tuple[str, int]], axes: Sequence[Axis], cuts: Iterable[Cuts]
) -> list[tuple[str, int]]:
    """The mesh axes along which nothing is sharded or mapped, with their sizes."""
    if any(axis.kind == "spmap" for axis in axes):
        return []
    used = {axis.name for axis in axes if axis.devices > 1}
    used.update(*itertools.chain(*cuts))
    return [(name, size) for name, size in mesh if size > 1 and name not in used]
