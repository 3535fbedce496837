"""`mesh_map`: `jax.shard_map` with dicts of mesh axes in place of PartitionSpecs.

A call is read by tracing the function of a block once, for the shapes of its results
and the mesh axes that it uses. Then the function is bound: to `jax.shard_map`, or with
``lowering="spmd"`` to one `jax.vmap` for each mesh axis, over arrays reshaped so that
the mesh axes are in front.
"""

import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, overload

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardmap._jax import context
from shardmap._jax.arrays import varying_axes
from shardmap._jax.context import NO_MESH
from shardmap._jax.effects import axes_used
from shardmap._jax.stages import trace_as
from shardmap._jax.typechecks import bound_axes
from shardmap._jax.types import (
    AnyMesh,
    Aval,
    Jaxpr,
    PyTree,
    TreeDef,
    Value,
    aval_of,
    with_shape,
    without_sharding,
)
from shardmap._jax.walk import jaxprs
from shardmap.api.calls import caches, options
from shardmap.api.calls.call import Arguments, Call, ProcessLocal
from shardmap.api.calls.options import Lowering
from shardmap.api.calls.programs import Args, Kwargs, Programs
from shardmap.api.calls.statics import apply_statics, wrap_statics
from shardmap.api.function import Mapped, P, R
from shardmap.arrays import placement, processes, trees
from shardmap.arrays.process_local import as_global
from shardmap.map import agreement, contexts, tracing
from shardmap.map.collectives.names import in_mesh_order
from shardmap.map.collectives.rewrites import tile_collectives
from shardmap.map.collectives.split import has_collectives
from shardmap.map.constraint import constraints_in
from shardmap.map.layout import inner_maps
from shardmap.map.primitives import explicit_sharding
from shardmap.map.primitives.custom_partitioning import without_custom_partitioning
from shardmap.map.primitives.map_primitive import remove_axis
from shardmap.map.primitives.shard_maps import axes_used_inside
from shardmap.map.shardings import MapShardings
from shardmap.sharding.conversions import cut_spec
from shardmap.sharding.mesh import auto_mesh
from shardmap.units import WithOptions, shown

Axes = dict[str, int]
"""Mesh axis names, each with the array dimension that it cuts."""


# Axes


def _is_axes(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, str) and type(dimension) is int
        for name, dimension in value.items()
    )


def _check_names(parameter: str, axes: PyTree, mesh: AnyMesh) -> None:
    """Refuses what are no axes of ``mesh``."""
    for leaf in jax.tree.leaves(axes, is_leaf=_is_axes):
        if not _is_axes(leaf):
            raise TypeError(
                f"mesh_map {parameter} must be dicts of mesh axis names and "
                f"dimensions, or (nested) containers of them, but got {shown(leaf)} in "
                f"{shown(axes)}."
            )
        if unknown := set(leaf) - set(mesh.axis_names):
            raise ValueError(
                f"mesh_map {parameter} names {sorted(unknown)}, but the mesh has the "
                f"axes {mesh.axis_names}."
            )
        if min(leaf.values(), default=0) < 0:
            raise ValueError(
                f"mesh_map {parameter} has a dimension below 0 in {leaf}; count from "
                "the front."
            )


def _cuts(axes: Axes, ndim: int) -> list[tuple[str, ...]]:
    """The mesh axes that cut each dimension, major to minor."""
    return [
        tuple(name for name, where in axes.items() if where == dimension)
        for dimension in range(ndim)
    ]


def _partition_spec(axes: Axes) -> PartitionSpec:
    ndim = max(axes.values(), default=-1) + 1
    return cut_spec({k: names for k, names in enumerate(_cuts(axes, ndim)) if names})


def _counts(mesh: AnyMesh, axes: Axes, ndim: int) -> list[int]:
    """How many blocks there are along each dimension."""
    sizes = ([mesh.shape[name] for name in names] for names in _cuts(axes, ndim))
    return list(map(math.prod, sizes))


def _block_aval(mesh: AnyMesh, aval: Aval, axes: Axes) -> Aval:
    """The aval of a block of an array."""
    counts = _counts(mesh, axes, aval.ndim)
    return with_shape(aval, list(map(operator.floordiv, aval.shape, counts)))


# Calls


class Options(NamedTuple):
    """The arguments of `mesh_map` but the function."""

    mesh: AnyMesh
    in_axes: PyTree
    out_axes: PyTree
    static_argnums: tuple[int, ...]
    donate_argnums: tuple[int, ...]
    lowering: Lowering

    def key(self) -> Hashable:
        """Hashable, equal for equal options."""

        def hashable(axes: PyTree) -> Hashable:
            leaves, tree = options.hashable(axes, _is_axes)
            return tuple(tuple(leaf.items()) for leaf in leaves), tree

        return self._replace(
            in_axes=hashable(self.in_axes), out_axes=hashable(self.out_axes)
        )


@dataclasses.dataclass(frozen=True, eq=False)
class MeshCall(Call):
    """One call of `mesh_map`.

    Attributes:
      mesh: the devices.
      block: the function of the leaves' blocks, with flat results.
      jaxpr: what it computes.
      in_axes, out_axes: those of each leaf and of each result.
      out_blocks: the avals of what a block computes.
      manual_axes: the mesh axes that `jax.shard_map` is over.
      named_axes: the other mesh axes whose names the function may use.
      across_processes: whether some devices are another process's.
      sends: whether anything goes between devices.
    """

    mesh: AnyMesh
    block: Callable[..., tracing.Flattened]
    jaxpr: Jaxpr
    in_axes: Sequence[Axes]
    out_axes: Sequence[Axes]
    out_blocks: Sequence[Aval]
    manual_axes: tuple[str, ...]
    named_axes: tuple[str, ...]
    across_processes: bool
    sends: bool

    def run_block(self, *blocks: Value) -> list[Any]:
        """What a block computes, flat."""
        closed = jax.make_jaxpr(self.block, axis_env=[])(*blocks)
        jaxpr = tile_collectives(closed.jaxpr)
        jaxpr = in_mesh_order(jaxpr, self.mesh)
        return list(jax.core.eval_jaxpr(jaxpr, closed.consts, *blocks))

    @property
    def communicates(self) -> bool:
        return self.sends

    @functools.cached_property
    def shardings(self) -> MapShardings:
        def sharding(axes: Axes, aval: Aval) -> NamedSharding:
            return NamedSharding(
                self.mesh,
                _partition_spec({} if placement.has_no_bytes(aval) else axes),
                memory_kind=placement.memory_kind(aval),
            )

        return MapShardings(
            tuple(map(sharding, self.in_axes, self.in_avals)),
            tuple(map(sharding, self.out_axes, self.out_blocks)),
        )

    @property
    def devices(self) -> list[jax.Device]:
        return _devices_of(self.mesh)

    @property
    def described(self) -> str:
        devices = [device.id for device in self.devices]
        kinds = [aval.str_short() for aval in self.in_avals]
        return (
            f"blocks on mesh {dict(self.mesh.shape)}, devices {devices}, arguments "
            f"{kinds}"
        )

    @property
    def global_avals(self) -> tuple[Sequence[Aval], Sequence[Aval]]:
        def whole(axes: Axes, block: Aval) -> Aval:
            counts = _counts(self.mesh, axes, block.ndim)
            return with_shape(block, list(map(operator.mul, block.shape, counts)))

        return self.in_avals, list(map(whole, self.out_axes, self.out_blocks))

    @functools.cached_property
    def process_local(self) -> ProcessLocal | None:
        """None of it is: a call takes and gives global arrays."""
        if not self.across_processes:
            return None
        count = len(self.in_avals)
        return ProcessLocal([None] * count, [None] * count, [None] * len(self.out_axes))


def _devices_of(mesh: AnyMesh) -> list[jax.Device]:
    """The devices of a mesh; none of an abstract one."""
    return list(mesh.devices.flat) if isinstance(mesh, Mesh) else []


class MeshPrograms(Programs[MeshCall, Options]):
    """All that is made for one function that `mesh_map` maps."""

    what = "mesh_map"

    def __init__(self, fun: Callable[..., Any], options: Options) -> None:
        super().__init__(fun, options)
        # JAX finds a trace again by the function that is traced.
        self._blocks: caches.LRUCache[Callable[..., tracing.Flattened]] = (
            caches.LRUCache()
        )

    def infer_params(
        self,
        args: Args,
        kwargs: Kwargs,
        are_global: Sequence[bool] | None = None,
        alone: bool = True,
    ) -> MeshCall:
        arguments = Arguments.of(args, kwargs)
        mesh = self.options.mesh
        dynamic = [args[k] for k in arguments.argnums]

        def names() -> list[str]:
            return trees.leaf_names(self.fun(), arguments.argnums, dynamic, kwargs)

        avals = self.leaf_avals(arguments.leaves, names)
        if self.options.lowering == "spmd" and any(map(varying_axes, avals)):
            raise ValueError(
                f"{self._named()} has lowering='spmd' inside a jax.shard_map with "
                "check_vma=True. Give that check_vma=False, or this "
                "lowering='manual'."
            )
        in_axes = self.in_axes(arguments)
        _check_in_axes(in_axes, avals, mesh, names, (dynamic, kwargs))
        around = self._axes_around()
        own = tuple(
            name
            for name in mesh.axis_names
            if name not in around or not tracing.is_bound(name)
        )
        free = tuple(name for name in own if name not in around)
        block = self._block(arguments, args, kwargs)
        jaxpr, out_tree, seen = self._traced(block, avals, in_axes, own, free)
        out_axes = self.out_axes(out_tree)
        out_blocks = [without_sharding(aval_of(var)) for var in jaxpr.outvars]
        _check_out_axes(out_axes, out_blocks, out_tree)
        # Maps inside bind these.
        inside = axes_used_inside(jaxpr) - self._named_axes()
        own, free = (
            tuple(name for name in names if name not in inside) for names in (own, free)
        )
        self._check_results(jaxpr, in_axes, out_axes, out_tree, own, seen)
        manual = free if self.options.lowering == "manual" else ()
        return MeshCall(
            arguments,
            avals,
            out_tree,
            mesh,
            block,
            jaxpr,
            in_axes,
            out_axes,
            out_blocks,
            manual,
            tuple(name for name in own if name not in manual),
            self.across_processes(),
            self.options.lowering == "spmd" or _communicates(jaxpr),
        )

    def _axes_around(self) -> set[str]:
        """The mesh axes that a map or `jax.shard_map` around runs along.

        Raises:
          ValueError: it is on another mesh or other devices, or runs along axes that
            are named here.
        """
        mesh, there = self.options.mesh, jax.sharding.get_abstract_mesh()
        devices = _devices_of(mesh)
        if devices and contexts.has_mesh() and devices != contexts.mesh_devices():
            raise ValueError(
                f"{self._named()} runs on the devices {[d.id for d in devices]}, but "
                "the program that it is a part of runs on those of jax.set_mesh, "
                f"{[d.id for d in contexts.mesh_devices()]}. Set a mesh of these "
                "devices, or call it by itself."
            )
        if there.manual_axes and there.shape_tuple != mesh.abstract_mesh.shape_tuple:
            raise ValueError(
                f"{self._named()} names the mesh {dict(mesh.shape)}, but is inside a "
                f"mesh_map or jax.shard_map of a mesh {dict(there.shape)}. Name that "
                "mesh."
            )
        around = {
            name
            for name in mesh.axis_names
            if name in there.manual_axes
            or tracing.is_bound(tracing.MeshAxisMarker(name))
        }
        if both := self._named_axes() & around:
            raise ValueError(
                f"{self._named()} names the mesh axes {sorted(both)}, along which a "
                "map or jax.shard_map around it runs already. Name other axes."
            )
        return around

    def _named_axes(self) -> set[str]:
        given = self.options.in_axes, self.options.out_axes
        return {
            name for axes in jax.tree.leaves(given, is_leaf=_is_axes) for name in axes
        }

    def _block(
        self, arguments: Arguments, args: Args, kwargs: Kwargs
    ) -> Callable[..., tracing.Flattened]:
        key = arguments.in_tree, arguments.statics
        block = self._blocks.get(key)
        if block is None:
            fun, structure = self.fun, arguments._replace(leaves=())

            def block(*blocks: Value) -> tracing.Flattened:
                result = apply_statics(fun(), *structure.with_leaves(blocks))
                return tracing.Flattened(*jax.tree.flatten(result))

            static = arguments.static_argnums
            trace_as(block, self.what, fun(), args, kwargs, static)
            block = self._blocks.setdefault(key, block)
        return block

    def _traced(
        self,
        block: Callable[..., tracing.Flattened],
        avals: Sequence[Aval],
        in_axes: Sequence[Axes],
        own: Sequence[str],
        free: Sequence[str],
    ) -> tuple[Jaxpr, PyTree, AbstractMesh]:
        """What a block computes, the structure of its result, and the mesh it sees.

        Mesh axes that no array names are left to maps inside.
        """
        mesh, named = self.options.mesh, self._named_axes()
        manual: tuple[str, ...] = ()
        if self.options.lowering == "manual":
            manual = tuple(name for name in free if name in named) or tuple(free)
        axes: dict[Any, int] = {
            name: mesh.shape[name] for name in own if name not in manual
        }
        if not manual:
            axes |= {tracing.MeshAxisMarker(name): 1 for name in named}

        def trace(fun: Callable[..., Any], *args: Value) -> tuple[Any, Any]:
            env = list(axes.items())
            traced: Any = jax.make_jaxpr(fun, axis_env=env, return_shape=True)(*args)
            return traced

        found: list[Any] = []

        def look(*blocks: Value) -> tuple[()]:
            closed, out = trace(block, *blocks)
            tracing.check_constants(closed.consts)
            if consts := closed.consts:

                def run(*args: Value) -> list[Any]:
                    given, rest = args[: len(consts)], args[len(consts) :]
                    return list(jax.core.eval_jaxpr(jaxpr, given, *rest))

                jaxpr = closed.jaxpr
                closed, _ = trace(run, *consts, *blocks)
            found.extend((closed.jaxpr, out.tree, jax.sharding.get_abstract_mesh()))
            return ()

        run: Callable[..., Any] = look
        if manual:
            run = _shard_mapped(mesh, look, in_axes, (), manual)
        else:
            avals = [
                _block_aval(mesh, *each) for each in zip(avals, in_axes, strict=True)
            ]
        with (
            _on(mesh, bool(manual)),
            bound_axes(axes),  # JAX may check the jaxpr afterwards.
            tracing.names_said(*mesh.axis_names),
        ):
            jax.eval_shape(run, *map(without_sharding, avals))
        jaxpr, out_tree, seen = found
        return jaxpr, out_tree, seen

    def _check_results(
        self,
        jaxpr: Jaxpr,
        in_axes: Sequence[Axes],
        out_axes: Sequence[Axes],
        out_tree: TreeDef,
        own: Sequence[str],
        seen: AbstractMesh,
    ) -> None:
        """Refuses results that differ along mesh axes that their axes do not name."""
        sizes = {name: self.options.mesh.shape[name] for name in own}
        used = _axes_used(jaxpr)
        constants = (None,) * (len(jaxpr.invars) - len(in_axes))
        jaxpr = without_custom_partitioning(tile_collectives(jaxpr))
        for name, size in sizes.items():
            dims = tuple(0 if name in axes else None for axes in in_axes)
            if all(name in axes for axes in out_axes) or not (
                name in used or 0 in dims
            ):
                continue
            with jax.sharding.use_abstract_mesh(seen), bound_axes(sizes):
                differs = tracing.batched_results(
                    jaxpr, tracing.Batch(name, size), constants + dims
                )
            bad = [
                k for k, axes in enumerate(out_axes) if differs[k] and name not in axes
            ]
            if bad:
                names = trees.result_names(out_tree)
                listed = trees.bullets([f"{names[k]}: {out_axes[k]}" for k in bad])
                raise ValueError(
                    f"mesh_map out_axes do not name mesh axis {name!r}, along which "
                    f"these results of {self.name} can differ:{listed}\nName it with "
                    "the dimension that it cuts, or combine the blocks with a "
                    f"collective over it, such as jax.lax.pmean(x, {name!r})."
                )

    def bind(self, args: Args, kwargs: Kwargs) -> PyTree:
        arguments = Arguments.of(args, kwargs)
        if self.across_processes() and not tracing.inside_map():
            call = self.infer_params(args, kwargs)
            leaves = as_global(arguments.leaves, call.shardings.operands)
            args, kwargs = arguments.with_leaves(leaves)
        return self._part(*args, **kwargs)

    @functools.cached_property
    def _part(self) -> jax.stages.Wrapped:
        """What adds the map to whatever is being traced: JAX keeps its traces."""

        def run(*args: PyTree, **kwargs: PyTree) -> PyTree:
            leaves = Arguments.of(args, kwargs).leaves
            return self.bind_call(self.infer_params(args, kwargs), leaves)

        caches.described_like(run, self.fun(), self.name)
        static = self.options.static_argnums
        return jax.jit(run, static_argnums=static, static_argnames=())

    def bind_call(self, call: MeshCall, leaves: Sequence[Value]) -> PyTree:
        run = functools.partial(_bound if call.manual_axes else _vectorized, call)
        operands = list(map(explicit_sharding.drop_sharding, leaves))
        if context.config_value("jax_disable_jit"):
            with jax.disable_jit(False):
                results = jax.jit(run)(*operands)
        else:
            results = run(*operands)
        if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
            results = [
                explicit_sharding.sharding_type_p.bind(result, sharding=None)
                for result in results
            ]
        return jax.tree.unflatten(call.out_tree, results)

    def agree(self, call: MeshCall) -> None:
        operands = ", ".join(aval.str_short() for aval in call.in_avals)
        agreement.agree(
            call.mesh,
            self._named(),
            lambda: (
                f"{self.name}, mesh {dict(call.mesh.shape)}, arguments ({operands}), "
                f"in_axes {call.in_axes}, out_axes {call.out_axes}, operations "
                f"{agreement.operations(call.jaxpr)}"
            ),
        )

    def across_processes(self) -> bool:
        devices = _devices_of(self.options.mesh)
        return bool(devices) and processes.several(devices)

    def has_other_devices(self, args: Args, kwargs: Kwargs) -> bool:
        devices = _devices_of(self.options.mesh)
        return bool(devices) and devices != contexts.mesh_devices()

    def in_axes(self, arguments: Arguments) -> list[Axes]:
        """The axes of each leaf: of what is passed by keyword there are none."""
        prefix, argnums = self.options.in_axes, arguments.argnums
        if isinstance(prefix, tuple) and len(prefix) == arguments.num_positional:
            prefix = tuple(prefix[k] for k in argnums)
        positional, keywords = arguments.in_tree.children()
        axes = trees.broadcast_axes(
            "in_axes", prefix, positional, "the arguments", _is_axes, caller="mesh_map"
        )
        return [*axes, *({} for _ in range(keywords.num_leaves))]

    def out_axes(self, out: PyTree) -> list[Axes]:
        """The axes of each leaf of a result like ``out``."""
        prefix = self.options.out_axes
        return list(
            trees.broadcast_axes(
                "out_axes", prefix, out, "the result", _is_axes, caller="mesh_map"
            )
        )


def _check_in_axes(
    all_axes: Sequence[Axes],
    avals: Sequence[Aval],
    mesh: AnyMesh,
    names: Callable[[], list[str]],
    args: PyTree,
) -> None:
    """Refuses dimensions that an argument does not have, or that do not divide."""
    problems = []
    for k, (aval, axes) in enumerate(zip(avals, all_axes, strict=True)):
        for dimension, mesh_axes in enumerate(_cuts(axes, aval.ndim)):
            count = math.prod(mesh.shape[name] for name in mesh_axes)
            if aval.shape[dimension] % count:
                what = (
                    f"dimension {dimension} of size {aval.shape[dimension]} does not "
                    f"divide among the {count} devices along {mesh_axes}"
                )
                problems.append((k, aval, what))
        if (highest := max(axes.values(), default=-1)) >= aval.ndim:
            what = f"it has no dimension {highest}, which {axes} names"
            problems.append((k, aval, what))
    if problems:
        paths = names()
        listed = trees.bullets(
            [f"{paths[k]} is {aval.str_short()}: {what}" for k, aval, what in problems]
        )
        raise ValueError(
            f"mesh_map cannot cut these arguments over the mesh:{listed}\nCut other "
            "dimensions, or pad them to a multiple."
            + trees.advice_on_lists(paths, args)
        )


def _check_out_axes(
    out_axes: Sequence[Axes], blocks: Sequence[Aval], out_tree: TreeDef
) -> None:
    for k, (axes, aval) in enumerate(zip(out_axes, blocks, strict=True)):
        if max(axes.values(), default=-1) >= aval.ndim:
            raise ValueError(
                f"mesh_map out_axes {axes} names a dimension that "
                f"{trees.result_names(out_tree)[k]} of shape {aval.shape} does not "
                "have."
            )


def _axes_used(jaxpr: Jaxpr) -> set[Hashable]:
    """The names that collectives go over, in what equations hold too."""
    return {name for each in jaxprs(jaxpr) for name in axes_used(each.effects)}


def _communicates(jaxpr: Jaxpr) -> bool:
    """Whether blocks talk to each other, or something inside them is cut too."""
    return bool(
        has_collectives(jaxpr)
        or inner_maps(jaxpr)
        or constraints_in(jaxpr)
        or axes_used_inside(jaxpr)
    )


# What is bound


def _on(mesh: AnyMesh, is_manual: bool) -> AbstractContextManager[Any]:
    """Where this is entered, `jax.shard_map` and constraints are on ``mesh``.

    Inside a `jax.shard_map` they are on its mesh already.
    """
    if jax.sharding.get_abstract_mesh().manual_axes:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(NO_MESH if is_manual else mesh.abstract_mesh)


def _shard_mapped(
    mesh: AnyMesh,
    block: Callable[..., Any],
    in_axes: Sequence[Axes],
    out_specs: PyTree,
    manual_axes: Iterable[str],
) -> Callable[..., Any]:
    is_inside = bool(jax.sharding.get_abstract_mesh().manual_axes)
    return jax.shard_map(
        block,
        mesh=None if is_inside else mesh,
        in_specs=tuple(map(_partition_spec, in_axes)),
        out_specs=out_specs,
        axis_names=set(manual_axes),
        check_vma=False,
    )


def _bound(call: MeshCall, *leaves: Value) -> list[Any]:
    """`jax.shard_map` of the block."""

    def block(*blocks: Value) -> list[Any]:
        run = call.run_block
        for name in call.named_axes:
            axis = tracing.Batch(name, call.mesh.shape[name])
            run = axis.vectorize_function(run, (None,) * len(blocks), None)
        return run(*blocks)

    with _on(call.mesh, True):
        return _shard_mapped(
            call.mesh,
            block,
            call.in_axes,
            list(map(_partition_spec, call.out_axes)),
            call.manual_axes,
        )(*leaves)


def _vectorized(call: MeshCall, *leaves: Value) -> list[Any]:
    """The block under `jax.vmap` along each mesh axis, for the partitioner to cut."""
    sizes, names = call.mesh.shape, call.named_axes
    around = jax.sharding.get_abstract_mesh()
    alone = bool(names) and not (around.manual_axes or tracing.inside_map())

    def cut(value: Value, sharding: NamedSharding) -> Any:
        return jax.lax.with_sharding_constraint(value, sharding) if alone else value

    def tiled(leaf: Value, sharding: NamedSharding, aval: Aval, axes: Axes) -> Any:
        block = iter(_block_aval(call.mesh, aval, axes).shape)
        shape = [sizes[name] if name else next(block) for name in _layout(axes, aval)]
        return jnp.reshape(cut(leaf, sharding), shape)

    tiles = map(tiled, leaves, call.shardings.operands, call.in_avals, call.in_axes)
    ins = list(map(_layout, call.in_axes, call.in_avals))
    outs = list(map(_layout, call.out_axes, call.out_blocks))
    levels = [(name, _take_out(ins, name), _take_out(outs, name)) for name in names]
    run = call.run_block
    for name, in_dims, out_dims in reversed(levels):
        run = _along(tracing.Batch(name, sizes[name]), run, in_dims, out_dims)
    with _on(call.mesh, False):
        results = run(*tiles)
    _, whole = call.global_avals
    return [
        cut(jnp.reshape(result, aval.shape), sharding)
        for result, aval, sharding in zip(
            results, whole, call.shardings.results, strict=True
        )
    ]


def _layout(axes: Axes, aval: Aval) -> list[str | None]:
    """The dimensions of an array whose blocks have their mesh axes in front of them.

    None stands for a dimension of the block.
    """
    return [name for names in _cuts(axes, aval.ndim) for name in (*names, None)]


def _take_out(layouts: Sequence[list[str | None]], name: str) -> list[int | None]:
    """Where each layout has a mesh axis, which it then has no longer."""
    dims = [each.index(name) if name in each else None for each in layouts]
    for layout, dim in zip(layouts, dims, strict=True):
        if dim is not None:
            del layout[dim]
    return dims


def _along(
    axis: tracing.Batch,
    run: Callable[..., list[Any]],
    in_dims: Sequence[int | None],
    out_dims: Sequence[int | None],
) -> Callable[..., list[Any]]:
    """``run``, vectorized along one mesh axis."""
    walks = (
        [tracing.MeshAxisMarker(str(axis.name))]
        if {*in_dims, *out_dims} - {None}
        else []
    )

    def mapped(*args: Value) -> list[Any]:
        avals = list(map(remove_axis, map(jax.typeof, args), in_dims))
        seen = jax.sharding.get_abstract_mesh()
        body = tracing.trace_body(run, avals, axis.name, axis.size, walks, seen)
        dims = [None] * len(body.constants) + list(in_dims)
        jaxpr = without_custom_partitioning(body.jaxpr)
        run_all = axis.vectorize(jaxpr, dims, list(out_dims))
        return list(run_all(*body.constants, *args))

    return mapped


# The public function


class MeshMappedFunction(Mapped[P, R]):
    """A function mapped over the blocks of a mesh; what `mesh_map` returns."""

    _kind = MeshPrograms

    def shardings(
        self, args: tuple[PyTree, ...], out: PyTree
    ) -> tuple[list[NamedSharding], list[NamedSharding]]:
        """The shardings of the arguments' leaves and of those of a result like ``out``.

        What is passed by keyword is not among them.
        """
        programs: MeshPrograms = self._programs
        mesh = programs.options.mesh
        in_axes = programs.in_axes(Arguments.of(wrap_statics(args, self._static), {}))
        return (
            [NamedSharding(mesh, _partition_spec(axes)) for axes in in_axes],
            [
                NamedSharding(mesh, _partition_spec(axes))
                for axes in programs.out_axes(out)
            ],
        )


class Decorator(Protocol):
    """What makes such functions, with its options chosen."""

    def __call__(self, fun: Callable[P, R], /) -> MeshMappedFunction[P, R]: ...


@overload
def mesh_map(
    fun: Callable[P, R],
    mesh: Mesh,
    in_axes: PyTree,
    out_axes: PyTree,
    *,
    lowering: Lowering = "manual",
    donate_argnums: int | Iterable[int] = (),
    static_argnums: int | Iterable[int] = (),
) -> MeshMappedFunction[P, R]: ...


@overload
def mesh_map(
    fun: None = None,
    *,
    mesh: Mesh,
    in_axes: PyTree,
    out_axes: PyTree,
    lowering: Lowering = "manual",
    donate_argnums: int | Iterable[int] = (),
    static_argnums: int | Iterable[int] = (),
) -> Decorator: ...


def mesh_map(
    fun: Callable[..., Any] | None = None,
    mesh: Mesh | None = None,
    in_axes: PyTree = None,
    out_axes: PyTree = None,
    *,
    lowering: Lowering = "manual",
    donate_argnums: int | Iterable[int] = (),
    static_argnums: int | Iterable[int] = (),
) -> Any:
    """Maps a function over blocks of arrays, one block for each device of a mesh.

    Each leaf of ``in_axes`` and ``out_axes`` is a dict from mesh axis names to array
    dimensions. A dimension that a mesh axis names is cut among the devices along it;
    the function gets the block, with all its dimensions. Several mesh axes on one
    dimension cut it major to minor, in the order of the dict. Along mesh axes that are
    not named, all devices have the same block. Collectives go over mesh axis names.

    The idea is `jax.shard_map`'s, and its elder xmap's with anonymous blocks; it is
    made of maps as `spmap` makes them, one inside the other.

    Args:
      fun: takes and gives pytrees of blocks. Left out, ``mesh_map(...)`` is a
        decorator.
      mesh: the devices.
      in_axes: a pytree prefix of the tuple of arguments with dicts as leaves, such as
        ``({"data": 0}, {})``, ``{}`` for what every device gets whole, as it does what
        is passed by keyword. Static arguments may have an entry or none.
      out_axes: the same for the result.
      lowering: as for `spmap`. Default ``"manual"``.
      donate_argnums: as for `spmap`.
      static_argnums: positions of arguments that are compile-time constants, as for
        `spmap`.

    Returns:
      The mapped function, with ``lower`` and ``trace`` as `jax.jit` gives them, and
      ``explain``.

    Raises:
      TypeError: ``fun`` is not callable, no mesh or axes, or axes that are no dicts of
        names and dimensions. When called: an argument that JAX cannot compute with.
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
    if fun is None:
        return WithOptions(
            mesh_map,
            mesh=mesh,
            in_axes=in_axes,
            out_axes=out_axes,
            lowering=lowering,
            donate_argnums=donate_argnums,
            static_argnums=static_argnums,
        )
    options.check_callable("mesh_map", fun)
    if mesh is None or in_axes is None or out_axes is None:
        raise TypeError(
            "mesh_map needs mesh, in_axes and out_axes, but got "
            f"mesh={mesh}, in_axes={in_axes} and out_axes={out_axes}. "
            "shardmap.make_mesh makes a mesh; axes of {} cut nothing."
        )
    options.check_mesh(mesh, "mesh_map")
    _check_names("in_axes", in_axes, mesh)
    _check_names("out_axes", out_axes, mesh)
    if isinstance(in_axes, list):
        in_axes = tuple(in_axes)
    given_static = "static_argnums", static_argnums
    static, donated = options.positions("mesh_map", fun, given_static, donate_argnums)
    return MeshMappedFunction(
        fun,
        Options(
            mesh=auto_mesh(mesh),
            in_axes=in_axes,
            out_axes=out_axes,
            static_argnums=static,
            donate_argnums=donated,
            lowering=options.lowering(lowering, None, "mesh_map"),
        ),
    )
