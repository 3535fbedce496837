"""The rule of ``cond``: a shard computes its box in each branch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax import lax

from shardmap.planning.engine.factors import RuleTable
from shardmap.planning.engine.nodes import Node
from shardmap.planning.engine.rules import Factor, Need
from shardmap.planning.engine.slices import Box, Interval, hull_of, whole
from shardmap.planning.lax.control.body import (
    ELSEWHERE,
    BodyShard,
    Boxes,
    Inner,
    InnerBody,
)

Branches: TypeAlias = tuple[tuple[BodyShard, ...], tuple[Factor, ...]]
"""The shard of each branch, and the summed loops that run over a part only."""


class Cond(Inner):
    """``cond``: a shard reads the hull of the boxes that the branches need."""

    remedy = f"{ELSEWHERE}; or compute all branches, and choose with jnp.where"

    def __init__(self, node: Node, table: RuleTable) -> None:
        super().__init__(node)
        self.bodies = [
            InnerBody(node, jaxpr, table) for jaxpr in node.params["branches"]
        ]
        ins = [(k, 0) for k in range(1, len(node.ins))]
        outs = [(k, 0) for k in range(len(node.outs))]
        self.name_loops([(body, ins, outs) for body in self.bodies])

    def backward(self, boxes: Boxes, loops: Mapping[Factor, Interval]) -> Need:
        limited = self.limited(loops)
        recipes = [
            body.trace(boxes, self.intervals(k, limited, boxes))
            for k, body in enumerate(self.bodies)
        ]
        each = [b.needs(r) for b, r in zip(self.bodies, recipes, strict=True)]
        needed = [hull_of(row) for row in zip(*each, strict=True)]
        bodies = tuple(
            body.shard(recipe, boxes, needed)
            for body, recipe in zip(self.bodies, recipes, strict=True)
        )
        starts = [start for recipe in recipes for start in recipe.starts]
        starts += [start for start, _ in limited.values()]
        index: Box = whole(self.node.in_shapes[0])
        static: Branches = bodies, tuple(limited)
        return Need((index, *needed), static, tuple(starts))

    def emit(
        self, values: Sequence[Any], static: Branches, starts: Sequence[jax.Array]
    ) -> Sequence[Any]:
        [index, *operands], [shards, limited] = values, static

        def branch(k: int) -> Callable[..., list[Any]]:
            starts_of_body = starts[sum(each.starts for each in shards[:k]) :]

            def run(*operands: Any) -> list[Any]:
                outs = self.bodies[k].run(shards[k], operands, starts_of_body)
                return self.only_first(self.typed(outs), limited, starts, k)

            return run

        branches = [branch(k) for k in range(len(self.bodies))]
        return lax.switch(index, branches, *operands)
