"""`mesh_map`: a function of blocks, one for each device of a mesh.

Each mesh axis is one map over blocks. An array is reshaped so that a dimension cut
along mesh axes becomes the axes and, behind them, the block; then the axes are mapped,
one inside the other, all on the one mesh. Along an axis that cuts nothing, nothing is
mapped, but collectives know its name.
"""

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardmap._jax.context import nothing_is_traced
from shardmap.api import pickling
from shardmap.api.calls import kept, options
from shardmap.api.calls.stages import Lowered
from shardmap.api.mesh_blocks import (
    Axes,
    dimensions_of,
    from_blocks,
    is_axes,
    reshaped,
    to_blocks,
)
from shardmap.api.spmap import explanation, mapped_as
from shardmap.arrays import array_likes, placement, trees
from shardmap.arrays.process_local import as_global
from shardmap.arrays.running import map_jit
from shardmap.map import agreement, contexts, tracing
from shardmap.map.primitives.shard_maps import axes_used_inside
from shardmap.sharding.mesh import auto_mesh
from shardmap.sharding.spec import ShardingSpec


class _Options(NamedTuple):
    mesh: Mesh
    in_axes: Any
    out_axes: Any
    lowering: str
    donate_argnums: tuple[int, ...]

    def key(self) -> Hashable:
        """Hashable, equal for equal options."""
        in_axes, out_axes = (
            (tuple(tuple(axes.items()) for axes in leaves), tree)
            for leaves, tree in (
                jax.tree.flatten(axes, is_leaf=is_axes)
                for axes in (self.in_axes, self.out_axes)
            )
        )
        return self._replace(in_axes=in_axes, out_axes=out_axes)


def _is_free(name: str) -> bool:
    """Whether a mesh axis that no array names is the map's own to bind.

    It is not where collectives mean the map or the `jax.shard_map` around that walks
    the axis, and calls it so.
    """
    walked = tracing.is_bound(tracing.Walks(name)) or (
        name in jax.sharding.get_abstract_mesh().manual_axes
    )
    return not (walked and tracing.is_bound(name))


class MeshMappedFunction:
    """A function mapped over the blocks of a mesh; what `mesh_map` returns."""

    def __init__(self, fun: Callable[..., Any], options: _Options) -> None:
        functools.update_wrapper(self, fun)
        self._map: _BlockMap = kept.kept_for(
            fun, options.key(), lambda: _BlockMap(fun, options)
        )
        # The map finds the function by a weak reference, to an equal one perhaps.
        self._fun = self._map.fun()

    def __call__(self, *args: Any) -> Any:
        if not nothing_is_traced():
            leaves, in_tree, in_axes = self._map.read(args)
            leaves = as_global(leaves, map(self._map.sharding, in_axes, leaves))
            return self._map.bind(leaves, in_tree, in_axes)
        if contexts.has_mesh():
            return self._map.under_mesh(args)
        return self._map.run(args)

    def __reduce__(self) -> Any:
        return pickling.reduced(self, self._fun, self._map.options)

    def lower(self, *args: Any) -> Lowered:
        """Lowers the map for these arguments, running nothing.

        Returns:
          A `jax.stages.Lowered` with ``in_specs`` and ``out_specs``.
        """
        leaves, in_tree, in_axes = self._map.read(args)
        # Calls have a program of their own, which all processes lower at once.
        program, shardings, out_shardings = self._map.program(
            leaves, in_tree, in_axes, is_new=True
        )
        # Arrays that lie elsewhere would be asked to lie as the map wants them.
        structs = jax.tree.unflatten(
            in_tree,
            [
                jax.ShapeDtypeStruct(
                    aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding
                )
                for aval, sharding in zip(
                    map(array_likes.leaf_aval, leaves), shardings, strict=True
                )
            ],
        )
        with agreement.lowering_to_look() as agree:
            lowered = program.lower(*structs)
        out_info = jax.tree.leaves(lowered.out_info)
        in_specs, out_specs = (
            [
                ShardingSpec.from_named_sharding(sharding, len(leaf.shape))
                for sharding, leaf in zip(given, items, strict=True)
            ]
            for given, items in (
                (shardings, jax.tree.leaves(structs)),
                (out_shardings, out_info),
            )
        )
        return Lowered(
            lowered,
            jax.tree.unflatten(in_tree, in_specs),
            jax.tree.unflatten(jax.tree.structure(lowered.out_info), out_specs),
            agree,
        )

    def trace(self, *args: Any) -> jax.stages.Traced:
        """Traces the map for these arguments, as `jax.jit(fun).trace` does."""
        return jax.jit(self).trace(*args)

    def explain(self, *args: Any) -> Any:
        """What runs in parallel for these arguments, and at what cost.

        Returns:
          An `Explanation`; see `shardmap.explain`.
        """
        return explanation(self, args, {})

    def shardings(
        self, args: Any, out: Any
    ) -> tuple[list[NamedSharding], list[NamedSharding]]:
        """How the leaves of the arguments and of a result like ``out`` lie."""
        _, _, in_axes = self._map.read(args)
        return (
            [self._map.sharding(axes) for axes in in_axes],
            [self._map.sharding(axes) for axes in self._map.out_axes(out)],
        )


class _BlockMap:
    """All that is made for one function under one set of options.

    It does not hold the function, so it may live as long as the function does.
    """

    def __init__(self, fun: Callable[..., Any], options: _Options) -> None:
        self.fun = kept.WeakFunction(fun)
        self._name = getattr(fun, "__name__", type(fun).__name__)
        self.options = options
        self._programs: dict[Hashable, Any] = {}
        # Tried first for arguments of the same structure.
        self._recent: dict[Any, Any] = {}

    def run(self, args: Any) -> Any:
        """Runs the map on arguments that lie anywhere."""
        leaves, in_tree = jax.tree.flatten(args)
        recent = self._recent.get(in_tree)
        if recent is not None:
            try:
                return recent(*args)
            except (TypeError, ValueError):
                self._recent.pop(in_tree, None)
        program, in_shardings, _ = self.program(*self.read(args))
        placed = placement.place(leaves, in_shardings)
        result = program(*jax.tree.unflatten(in_tree, placed))
        if all(a is b for a, b in zip(leaves, placed, strict=True)):
            self._recent[in_tree] = program
        return result

    def under_mesh(self, args: Any) -> Any:
        """Runs the map under `jax.set_mesh`, or alone if it has other devices."""
        if list(self.options.mesh.devices.flat) != contexts.mesh_devices():
            with jax.set_mesh(contexts.NO_MESH):
                return self.run(args)
        return self._under_mesh(args, {})

    @functools.cached_property
    def _under_mesh(self) -> contexts.UnderMesh:
        return contexts.UnderMesh(
            self._name,
            lambda args, _: self.bind(*self.read(args)),
            donate_argnums=self.options.donate_argnums,
        )

    def read(self, args: Any) -> tuple[list[Any], Any, list[Axes]]:
        """Checks the arguments of a call: their leaves, structure and axes."""
        leaves, in_tree = jax.tree.flatten(args)
        in_axes = list(
            trees.broadcast_axes(
                "in_axes", self.options.in_axes, args, "the arguments", is_axes
            )
        )
        mesh = self.options.mesh
        problems = []
        for k, (leaf, axes) in enumerate(zip(leaves, in_axes, strict=True)):
            aval = array_likes.leaf_aval(leaf)
            for dimension, names in enumerate(dimensions_of(axes, aval.ndim)):
                pieces = math.prod(mesh.shape[name] for name in names)
                if aval.shape[dimension] % pieces:
                    what = (
                        f"dimension {dimension} of size {aval.shape[dimension]} does "
                        f"not divide among the {pieces} devices along {names}"
                    )
                    problems.append((k, aval, what))
            if (highest := max(axes.values(), default=-1)) >= aval.ndim:
                what = f"it has no dimension {highest}, which {axes} names"
                problems.append((k, aval, what))
        if problems:
            paths = trees.leaf_names(self.fun(), range(len(args)), args, {})
            listed = "".join(
                f"\n  * {paths[k]} is {aval.str_short()}: {what}"
                for k, aval, what in problems
            )
            raise ValueError(
                f"mesh_map cannot cut these arguments over the mesh:{listed}\nCut "
                "other dimensions, or pad them to a multiple."
            )
        return leaves, in_tree, in_axes

    def program(
        self,
        leaves: Sequence[Any],
        in_tree: Any,
        in_axes: Sequence[Axes],
        is_new: bool = False,
    ) -> tuple[Any, tuple[NamedSharding, ...], tuple[NamedSharding, ...]]:
        """What runs calls like this one, and how arguments and results lie."""
        avals = [array_likes.leaf_aval(leaf) for leaf in leaves]
        key = in_tree, tuple((aval.shape, aval.dtype, aval.weak_type) for aval in avals)
        if is_new or key not in self._programs:
            bind = functools.partial(self.bind, in_tree=in_tree, in_axes=in_axes)
            structs = [
                jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
                for aval in avals
            ]
            out_shape = jax.eval_shape(lambda *leaves: bind(leaves), *structs)
            in_shardings = tuple(map(self.sharding, in_axes, leaves))
            out_shardings = tuple(map(self.sharding, self.out_axes(out_shape)))
            mesh = self.options.mesh

            def call(*args: Any) -> Any:
                leaves = jax.tree.leaves(args)
                tracing.log_compile(
                    "%s: blocks on mesh %s, devices %s, arguments %s",
                    self._name,
                    dict(mesh.shape),
                    [device.id for device in mesh.devices.flat],
                    [jax.typeof(leaf).str_short() for leaf in leaves],
                )
                return bind(leaves)

            kept.described_like(call, self.fun(), self._name)
            program = map_jit(
                call,
                list(mesh.devices.flat),
                communicates=True,
                in_shardings=jax.tree.unflatten(in_tree, in_shardings),
                out_shardings=jax.tree.unflatten(
                    jax.tree.structure(out_shape), out_shardings
                ),
                donate_argnums=[
                    argnum
                    for argnum in self.options.donate_argnums
                    if argnum < len(in_tree.children())
                ],
                donate_argnames=(),
            )
            made = program, in_shardings, out_shardings
            if is_new:
                return made
            self._programs[key] = made
        return self._programs[key]

    def sharding(self, axes: Axes, leaf: Any = None) -> NamedSharding:
        """How an array with these axes lies."""
        if placement.has_no_bytes(leaf):
            axes = {}
        ndim = max(axes.values(), default=-1) + 1
        entries = [names or None for names in dimensions_of(axes, ndim)]
        return NamedSharding(self.options.mesh, PartitionSpec(*entries))

    def out_axes(self, out: Any) -> list[Axes]:
        """The axes of each leaf of a result like ``out``."""
        return list(
            trees.broadcast_axes(
                "out_axes", self.options.out_axes, out, "the result", is_axes
            )
        )

    def bind(self, leaves: Sequence[Any], in_tree: Any, in_axes: Sequence[Axes]) -> Any:
        """Reshapes, maps over one mesh axis inside the other, and reshapes back."""
        mesh, lowering = self.options.mesh, self.options.lowering
        fun = self.fun()

        def block(*blocks: Any) -> list[Any]:
            results = jax.tree.leaves(fun(*jax.tree.unflatten(in_tree, blocks)))
            # On a mesh without axes there is no map to make arrays of numbers.
            return results if levels else list(map(jnp.asarray, results))

        block.__name__ = self._name

        def whole(*blocks: Any) -> Any:
            return fun(*jax.tree.unflatten(in_tree, blocks))

        traced, out_shape = jax.make_jaxpr(
            whole, axis_env=list(mesh.shape.items()), return_shape=True
        )(
            *(
                self._block_aval(leaf, axes)
                for leaf, axes in zip(leaves, in_axes, strict=True)
            )
        )
        out_axes = self.out_axes(out_shape)
        shapes = jax.tree.leaves(out_shape)
        for k, (axes, shape) in enumerate(zip(out_axes, shapes, strict=True)):
            if max(axes.values(), default=-1) >= len(shape.shape):
                name = trees.result_names(jax.tree.structure(out_shape))[k]
                raise ValueError(
                    f"mesh_map out_axes {axes} names a dimension that {name} of "
                    f"shape {shape.shape} does not have."
                )
        used = {name for axes in [*in_axes, *out_axes] for name in axes}
        used_inside = axes_used_inside(traced)
        levels = tuple(
            name
            for name in mesh.axis_names
            if name in used or (name not in used_inside and _is_free(name))
        )
        mapped = block
        for name in reversed(levels):
            walked = name in used or not tracing.is_bound(tracing.Walks(name))
            mapped = mapped_as(
                "mesh_map",
                mapped,
                name,
                in_axes=tuple(0 if name in axes else None for axes in in_axes),
                out_axes=[0 if name in axes else None for axes in out_axes],
                axis_size=mesh.shape[name],
                mesh=mesh,
                mesh_axes=name if walked else (),
                lowering=lowering,
            )
        results = mapped(
            *(
                reshaped(to_blocks, leaf, axes, levels, mesh)
                for leaf, axes in zip(leaves, in_axes, strict=True)
            )
        )
        return jax.tree.unflatten(
            jax.tree.structure(out_shape),
            [
                reshaped(from_blocks, result, axes, levels)
                for result, axes in zip(results, out_axes, strict=True)
            ],
        )

    def _block_aval(self, leaf: Any, axes: Axes) -> jax.ShapeDtypeStruct:
        aval = array_likes.leaf_aval(leaf)
        shape = [
            size // math.prod(self.options.mesh.shape[name] for name in names)
            for size, names in zip(
                aval.shape, dimensions_of(axes, aval.ndim), strict=True
            )
        ]
        return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type)


def mesh_map(
    fun: Callable[..., Any],
    mesh: Mesh,
    in_axes: Any,
    out_axes: Any,
    *,
    lowering: str = "manual",
    donate_argnums: int | Iterable[int] = (),
) -> MeshMappedFunction:
    """Maps a function over blocks of arrays, one block for each device of a mesh.

    Each leaf of ``in_axes`` and ``out_axes`` is a dict from mesh axis names to array
    dimensions. A dimension that a mesh axis names is cut among the devices along it;
    the function gets the block, with all its dimensions. Several mesh axes on one
    dimension cut it major to minor, in the order of the dict. Along mesh axes that are
    not named, all devices have the same block. Collectives go over mesh axis names.

    The idea is `jax.shard_map`'s, and its elder xmap's with anonymous blocks; it is
    made of maps as `spmap` makes them, one inside the other.

    Args:
      fun: takes and gives pytrees of blocks.
      mesh: the devices.
      in_axes: a pytree prefix of the tuple of arguments with dicts as leaves, such as
        ``({"data": 0}, {})``, ``{}`` for what every device gets whole.
      out_axes: the same for the result.
      lowering: as for `spmap`. Default ``"manual"``.
      donate_argnums: as for `spmap`.

    Returns:
      The mapped function, with ``lower``.

    Raises:
      TypeError: axes that are no dicts of names and dimensions.
      ValueError: a mesh axis that ``mesh`` does not have. When called: a dimension that
        an array does not have or that does not divide, a result that differs along a
        mesh axis that its out axes do not name.

    Example:
      >>> import jax, numpy as np, shardmap as sm
      >>> mesh = sm.make_mesh({"data": 4, "model": 2})
      >>> product = sm.mesh_map(
      ...     lambda x, w: jax.lax.psum(x @ w, "model"),
      ...     mesh,
      ...     in_axes=({"data": 0, "model": 1}, {"model": 0}),
      ...     out_axes={"data": 0},
      ... )
      >>> product(np.ones((8, 6)), np.ones((6, 3))).shape
      (8, 3)
    """
    for name, axes in (("in_axes", in_axes), ("out_axes", out_axes)):
        for leaf in jax.tree.leaves(axes, is_leaf=is_axes):
            if not is_axes(leaf):
                raise TypeError(
                    f"mesh_map {name} must be dicts of mesh axis names and dimensions, "
                    f"or (nested) containers of them, but got {leaf!r} in {axes}."
                )
            if unknown := set(leaf) - set(mesh.axis_names):
                raise ValueError(
                    f"mesh_map {name} names {sorted(unknown)}, but the mesh has the "
                    f"axes {mesh.axis_names}."
                )
            if min(leaf.values(), default=0) < 0:
                raise ValueError(
                    f"mesh_map {name} has a dimension below 0 in {leaf}; count from "
                    "the front."
                )
    if isinstance(in_axes, list):
        in_axes = tuple(in_axes)
    return MeshMappedFunction(
        fun,
        _Options(
            auto_mesh(mesh),
            in_axes,
            out_axes,
            options.lowering(lowering, None),
            options.index_tuple("donate_argnums", donate_argnums),
        ),
    )
