"""How `spmap` traces a call: the parameters of its map, and its checks."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
from jax.sharding import (
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from shardmap._jax import context
from shardmap._jax.types import (
    Aval,
    Axes,
    PyTree,
    Value,
)
from shardmap.api import over_processes
from shardmap.api.arguments import Arguments
from shardmap.api.programs import run_call
from shardmap.api.transformed import Args, Call, Kwargs, Transformed
from shardmap.arrays import array_likes, processes, trees
from shardmap.map import set_mesh, tracing
from shardmap.map.differing import differing_results
from shardmap.map.layout import (
    MapShardings,
    map_mesh,
    map_shardings,
)
from shardmap.map.lowering import spmap_p
from shardmap.map.mesh_compatibility import check_inside
from shardmap.map.primitives.map_primitive import MapParams, insert_axis, remove_axis
from shardmap.sharding.mesh import mesh_devices
from shardmap.units import Auto


class ElementMap(Transformed):
    """A function under `spmap`."""

    what = "spmap"
    static_parameter = "static_broadcasted_argnums"

    @staticmethod
    def is_leaf(value: Any) -> bool:
        return value is None  # Which pytrees take for an empty container.

    def trace_call(self, arguments: Arguments, is_top_level: bool = True) -> Call:
        avals: Sequence[Aval] = self.leaf_avals(arguments)
        in_axes = self._in_axes(arguments, avals)
        # While JAX traces there is no process-local data.
        is_called = not any(isinstance(x, jax.core.Tracer) for x in arguments.leaves)
        if not is_called or tracing.inside_map() or not self._is_across_processes():
            return self._trace(arguments, avals, in_axes, is_top_level)[0]
        avals, is_local = over_processes.global_avals(
            self, self._devices(), arguments, avals, in_axes
        )
        call, params = self._trace(arguments, avals, in_axes, is_top_level)
        return over_processes.of_process(call, params, in_axes, is_local)

    def bind(self, args: Args, kwargs: Kwargs) -> PyTree:
        arguments = self.read(args, kwargs)
        # Without jit no map is a part of another program.
        is_top_level = bool(context.config_value("jax_disable_jit"))
        call = self.trace_call(arguments, is_top_level)
        if call.process_local is not None and context.nothing_is_traced():
            with jax.disable_jit(False):
                return run_call(self, args, kwargs)[0]
        return call.result(arguments.leaves)

    def is_on_set_mesh(self) -> bool:
        return not self._is_across_processes() and set_mesh.is_on_mesh(self._devices())

    def _devices(self) -> list[jax.Device]:
        """The devices of its mesh, its own, those that are set, or all."""
        options = self.options
        if options.mesh is not None:
            return mesh_devices(options.mesh) or set_mesh.current_mesh_devices()
        if options.devices is not None:
            return list(options.devices)
        if options.backend is None and set_mesh.has_mesh():
            return set_mesh.current_mesh_devices()
        return processes.all_devices(options.backend)

    def _is_across_processes(self) -> bool:
        """Whether the map may run on devices of more than this process."""
        if jax.process_count(self.options.backend) == 1:
            return False
        return processes.spans_processes(self._devices())

    def _trace(
        self,
        arguments: Arguments,
        avals: Sequence[Aval],
        in_axes: Axes,
        is_top_level: bool,
    ) -> tuple[Call, MapParams]:
        """Traces a call of global arrays of these avals."""
        options = self.options
        axis_size = self._axis_size(arguments, avals, in_axes)
        element = self.flat_function(arguments)
        body = self._body(element, in_axes, avals, axis_size)
        is_auto = isinstance(options.batch_size, Auto)
        params = MapParams(
            axis_name=options.axis_name,
            axis_size=axis_size,
            in_axes=(None,) * len(body.constants) + in_axes,
            out_axes=self._out_axes(body, in_axes),
            call_jaxpr=body.jaxpr,
            name=self.name,
            batch_size=None if is_auto else cast(int | None, options.batch_size),
            lowering=options.lowering,
        )
        operands = [*avals, *map(jax.typeof, body.constants)]
        params = self._on_devices(params, is_top_level, operands)
        if is_auto:
            from shardmap.map.lowering.batch_size import batch_that_fits

            batch_size = batch_that_fits(params, cast(int, options.memory))
            params = dataclasses.replace(params, batch_size=batch_size)
        if params.mesh is not None and not tracing.inside_map():
            check_inside(params)
        # The types of its operands have said on how many devices it runs.
        is_typed = (
            not is_top_level
            and params.mesh is not None
            and options.mesh is None
            and params.mesh.size < len(self._devices())
        )
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
            functools.partial(_bind_map, body.constants, params, is_typed),
            functools.partial(_leaf_shardings, body.constants, params),
        )
        return call, params

    def _in_axes(self, arguments: Arguments, avals: Sequence[Aval]) -> Axes:
        """The mapped axis of each leaf."""
        static, count = self.options.static_argnums, arguments.num_positional
        if static and max(static) >= count:
            raise ValueError(
                f"{self.full_name} has static_broadcasted_argnums={static}, "
                f"but was called with {count} positional arguments. Pass all static "
                "ones by position."
            )
        prefix = self.options.in_axes
        if isinstance(prefix, tuple) and len(prefix) != count:
            raise ValueError(
                f"spmap in_axes has {len(prefix)} entries, one for each positional "
                f"argument, but {self.name} was called with {count}."
            )
        in_axes = self.broadcast_in("in_axes", prefix, arguments, 0)
        for k, (axis, aval) in enumerate(zip(in_axes, avals, strict=True)):
            if axis is not None and not -aval.ndim <= axis < aval.ndim:
                raise ValueError(
                    f"spmap was requested to map {self.leaf_names(arguments)[k]}, "
                    f"{aval.str_short()} of rank {aval.ndim}, along axis {axis}, which "
                    "it does not have. Give None in in_axes for what every element "
                    "should get whole; of a list, map numpy.stack(list)."
                )
        return tuple(
            None if axis is None else axis % aval.ndim
            for axis, aval in zip(in_axes, avals, strict=True)
        )

    def _axis_size(
        self, arguments: Arguments, avals: Sequence[Aval], in_axes: Axes
    ) -> int:
        """The size of the mapped axis, which all mapped arguments share."""
        axis_size: int | None = self.options.axis_size
        sizes = {
            k: aval.shape[axis]
            for k, (axis, aval) in enumerate(zip(in_axes, avals, strict=True))
            if axis is not None
        }
        if not sizes:
            if axis_size is None:
                raise ValueError(
                    "spmap wrapped function must be passed at least one argument "
                    f"containing an array to map, but {len(avals)} are not mapped. "
                    "Give axis_size=n to map over n elements all the same."
                )
            return axis_size
        (first, size), *others = sizes.items()
        for k, other in others:
            if other != size:
                paths = self.leaf_names(arguments)
                raise ValueError(
                    "spmap got inconsistent sizes for array axes to be mapped: "
                    f"{paths[first]}, {avals[first].str_short()}, has {size} at axis "
                    f"{in_axes[first]}, {paths[k]}, {avals[k].str_short()}, has "
                    f"{other} at axis {in_axes[k]}. Give None in in_axes for what is "
                    "not mapped."
                )
        if not isinstance(size, int):
            raise ValueError(
                f"spmap maps {self.leaf_names(arguments)[first]} along an axis of the "
                f"symbolic size {size}, but the number of elements decides where each "
                "one runs. Export the program for a number of them; other axes may "
                "have symbols."
            )
        if axis_size is not None and size != axis_size:
            raise ValueError(
                f"Specified axis_size {axis_size} doesn't match received axis_size "
                f"{size} of {self.leaf_names(arguments)[first]}. Leave axis_size out, "
                f"or give {size}."
            )
        return size

    def _body(
        self,
        element: Callable[..., trees.Flattened],
        in_axes: Axes,
        avals: Sequence[Aval],
        axis_size: int,
    ) -> tracing.Body:
        """Traces the function of one element."""
        if context.config_value("jax_disable_jit"):
            # A new object, so that JAX calls the function each time.
            element = functools.partial(element)
        return tracing.trace_body(
            element,
            list(map(remove_axis, avals, in_axes)),
            self.options.axis_name,
            axis_size,
            self._markers(),
            self._set_mesh(),
        )

    def _markers(self) -> list[tracing.DevicesMarker | tracing.MeshAxisMarker]:
        """What maps inside look up in the axis environment."""
        options = self.options
        known: list[tracing.DevicesMarker | tracing.MeshAxisMarker] = [
            tracing.MeshAxisMarker(mesh_axis) for mesh_axis in options.mesh_axes or ()
        ]
        devices = tracing.DevicesMarker(tuple(self._devices()))
        if not tracing.inside_map():
            return [*known, devices]
        is_elsewhere = options.devices is not None or options.backend is not None
        if is_elsewhere and not tracing.is_bound(devices):
            raise ValueError(
                f"{self.full_name} names the devices "
                f"{[device.id for device in devices.devices]}, but is inside a map on "
                "others, or in another order. Leave devices and backend out of the "
                "inner map."
            )
        return known

    def _set_mesh(self) -> AbstractMesh | None:
        """The mesh of the map, if it is that of `jax.set_mesh`."""
        around = jax.sharding.get_abstract_mesh()
        if self.options.mesh is None or around.empty:
            return None
        mesh: AbstractMesh = self.options.mesh.abstract_mesh
        return mesh if mesh.shape_tuple == around.shape_tuple else None

    def _on_devices(
        self, params: MapParams, is_top_level: bool, operands: Sequence[Aval]
    ) -> MapParams:
        """The map on its devices; inside another one, as it is."""
        options, name = self.options, self.full_name
        if jax.sharding.get_abstract_mesh().manual_axes:
            self._check_in_shard_map()
            if options.mesh is None:
                return params
        else:
            set_mesh.check_devices(name, self._devices())
        if options.mesh is not None:
            params = params.on(options.mesh, options.mesh_axes or ())
        elif tracing.inside_map():
            return params
        else:
            devices = self._devices()
            if not is_top_level:
                devices = devices[: self._typed_size(operands)]
            mesh, mesh_axes, inner_axes = map_mesh(
                params.axis_name,
                params.axis_size,
                params.call_jaxpr,
                devices,
                use_all_devices=not is_top_level,
            )
            params = params.on(mesh, mesh_axes, inner_axes)
        set_mesh.check_mesh(name, cast(Mesh, params.mesh))
        return params

    def _check_in_shard_map(self) -> None:
        """Checks the devices and mesh axes of a map inside `jax.shard_map`."""
        options, around = self.options, jax.sharding.get_abstract_mesh()
        is_elsewhere = options.devices is not None or options.backend is not None
        if options.mesh is not None:
            is_elsewhere = self._set_mesh() is None
        if is_elsewhere or set(options.mesh_axes or ()) & set(around.manual_axes):
            named = f"the devices {[device.id for device in self._devices()]}"
            if options.mesh is not None:
                named = f"mesh_axes={options.mesh_axes} of {dict(options.mesh.shape)}"
            raise ValueError(
                f"{self.full_name} is inside jax.shard_map over {around.manual_axes} "
                f"of a mesh {dict(around.shape)}, but names {named}. Leave that out, "
                "or name other axes of that mesh with mesh= and mesh_axes=."
            )

    def _typed_size(self, operands: Sequence[Aval]) -> int | None:
        """On how many devices, the first ones, a part of a program runs; None: on all.

        What a map of few elements returned is on the first devices only, and so is the
        program that it is an argument of. Its type tells how many those are.
        """
        options = self.options
        meshes = [aval.sharding.mesh for aval in operands]
        sizes = {mesh.size for mesh in meshes if not mesh.empty}
        if options.devices or options.backend or set_mesh.has_mesh():
            return None
        return sizes.pop() if len(sizes) == 1 else None

    def _out_axes(self, body: tracing.Body, in_axes: Axes) -> Axes:
        given = self.broadcast_out("out_axes", self.options.out_axes, body.out_tree)
        out_axes: list[int | None] = []
        for axis, var in zip(given, body.jaxpr.outvars, strict=True):
            rank = var.aval.ndim + 1
            if axis is not None and not -rank <= axis < rank:
                raise ValueError(
                    f"spmap out_axes puts the mapped axis at {axis}, but the result is "
                    f"{var.aval.str_short()}: with the mapped axis it has rank {rank}. "
                    f"Give an axis from {-rank} to {rank - 1}."
                )
            out_axes.append(None if axis is None else axis % rank)
        if None in out_axes:
            self._check_unmapped(out_axes, body, in_axes)
        return tuple(out_axes)

    def _check_unmapped(
        self, out_axes: Sequence[int | None], body: tracing.Body, in_axes: Axes
    ) -> None:
        """Checks that results without the mapped axis are equal on all elements."""
        constants = (False,) * len(body.constants)
        mapped = tuple(axis is not None for axis in in_axes)
        name = self.options.axis_name
        differs = differing_results(body.jaxpr, name, constants + mapped)
        for k, (axis, differ) in enumerate(zip(out_axes, differs, strict=True)):
            if axis is None and differ:
                raise UnmappedResultsDiffer(
                    "spmap has mapped output but out_axes is None: "
                    f"{trees.result_names(body.out_tree)[k]} of {self.name} "
                    "can differ between elements. Combine it with a collective such as "
                    "jax.lax.pmean, or give out_axes an axis."
                )


class UnmappedResultsDiffer(ValueError):
    """A result differs between elements, though its ``out_axes`` is None."""


def _leaf_shardings(constants: Sequence[Value], params: MapParams) -> MapShardings:
    """The shardings of the leaves, which are operands after the constants."""
    operands, results = map_shardings(params)
    return MapShardings(operands[len(constants) :], results)


def _bind_map(
    constants: Sequence[Value],
    params: MapParams,
    is_typed: bool,
    *leaves: Value,
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
                operands[k] = array_likes.device_put_array_like(leaves[k], shardings[k])
    results = spmap_p.bind(*constants, *operands, **params.as_dict())
    if is_typed:  # What follows in a program is on these devices, too.
        return [_typed(result, cast(Mesh, params.mesh)) for result in results]
    return results


def _typed(value: Value, mesh: Mesh) -> Any:
    """A value of a program that is being traced, with this mesh in its type."""
    aval = jax.typeof(value)
    if not aval.sharding.mesh.empty or aval.dtype == jax.dtypes.float0:
        return value
    spec = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * aval.ndim)
    return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, spec))
