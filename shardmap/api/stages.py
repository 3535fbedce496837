"""The stages of a mapped function: those of JAX, with the specs of its arrays."""

from typing import Any, cast

import jax

from shardmap._jax.types import PyTree
from shardmap.api.arguments import Static
from shardmap.api.programs import check_devices, jit_call
from shardmap.api.transformed import Args, Call, Kwargs, Transformed
from shardmap.map import agreement
from shardmap.sharding.spec import ShardingSpec


class Lowered(jax.stages.Lowered):
    """A lowered map: all of `jax.stages.Lowered`, and the specs of its arrays.

    Over several processes, what it compiles takes and returns global arrays.

    Attributes:
      in_specs: a `ShardingSpec` per array, in the structure of the positional
        arguments. A dict for the keyword arguments follows, if there are any. A static
        argument has None.
      out_specs: the same in the structure of the result.

    Example:
      >>> import numpy as np, shardmap as sm
      >>> lowered = sm.spmap(lambda x: x + 1).lower(np.ones((8, 3)))
      >>> lowered.in_specs[0]
      ShardingSpec((Chunked((8,)), None), (ShardedAxis(0),))
      >>> lowered.compile()(np.ones((8, 3))).shape
      (8, 3)
    """

    __slots__ = ()
    _name: str
    in_specs: tuple[Any, ...]
    out_specs: PyTree

    def __repr__(self) -> str:
        return (
            f"<Lowered {self._name}: in_specs={self.in_specs}, "
            f"out_specs={self.out_specs}>"
        )


def lower(transformed: Transformed, args: Args, kwargs: Kwargs) -> Lowered:
    """Lowers a call of a mapped function that is not inside another map."""
    call = transformed.trace_call(transformed.read(args, kwargs))
    if call.shardings is None:
        raise ValueError(
            f"{transformed.full_name} cannot be lowered inside another map: "
            "it is part of that map's program. Lower the outermost one."
        )
    check_devices(transformed, call)
    # One process alone may ask for it.
    with agreement.unchecked():
        lowered: Any = trace(transformed, call).lower()
    # The constructors of stages are not public.
    lowered.__class__ = Lowered
    lowered._name = transformed.full_name
    in_specs, out_specs = (
        [
            ShardingSpec.from_named_sharding(sharding, aval.ndim)
            for sharding, aval in zip(shardings, avals, strict=True)
        ]
        for shardings, avals in zip(
            call.shardings, (call.in_avals, call.out_avals), strict=True
        )
    )
    args_specs, kwargs_specs = call.arguments.with_leaves(in_specs)
    by_position = [None if type(arg) is Static else arg for arg in args_specs]
    lowered.in_specs = (*by_position, *([kwargs_specs] if kwargs_specs else []))
    lowered.out_specs = jax.tree.unflatten(call.out_tree, out_specs)
    return cast(Lowered, lowered)


def trace(transformed: Transformed, call: Call) -> jax.stages.Traced:
    """The program, whose static arguments compiled functions do not take."""
    inside_map = call.shardings is None
    leaves = call.arguments.leaves if inside_map else call.structs()
    args, kwargs = call.arguments.with_leaves(leaves)

    def run(*args: PyTree, **kwargs: PyTree) -> PyTree:
        return call.result(jax.tree.leaves((args, kwargs)))

    # A tree of several could be none that a user's class takes.
    shardings = set(call.shardings.results) if call.shardings else set()
    program = jit_call(
        transformed,
        run,
        call,
        shardings.pop() if len(shardings) == 1 else None,
        static_argnums=tuple(call.arguments.statics),
        donate_argnums=transformed.donate_argnums,
        donate_argnames=transformed.donate_argnames,
    )
    return program.trace(*args, **kwargs)
