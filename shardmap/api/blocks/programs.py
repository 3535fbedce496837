"""How `mesh_map` reads a call: blocks checked and traced, and maps bound for them.

Each mesh axis is one map over blocks. An array is reshaped so that a dimension cut
along mesh axes becomes the axes and, behind them, the block; then the axes are mapped,
one inside the other, all on the one mesh. Along an axis that cuts nothing, nothing is
mapped, but collectives know its name.
"""

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence

import jax

from shardmap._jax.stages import trace_as
from shardmap._jax.typechecks import bound_axes
from shardmap._jax.types import (
    AnyMesh,
    Aval,
    ClosedJaxpr,
    Jaxpr,
    PyTree,
    TreeDef,
    Value,
    aval_of,
    without_sharding,
)
from shardmap.api.blocks.axes import (
    Axes,
    devices_of,
    dimensions_of,
    from_blocks,
    is_axes,
    reshaped,
    scaled,
    to_blocks,
)
from shardmap.api.blocks.calls import Block, BlockCall, Options
from shardmap.api.calls import kept
from shardmap.api.calls.call import Arguments
from shardmap.api.calls.programs import Args, Kwargs, Programs
from shardmap.api.elements.options import Options as ElementOptions
from shardmap.api.elements.programs import ElementPrograms
from shardmap.arrays import processes, trees
from shardmap.arrays.process_local import as_global
from shardmap.map import contexts, tracing
from shardmap.map.collectives.split import has_collectives
from shardmap.map.constraint import constraints_in
from shardmap.map.layout import inner_maps
from shardmap.map.primitives.shard_maps import axes_used_inside


class _AxisPrograms(ElementPrograms):
    """The map over one mesh axis, whose errors speak of `mesh_map`."""

    what = "mesh_map"

    def __init__(
        self,
        fun: Callable[..., list[Value]],
        options: ElementOptions,
        call: BlockCall,
    ) -> None:
        super().__init__(fun, options)
        self._results = trees.result_names(call.out_tree)
        self._result_axes = call.out_axes

    def unmapped(self, bad: Sequence[int], out_tree: TreeDef) -> ValueError:
        axis = self.options.axis_name
        listed = trees.bullets(
            [f"{self._results[k]}: {self._result_axes[k]}" for k in bad]
        )
        return ValueError(
            f"mesh_map out_axes do not name mesh axis {axis!r}, along which these "
            f"results of {self.name} can differ:{listed}\nName it with the dimension "
            "that it cuts, or combine the blocks with a collective over it, such as "
            f"jax.lax.pmean(x, {axis!r})."
        )


class BlockPrograms(Programs[BlockCall, Options]):
    """All that is made for one function that `mesh_map` maps."""

    what = "mesh_map"

    def __init__(self, fun: Callable[..., object], options: Options) -> None:
        super().__init__(fun, options)
        self._blocks: kept.Kept[Block] = kept.Kept()
        self._maps: kept.Kept[Callable[..., list[Value]]] = kept.Kept()

    def read(
        self,
        args: Args,
        kwargs: Kwargs,
        are_global: Sequence[bool] | None = None,
        alone: bool = True,
    ) -> BlockCall:
        arguments = Arguments.of(args, kwargs)
        mesh = self.options.mesh
        dynamic = [args[k] for k in arguments.argnums]

        def names() -> list[str]:
            return trees.leaf_names(self.fun(), arguments.argnums, dynamic, kwargs)

        avals = self.leaf_avals(arguments.leaves, names)
        in_axes = self.in_axes(arguments)
        _check_axes(in_axes, avals, mesh, names, (dynamic, kwargs))

        block = functools.partial(scaled, mesh, operator.floordiv)
        traced, out_shape = self._traced(
            self._block(arguments, args, kwargs), list(map(block, avals, in_axes))
        )
        out_axes = self.out_axes(out_shape)
        out_blocks = [without_sharding(aval_of(var)) for var in traced.jaxpr.outvars]
        out_tree = jax.tree.structure(out_shape)
        _check_out_axes(out_axes, out_blocks, out_tree)
        used = {name for axes in [*in_axes, *out_axes] for name in axes}
        used_inside = axes_used_inside(traced)
        return BlockCall(
            arguments,
            avals,
            out_tree,
            mesh,
            in_axes,
            out_axes,
            out_blocks,
            tuple(
                name
                for name in mesh.axis_names
                if name in used or (name not in used_inside and _is_free(name))
            ),
            self.across_processes(),
            self.options.lowering == "spmd" or _communicates(traced.jaxpr),
        )

    def _block(self, arguments: Arguments, args: Args, kwargs: Kwargs) -> Block:
        key = arguments.in_tree, arguments.statics
        block = self._blocks.get(key)
        if block is None:
            block = Block(self.fun, *key)
            static = arguments.static_argnums
            trace_as(block, self.what, self.fun(), args, kwargs, static)
            block = self._blocks.keep(key, block)
        return block

    def _traced(
        self, block: Block, avals: Sequence[Aval]
    ) -> tuple[ClosedJaxpr, PyTree]:
        """What the function does with one block, and the shapes of its results."""
        mesh = self.options.mesh
        with (
            bound_axes(mesh.shape),  # JAX may check the jaxpr afterwards.
            tracing.names_said(*mesh.axis_names),
        ):
            closed, out_shape = jax.make_jaxpr(
                block, axis_env=list(mesh.shape.items()), return_shape=True
            )(*map(without_sharding, avals))
        tracing.check_constants(closed.consts)
        return closed, out_shape

    def bind(self, args: Args, kwargs: Kwargs) -> PyTree:
        call = self.read(args, kwargs)
        leaves = call.arguments.leaves
        if call.across_processes and not tracing.inside_map():
            leaves = as_global(leaves, call.shardings.operands)
        return self.bind_call(call, leaves)

    def bind_call(self, call: BlockCall, leaves: Sequence[Value]) -> PyTree:
        """Reshapes, maps over one mesh axis inside the other, and reshapes back."""
        mesh, levels = call.mesh, call.levels
        results = self._mapped(call)(
            *(
                reshaped(to_blocks, leaf, axes, levels, mesh)
                for leaf, axes in zip(leaves, call.in_axes, strict=True)
            )
        )
        return jax.tree.unflatten(
            call.out_tree,
            [
                reshaped(from_blocks, result, axes, levels)
                for result, axes in zip(results, call.out_axes, strict=True)
            ],
        )

    def _mapped(self, call: BlockCall) -> Callable[..., list[Value]]:
        """The function of the leaves' blocks, mapped over one mesh axis after another.

        There is one for each kind of call, by which JAX finds its traces again.
        """
        used = {name for axes in [*call.in_axes, *call.out_axes] for name in axes}
        on_mesh = tuple(
            name in used or not tracing.is_bound(tracing.Walks(name))
            for name in call.levels
        )
        in_axes, out_axes = (
            tuple(tuple(axes.items()) for axes in all_axes)
            for all_axes in (call.in_axes, call.out_axes)
        )
        arguments = call.arguments
        key = (
            arguments.in_tree,
            arguments.statics,
            (in_axes, out_axes),
            (call.levels, on_mesh),
        )
        mapped = self._maps.get(key)
        if mapped is None:
            block = Block(self.fun, arguments.in_tree, arguments.statics)
            # On a mesh without axes there is no map to make arrays of numbers.
            mapped = block.leaves if call.levels else block.arrays
            levels = zip(reversed(call.levels), reversed(on_mesh), strict=True)
            for name, is_on_mesh in levels:
                mapped = self._mapped_once(mapped, name, is_on_mesh, call)
            mapped = self._maps.keep(key, mapped)
        return mapped

    def _mapped_once(
        self,
        fun: Callable[..., list[Value]],
        name: str,
        is_on_mesh: bool,
        call: BlockCall,
    ) -> Callable[..., list[Value]]:
        """``fun``, mapped over one mesh axis."""

        def named(*leaves: Value) -> list[Value]:
            return fun(*leaves)

        named.__name__ = self.name
        programs = _AxisPrograms(
            named,
            ElementOptions(
                axis_name=name,
                in_axes=tuple(0 if name in axes else None for axes in call.in_axes),
                out_axes=[0 if name in axes else None for axes in call.out_axes],
                axis_size=call.mesh.shape[name],
                mesh=call.mesh,
                mesh_axes=(name,) if is_on_mesh else (),
                lowering=self.options.lowering,
                kind="mesh_map",
            ),
            call,
        )

        @functools.wraps(named)  # And so holds it, which the programs do not.
        def mapped(*leaves: Value) -> list[Value]:
            results: list[Value] = programs.bind(leaves, {})
            return results

        return mapped

    def across_processes(self) -> bool:
        devices = devices_of(self.options.mesh)
        return bool(devices) and processes.several(devices)

    def has_other_devices(self, args: Args, kwargs: Kwargs) -> bool:
        return devices_of(self.options.mesh) != contexts.mesh_devices()

    def in_axes(self, arguments: Arguments) -> list[Axes]:
        """The axes of each leaf: of what is passed by keyword there are none."""
        prefix = self.options.in_axes
        argnums = arguments.argnums
        if isinstance(prefix, tuple) and len(prefix) == arguments.num_positional:
            prefix = tuple(prefix[k] for k in argnums)
        positional, keywords = arguments.in_tree.children()
        axes = trees.broadcast_axes(
            "in_axes", prefix, positional, "the arguments", is_axes, caller="mesh_map"
        )
        return [*axes, *({} for _ in range(keywords.num_leaves))]

    def out_axes(self, out: PyTree) -> list[Axes]:
        """The axes of each leaf of a result like ``out``."""
        return list(
            trees.broadcast_axes(
                "out_axes",
                self.options.out_axes,
                out,
                "the result",
                is_axes,
                caller="mesh_map",
            )
        )


def _check_axes(
    all_axes: Sequence[Axes],
    avals: Sequence[Aval],
    mesh: AnyMesh,
    names: Callable[[], list[str]],
    args: PyTree,
) -> None:
    """Refuses dimensions that an argument does not have, or that do not divide."""
    problems = []
    for k, (aval, axes) in enumerate(zip(avals, all_axes, strict=True)):
        for dimension, mesh_axes in enumerate(dimensions_of(axes, aval.ndim)):
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
    out_axes: Sequence[Mapping[str, int]], blocks: Sequence[Aval], out_tree: TreeDef
) -> None:
    for k, (axes, aval) in enumerate(zip(out_axes, blocks, strict=True)):
        if max(axes.values(), default=-1) >= aval.ndim:
            raise ValueError(
                f"mesh_map out_axes {axes} names a dimension that "
                f"{trees.result_names(out_tree)[k]} of shape {aval.shape} does not "
                "have."
            )


def _communicates(block: Jaxpr) -> bool:
    """Whether blocks talk to each other, or something inside them is cut too."""
    return bool(has_collectives(block) or inner_maps(block) or constraints_in(block))


def _is_free(name: str) -> bool:
    """Whether a mesh axis that no array names is the map's own to bind.

    It is not where collectives mean the map or the `jax.shard_map` around that walks
    the axis, and calls it so.
    """
    walked = tracing.is_bound(tracing.Walks(name)) or (
        name in jax.sharding.get_abstract_mesh().manual_axes
    )
    return not (walked and tracing.is_bound(name))
