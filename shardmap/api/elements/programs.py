"""How `spmap` reads and binds a call."""

import functools
from collections.abc import Callable, Sequence
from typing import cast

import jax
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from shardmap._jax import context
from shardmap._jax.types import Aval, Axes, Jaxpr, Params, PyTree, TreeDef, Value
from shardmap._lazy import ask
from shardmap.api.calls.call import Arguments, without_statics
from shardmap.api.calls.programs import Args, Kwargs, Programs
from shardmap.api.elements import ambient_mesh, axes
from shardmap.api.elements.calls import ElementCall, with_axis
from shardmap.api.elements.options import Options
from shardmap.arrays import array_likes, processes, trees
from shardmap.arrays.process_local import parts_along, which_are_global
from shardmap.map import agreement, contexts, tracing
from shardmap.map.layout import (
    MeshPlacement,
    check_inner_meshes,
    map_mesh,
    own_placement,
)
from shardmap.map.lowering import spmap_p
from shardmap.map.primitives import explicit_sharding
from shardmap.map.primitives.map_primitive import remove_axis
from shardmap.units import Auto


class ElementPrograms(Programs[ElementCall, Options]):
    """The programs of one function under `spmap`."""

    what = "spmap"
    static_parameter = "static_broadcasted_argnums"

    def infer_params(self, arguments: Arguments, alone: bool = True) -> ElementCall:
        options = self.options
        self._check_static_count(arguments.num_positional)
        positional, keywords = arguments.in_tree.children()
        in_axes = (
            trees.broadcast_axes(
                "in_axes",
                self._in_axes_prefix(arguments),
                positional,
                "the positional arguments",
            )
            + (0,) * keywords.num_leaves
        )

        def names() -> list[str]:
            return self.leaf_names(arguments)

        avals = self.leaf_avals(arguments)
        args, kwargs = arguments.with_leaves(arguments.leaves)
        in_axes = axes.normalize_in_axes(
            in_axes, avals, names, (without_statics(args), kwargs)
        )
        are_global = self._are_global(arguments)
        is_local = are_global is not None and axes.are_process_local(
            are_global, in_axes, names
        )
        axis_size = self._axis_size(in_axes, avals, names, is_local)
        body = self._body(self.flat_function(arguments), in_axes, avals, axis_size)
        params = {
            "axis_name": options.axis_name,
            "axis_size": axis_size,
            "in_axes": (None,) * len(body.constants) + in_axes,
            "out_axes": self._out_axes(body, in_axes, axis_size),
            "call_jaxpr": body.jaxpr,
            "name": self.name,
            "batch_size": options.batch_size,
            "lowering": options.lowering,
            **self._on_devices(axis_size, body.jaxpr, alone),
        }
        if isinstance(options.batch_size, Auto):
            fits = ask("batch_that_fits")(params, options.memory)
            params["batch_size"] = fits
        if params["mesh"] is not None and not tracing.inside_map():
            check_inner_meshes(params)
        out_avals = [
            with_axis(var.aval, axis, axis_size)
            for var, axis in zip(body.jaxpr.outvars, params["out_axes"], strict=True)
        ]
        return ElementCall(
            arguments,
            avals,
            body.out_tree,
            out_avals,
            params["mesh"],
            body,
            params,
            are_global is not None,
            is_local,
        )

    def _are_global(self, arguments: Arguments) -> list[bool] | None:
        """Which leaves are global arrays, and not process-local data.

        None where there is no process-local data: in one process, and while JAX traces.
        """
        if arguments.all_global or tracing.inside_map() or not self.across_processes():
            return None
        return which_are_global(arguments.leaves)

    def _check_static_count(self, count: int) -> None:
        static = self.options.static_argnums
        if static and max(static) >= count:
            raise ValueError(
                f"spmapped function has static_broadcasted_argnums={static} but was "
                f"called with only {count} positional argument"
                f"{'' if count == 1 else 's'}. All static broadcasted arguments must "
                "be passed positionally."
            )

    def _in_axes_prefix(self, arguments: Arguments) -> PyTree:
        """The ``in_axes`` of arguments that are not static."""
        prefix, count = self.options.in_axes, arguments.num_positional
        if isinstance(prefix, tuple) and len(prefix) != count:
            raise ValueError(
                f"spmap in_axes has {len(prefix)} entries, one for each positional "
                f"argument, but {self.name} was called with {count}. Arguments passed "
                "by keyword have none: they are always mapped along axis 0."
            )
        return arguments.given(prefix)

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

    def bind(self, args: Args, kwargs: Kwargs) -> PyTree:
        arguments = self._arguments(args, kwargs)
        # Without jit no map is a part of another program.
        alone = bool(context.config_value("jax_disable_jit"))
        call = self.infer_params(arguments, alone)
        if call.is_process_local:
            if context.nothing_is_traced():
                with jax.disable_jit(False):
                    return self.run(args, kwargs)[0]
            raise ValueError(
                f"{self._named()} is transformed with process-local data, which only a "
                "call of it takes. Transform what it maps, or make global arrays with "
                "jax.make_array_from_process_local_data and put the transformation "
                "under jax.jit, such as jax.jit(jax.grad(loss))."
            )
        if call.is_across_processes:
            self.agree(call)
        return self.bind_call(call, arguments.leaves)

    def bind_call(self, call: ElementCall, leaves: Sequence[Value]) -> PyTree:
        operands = [*call.body.constants, *_as_arrays(call, leaves)]
        operands = list(map(explicit_sharding.drop_sharding, operands))
        results = spmap_p.bind(*operands, **call.params)
        return jax.tree.unflatten(call.out_tree, results)

    def across_processes(self) -> bool:
        """Whether the map may run on devices of more than this process."""
        if jax.process_count(self.options.backend) == 1:
            return False
        mesh = self.options.mesh
        return processes.several(
            self._devices() if mesh is None else list(mesh.devices.flat)
        )

    def has_other_devices(self) -> bool:
        others = ambient_mesh.other_devices(self.options)
        return self.across_processes() or bool(others)

    def agree(self, call: ElementCall) -> None:
        """Checks that all processes make this call."""
        agreement.agree(
            call.params["mesh"],
            self._named(),
            lambda: agreement.description(call.params),
        )

    def _devices(self) -> Sequence[jax.Device]:
        return ambient_mesh.devices_of(self.options)

    def _on_devices(self, axis_size: int, call_jaxpr: Jaxpr, alone: bool) -> Params:
        """The parameters of the equation that place it on devices."""
        mesh, mesh_axes = self.options.mesh, self.options.mesh_axes
        nowhere = {"mesh": None, "mesh_axes": None, "inner_axes": ()}
        if jax.sharding.get_abstract_mesh().manual_axes:
            ambient_mesh.check_in_shard_map(self.name, self.options)
            if mesh is None:
                return nowhere
        else:
            ambient_mesh.check_devices(self.name, self.options)
        if mesh is not None:
            contexts.check_mesh(self._named(), cast(Mesh, mesh))
            return {"mesh": mesh, "mesh_axes": mesh_axes, "inner_axes": ()}
        if tracing.inside_map():
            return nowhere
        mesh = map_mesh(
            self.options.axis_name,
            axis_size,
            call_jaxpr,
            self._devices(),
            shared=not alone,
        )
        contexts.check_mesh(self._named(), mesh)
        return {"mesh": mesh} | own_placement(mesh)._asdict()

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
            return axes.mapped_size(in_axes, avals, names, wanted)
        walk = MeshPlacement(self.options.mesh_axes or (), ())
        parts = parts_along(mesh, walk.mesh_axes) if mesh else self._process_count()
        if any(axis is not None for axis in in_axes) or wanted is None:
            own = axes.mapped_size(in_axes, avals, names, None)
        else:
            own = wanted // parts
        divisor = walk.device_count(mesh) if mesh else parts
        return axes.check_elements(self.name, own, parts, wanted, divisor)

    def _process_count(self) -> int:
        return len({device.process_index for device in self._devices()})

    def _out_axes(self, body: tracing.Body, in_axes: Axes, axis_size: int) -> Axes:
        avals = [var.aval for var in body.jaxpr.outvars]
        out_axes = trees.broadcast_axes(
            "out_axes", self.options.out_axes, body.out_tree, "the result"
        )
        out_axes = axes.normalize_out_axes(out_axes, avals)
        if None in out_axes:
            batch = tracing.Batch(self.options.axis_name, axis_size)
            bad = axes.unmapped_that_differ(out_axes, body, in_axes, batch)
            if bad:
                raise self.unmapped(bad, body.out_tree)
        return out_axes

    def unmapped(self, bad: Sequence[int], out_tree: TreeDef) -> ValueError:
        """The error for results without the axis that differ along it."""
        names = trees.result_names(out_tree)
        return axes.unmapped(self.name, [names[k] for k in bad])


def _as_arrays(call: ElementCall, leaves: Sequence[Value]) -> Sequence[Value]:
    """Reads array-likes; other leaves stay."""
    if not any(map(array_likes.is_array_like, leaves)):
        return leaves
    here = SingleDeviceSharding(jax.local_devices()[0])
    shardings: Sequence[Sharding] = [here] * len(leaves)
    if call.shardings:
        shardings = call.shardings.operands
    with jax.ensure_compile_time_eval():
        return [
            array_likes.lay_out(leaf, sharding)
            if array_likes.is_array_like(leaf)
            else leaf
            for leaf, sharding in zip(leaves, shardings, strict=True)
        ]
