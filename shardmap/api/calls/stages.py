"""What `lower` gives: JAX's own stage, and how the arrays lie as specs."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from shardmap._jax.stages import copy_stage
from shardmap.api.calls.across import NeedsAnotherProgramError
from shardmap.api.calls.call import Call
from shardmap.api.calls.programs import FunctionMap
from shardmap.arrays import array_likes
from shardmap.map import agreement, tracing
from shardmap.map.shardings import MapShardings
from shardmap.sharding.spec import ShardingSpec


class Lowered(jax.stages.Lowered):
    """A lowered map: all of `jax.stages.Lowered`, and the specs of its arrays.

    Attributes:
      in_specs: a `ShardingSpec` per array, in the structure of the positional
        arguments; behind them, if there are any, a dict of the keyword arguments.
        None stands where an argument is static.
      out_specs: the same in the structure of the result.

    Example:
      >>> import numpy as np, shardmap as sm
      >>> lowered = sm.spmap(lambda x: x + 1).lower(np.ones((8, 3)))
      >>> lowered.in_specs[0]
      ShardingSpec((Chunked((8,)), None), (ShardedAxis(0),))
      >>> lowered.compile()(np.ones((8, 3))).shape
      (8, 3)
    """

    __slots__ = ("_across", "_agree", "in_specs", "out_specs")

    def __init__(
        self,
        lowered: jax.stages.Lowered,
        in_specs: Any,
        out_specs: Any,
        agree: Callable[[], None],
        across: Callable[[Any], Callable[..., Any]] | None = None,
    ) -> None:
        """Adds to what JAX has lowered.

        Args:
          lowered: JAX's own.
          in_specs, out_specs: see the class.
          agree: sees, before the first run, that all processes make it.
          across: gives, for the compiled function, one of what this process has.
        """
        copy_stage(lowered, self)
        self.in_specs = in_specs
        self.out_specs = out_specs
        self._agree = agree
        self._across = across

    def compile(self, *args: Any, **kwargs: Any) -> jax.stages.Compiled:
        """Compiles, as `jax.stages.Lowered.compile` does."""
        compiled = super().compile(*args, **kwargs)
        return _Compiled(compiled, self._agree, self._across)


class _Compiled(jax.stages.Compiled):
    """A compiled map, perhaps over several processes, also under `jax.disable_jit`."""

    def __init__(
        self,
        compiled: jax.stages.Compiled,
        agree: Callable[[], None],
        across: Callable[[Any], Callable[..., Any]] | None,
    ) -> None:
        copy_stage(compiled, self)
        self._run = across(compiled) if across is not None else compiled
        several = jax.process_count() > 1
        self._agree: Callable[[], None] | None = agree if several else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._agree is not None:
            self._agree()
            self._agree = None
        if tracing.config_value("jax_disable_jit"):
            with jax.disable_jit(False):
                return self._run(*args, **kwargs)
        try:
            return self._run(*args, **kwargs)
        except NeedsAnotherProgramError:
            raise TypeError(
                "this compiled map was lowered for arguments of another structure, or "
                "for global arrays where these are rows of this process, or the other "
                "way round"
            ) from None


def lower(
    function_map: FunctionMap, args: Sequence[Any], kwargs: dict[str, Any]
) -> Lowered:
    """Lowers a call of a mapped function.

    Raises:
      ValueError: inside another map, whose program it would be a part of.
    """
    call = function_map.read(args, kwargs, function_map.are_whole(args, kwargs))
    shardings = call.shardings
    if shardings is None:
        raise ValueError(
            f"spmap of {function_map.name} cannot be lowered inside another map: it is "
            "part of that map's program. Lower the outermost one."
        )
    leaves = _structs(call, shardings)
    static = function_map.options.static_argnums
    full_args, mapped_kwargs = _arguments(call, leaves, args, static)
    program = function_map.program(call, kwargs)
    with agreement.lowering_to_look():
        lowered = program.lower(*full_args, **mapped_kwargs)

    in_specs = [
        ShardingSpec.from_named_sharding(leaf.sharding, len(leaf.shape))
        for leaf in leaves
    ]
    out_specs = [
        ShardingSpec.from_named_sharding(
            sharding, var.aval.ndim + (out_axis is not None)
        )
        for sharding, var, out_axis in zip(
            shardings.results,
            call.body.jaxpr.outvars,
            call.params["out_axes"],
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
        functools.partial(function_map.agree, call)
        if call.is_across_processes
        else lambda: None,
        # Compiled functions are called without the static arguments.
        functools.partial(function_map.across, call)
        if call.is_across_processes
        else None,
    )


def trace(
    function_map: FunctionMap, args: Sequence[Any], kwargs: dict[str, Any]
) -> jax.stages.Traced:
    """Traces the program of a call of a mapped function."""
    call = function_map.read(args, kwargs, function_map.are_whole(args, kwargs))
    program = function_map.program(call, kwargs)
    if call.is_across_processes and call.shardings is not None:
        leaves = _structs(call, call.shardings)
        static = function_map.options.static_argnums
        args, kwargs = _arguments(call, leaves, args, static)
    return program.trace(*args, **kwargs)


def _structs(call: Call, shardings: MapShardings) -> list[jax.ShapeDtypeStruct]:
    """What the program takes, with all processes' rows."""
    avals = list(map(array_likes.leaf_aval, call.leaves))
    shapes = [aval.shape for aval in avals]
    if call.is_rows:
        operands, _ = call.rows()
        own = operands[len(call.body.constants) :]
        shapes = [
            rows.whole_shape(shape) for rows, shape in zip(own, shapes, strict=True)
        ]
    return [
        jax.ShapeDtypeStruct(
            shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding
        )
        for shape, aval, sharding in zip(shapes, avals, shardings.operands, strict=True)
    ]


def _arguments(
    call: Call, leaves: Sequence[Any], args: Sequence[Any], static: Sequence[int]
) -> tuple[list[Any], dict[str, Any]]:
    """The leaves as arguments, among the static ones of ``args``."""
    mapped_args, mapped_kwargs = jax.tree.unflatten(call.in_tree, leaves)
    rest = iter(mapped_args)
    full_args = [arg if k in static else next(rest) for k, arg in enumerate(args)]
    return full_args, mapped_kwargs
