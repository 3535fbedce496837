"""How `spmap` infers the parameters of a call and binds it."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from shardmap._jax import context
from shardmap._jax.effects import ORDERED_DEBUG_EFFECT
from shardmap._jax.types import (
    AnyMesh,
    Aval,
    Axes,
    Jaxpr,
    PyTree,
    Value,
    with_shape,
)
from shardmap.api import ambient_mesh
from shardmap.api.arguments import Arguments
from shardmap.api.options import SpmapOptions
from shardmap.api.programs import Args, Call, Kwargs, ProcessLocal, Programs
from shardmap.arrays import array_likes, processes, trees
from shardmap.arrays.process_local import (
    parts_along,
    shardings_along,
    which_are_global,
)
from shardmap.map import contexts, tracing
from shardmap.map.batch import Batch, batched_results
from shardmap.map.layout import (
    MapShardings,
    map_mesh,
    map_shardings,
)
from shardmap.map.lowering import spmap_p
from shardmap.map.mesh_compatibility import check_inside
from shardmap.map.primitives.map_primitive import insert_axis, remove_axis
from shardmap.map.primitives.params import MapParams, MeshPlacement
from shardmap.units import Auto


class ElementPrograms(Programs):
    """The programs of one function under `spmap`."""

    what = "spmap"
    static_parameter = "static_broadcasted_argnums"
    options: SpmapOptions

    def infer_params(self, arguments: Arguments, alone: bool = True) -> Call:
        options = self.options
        names = functools.partial(self.leaf_names, arguments)
        avals = self.leaf_avals(arguments)
        in_axes = _from_front(self._in_axes(arguments), avals, names, arguments)
        are_global = self._are_global(arguments)
        is_local = are_global is not None and _are_process_local(
            are_global, in_axes, names
        )
        axis_size = self._axis_size(in_axes, avals, names, is_local)
        body = self._body(self.flat_function(arguments), in_axes, avals, axis_size)
        is_auto = isinstance(options.batch_size, Auto)
        params = MapParams(
            axis_name=options.axis_name,
            axis_size=axis_size,
            in_axes=(None,) * len(body.constants) + in_axes,
            out_axes=self._out_axes(body, in_axes, axis_size),
            call_jaxpr=body.jaxpr,
            name=self.name,
            batch_size=None if is_auto else cast(int | None, options.batch_size),
            lowering=options.lowering,
        ).on(*self._on_devices(axis_size, body.jaxpr, alone))
        if is_auto:
            params = _with_batch_that_fits(params, cast(int, options.memory))
        if params.mesh is not None and not tracing.inside_map():
            check_inside(params)
        call = Call(
            arguments,
            avals,
            body.out_tree,
            [
                insert_axis(var.aval, axis_size, axis)
                for var, axis in zip(body.jaxpr.outvars, params.out_axes, strict=True)
            ],
            params.mesh,
            body.jaxpr,
            functools.partial(_bind, body.constants, params),
            functools.partial(_leaf_shardings, body.constants, params),
        )
        if are_global is None or not call.devices:
            return call
        return _with_process_local(call, params, in_axes, is_local)

    def bind(self, args: Args, kwargs: Kwargs) -> PyTree:
        arguments = self.read(args, kwargs)
        # Without jit no map is a part of another program.
        alone = bool(context.config_value("jax_disable_jit"))
        call = self.infer_params(arguments, alone)
        if call.process_local is not None:
            if call.process_local.results is None:
                self.agree(call)
            elif context.nothing_is_traced():
                with jax.disable_jit(False):
                    return self.run(args, kwargs)[0]
            else:
                raise ValueError(
                    f"{self.full_name} is transformed with process-local data, which "
                    "only a call of it takes. Transform what it maps, or make global "
                    "arrays with jax.make_array_from_process_local_data and put the "
                    "transformation under jax.jit, such as jax.jit(jax.grad(loss))."
                )
        return call.result(arguments.leaves)

    # What the parameters are inferred from

    def _are_global(self, arguments: Arguments) -> list[bool] | None:
        """Which leaves are global arrays, and not process-local data.

        None where there is no process-local data: in one process, and while JAX traces.
        """
        if tracing.inside_map() or not self.across_processes():
            return None
        return which_are_global(arguments.leaves)

    def _in_axes(self, arguments: Arguments) -> Sequence[int | None]:
        """The mapped axis of each leaf, as the user gave it."""
        static, count = self.options.static_argnums, arguments.num_positional
        if static and max(static) >= count:
            raise ValueError(
                f"spmapped function has static_broadcasted_argnums={static} but was "
                f"called with only {count} positional argument"
                f"{'' if count == 1 else 's'}. All static broadcasted arguments must "
                "be passed positionally."
            )
        prefix = self.options.in_axes
        if isinstance(prefix, tuple) and len(prefix) != count:
            raise ValueError(
                f"spmap in_axes has {len(prefix)} entries, one for each positional "
                f"argument, but {self.name} was called with {count}."
                + arguments.advice_on_keywords()
            )
        in_axes = self.broadcast_in("in_axes", prefix, arguments, 0)
        _refuse_sparse("in_axes", in_axes, arguments.in_tree)
        return in_axes

    def _body(
        self,
        element: Callable[..., tracing.Flattened],
        in_axes: Axes,
        avals: Sequence[Aval],
        axis_size: int,
    ) -> tracing.Body:
        """Traces the function of one element."""
        if context.config_value("jax_disable_jit"):
            # A new object, so that JAX calls the function each time.
            element = functools.partial(element)
        around = jax.sharding.get_abstract_mesh()
        try:
            return tracing.trace_body(
                element,
                list(map(remove_axis, avals, in_axes)),
                self.options.axis_name,
                axis_size,
                ambient_mesh.axis_env_markers(self.name, self.options),
                ambient_mesh.same_mesh(self.options, around),
            )
        except (RuntimeError, ValueError) as error:
            ambient_mesh.explain_meshes(self.name, around, error)
            raise

    def across_processes(self) -> bool:
        """Whether the map may run on devices of more than this process."""
        if jax.process_count(self.options.backend) == 1:
            return False
        return processes.several(self.devices())

    def devices(self) -> list[jax.Device]:
        return ambient_mesh.devices_of(self.options)

    def joins_mesh(self) -> bool:
        return not self.across_processes() and super().joins_mesh()

    def _on_devices(
        self, axis_size: int, call_jaxpr: Jaxpr, alone: bool
    ) -> tuple[AnyMesh | None, MeshPlacement | None]:
        """The mesh, and the placement of the map on it."""
        mesh, mesh_axes = self.options.mesh, self.options.mesh_axes
        nowhere = None, None
        if jax.sharding.get_abstract_mesh().manual_axes:
            ambient_mesh.check_in_shard_map(self.name, self.options)
            if mesh is None:
                return nowhere
        else:
            contexts.check_devices(self.full_name, self.devices())
        if mesh is not None:
            contexts.check_mesh(self.full_name, cast(Mesh, mesh))
            _refuse_ordered_debug(self.full_name, call_jaxpr, mesh)
            return mesh, MeshPlacement(mesh_axes or (), ())
        if tracing.inside_map():
            return nowhere
        mesh, placement = map_mesh(
            self.options.axis_name,
            axis_size,
            call_jaxpr,
            self.devices(),
            use_all_devices=not alone,
        )
        contexts.check_mesh(self.full_name, mesh)
        _refuse_ordered_debug(self.full_name, call_jaxpr, mesh)
        return mesh, placement

    def _axis_size(
        self,
        in_axes: Axes,
        avals: Sequence[Aval],
        names: Callable[[], list[str]],
        is_process_local: bool,
    ) -> int:
        """The number of elements, on all processes."""
        wanted, mesh = self.options.axis_size, cast(Mesh | None, self.options.mesh)
        if not is_process_local:
            return _mapped_size(in_axes, avals, names, wanted)
        mesh_axes = self.options.mesh_axes or ()
        parts = len({device.process_index for device in self.devices()})
        if mesh is not None:
            parts = parts_along(mesh, mesh_axes)
        if any(axis is not None for axis in in_axes) or wanted is None:
            own = _mapped_size(in_axes, avals, names, None)
        else:
            own = wanted // parts
        divisor = math.prod(mesh.shape[n] for n in mesh_axes) if mesh else parts
        return _check_elements(self.name, own, parts, wanted, divisor)

    def _out_axes(self, body: tracing.Body, in_axes: Axes, axis_size: int) -> Axes:
        avals = [var.aval for var in body.jaxpr.outvars]
        given = self.broadcast_out("out_axes", self.options.out_axes, body.out_tree)
        _refuse_sparse("out_axes", given, body.out_tree)
        out_axes = _out_axes_from_front(given, avals)
        if None in out_axes:
            batch = Batch(self.options.axis_name, axis_size)
            self._check_unmapped(out_axes, body, in_axes, batch)
        return out_axes

    def _check_unmapped(
        self, out_axes: Axes, body: tracing.Body, in_axes: Axes, batch: Batch
    ) -> None:
        """Checks that results without the mapped axis are equal on all elements."""
        dims = (None,) * len(body.constants) + tuple(
            None if axis is None else 0 for axis in in_axes
        )
        differs = batched_results(body.jaxpr, batch, dims)
        bad = [
            k
            for k, (axis, differ) in enumerate(zip(out_axes, differs, strict=True))
            if axis is None and differ
        ]
        if bad:
            names = trees.result_names(body.out_tree)
            raise UnmappedResultsDiffer(
                "spmap has mapped output but out_axes is None: these results of "
                f"{self.name} can differ between the elements of the axis:"
                f"{trees.bullets([names[k] for k in bad])}\nCombine them with a "
                "collective over the axis, such as jax.lax.pmean, or give out_axes a "
                "position for the mapped axis."
            )


class UnmappedResultsDiffer(ValueError):
    """A result differs between elements, though its ``out_axes`` is None."""


def _with_batch_that_fits(params: MapParams, memory: int) -> MapParams:
    from shardmap.planning.inside.batch_size import batch_that_fits

    return dataclasses.replace(params, batch_size=batch_that_fits(params, memory))


def _leaf_shardings(constants: Sequence[Value], params: MapParams) -> MapShardings:
    """The shardings of the leaves, which are operands after the constants."""
    operands, results = map_shardings(params)
    return MapShardings(operands[len(constants) :], results)


def _bind(
    constants: Sequence[Value], params: MapParams, leaves: Sequence[Value]
) -> list[Any]:
    """Binds the map to the constants and the leaves, array-likes as arrays."""
    operands = list(leaves)
    if which := [k for k, x in enumerate(leaves) if array_likes.is_array_like(x)]:
        here = SingleDeviceSharding(jax.local_devices()[0])
        shardings: Sequence[Sharding] = [here] * len(leaves)
        if params.mesh is not None:
            shardings = _leaf_shardings(constants, params).operands
        with jax.ensure_compile_time_eval():
            for k in which:
                operands[k] = array_likes.lay_out(leaves[k], shardings[k])
    return spmap_p.bind(*constants, *operands, **params.as_dict())


def _with_process_local(
    call: Call, params: MapParams, in_axes: Axes, is_local: bool
) -> Call:
    """A call on devices of several processes.

    Args:
      call: the call, with the avals that this process passes.
      params: of the map's equation.
      in_axes: the mapped axis of each leaf.
      is_local: whether the leaves are this process's part of longer global arrays.
    """
    assert call.shardings is not None
    parts = parts_along(cast(Mesh, params.mesh), params.mesh_axes or ())
    operands, results = (
        [shardings_along(s, axis, parts) for s, axis in zip(each, axes, strict=True)]
        for each, axes in zip(call.shardings, (in_axes, params.out_axes), strict=True)
    )
    if not is_local:
        return dataclasses.replace(call, process_local=ProcessLocal(operands, None))
    in_avals = [
        with_shape(aval, each.global_shape(aval.shape))
        for each, aval in zip(operands, call.in_avals, strict=True)
    ]
    local = ProcessLocal(operands, results)
    return dataclasses.replace(call, in_avals=in_avals, process_local=local)


# Checks of mapped axes: errors name each bad leaf by its key path, with its shape


def _refuse_ordered_debug(who: str, call_jaxpr: Jaxpr, mesh: AnyMesh) -> None:
    """Refuses what JAX has on one device only, in its own words without a remedy."""
    if mesh.size > 1 and ORDERED_DEBUG_EFFECT in call_jaxpr.effects:
        raise ValueError(
            f"{who} calls jax.debug.print or jax.debug.callback with ordered=True, "
            f"which JAX has on one device only, but the map is for {mesh.size}. Use "
            "shardmap.tap_print, shardmap.tap or jax.experimental.io_callback with "
            "ordered=True, which are ordered on each device."
        )


def _refuse_sparse(
    option: str, axes: Sequence[int | None], tree: jax.tree_util.PyTreeDef
) -> None:
    """Refuses mapped sparse arrays, whose parts have an axis that they do not know."""
    for k, kind in trees.sparse_leaves(tree).items():
        if axes[k] is not None:
            raise ValueError(
                f"spmap {option} maps a sparse array, a {kind}, as the pytree of its "
                "parts, and each element would have the shape of the whole. Map its "
                f"parts, such as data and indices, and make a {kind} of them in the "
                "function, or use jax.vmap."
            )


def _from_front(
    axes: Sequence[int | None],
    avals: Sequence[Any],
    names: Callable[[], list[str]],
    arguments: Arguments,
) -> tuple[int | None, ...]:
    """Axes counted from the front.

    Raises:
      ValueError: an axis that its argument does not have.
    """
    bad = [
        k
        for k, (axis, aval) in enumerate(zip(axes, avals, strict=True))
        if axis is not None and not -aval.ndim <= axis < aval.ndim
    ]
    if bad:
        paths = names()
        listed = trees.bullets(
            [
                f"{paths[k]} is {avals[k].str_short()} (rank {avals[k].ndim}), "
                f"in_axes asks for axis {axes[k]}"
                for k in bad
            ]
        )
        raise ValueError(
            "spmap was requested to map its argument along an axis that it does not "
            f"have:{listed}\nGive None in in_axes for what every element should get "
            "whole." + arguments.advice_on_keywords() + arguments.advice_on_lists(bad)
        )
    return tuple(
        None if axis is None else axis % aval.ndim
        for axis, aval in zip(axes, avals, strict=True)
    )


def _out_axes_from_front(
    axes: Sequence[int | None], avals: Sequence[Any]
) -> tuple[int | None, ...]:
    """Negative axes counted from the front of the result with the mapped axis in it.

    Raises:
      ValueError: an axis beyond the result's rank.
    """
    for axis, aval in zip(axes, avals, strict=True):
        if axis is not None and not -aval.ndim - 1 <= axis <= aval.ndim:
            raise ValueError(
                f"spmap out_axes puts the mapped axis at {axis}, but the result is "
                f"{aval.str_short()}: with the mapped axis it has rank "
                f"{aval.ndim + 1}. Give an axis from {-aval.ndim - 1} to {aval.ndim}."
            )
    return tuple(
        None if axis is None else axis % (aval.ndim + 1)
        for axis, aval in zip(axes, avals, strict=True)
    )


def _mapped_size(
    axes: Sequence[int | None],
    avals: Sequence[Any],
    names: Callable[[], list[str]],
    axis_size: int | None,
) -> int:
    """The size of the mapped axis, which all mapped arguments share.

    Raises:
      ValueError: sizes that differ, a size that is a symbol of `jax.export`, or no
        mapped argument and no ``axis_size``.
    """
    sizes = [
        (k, aval.shape[axis])
        for k, (axis, aval) in enumerate(zip(axes, avals, strict=True))
        if axis is not None
    ]
    distinct = {size for _, size in sizes}
    if len(distinct) > 1:
        paths = names()
        listed = trees.bullets(
            [
                f"{paths[k]} is {avals[k].str_short()}, axis {axes[k]} has size {size}"
                for k, size in sizes
            ],
            [size for _, size in sizes],
        )
        raise ValueError(
            f"spmap got inconsistent sizes for array axes to be mapped:{listed}\n"
            "Give all of them the same size, or None in in_axes for what every "
            "element should get whole."
        )
    if not distinct:
        if axis_size is None:
            raise ValueError(
                "spmap wrapped function must be passed at least one argument "
                f"containing an array to map, but got {len(avals)} "
                f"array{'' if len(avals) == 1 else 's'}, none mapped. "
                "Give axis_size=n to map over n elements all the same."
            )
        return axis_size
    (size,) = distinct
    if not isinstance(size, int):
        raise ValueError(
            f"spmap maps {names()[sizes[0][0]]} along an axis of the symbolic size "
            f"{size}, but the number of elements decides where each one runs. Export "
            "the program for a number of them; other axes may have symbols."
        )
    if axis_size is not None and size != axis_size:
        raise ValueError(
            f"Specified axis_size {axis_size} doesn't match received axis_size {size} "
            f"of {names()[sizes[0][0]]}. Leave axis_size out, or give {size}."
        )
    return size


# Process-local data


def _are_process_local(
    are_global: Sequence[bool], in_axes: Axes, names: Callable[[], list[str]]
) -> bool:
    """Whether the call is with process-local data, and not with global arrays.

    Only mapped arguments count; others are equal in all processes.

    Raises:
      ValueError: names mapped arguments of both kinds.
    """
    mapped = [k for k, axis in enumerate(in_axes) if axis is not None]
    kinds = [are_global[k] for k in mapped or range(len(in_axes))]
    if mapped and len(set(kinds)) > 1:
        described = {True: "a global array", False: "process-local data"}
        listed = trees.bullets(
            [f"{names()[k]} is {described[are_global[k]]}" for k in mapped], kinds
        )
        raise ValueError(
            "spmap takes either global arrays, which are spread over all processes, or "
            f"process-local data, but these are mapped together:{listed}\n"
            "jax.make_array_from_process_local_data makes a global array of the latter."
        )
    return not any(kinds)


def _check_elements(
    name: str, own: int, parts: int, wanted: int | None, divisor: int
) -> int:
    """The number of elements on all processes.

    Args:
      name: the mapped function's, for errors.
      own: how many this process passes.
      parts: how many processes pass different ones.
      wanted: the ``axis_size`` that was asked for, if any.
      divisor: what the number has to be a multiple of.

    Raises:
      ValueError: there are none, or not as many as wanted, or no multiple.
    """
    if own == 0:
        raise ValueError(
            f"spmap of {name} over {parts} processes needs at least one element on "
            "each."
        )
    if wanted is not None and own * parts != wanted:
        raise ValueError(
            f"spmap got axis_size {wanted}, which counts the elements on all "
            f"processes, but {own} on each of {parts} are {own * parts}. Pass the "
            "elements of each process only, all processes equally many."
        )
    if own * parts % divisor:
        raise ValueError(
            f"spmap of {name}: {own} elements on each of {parts} processes do not "
            f"divide among the {divisor} devices of the mesh that share them. Pass a "
            "multiple, or global arrays."
        )
    return own * parts
