"""The rule of maps: a map is one vectorized function."""

from typing import Any

from shardmap._jax.rules import Vmap
from shardmap.map.collectives.split import vectorized
from shardmap.map.primitives.map_primitive import MapPrimitive, spmap_p
from shardmap.planning.engine.nodes import Graph, Node, Operand, Rewrite


def mapped(graph: Graph, node: Node) -> list[Operand]:
    params = node.params
    function = vectorized(
        params["call_jaxpr"],
        Vmap(params["axis_name"], params["axis_size"]),
        params["in_axes"],
        list(params["out_axes"]),
    )
    return graph.call(function, node.ins, fixed=False)


REWRITES: dict[Any, Rewrite] = {spmap_p: mapped, MapPrimitive: mapped}
