"""What is made for a function that is mapped: traces, programs, lowered forms.

A call is read (`FunctionMap.read`): its arguments checked, the function traced on one
element. Then it is bound, if JAX is tracing, or run by a `jax.jit` made for calls of
its kind.
"""

import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from shardmap.api.calls import arguments, kept, refusals, surroundings
from shardmap.api.calls.across import AcrossProcesses, are_rows, check_elements
from shardmap.api.calls.call import Call, Element, Prepared, as_arrays, probe_of
from shardmap.api.calls.options import Options
from shardmap.arrays import array_likes, placement, processes, trees
from shardmap.arrays.process_local import convert_p, is_whole, look, parts_along
from shardmap.arrays.running import map_jit
from shardmap.map import agreement, contexts, tracing
from shardmap.map.layout import MeshWalk, check_inner_meshes, map_mesh, own_walk
from shardmap.map.lowering.evaluation import communicates
from shardmap.map.primitives.axis import axis_text
from shardmap.map.primitives.map_primitive import remove_axis, spmap_p
from shardmap.map.shardings import MapShardings


class FunctionMap:
    """All that is made for one function under one set of options.

    It does not hold the function, so it may live as long as the function does.
    """

    def __init__(self, fun: Callable[..., Any], options: Options) -> None:
        self.fun = kept.WeakFunction(fun)
        self.name = getattr(fun, "__name__", type(fun).__name__)
        self.options = options
        self._donate_argnames = trees.keyword_names(fun, options.donate_argnums)
        # Bounded, as there is one for each value of the static arguments.
        self._element = functools.lru_cache(maxsize=1024)(
            functools.partial(Element, self.fun)
        )
        self._program = functools.lru_cache(maxsize=1024)(self._make_program)
        self._programs_by_key: dict[Hashable, tuple[Any, ...]] = {}
        self._agreed: set[str] = set()

    @property
    def has_statics(self) -> bool:
        """Whether some arguments are compile-time constants."""
        return bool(self.options.static_argnums)

    def read(
        self,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        are_whole: Sequence[bool] | None = None,
        alone: bool = True,
    ) -> Call:
        """Checks the arguments of a call and traces the function on one element.

        Args:
          args: the positional arguments, those that are static each as a `Static`.
          kwargs: the keyword arguments.
          are_whole: in a map over several processes, which leaves are global arrays;
            what others hold are this process's rows. None: there are no others.
          alone: whether the map is a program of its own, and no part of another.
        """
        options = self.options
        static = set(options.static_argnums)
        if static and max(static) >= len(args):
            raise ValueError(
                f"spmapped function has static_broadcasted_argnums="
                f"{options.static_argnums} but was called with only {len(args)} "
                f"positional argument{'' if len(args) == 1 else 's'}. All static "
                "broadcasted arguments must be passed positionally."
            )
        argnums = [k for k in range(len(args)) if k not in static]
        mapped_args = tuple(args[k] for k in argnums)
        leaves, in_tree = jax.tree.flatten((mapped_args, kwargs))

        def names() -> list[str]:
            return trees.leaf_names(self.fun(), argnums, mapped_args, kwargs)

        prefix = options.in_axes
        if isinstance(prefix, tuple):
            if len(prefix) != len(args):
                raise ValueError(
                    f"spmap in_axes has {len(prefix)} entries, one for each "
                    f"positional argument, but {self.name} was called with "
                    f"{len(args)}. Arguments passed by keyword have none: they are "
                    "always mapped along axis 0."
                )
            prefix = tuple(prefix[k] for k in argnums)
        in_axes = trees.broadcast_axes(
            "in_axes", prefix, mapped_args, "the positional arguments"
        ) + (0,) * len(jax.tree.leaves(kwargs))
        avals = []
        for k, leaf in enumerate(leaves):
            try:
                avals.append(array_likes.leaf_aval(leaf))
            except TypeError:
                raise TypeError(
                    f"spmap argument {names()[k]} of type {type(leaf)} is not a valid "
                    "JAX type. Give its position in static_broadcasted_argnums if it "
                    "is to be a compile-time constant."
                ) from None
        in_axes = arguments.normalize_in_axes(in_axes, avals, names)
        is_rows = are_whole is not None and are_rows(are_whole, in_axes, names)
        axis_size = self._axis_size(in_axes, avals, names, is_rows)
        statics = tuple((k, args[k]) for k in sorted(static))
        element: Callable[..., Any]
        try:
            element = self._element(in_tree, statics)
        except TypeError:
            raise refusals.unhashable(self.name, statics) from None
        if tracing.config_value("jax_disable_jit"):
            # The function is called every time then; JAX does not know this object.
            element = functools.partial(element)
        around = jax.sharding.get_abstract_mesh()
        try:
            body = tracing.trace_body(
                element,
                list(map(remove_axis, avals, in_axes)),
                options.axis_name,
                axis_size,
                surroundings.facts(self.name, self.options),
                surroundings.same_mesh(self.options, around),
            )
        except (RuntimeError, ValueError) as error:
            surroundings.explain_specs(self.name, around, error)
            raise
        params = {
            "axis_name": options.axis_name,
            "axis_size": axis_size,
            "in_axes": (None,) * len(body.constants) + in_axes,
            "out_axes": self._out_axes(body, in_axes, axis_size),
            "call_jaxpr": body.jaxpr,
            "name": self.name,
            "batch_size": options.batch_size,
            "lowering": options.lowering,
            "kind": options.kind,
        }
        params |= self._place(axis_size, body.jaxpr, alone)
        if params["mesh"] is not None and not tracing.inside_map():
            check_inner_meshes(params)
        return Call(leaves, in_tree, body, params, are_whole is not None, is_rows)

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Adds the map to whatever is being traced."""
        are_whole = None
        if self.across_processes and not tracing.inside_map():
            are_whole = look(self._leaves(args, kwargs))
        call = self.read(args, kwargs, are_whole, alone=False)
        if are_whole is not None:
            self.agree(call)
        return self._bind(call)

    def under_mesh(
        self, alone: Callable[[Any, Any], Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Runs the map under `jax.set_mesh`, or ``alone`` if it has other devices."""
        if self.across_processes or surroundings.other_devices(self.options):
            with jax.set_mesh(contexts.NO_MESH):
                return alone(args, kwargs)
        return self._under_mesh(args, kwargs)

    @functools.cached_property
    def _under_mesh(self) -> contexts.UnderMesh:
        return contexts.UnderMesh(
            self.name,
            self.bind,
            self.options.static_argnums,
            donate_argnums=self.options.donate_argnums,
            donate_argnames=self._donate_argnames,
        )

    def _bind(self, call: Call) -> Any:
        operands = [*call.body.constants, *as_arrays(call)]
        operands = list(map(contexts.untyped, operands))
        if call.is_rows:
            own_operands, own_results = call.rows()
            operands = [
                convert_p.bind(operand, rows=own, to="whole")
                for operand, own in zip(operands, own_operands, strict=True)
            ]
        results = spmap_p.bind(*operands, **call.params)
        if call.is_rows:
            results = [
                convert_p.bind(result, rows=own, to="own")
                for result, own in zip(results, own_results, strict=True)
            ]
        return jax.tree.unflatten(call.body.out_tree, results)

    def _leaves(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        static = self.options.static_argnums
        given = tuple(arg for k, arg in enumerate(args) if k not in static)
        return jax.tree.leaves((given, kwargs))

    @property
    def across_processes(self) -> bool:
        """Whether the map runs on devices of more than this process."""
        if jax.process_count(self.options.backend) == 1:
            return False
        mesh = self.options.mesh
        return processes.several(
            self._devices() if mesh is None else list(mesh.devices.flat)
        )

    def are_whole(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> list[bool] | None:
        """Which leaves are global arrays; None in one process."""
        if not self.across_processes:
            return None
        return list(map(is_whole, self._leaves(args, kwargs)))

    def _devices(self) -> Sequence[jax.Device]:
        return surroundings.devices_of(self.options)

    def across(
        self, call: Call, program: Any, statics: dict[int, Any] | None = None
    ) -> AcrossProcesses:
        """A program over several processes, to be called as in this call."""
        static = self.options.static_argnums
        count = len(call.in_tree.children()[0].children()) + len(static)
        argnums = [k for k in range(count) if k not in static]
        donated = self._donated(argnums, call.in_tree)
        return AcrossProcesses(program, call, donated, statics or {})

    def agree(self, call: Call) -> None:
        """Once for each kind of call: sees that all processes make it."""
        kind = agreement.description(call.params)
        if kind not in self._agreed:
            agreement.agree(call.params["mesh"], f"spmap of {self.name}", kind)
            self._agreed.add(kind)

    def prepare(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Prepared:
        """The program for a call, and the arguments laid out for it."""
        static = self.options.static_argnums
        argnums = [k for k in range(len(args)) if k not in static]
        leaves, in_tree = jax.tree.flatten((tuple(args[k] for k in argnums), kwargs))
        are_whole = self.are_whole(args, kwargs)
        key = (
            in_tree,
            None if are_whole is None else tuple(are_whole),
            tuple(
                (leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else type(leaf)
                for leaf in leaves
            ),
            tuple(args[k] for k in static if k < len(args)),
        )
        try:
            program, shardings, donated, probe, must_lie = self._programs_by_key[key]
        except (KeyError, TypeError):
            call = self.read(args, kwargs, are_whole)
            program = self.program(call, kwargs, agrees=are_whole is not None)
            donated = self._donated(argnums, in_tree)
            shardings = call.shardings and call.shardings.operands
            probe = probe_of(call, argnums)
            if call.is_rows:
                # This lays out its arguments itself, and knows what it is for.
                statics = {k: args[k] for k in static}
                program = self.across(call, program, statics)
                shardings = probe = None
            must_lie = tuple(
                (k, sharding)
                for k, sharding in enumerate(shardings or ())
                if donated[k]
            )
            if len(self._programs_by_key) >= 1024:
                self._programs_by_key.clear()
            found = program, shardings, donated, probe, must_lie
            self._programs_by_key[key] = found
        # `jax.jit` lays out positional arguments, but not keyword arguments.
        placed = placement.place(leaves, shardings, bool(kwargs), donated)
        moved = any(a is not b for a, b in zip(leaves, placed, strict=True))
        if moved:
            mapped_args, kwargs = jax.tree.unflatten(in_tree, placed)
            laid_out = dict(zip(argnums, mapped_args, strict=True))
            args = [laid_out.get(k, arg) for k, arg in enumerate(args)]
        return Prepared(program, args, kwargs, moved, must_lie, probe)

    def _donated(self, argnums: Sequence[int], in_tree: Any) -> list[bool]:
        """Which leaves are donated."""
        if not self.options.donate_argnums:
            return [False] * in_tree.num_leaves
        positional, by_name = in_tree.children()
        given = [
            (argnum in self.options.donate_argnums, tree)
            for argnum, tree in zip(argnums, positional.children(), strict=True)
        ] + [
            (name in self._donate_argnames, tree)
            for name, tree in zip(
                by_name.node_data()[1], by_name.children(), strict=True
            )
        ]
        return [donated for donated, tree in given for _ in range(tree.num_leaves)]

    def program(self, call: Call, kwargs: dict[str, Any], agrees: bool = False) -> Any:
        """The `jax.jit` that runs calls like this one.

        Args:
          call: the call.
          kwargs: its keyword arguments.
          agrees: whether it makes sure, when it is traced, that other processes do the
            same. It must then be traced by calls only, which all of them make.
        """
        return self._program(
            call.in_tree,
            call.body.out_tree,
            call.params["mesh"],
            call.shardings,
            call.params["mesh"] is not None and communicates(call.params),
            bool(kwargs),
            agrees,
        )

    def _make_program(
        self,
        in_tree: Any,
        out_tree: Any,
        mesh: Mesh | None,
        shardings: MapShardings | None,
        sends: bool,
        has_keywords: bool,
        agrees: bool,
    ) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            call = self.read(args, kwargs)
            if call.shardings != shardings or call.body.out_tree != out_tree:
                raise ValueError("this call needs another program")
            if agrees:
                self.agree(call)
            _log_compile(call.params)
            return self._bind(call)

        kept.described_like(run, self.fun(), self.name)
        static = self.options.static_argnums
        count = len(in_tree.children()[0].children()) + len(static)
        options: dict[str, Any] = {
            "static_argnums": static,
            "static_argnames": (),
            "donate_argnums": [k for k in self.options.donate_argnums if k < count],
            "donate_argnames": self._donate_argnames,
        }
        if mesh is None or shardings is None:
            return jax.jit(run, **options)
        options["out_shardings"] = _as_prefix(out_tree, shardings.results)
        if not has_keywords:
            positional, _ = in_tree.children()
            operands = iter(shardings.operands)
            options["in_shardings"] = tuple(
                _as_prefix(tree, list(itertools.islice(operands, tree.num_leaves)))
                for tree in positional.children()
            )
        return map_jit(run, list(mesh.devices.flat), sends, **options)

    def _place(self, axis_size: int, call_jaxpr: Any, alone: bool) -> dict[str, Any]:
        """The parameters of the equation that say on which devices it runs."""
        mesh, mesh_axes = self.options.mesh, self.options.mesh_axes
        nowhere = {"mesh": None, "mesh_axes": None, "inner_axes": ()}
        if jax.sharding.get_abstract_mesh().manual_axes:
            return nowhere
        surroundings.check_devices(self.name, self.options)
        if mesh is not None:
            contexts.check_mesh(f"spmap of {self.name}", mesh)
            return {"mesh": mesh, "mesh_axes": mesh_axes, "inner_axes": ()}
        if tracing.inside_map():
            return nowhere
        mesh = map_mesh(
            self.options.axis_name,
            axis_size,
            call_jaxpr,
            self._devices(),
            "unused" if alone else "shared",
        )
        contexts.check_mesh(f"spmap of {self.name}", mesh)
        return {"mesh": mesh} | own_walk(mesh)._asdict()

    def _axis_size(
        self,
        in_axes: Sequence[int | None],
        avals: Sequence[Any],
        names: Callable[[], list[str]],
        is_rows: bool,
    ) -> int:
        """The number of elements, on all processes."""
        wanted, mesh = self.options.axis_size, self.options.mesh
        if not is_rows:
            return arguments.mapped_size(in_axes, avals, names, wanted)
        walk = MeshWalk(self.options.mesh_axes or (), ())
        parts = parts_along(mesh, walk.mesh_axes) if mesh else self._process_count()
        if any(axis is not None for axis in in_axes) or wanted is None:
            own = arguments.mapped_size(in_axes, avals, names, None)
        else:
            own = wanted // parts
        divisor = walk.device_count(mesh) if mesh else parts
        return check_elements(self.name, own, parts, wanted, divisor)

    def _process_count(self) -> int:
        return len({device.process_index for device in self._devices()})

    def _out_axes(
        self, body: tracing.Body, in_axes: Sequence[int | None], axis_size: int
    ) -> tuple[int | None, ...]:
        avals = [var.aval for var in body.jaxpr.outvars]
        axes = trees.broadcast_axes(
            "out_axes",
            self.options.out_axes,
            body.out_tree,
            "the result",
        )
        axes = arguments.normalize_out_axes(axes, avals)
        if None in axes:
            batch = tracing.Batch(self.options.axis_name, axis_size)
            refusals.check_unmapped(self.name, axes, body, in_axes, batch)
        return axes


def _log_compile(params: dict[str, Any]) -> None:
    mesh = params["mesh"]
    tracing.log_compile(
        "%s: %s of %d elements on devices %s, elements %s",
        params["name"],
        axis_text(params["axis_name"]),
        params["axis_size"],
        "around it" if mesh is None else [device.id for device in mesh.devices.flat],
        [var.aval.str_short() for var in params["call_jaxpr"].invars],
    )


def _as_prefix(tree: Any, shardings: Sequence[Any]) -> Any:
    """Shardings as `jax.jit` takes them for a pytree: one for all leaves, if it can be.

    None leaves it to the program, where they can neither be one nor a tree.
    """
    if shardings and all(sharding == shardings[0] for sharding in shardings):
        return shardings[0]
    return trees.with_leaves(tree, shardings)
