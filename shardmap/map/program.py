"""What is made for a function that is mapped: traces, programs, lowered forms.

A call is read (`FunctionMap.read`): its arguments checked, the function traced on one
element. Then it is bound, if JAX is tracing, or run by a `jax.jit` made for calls of
its kind.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from absl import logging
from jax.sharding import Mesh

import shardmap.map.rules  # noqa: F401 (registers the rules)
from shardmap.map import arguments, functions, placement, tracing
from shardmap.map.calls import Call, Element, Options, Prepared, as_arrays, probe_of
from shardmap.map.constraints import is_partition_axis
from shardmap.map.layout import (
    MapShardings,
    check_inner_meshes,
    map_mesh,
)
from shardmap.map.lowering import communicates
from shardmap.map.primitive import remove_axis, spmap_p
from shardmap.map.running import map_jit


class FunctionMap:
    """All that is made for one function under one set of options.

    It does not hold the function, so it may live as long as the function does.
    """

    def __init__(self, fun: Callable[..., Any], options: Options) -> None:
        self.fun = functions.WeakFunction(fun)
        self.name = getattr(fun, "__name__", type(fun).__name__)
        self.options = options
        self._donate_argnames = arguments.keyword_names(fun, options.donate_argnums)
        # Bounded, as there is one for each value of the static arguments.
        self._element = functools.lru_cache(maxsize=1024)(
            functools.partial(Element, self.fun)
        )
        self._program = functools.lru_cache(maxsize=1024)(self._make_program)
        self._programs_by_key: dict[Hashable, tuple[Any, ...]] = {}

    @property
    def has_statics(self) -> bool:
        """Whether some arguments are compile-time constants."""
        return bool(self.options.static_argnums)

    def read(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Call:
        """Checks the arguments of a call and traces the function on one element."""
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
            return arguments.leaf_names(self.fun(), argnums, mapped_args, kwargs)

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
        in_axes = arguments.broadcast_axes(
            "in_axes", prefix, mapped_args, "the positional arguments"
        ) + (0,) * len(jax.tree.leaves(kwargs))
        avals = []
        for k, leaf in enumerate(leaves):
            try:
                avals.append(arguments.leaf_aval(leaf))
            except TypeError:
                raise TypeError(
                    f"spmap argument {names()[k]} of type {type(leaf)} is not a valid "
                    "JAX type. Give its position in static_broadcasted_argnums if it "
                    "is to be a compile-time constant."
                ) from None
        in_axes = arguments.normalize_in_axes(in_axes, avals, names)
        axis_size = arguments.mapped_size(in_axes, avals, names, options.axis_size)
        statics = tuple((k, args[k]) for k in sorted(static))
        try:
            element = self._element(in_tree, statics)
        except TypeError:
            raise self._unhashable(statics) from None
        body = tracing.trace_body(
            element,
            list(map(remove_axis, avals, in_axes)),
            options.axis_name,
            axis_size,
        )
        params = {
            "axis_name": options.axis_name,
            "axis_size": axis_size,
            "in_axes": (None,) * len(body.constants) + in_axes,
            "out_axes": self._out_axes(body, in_axes, axis_size),
            "call_jaxpr": body.jaxpr,
            "name": self.name,
            "batch_size": options.batch_size,
            "lowering": options.lowering,
        }
        params |= self._place(axis_size, body.jaxpr)
        if params["mesh"] is not None and not tracing.inside_map():
            check_inner_meshes(params)
        return Call(leaves, in_tree, body, params)

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Adds the map to whatever is being traced."""
        return self._bind(self.read(args, kwargs))

    def _bind(self, call: Call) -> Any:
        leaves = as_arrays(call)
        results = spmap_p.bind(*call.body.constants, *leaves, **call.params)
        return jax.tree.unflatten(call.body.out_tree, results)

    def prepare(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Prepared:
        """The program for a call, and the arguments laid out for it."""
        static = self.options.static_argnums
        argnums = [k for k in range(len(args)) if k not in static]
        leaves, in_tree = jax.tree.flatten((tuple(args[k] for k in argnums), kwargs))
        key = (
            in_tree,
            tuple(
                (leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else type(leaf)
                for leaf in leaves
            ),
            tuple(args[k] for k in static if k < len(args)),
        )
        try:
            program, shardings, donated, probe = self._programs_by_key[key]
        except (KeyError, TypeError):
            call = self.read(args, kwargs)
            program = self.program(call, kwargs)
            shardings = call.shardings and call.shardings.operands
            donated = self._donated(argnums, in_tree)
            probe = probe_of(call, argnums)
            if len(self._programs_by_key) >= 1024:
                self._programs_by_key.clear()
            self._programs_by_key[key] = program, shardings, donated, probe
        # `jax.jit` lays out positional arguments, but not keyword arguments.
        placed = placement.place(leaves, shardings, bool(kwargs), donated)
        moved = any(a is not b for a, b in zip(leaves, placed, strict=True))
        if moved:
            mapped_args, kwargs = jax.tree.unflatten(in_tree, placed)
            laid_out = dict(zip(argnums, mapped_args, strict=True))
            args = [laid_out.get(k, arg) for k, arg in enumerate(args)]
        must_lie = tuple(
            (k, sharding)
            for k, (sharding, is_donated) in enumerate(
                zip(shardings or (), donated, strict=bool(shardings))
            )
            if is_donated
        )
        return Prepared(program, args, kwargs, moved, must_lie, probe)

    def _donated(self, argnums: Sequence[int], in_tree: Any) -> list[bool]:
        """Which leaves are donated."""
        if not self.options.donate_argnums:
            return [False] * in_tree.num_leaves
        numbered = jax.tree.unflatten(in_tree, range(in_tree.num_leaves))
        positional, by_name = numbered
        given = [
            arg
            for argnum, arg in zip(argnums, positional, strict=True)
            if argnum in self.options.donate_argnums
        ] + [by_name[name] for name in self._donate_argnames if name in by_name]
        donated = set(jax.tree.leaves(given))
        return [k in donated for k in range(in_tree.num_leaves)]

    def program(self, call: Call, kwargs: dict[str, Any]) -> Any:
        """The `jax.jit` that runs calls like this one."""
        return self._program(
            call.in_tree,
            call.body.out_tree,
            call.params["mesh"],
            call.shardings,
            call.params["mesh"] is not None and communicates(call.params),
            bool(kwargs),
        )

    def _make_program(
        self,
        in_tree: Any,
        out_tree: Any,
        mesh: Mesh | None,
        shardings: MapShardings | None,
        sends: bool,
        has_keywords: bool,
    ) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            call = self.read(args, kwargs)
            if call.shardings != shardings or call.body.out_tree != out_tree:
                raise ValueError("this call needs another program")
            _log_compile(call.params)
            return self._bind(call)

        run.__name__ = run.__qualname__ = self.name
        options: dict[str, Any] = {
            "static_argnums": self.options.static_argnums,
            "donate_argnums": self.options.donate_argnums,
            "donate_argnames": self._donate_argnames,
        }
        if mesh is None or shardings is None:
            return jax.jit(run, **options)
        options["out_shardings"] = jax.tree.unflatten(out_tree, shardings.results)
        if not has_keywords:
            options["in_shardings"], _ = jax.tree.unflatten(in_tree, shardings.operands)
        return map_jit(run, list(mesh.devices.flat), sends, **options)

    def _place(self, axis_size: int, call_jaxpr: Any) -> dict[str, Any]:
        """The parameters of the equation that say on which devices it runs."""
        mesh, mesh_axes = self.options.mesh, self.options.mesh_axes
        nowhere = {"mesh": None, "mesh_axes": None, "inner_axes": ()}
        if jax.sharding.get_abstract_mesh().manual_axes:
            return nowhere
        if mesh is not None:
            return {"mesh": mesh, "mesh_axes": mesh_axes, "inner_axes": ()}
        if tracing.inside_map():
            return nowhere
        devices = self.options.devices or jax.local_devices(
            backend=self.options.backend
        )
        mesh = map_mesh(self.options.axis_name, axis_size, call_jaxpr, devices)
        own, *inner = (n for n in mesh.axis_names if not is_partition_axis(n))
        return {"mesh": mesh, "mesh_axes": (own,), "inner_axes": tuple(inner)}

    def _out_axes(
        self, body: tracing.Body, in_axes: Sequence[int | None], axis_size: int
    ) -> tuple[int | None, ...]:
        avals = [var.aval for var in body.jaxpr.outvars]
        axes = arguments.broadcast_axes(
            "out_axes",
            self.options.out_axes,
            jax.tree.unflatten(body.out_tree, avals),
            "the result",
        )
        axes = arguments.normalize_out_axes(axes, avals)
        if None in axes:
            self._check_unmapped(axes, body, in_axes, axis_size)
        return axes

    def _check_unmapped(
        self,
        out_axes: Sequence[int | None],
        body: tracing.Body,
        in_axes: Sequence[int | None],
        axis_size: int,
    ) -> None:
        """Refuses ``out_axes=None`` for a result that differs between elements."""
        dims = (None,) * len(body.constants) + tuple(
            None if axis is None else 0 for axis in in_axes
        )
        batch = tracing.Batch(self.options.axis_name, axis_size)
        differs = tracing.batched_results(body.jaxpr, batch, dims)
        numbered = jax.tree.unflatten(body.out_tree, range(len(out_axes)))
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(numbered)]
        bad = [
            f"\n  * result{jax.tree_util.keystr(path)}"
            for path, axis, differ in zip(paths, out_axes, differs, strict=True)
            if axis is None and differ
        ]
        if bad:
            raise ValueError(
                "spmap has mapped output but out_axes is None: these results of "
                f"{self.name} can differ between the elements of the axis:"
                f"{''.join(bad)}\nCombine them with a collective over the axis, such "
                "as jax.lax.pmean, or give out_axes a position for the mapped axis."
            )

    def _unhashable(self, statics: Sequence[tuple[int, Any]]) -> ValueError:
        listed = ", ".join(
            f"argument {argnum} of type {type(value)}"
            for argnum, value in statics
            if not _is_hashable(value)
        )
        return ValueError(
            f"Non-hashable static arguments are used in spmap of {self.name}: "
            f"{listed}. What static_broadcasted_argnums names needs __hash__ and "
            "__eq__."
        )


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _log_compile(params: dict[str, Any]) -> None:
    level = (
        logging.WARNING if tracing.config_value("jax_log_compiles") else logging.DEBUG
    )
    mesh = params["mesh"]
    logging.log(
        level,
        "shardmap: compiling %s: axis %r of %d elements on devices %s, elements %s",
        params["name"],
        params["axis_name"],
        params["axis_size"],
        "around it" if mesh is None else [device.id for device in mesh.devices.flat],
        [var.aval.str_short() for var in params["call_jaxpr"].invars],
    )
