"""Maps vectorised as a whole, for the partitioner to cut."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardmap._jax.types import Param, Value
from shardmap.map.lowering.blocks import block_function
from shardmap.map.lowering.decision import Decision
from shardmap.map.lowering.under_mesh import under_mesh
from shardmap.map.primitives.axis import AxisLayout, pad, unpad
from shardmap.map.shardings import map_shardings


def partitioned(*, decision: Decision, **params: Param) -> Callable[..., list[Any]]:
    """A map as one vectorised program for the partitioner to split."""
    mesh, in_axes, out_axes = params["mesh"], params["in_axes"], params["out_axes"]
    places = decision.axis.places
    axis = AxisLayout(params["axis_name"], params["axis_size"], block=places)
    jaxpr = under_mesh(params["call_jaxpr"], mesh.abstract_mesh)
    block = block_function(jaxpr, axis, in_axes, out_axes)
    padded = params | {"axis_size": places}
    operand_shardings, result_shardings = map_shardings(padded)

    def run(*operands: Value) -> list[Any]:
        results = block(
            *map(_cut, pad(operands, in_axes, axis.padding), operand_shardings)
        )
        constrained = map(_cut, results, result_shardings)
        return unpad(list(constrained), out_axes, axis)

    return run


def _cut(array: Value, sharding: NamedSharding) -> Any:
    """The array cut as a map wants it; other dimensions are left to the partitioner.

    It might be an element of a map around, which has them cut already.
    """
    entries = [*sharding.spec, *[None] * (array.ndim - len(sharding.spec))]
    loose = [PartitionSpec.UNCONSTRAINED if e is None else e for e in entries]
    return jax.lax.with_sharding_constraint(
        array,
        NamedSharding(
            sharding.mesh, PartitionSpec(*loose), memory_kind=sharding.memory_kind
        ),
    )
