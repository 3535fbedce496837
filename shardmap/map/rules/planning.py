"""The rule of maps in plans: a map is one vectorized function."""

from typing import Any

from shardmap.arrays.plan_rules import REWRITES
from shardmap.map.batch import Batch
from shardmap.map.primitives.map_primitive import MapPrimitive


def register(primitive: MapPrimitive) -> None:
    REWRITES[primitive] = _mapped


def _mapped(graph: Any, node: Any) -> list[Any]:
    params = node.params
    batch = Batch(params["axis_name"], params["axis_size"])
    function = batch.vectorize(
        params["call_jaxpr"], params["in_axes"], list(params["out_axes"])
    )
    operands: list[Any] = graph.call(function, node.ins, fixed=False)
    return operands
