"""How `mesh_map` traces a call: `jax.shard_map` of a function of blocks.

The function of a block is traced once for the structure of its result and the mesh axes
that it uses, and then bound to `jax.shard_map`. With ``lowering="spmd"`` it is bound to
one `spmap` for each mesh axis, over arrays that have the mesh axes as dimensions.
"""

import collections
import functools
import math
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shardmap._jax.context import NO_MESH, bound_axes, varying_axes
from shardmap._jax.effects import axes_used
from shardmap._jax.errors import explained_axis_names
from shardmap._jax.primitives import SHARD_MAP
from shardmap._jax.types import (
    AnyMesh,
    Aval,
    ClosedJaxpr,
    Jaxpr,
    PyTree,
    TreeDef,
    Value,
    aval_of,
    with_shape,
    without_sharding,
)
from shardmap._jax.walk import primitives_in, without_constants
from shardmap.api import caches
from shardmap.api.arguments import Arguments
from shardmap.api.options import Lowering
from shardmap.api.programs import (
    Call,
    bind_in_jit,
    run_on_set_mesh,
    run_without_mesh,
)
from shardmap.api.user_function import Args, FlatFunction, Kwargs, UserFunction
from shardmap.arrays import placement, trees
from shardmap.map import set_mesh, tracing
from shardmap.map.collectives.rewrites import for_shard_map
from shardmap.map.differing import differing_results
from shardmap.map.layout import MapShardings
from shardmap.map.mesh_compatibility import axes_used_inside
from shardmap.map.primitives import explicit_sharding
from shardmap.map.primitives.map_primitive import spmap_p
from shardmap.sharding.conversions import cut_spec
from shardmap.sharding.mesh import mesh_devices, with_manual_axes
from shardmap.units import is_integer

MeshAxes = dict[str, int]
"""Mesh axis names, each with the array dimension that it cuts."""


# MeshAxes


def is_axes(value: object) -> bool:
    """Whether a value is a leaf of ``in_axes`` or ``out_axes``."""
    return isinstance(value, dict) and all(
        isinstance(name, str) and is_integer(dimension)
        for name, dimension in value.items()
    )


def _dim_to_mesh_axes(axes: MeshAxes) -> dict[int, tuple[str, ...]]:
    """The mesh axes that cut each dimension, major to minor."""
    mesh_axes: dict[int, tuple[str, ...]] = {}
    for name, dimension in axes.items():
        mesh_axes[dimension] = (*mesh_axes.get(dimension, ()), name)
    return mesh_axes


def _partition_spec(axes: MeshAxes) -> PartitionSpec:
    return cut_spec(_dim_to_mesh_axes(axes))


def _scaled(
    mesh: AnyMesh,
    scale: Callable[[int, int], int],
    shape: Sequence[int],
    axes: MeshAxes,
) -> list[int]:
    """The shape of a block, if ``scale`` divides; of all blocks, if it multiplies."""
    scaled = list(shape)
    for name, dimension in axes.items():
        scaled[dimension] = scale(scaled[dimension], mesh.shape[name])
    return scaled


class MeshMapOptions(NamedTuple):
    """The arguments of `mesh_map` but the function."""

    mesh: AnyMesh
    in_axes: PyTree
    out_axes: PyTree
    static_argnums: tuple[int, ...]
    donate_argnums: tuple[int, ...]
    lowering: Lowering
    check_vma: bool = False


# The two lowerings


class _Blocks(NamedTuple):
    """How arrays are cut into blocks.

    Attributes:
      mesh: the devices.
      names: the mesh axes that the map is over.
      in_axes, out_axes: of each leaf and of each result.
    """

    mesh: AnyMesh
    names: Sequence[str]
    in_axes: Sequence[MeshAxes]
    out_axes: Sequence[MeshAxes]

    def shard_map(self, run: Callable[..., Any], leaves: Sequence[Value]) -> Any:
        """Runs a function of blocks under `jax.shard_map`."""
        if not self.names:
            return run(*leaves)
        # A `jax.shard_map` around has set its mesh, which this one takes.
        is_inside = bool(jax.sharding.get_abstract_mesh().manual_axes)
        return jax.shard_map(
            run,
            mesh=None if is_inside else self.mesh,
            in_specs=tuple(map(_partition_spec, self.in_axes)),
            out_specs=list(map(_partition_spec, self.out_axes)),
            axis_names=set(self.names),
            check_vma=False,
        )(*leaves)

    def nested_spmaps(self, run: Callable[..., Any], leaves: Sequence[Value]) -> Any:
        """Runs a function of blocks under a `spmap` along each mesh axis."""
        from shardmap.api.spmap import spmap  # Slow to import, and rarely needed.

        mesh: Any = self.mesh
        for k in reversed(range(len(self.names))):
            name, around = self.names[k], self.names[:k]
            run = spmap(
                run,
                name,
                in_axes=tuple(
                    _axis_of_tiles(axes, name, around) for axes in self.in_axes
                ),
                out_axes=[_axis_of_tiles(axes, name, around) for axes in self.out_axes],
                axis_size=mesh.shape[name],
                mesh=mesh,
                mesh_axes=name,
                lowering="spmd",
            )
        results = run(*map(self._tiled, leaves, self.in_axes))
        return list(map(self._joined, results, self.out_axes))

    def _tiled(self, array: Value, axes: MeshAxes) -> Value:
        """Splits each dimension that is cut: its mesh axes, and then the block's."""
        block = _scaled(self.mesh, operator.floordiv, jnp.shape(array), axes)
        sizes: dict[Any, int] = dict(self.mesh.shape) | dict(enumerate(block))
        dims = _dims_of_tiles(axes, len(block))
        return jnp.reshape(array, [sizes[each] for each in dims])

    def _joined(self, tiles: Value, axes: MeshAxes) -> Value:
        """The reverse of `_tiled`."""
        dims = _dims_of_tiles(axes, tiles.ndim - len(axes))
        block = [
            n for n, each in zip(tiles.shape, dims, strict=True) if each not in axes
        ]
        return jnp.reshape(tiles, _scaled(self.mesh, operator.mul, block, axes))


def _dims_of_tiles(axes: MeshAxes, ndim: int) -> list[Any]:
    """The dimensions of an array that is split, with the mesh axes before them."""
    mesh_axes = _dim_to_mesh_axes(axes)
    return [each for dim in range(ndim) for each in (*mesh_axes.get(dim, ()), dim)]


def _axis_of_tiles(axes: MeshAxes, name: str, around: Sequence[str]) -> int | None:
    """Where an array that is split has a mesh axis, inside of the maps around."""
    if name not in axes:
        return None
    dims = _dims_of_tiles(axes, axes[name] + 1)
    return [each for each in dims if each not in around].index(name)


# Calls


class BlockMap:
    """A function under `mesh_map`, as `programs.Transformed` has it."""

    is_leaf = staticmethod(is_axes)

    def __init__(self, fun: Callable[..., Any], options: MeshMapOptions) -> None:
        self.options = options
        self.function = UserFunction(fun, "mesh_map", options.donate_argnums, is_axes)
        # The functions for `jax.shard_map` with ``check_vma=True``.
        self._checked: collections.OrderedDict[Hashable, Callable[..., PyTree]] = (
            collections.OrderedDict()
        )

    @functools.cached_property
    def bind(self) -> Callable[[Args, Kwargs], PyTree]:
        return bind_in_jit(self)

    def run_under_mesh(
        self, run: Callable[[Args, Kwargs], PyTree], args: Args, kwargs: Kwargs
    ) -> PyTree:
        if set_mesh.is_on_mesh(self._devices()):
            return run_on_set_mesh(self, args, kwargs)
        return run_without_mesh(run, args, kwargs)

    def trace_call(self, arguments: Arguments, is_top_level: bool = True) -> Call:
        function, options, mesh = self.function, self.options, self.options.mesh
        avals = function.leaf_avals(arguments)
        in_axes = function.broadcast_in("in_axes", options.in_axes, arguments, {})
        self._check_arguments(arguments, avals, in_axes)
        around = self._axes_around()
        rest = [name for name in mesh.axis_names if name not in around]
        flat = function.flat_function(arguments)
        if options.check_vma:
            return self._checked_by_jax(arguments, flat, avals, in_axes, rest)
        blocks = [
            with_shape(aval, _scaled(mesh, operator.floordiv, aval.shape, axes))
            for aval, axes in zip(avals, in_axes, strict=True)
        ]
        closed, out_tree, names = self._traced(flat, blocks, rest)
        jaxpr = closed.jaxpr
        if closed.consts:
            jaxpr = without_constants(closed)
        jaxpr = for_shard_map(jaxpr, mesh)
        if not around:
            self._check_vmaps(jaxpr)
        out_axes = function.broadcast_out("out_axes", options.out_axes, out_tree)
        out_blocks = [without_sharding(aval_of(var)) for var in jaxpr.outvars]
        _check_ranks(out_axes, out_blocks, out_tree)
        self._check_results(jaxpr, out_tree, in_axes, out_axes, names)
        out_avals = [
            with_shape(aval, _scaled(mesh, operator.mul, aval.shape, axes))
            for aval, axes in zip(out_blocks, out_axes, strict=True)
        ]

        def run(*leaves: Value) -> list[Any]:
            # `spmap` binds other types than `jax.shard_map`, and so does one around
            # that checks what varies.
            if list(map(jax.typeof, leaves)) == list(closed.in_avals):
                return list(jax.core.eval_jaxpr(jaxpr, (), *closed.consts, *leaves))
            again = jax.make_jaxpr(flat)(*leaves)
            rewritten = for_shard_map(again.jaxpr, mesh)
            return list(jax.core.eval_jaxpr(rewritten, again.consts, *leaves))

        blocks_of = _Blocks(mesh, names, in_axes, out_axes)
        if options.lowering == "manual":
            bind = functools.partial(blocks_of.shard_map, run)
        else:
            bind = functools.partial(blocks_of.nested_spmaps, run)
        return Call(
            arguments,
            avals,
            out_tree,
            out_avals,
            mesh,
            jaxpr,
            functools.partial(_bind_without_types, bind),
            functools.partial(_shardings, mesh, in_axes, avals, out_axes, out_avals),
        )

    def _checked_by_jax(
        self,
        arguments: Arguments,
        function: FlatFunction,
        avals: Sequence[Aval],
        in_axes: Sequence[MeshAxes],
        names: Sequence[str],
    ) -> Call:
        """The call as `jax.shard_map` with ``check_vma=True`` has it."""
        mapped = self._shard_mapped(function, in_axes, names)
        with explained_axis_names(*names):
            traced: Any = jax.make_jaxpr(mapped, return_shape=True)(
                *map(without_sharding, avals)
            )
        closed, out = traced
        out_tree = jax.tree.structure(out)
        out_axes = self.function.broadcast_out(
            "out_axes", self.options.out_axes, out_tree
        )

        def bind(leaves: Sequence[Value]) -> list[Any]:
            operands = map(explicit_sharding.drop_sharding, leaves)
            return list(jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *operands))

        out_avals = list(map(without_sharding, closed.out_avals))
        return Call(
            arguments,
            avals,
            out_tree,
            out_avals,
            self.options.mesh,
            closed.jaxpr,
            bind,
            functools.partial(
                _shardings, self.options.mesh, in_axes, avals, out_axes, out_avals
            ),
        )

    def _shard_mapped(
        self, function: FlatFunction, in_axes: Sequence[MeshAxes], names: Sequence[str]
    ) -> Callable[..., PyTree]:
        """`jax.shard_map` that checks; JAX finds its trace again by this object."""
        is_inside = bool(jax.sharding.get_abstract_mesh().manual_axes)
        key = function, tuple(names), is_inside
        if (mapped := self._checked.get(key)) is not None:
            return mapped

        def run(*leaves: Value) -> PyTree:
            result = function(*leaves)
            return jax.tree.unflatten(result.tree, result.leaves)

        run.__name__ = self.function.name  # For JAX's errors.
        out_axes = self.options.out_axes
        mapped = jax.shard_map(
            run,
            mesh=None if is_inside else self.options.mesh,
            in_specs=tuple(map(_partition_spec, in_axes)),
            out_specs=jax.tree.map(_partition_spec, out_axes, is_leaf=is_axes),
            axis_names=set(names),
            check_vma=True,
        )
        return caches.keep(self._checked, key, mapped)

    def _axes_around(self) -> set[str]:
        """The mesh axes that a map or `jax.shard_map` around is over.

        Raises:
          ValueError: it is on another mesh or other devices, or is over axes that are
            named here.
        """
        mesh, there = self.options.mesh, jax.sharding.get_abstract_mesh()
        set_mesh.check_devices(self.function.full_name, self._devices())
        if there.manual_axes and there.shape_tuple != mesh.abstract_mesh.shape_tuple:
            raise ValueError(
                f"{self.function.full_name} names the mesh {dict(mesh.shape)}, but is "
                f"inside a mesh_map or jax.shard_map of a mesh {dict(there.shape)}. "
                "Name that mesh."
            )
        around = {
            name
            for name in mesh.axis_names
            if name in there.manual_axes
            or tracing.is_bound(tracing.MeshAxisMarker(name))
        }
        if both := self._named_axes & around:
            raise ValueError(
                f"{self.function.full_name} names the mesh axes {sorted(both)}, along "
                "which a map or jax.shard_map around it runs already. Name other axes."
            )
        return around

    @functools.cached_property
    def _named_axes(self) -> set[str]:
        given = self.options.in_axes, self.options.out_axes
        return {
            name for axes in jax.tree.leaves(given, is_leaf=is_axes) for name in axes
        }

    def _traced(
        self, function: FlatFunction, blocks: Sequence[Aval], names: Sequence[str]
    ) -> tuple[ClosedJaxpr, TreeDef, Sequence[str]]:
        """Traces the function of a block, with these mesh axes bound.

        Returns:
          The jaxpr; the structure of the result; and the mesh axes that the map is
          over: all but those that maps inside use, along which no array is cut here.
        """
        # Maps inside may be over axes that no array is cut along here.
        named = [name for name in names if name in self._named_axes] or names
        closed, out_tree = self._traced_over(function, blocks, names, named)
        inside = axes_used_inside(closed.jaxpr) - self._named_axes
        rest = [name for name in names if name not in inside]
        if self.options.lowering == "spmd" or set(rest) == set(named):
            return closed, out_tree, rest
        if primitives_in(closed.jaxpr) & {spmap_p, SHARD_MAP}:
            closed, out_tree = self._traced_over(function, blocks, names, rest)
        else:
            from shardmap.map.lowering import retracing  # Slow, and rarely needed.

            closed = retracing.retraced(closed, self._under(rest))
        return closed, out_tree, rest

    def _under(self, manual: Sequence[str]) -> Any:
        """The mesh with these Manual axes, and those of a `jax.shard_map` around."""
        there = jax.sharding.get_abstract_mesh()
        mesh: Any = there if there.manual_axes else self.options.mesh.abstract_mesh
        return with_manual_axes(mesh, {*manual, *there.manual_axes})

    def _traced_over(
        self,
        function: FlatFunction,
        blocks: Sequence[Aval],
        names: Sequence[str],
        manual: Sequence[str],
    ) -> tuple[ClosedJaxpr, TreeDef]:
        """Traces the function with mesh axes bound, some of which are Manual."""
        bound: dict[Any, int] = {name: self.options.mesh.shape[name] for name in names}
        if self.options.lowering == "spmd":
            bound |= {tracing.MeshAxisMarker(name): 1 for name in self._named_axes}
            manual = ()
        mesh = self._under(manual)
        # With the types of `jax.shard_map`.
        block_avals = [
            without_sharding(aval).update(
                sharding=NamedSharding(mesh, PartitionSpec(*[None] * aval.ndim))
            )
            for aval in blocks
        ]
        with (
            jax.sharding.use_abstract_mesh(mesh),
            bound_axes(bound),
            explained_axis_names(*names),
        ):
            traced: Any = jax.make_jaxpr(function, return_shape=True)(*block_avals)
        closed, out = traced
        tracing.check_constants(closed.consts)
        return closed, out.tree

    def _devices(self) -> list[jax.Device]:
        return mesh_devices(self.options.mesh) or set_mesh.current_mesh_devices()

    # Checks

    def _check_arguments(
        self, arguments: Arguments, avals: Sequence[Aval], in_axes: Sequence[MeshAxes]
    ) -> None:
        """Checks that arguments have the dimensions that are cut, which divide."""
        if self.options.lowering == "spmd" and any(map(varying_axes, avals)):
            raise ValueError(
                f"{self.function.full_name} has lowering='spmd' inside a "
                "jax.shard_map with check_vma=True. Give that check_vma=False, or this "
                "lowering='manual'."
            )
        mesh = self.options.mesh
        problems, divides = [], True
        for k, (aval, axes) in enumerate(zip(avals, in_axes, strict=True)):
            for dimension, names in _dim_to_mesh_axes(axes).items():
                count = math.prod(mesh.shape[name] for name in names)
                if dimension >= aval.ndim:
                    what = (
                        f"{axes} names dimension {dimension}, but its rank is "
                        f"{aval.ndim}"
                    )
                elif aval.shape[dimension] % count:
                    divides = False
                    what = (
                        f"dimension {dimension} of size {aval.shape[dimension]} does "
                        f"not divide among the {count} devices along {names}"
                    )
                else:
                    continue
                problems.append((k, f"{aval.str_short()}: {what}"))
        if problems:
            paths = self.function.leaf_names(arguments)
            listed = trees.bullets([f"{paths[k]} is {text}" for k, text in problems])
            raise ValueError(
                f"mesh_map cannot cut these arguments over the mesh:{listed}\n"
                + ("Cut" if divides else "Pad them to a multiple, or cut")
                + " other dimensions."
                + arguments.advice_on_lists([k for k, _ in problems])
            )

    def _check_vmaps(self, jaxpr: Jaxpr) -> None:
        """Checks that no `jax.vmap` around has the name of an axis that is used."""
        if self.options.lowering == "spmd" or tracing.inside_map():
            return
        for name in axes_used(jaxpr.effects) & set(self.options.mesh.axis_names):
            if tracing.is_bound(name):
                raise ValueError(
                    f"{self.function.full_name} has a mesh axis {name!r}, and is "
                    f"inside a jax.vmap with axis_name={name!r}: JAX would compute "
                    "collectives over the axis of the vmap. Give the vmap another "
                    "axis_name, or use lowering='spmd'."
                )

    def _check_results(
        self,
        jaxpr: Jaxpr,
        out_tree: TreeDef,
        in_axes: Sequence[MeshAxes],
        out_axes: Sequence[MeshAxes],
        names: Sequence[str],
    ) -> None:
        """Checks that results do not differ along mesh axes that they do not name."""
        constants = (False,) * (len(jaxpr.invars) - len(in_axes))
        for name in names:
            if all(name in axes for axes in out_axes):
                continue
            mapped = tuple(name in axes for axes in in_axes)
            differs = differing_results(jaxpr, name, constants + mapped)
            if bad := [
                k for k, axes in enumerate(out_axes) if differs[k] and name not in axes
            ]:
                results = trees.result_names(out_tree)
                listed = trees.bullets([f"{results[k]}: {out_axes[k]}" for k in bad])
                raise ValueError(
                    f"mesh_map out_axes do not name mesh axis {name!r}, along which "
                    f"these results of {self.function.name} can differ:{listed}\n"
                    "Name it with the dimension that it cuts, or combine the blocks "
                    f"with a collective over it, such as jax.lax.pmean(x, {name!r})."
                )


def _bind_without_types(
    bind: Callable[[Sequence[Value]], Any], leaves: Sequence[Value]
) -> list[Any]:
    """Binds a map to leaves without shardings in their types, nor those of a mesh."""
    there = jax.sharding.get_abstract_mesh()
    operands = list(map(explicit_sharding.drop_sharding, leaves))
    with jax.sharding.use_abstract_mesh(there if there.manual_axes else NO_MESH):
        results: list[Any] = bind(operands)
    if AxisType.Explicit in there.axis_types:
        return list(map(explicit_sharding.drop_sharding_p.bind, results))
    return results


def _shardings(
    mesh: AnyMesh,
    in_axes: Sequence[MeshAxes],
    in_avals: Sequence[Aval],
    out_axes: Sequence[MeshAxes],
    out_avals: Sequence[Aval],
) -> MapShardings:
    sharding = functools.partial(placement.array_sharding, mesh)
    return MapShardings(
        tuple(map(sharding, map(_partition_spec, in_axes), in_avals)),
        tuple(map(sharding, map(_partition_spec, out_axes), out_avals)),
    )


def _check_ranks(
    out_axes: Sequence[MeshAxes], blocks: Sequence[Aval], out_tree: TreeDef
) -> None:
    """Checks that each result has the dimensions that are cut."""
    for k, (axes, aval) in enumerate(zip(out_axes, blocks, strict=True)):
        if max(axes.values(), default=-1) >= aval.ndim:
            raise ValueError(
                f"mesh_map out_axes {axes} names a dimension that "
                f"{trees.result_names(out_tree)[k]} of shape {aval.shape} does not "
                "have."
            )
