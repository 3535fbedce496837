"""The stages of a mapped function: those of JAX, with the specs of its arrays."""

from typing import Any

import jax

from shardmap._jax.stages import copy_stage
from shardmap._jax.types import PyTree
from shardmap.api.arguments import Static
from shardmap.api.programs import Args, Call, Kwargs, Programs
from shardmap.map import agreement
from shardmap.sharding.spec import ShardingSpec


class Lowered(jax.stages.Lowered):
    """A lowered map: all of `jax.stages.Lowered`, and the specs of its arrays.

    Over several processes, what it compiles takes and returns global arrays.

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

    __slots__ = ("_name", "in_specs", "out_specs")

    def __init__(
        self,
        name: str,
        lowered: jax.stages.Lowered,
        in_specs: tuple[Any, ...],
        out_specs: PyTree,
    ) -> None:
        """Adds the specs to what JAX has lowered."""
        copy_stage(lowered, self)
        self._name = name
        self.in_specs = in_specs
        self.out_specs = out_specs

    def __repr__(self) -> str:
        return (
            f"<Lowered {self._name}: in_specs={self.in_specs}, "
            f"out_specs={self.out_specs}>"
        )


def lower(programs: Programs, args: Args, kwargs: Kwargs) -> Lowered:
    """Lowers a call of a mapped function.

    Raises:
      ValueError: inside another map, whose program it would be a part of.
    """
    call = programs.infer_params(programs.read(args, kwargs))
    if call.shardings is None:
        raise ValueError(
            f"{programs.full_name} cannot be lowered inside another map: "
            "it is part of that map's program. Lower the outermost one."
        )
    programs.check_devices(call)
    # One process alone may ask for it.
    with agreement.unchecked():
        lowered = trace(programs, call).lower()
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
    return Lowered(
        programs.full_name,
        lowered,
        (*by_position, *([kwargs_specs] if kwargs_specs else [])),
        jax.tree.unflatten(call.out_tree, out_specs),
    )


def trace(programs: Programs, call: Call) -> jax.stages.Traced:
    """The program, whose static arguments compiled functions do not take."""
    inside_map = call.shardings is None
    leaves = call.arguments.leaves if inside_map else call.structs()
    args, kwargs = call.arguments.with_leaves(leaves)
    program = programs.jitted(call, call.arguments.statics.keys())
    return program.trace(*args, **kwargs)
