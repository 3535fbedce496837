"""How `mesh_map` traces a call: `jax.shard_map` of a function of blocks.

With ``lowering="spmd"`` it is one `spmap` for each mesh axis instead, over arrays that
have the mesh axes as dimensions. Either way, results are checked where the function is
traced: `jax.shard_map` does so only with ``check_vma=True``.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardmap._jax.context import check_live, varying_axes
from shardmap._jax.effects import axes_used
from shardmap._jax.errors import explained_errors
from shardmap._jax.types import (
    AnyMesh,
    Aval,
    ClosedJaxpr,
    PyTree,
    Value,
    without_sharding,
)
from shardmap.api.arguments import Arguments
from shardmap.api.options import Lowering
from shardmap.api.transformed import (
    Call,
    FlatFunction,
    Transformed,
    bind_without_types,
    types_of_mesh_around,
)
from shardmap.arrays import placement, trees
from shardmap.arrays.trees import Flattened
from shardmap.map import set_mesh, tracing
from shardmap.map.collectives.rewrites import for_shard_map
from shardmap.map.differing import differing_results
from shardmap.map.layout import MapShardings
from shardmap.sharding.conversions import axes_in
from shardmap.sharding.mesh import mesh_devices


class MeshMapOptions(NamedTuple):
    """The arguments of `mesh_map` but the function, axes as PartitionSpecs."""

    mesh: AnyMesh
    in_specs: PyTree
    out_specs: PyTree
    axis_names: tuple[str, ...]
    static_argnums: tuple[int, ...]
    donate_argnums: tuple[int, ...]
    lowering: Lowering
    check_vma: bool = False


def is_spec(value: object) -> bool:
    """Whether a value is a leaf of ``in_specs`` or ``out_specs``."""
    return isinstance(value, PartitionSpec)


def mesh_axes(spec: PartitionSpec) -> dict[int, tuple[str, ...]]:
    """The mesh axes that cut each dimension, major to minor."""
    entries = map(axes_in, spec.partitions)
    return {dimension: names for dimension, names in enumerate(entries) if names}


def named_axes(specs: PyTree) -> set[str]:
    """The mesh axes that any of these specs names."""
    every = map(mesh_axes, jax.tree.leaves(specs, is_leaf=is_spec))
    return {name for cut in every for names in cut.values() for name in names}


class BlockMap(Transformed):
    """A function under `mesh_map`."""

    what = "mesh_map"
    is_leaf = staticmethod(is_spec)

    def is_on_set_mesh(self) -> bool:
        return set_mesh.is_on_mesh(self._devices())

    def trace_call(self, arguments: Arguments, is_top_level: bool = True) -> Call:
        options = self.options
        avals = self.leaf_avals(arguments)
        in_specs = self.broadcast_in(
            "in_axes", options.in_specs, arguments, PartitionSpec()
        )
        self._check_arguments(arguments, avals, in_specs)
        names = self._free_axes()
        block = self.flat_function(arguments)
        # A `spmap` tells its own name.
        told = names if options.lowering == "manual" else ()
        with types_of_mesh_around(), explained_errors(*told):
            traced: Any = jax.make_jaxpr(
                self._over(names, block, in_specs), return_shape=True
            )(*(a if varying_axes(a) else without_sharding(a) for a in avals))
        closed, out = traced
        check_live(closed.consts)
        self._check_vmaps(closed, names)
        out_specs = self._out_specs(out.tree)
        out_avals = list(map(without_sharding, closed.out_avals))
        run = functools.partial(jax.core.eval_jaxpr, closed.jaxpr, closed.consts)
        sharding = functools.partial(placement.array_sharding, options.mesh)
        return Call(
            arguments,
            avals,
            out.tree,
            out_avals,
            options.mesh,
            closed.jaxpr,
            functools.partial(bind_without_types, run),
            lambda: MapShardings(
                tuple(map(sharding, in_specs, avals)),
                tuple(map(sharding, out_specs, out_avals)),
            ),
        )

    def _over(
        self,
        names: Sequence[str],
        block: FlatFunction,
        in_specs: Sequence[PartitionSpec],
    ) -> Callable[..., Flattened]:
        """The function of whole leaves that is mapped over these mesh axes."""
        # A `jax.shard_map` around has set its mesh, which this one takes.
        is_inside = bool(jax.sharding.get_abstract_mesh().manual_axes)
        options = self.options

        def run(*blocks: Value) -> PyTree:
            closed, out = jax.make_jaxpr(block, return_shape=True)(*blocks)
            tracing.check_constants(closed.consts)
            self._check_results(closed, out.tree, in_specs, names)
            jaxpr = for_shard_map(closed.jaxpr, options.mesh)
            results = jax.core.eval_jaxpr(jaxpr, closed.consts, *blocks)
            return jax.tree.unflatten(out.tree, results)

        run.__name__ = self.name  # For JAX's errors.
        mapped: Callable[..., PyTree] = run
        if options.lowering == "spmd":
            mapped = functools.partial(self._as_spmaps, run, names, in_specs)
        elif names:
            mapped = jax.shard_map(
                run,
                mesh=None if is_inside else options.mesh,
                in_specs=tuple(in_specs),
                out_specs=options.out_specs,
                axis_names=set(names),
                check_vma=options.check_vma,
            )

        return lambda *leaves: Flattened(*jax.tree.flatten(mapped(*leaves)))

    def _as_spmaps(
        self,
        run: Callable[..., Any],
        names: Sequence[str],
        in_specs: Sequence[PartitionSpec],
        *leaves: Value,
    ) -> PyTree:
        """Runs a function of blocks under a `spmap` along each mesh axis."""
        from shardmap.api.spmap import spmap  # Slow to import, and rarely needed.

        mesh: Any = self.options.mesh
        for k in reversed(range(len(names))):
            name, axis = names[k], functools.partial(_tile_axis, names[k], names[:k])
            run = spmap(
                run,
                name,
                in_axes=tuple(map(axis, in_specs)),
                out_axes=jax.tree.map(axis, self.options.out_specs, is_leaf=is_spec),
                axis_size=mesh.shape[name],
                mesh=mesh,
                mesh_axes=name,
                lowering="spmd",
            )
        results, tree = jax.tree.flatten(run(*map(self._tiled, leaves, in_specs)))
        return jax.tree.unflatten(
            tree, map(self._joined, results, self._out_specs(tree))
        )

    def _tiled(self, array: Value, spec: PartitionSpec) -> Value:
        """Splits each dimension that is cut: its mesh axes, and then the block's."""
        block = _scaled(self.options.mesh, operator.floordiv, jnp.shape(array), spec)
        sizes: dict[Any, int] = {**self.options.mesh.shape, **dict(enumerate(block))}
        return jnp.reshape(
            array, [sizes[each] for each in _tile_dims(spec, len(block))]
        )

    def _joined(self, tiles: Value, spec: PartitionSpec) -> Value:
        """The reverse of `_tiled`."""
        dims = _tile_dims(spec, tiles.ndim - len(named_axes(spec)))
        sizes = zip(tiles.shape, dims, strict=True)
        block = [size for size, each in sizes if isinstance(each, int)]
        return jnp.reshape(tiles, _scaled(self.options.mesh, operator.mul, block, spec))

    def _out_specs(self, out_tree: Any) -> Sequence[PartitionSpec]:
        return self.broadcast_out("out_axes", self.options.out_specs, out_tree)

    def _devices(self) -> list[jax.Device]:
        return mesh_devices(self.options.mesh) or set_mesh.current_mesh_devices()

    def _free_axes(self) -> list[str]:
        """The mesh axes of the map that no map or `jax.shard_map` around is over."""
        who, mesh = self.full_name, self.options.mesh
        there = jax.sharding.get_abstract_mesh()
        set_mesh.check_devices(who, self._devices())
        if there.manual_axes and there.shape_tuple != mesh.abstract_mesh.shape_tuple:
            raise ValueError(
                f"{who} names the mesh {dict(mesh.shape)}, but is inside a mesh_map or "
                f"jax.shard_map of a mesh {dict(there.shape)}. Name that mesh."
            )
        around = {
            name
            for name in mesh.axis_names
            if name in there.manual_axes
            or tracing.is_bound(tracing.MeshAxisMarker(name))
        }
        if both := around & named_axes((self.options.in_specs, self.options.out_specs)):
            raise ValueError(
                f"{who} names the mesh axes {sorted(both)}, which a map or "
                "jax.shard_map around it is over already. Name other axes, or leave "
                "these out of axis_names= of the one around."
            )
        return [name for name in self.options.axis_names if name not in around]

    # Checks

    def _check_arguments(
        self,
        arguments: Arguments,
        avals: Sequence[Aval],
        in_specs: Sequence[PartitionSpec],
    ) -> None:
        """Checks that arguments have the dimensions that are cut, which divide."""
        who, mesh = self.full_name, self.options.mesh
        for k, (aval, spec) in enumerate(zip(avals, in_specs, strict=True)):
            for dimension, names in mesh_axes(spec).items():
                count = math.prod(mesh.shape[name] for name in names)
                if dimension >= aval.ndim or aval.shape[dimension] % count:
                    raise ValueError(
                        f"{who} cuts dimension {dimension} of "
                        f"{self.leaf_names(arguments)[k]}, {aval.str_short()}, into "
                        f"{count} blocks along {names}. Cut a dimension that it has "
                        f"and that {count} divides, or pad it to a multiple."
                    )

    def _check_vmaps(self, closed: ClosedJaxpr, names: Sequence[str]) -> None:
        """Checks that no `jax.vmap` around has the name of an axis that is used."""
        if self.options.lowering == "spmd" or tracing.inside_map():
            return
        vmapped = {*filter(tracing.is_bound, names)}
        inside = [equation.params.get("jaxpr") for equation in closed.jaxpr.eqns]
        for jaxpr in filter(None, inside):
            for name in axes_used(jaxpr.effects) & vmapped:
                raise ValueError(
                    f"{self.full_name} has a mesh axis {name!r} and is inside "
                    f"a jax.vmap with axis_name={name!r}, which JAX would take for it. "
                    "Give the vmap another axis_name, or use lowering='spmd'."
                )

    def _check_results(
        self,
        closed: ClosedJaxpr,
        out_tree: Any,
        in_specs: Sequence[PartitionSpec],
        names: Sequence[str],
    ) -> None:
        """Checks that results have the dimensions that are cut, and no other cuts."""
        out_specs = self._out_specs(out_tree)
        for k, (aval, spec) in enumerate(zip(closed.out_avals, out_specs, strict=True)):
            if max(mesh_axes(spec), default=-1) >= aval.ndim:
                raise ValueError(
                    f"mesh_map out_axes {spec} cuts a dimension that "
                    f"{trees.result_names(out_tree)[k]} of shape {aval.shape} does not "
                    "have."
                )
        if self.options.check_vma:
            return
        for name in names:
            given = tuple(name in named_axes(spec) for spec in in_specs)
            differs = differing_results(closed.jaxpr, name, given)
            for k, (spec, differ) in enumerate(zip(out_specs, differs, strict=True)):
                if differ and name not in named_axes(spec):
                    raise ValueError(
                        f"mesh_map out_axes do not name mesh axis {name!r}, along "
                        f"which {trees.result_names(out_tree)[k]} of {self.name} can "
                        "differ. Name it with the dimension that it cuts, or return "
                        f"jax.lax.pmean(x, {name!r})."
                    )


# Blocks


def _scaled(
    mesh: AnyMesh,
    scale: Callable[[int, int], int],
    shape: Sequence[int],
    spec: PartitionSpec,
) -> list[int]:
    """The shape of a block, if ``scale`` divides; of all blocks, if it multiplies."""
    scaled = list(shape)
    for dimension, names in mesh_axes(spec).items():
        for name in names:
            scaled[dimension] = scale(scaled[dimension], mesh.shape[name])
    return scaled


def _tile_dims(spec: PartitionSpec, ndim: int) -> list[Any]:
    """The dimensions of an array that is split, with the mesh axes before them."""
    cut = mesh_axes(spec)
    return [each for dim in range(ndim) for each in (*cut.get(dim, ()), dim)]


def _tile_axis(name: str, around: Sequence[str], spec: PartitionSpec) -> int | None:
    """Where an array that is split has a mesh axis, inside of the maps around."""
    dims = _tile_dims(spec, len(spec.partitions))
    left = [each for each in dims if each not in around]
    return left.index(name) if name in left else None
