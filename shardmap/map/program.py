"""What is made for a function that is mapped: traces, programs, lowered forms.

A call is read (`FunctionMap.read`): its arguments checked, the function traced on one
element. Then it is bound, if JAX is tracing, or run by a `jax.jit` made for calls of
its kind.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
from absl import logging
from jax.sharding import Mesh

import shardmap.map.rules  # noqa: F401 (registers the rules)
from shardmap.map import arguments, functions, placement, tracing
from shardmap.map.layout import MapShardings, map_mesh, map_shardings
from shardmap.map.lowering import map_jit
from shardmap.map.primitive import remove_axis, spmap_p
from shardmap.map.stages import Lowered
from shardmap.sharding.spec import ShardingSpec


class Options(NamedTuple):
    """The arguments of `spmap` but the function, hashable."""

    axis_name: Hashable
    in_axes: Any
    out_axes: Any
    static_argnums: tuple[int, ...]
    devices: tuple[jax.Device, ...] | None
    backend: str | None
    axis_size: int | None
    donate_argnums: tuple[int, ...]

    def key(self) -> Hashable:
        """Equal for equal options, whatever containers the axes are in."""
        in_axes, out_axes = (
            (tuple(leaves), tree)
            for leaves, tree in (
                jax.tree.flatten(axes, is_leaf=lambda x: x is None)
                for axes in (self.in_axes, self.out_axes)
            )
        )
        return self._replace(in_axes=in_axes, out_axes=out_axes)


class _Element:
    """The function of one element over flat leaves, to be traced.

    JAX finds a trace again by this object, so there is one for each function, options,
    argument structure and static arguments.
    """

    def __init__(
        self,
        fun: functions.WeakFunction,
        in_tree: Any,
        statics: tuple[tuple[int, Any], ...],
    ) -> None:
        self._fun = fun
        self._in_tree = in_tree
        self._statics = statics

    def __call__(self, *leaves: Any) -> Any:
        args, kwargs = jax.tree.unflatten(self._in_tree, leaves)
        args = list(args)
        for argnum, value in self._statics:
            args.insert(argnum, value)
        return self._fun()(*args, **kwargs)


class _Call(NamedTuple):
    """One call, read and traced: all that is needed to run or bind it."""

    leaves: list[Any]
    in_tree: Any
    in_axes: tuple[int | None, ...]
    out_axes: tuple[int | None, ...]
    axis_size: int
    body: tracing.Body
    mesh: Mesh | None

    @property
    def mesh_axis(self) -> str | None:
        return None if self.mesh is None else self.mesh.axis_names[0]

    @property
    def shardings(self) -> MapShardings | None:
        """How leaves and results lie; None inside another map."""
        if self.mesh is None:
            return None
        constants = len(self.body.constants)
        operands, results = map_shardings(
            self.mesh,
            (None,) * constants + self.in_axes,
            self.out_axes,
            self.body.jaxpr,
        )
        return MapShardings(operands[constants:], results)


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
            functools.partial(_Element, self.fun)
        )
        self._program = functools.lru_cache(maxsize=1024)(self._make_program)
        self._programs_by_key: dict[Hashable, tuple[Any, Any]] = {}

    def read(self, args: Sequence[Any], kwargs: dict[str, Any]) -> _Call:
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
        devices = self._devices(axis_size)

        statics = tuple((k, args[k]) for k in sorted(static))
        try:
            element = self._element(in_tree, statics)
        except TypeError:
            raise self._unhashable(statics) from None
        body = tracing.trace_body(
            element,
            [
                remove_axis(aval, axis)
                for aval, axis in zip(avals, in_axes, strict=True)
            ],
            options.axis_name,
            axis_size,
        )
        out_axes = self._out_axes(body, in_axes, axis_size)
        mesh = None
        if devices is not None:
            mesh = map_mesh(options.axis_name, axis_size, body.jaxpr, devices)
        return _Call(leaves, in_tree, in_axes, out_axes, axis_size, body, mesh)

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Adds the map to whatever is being traced."""
        return self._bind(self.read(args, kwargs))

    def _bind(self, call: _Call) -> Any:
        constants = call.body.constants
        results = spmap_p.bind(
            *constants,
            *call.leaves,
            axis_name=self.options.axis_name,
            axis_size=call.axis_size,
            in_axes=(None,) * len(constants) + call.in_axes,
            out_axes=call.out_axes,
            call_jaxpr=call.body.jaxpr,
            name=self.name,
            mesh=call.mesh,
            mesh_axis=call.mesh_axis,
        )
        return jax.tree.unflatten(call.body.out_tree, results)

    def prepare(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Any, Sequence[Any], dict[str, Any], bool]:
        """The program for a call, and the arguments laid out for it.

        The last value tells whether any argument had to be moved.
        """
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
            program, shardings = self._programs_by_key[key]
        except (KeyError, TypeError):
            call = self.read(args, kwargs)
            program = self.program(call, kwargs)
            shardings = call.shardings and call.shardings.operands
            if len(self._programs_by_key) >= 1024:
                self._programs_by_key.clear()
            self._programs_by_key[key] = program, shardings
        # `jax.jit` lays out positional arguments, but not keyword arguments.
        placed = placement.place(leaves, shardings, uncommitted=bool(kwargs))
        moved = any(a is not b for a, b in zip(leaves, placed, strict=True))
        if moved:
            mapped_args, kwargs = jax.tree.unflatten(in_tree, placed)
            laid_out = dict(zip(argnums, mapped_args, strict=True))
            args = [laid_out.get(k, arg) for k, arg in enumerate(args)]
        return program, args, kwargs, moved

    def program(self, call: _Call, kwargs: dict[str, Any]) -> Any:
        """The `jax.jit` that runs calls like this one."""
        return self._program(
            call.in_tree, call.body.out_tree, call.mesh, call.shardings, bool(kwargs)
        )

    def _make_program(
        self,
        in_tree: Any,
        out_tree: Any,
        mesh: Mesh | None,
        shardings: MapShardings | None,
        has_keywords: bool,
    ) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            call = self.read(args, kwargs)
            if call.shardings != shardings or call.body.out_tree != out_tree:
                raise ValueError("this call needs another program")
            _log_compile(self.name, self.options.axis_name, call)
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
        return map_jit(run, mesh, **options)

    def lower(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Lowered:
        """See `MappedFunction.lower`."""
        call = self.read(args, kwargs)
        shardings = call.shardings
        if shardings is None:
            raise ValueError(
                f"spmap of {self.name} cannot be lowered inside another map: it is "
                "part of that map's program. Lower the outermost one."
            )
        leaves = [
            jax.ShapeDtypeStruct(
                aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding
            )
            for aval, sharding in zip(
                map(arguments.leaf_aval, call.leaves), shardings.operands, strict=True
            )
        ]
        mapped_args, mapped_kwargs = jax.tree.unflatten(call.in_tree, leaves)
        rest = iter(mapped_args)
        static = self.options.static_argnums
        full_args = [arg if k in static else next(rest) for k, arg in enumerate(args)]
        lowered = self.program(call, kwargs).lower(*full_args, **mapped_kwargs)
        in_specs = [
            ShardingSpec.from_named_sharding(leaf.sharding, len(leaf.shape))
            for leaf in leaves
        ]
        out_specs = [
            ShardingSpec.from_named_sharding(
                sharding, len(var.aval.shape) + (axis is not None)
            )
            for sharding, var, axis in zip(
                shardings.results,
                call.body.jaxpr.outvars,
                call.out_axes,
                strict=True,
            )
        ]
        args_specs, kwargs_specs = jax.tree.unflatten(call.in_tree, in_specs)
        rest = iter(args_specs)
        by_position = [None if k in static else next(rest) for k in range(len(args))]
        return Lowered(
            lowered,
            (*by_position, *([kwargs_specs] if kwargs_specs else [])),
            jax.tree.unflatten(call.body.out_tree, out_specs),
        )

    def _devices(self, axis_size: int) -> Sequence[jax.Device] | None:
        """The devices to use, or None where an enclosing program has them."""
        if tracing.inside_map() or jax.sharding.get_abstract_mesh().manual_axes:
            return None
        devices = self.options.devices
        if devices is None:
            devices = jax.local_devices(backend=self.options.backend)
        if axis_size > len(devices):
            given = "given" if self.options.devices else "available"
            raise ValueError(
                f"compiling computation that requires {axis_size} logical devices, but "
                f"only {len(devices)} {devices[0].platform} devices are {given}: spmap "
                f"of {self.name} puts each of the {axis_size} elements of its axis on "
                "a device of its own. Map fewer elements, or on CPU set XLA_FLAGS="
                f"--xla_force_host_platform_device_count={axis_size} before JAX starts."
            )
        return devices

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


def _log_compile(name: str, axis_name: Hashable, call: _Call) -> None:
    level = (
        logging.WARNING if tracing.config_value("jax_log_compiles") else logging.DEBUG
    )
    logging.log(
        level,
        "shardmap: compiling %s: axis %r of %d elements on devices %s, elements %s",
        name,
        axis_name,
        call.axis_size,
        [device.id for device in call.mesh.devices.flat] if call.mesh else "around it",
        [var.aval.str_short() for var in call.body.jaxpr.invars],
    )
