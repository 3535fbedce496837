"""What `lower` gives: JAX's own stage, and how the arrays lie as specs."""

from collections.abc import Sequence
from typing import Any

import jax

from shardmap.map import arguments
from shardmap.map.program import FunctionMap
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

    __slots__ = ("in_specs", "out_specs")

    def __init__(
        self, lowered: jax.stages.Lowered, in_specs: Any, out_specs: Any
    ) -> None:
        for slot in jax.stages.Lowered.__slots__:
            setattr(self, slot, getattr(lowered, slot))
        self.in_specs = in_specs
        self.out_specs = out_specs


def lower(
    function_map: FunctionMap, args: Sequence[Any], kwargs: dict[str, Any]
) -> Lowered:
    """Lowers a call of a mapped function.

    Raises:
      ValueError: inside another map, whose program it would be a part of.
    """
    call = function_map.read(args, kwargs)
    shardings = call.shardings
    if shardings is None:
        raise ValueError(
            f"spmap of {function_map.name} cannot be lowered inside another map: it is "
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
    static = function_map.options.static_argnums
    mapped_args, mapped_kwargs = jax.tree.unflatten(call.in_tree, leaves)
    rest = iter(mapped_args)
    full_args = [arg if k in static else next(rest) for k, arg in enumerate(args)]
    program = function_map.program(call, kwargs)
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
    )
