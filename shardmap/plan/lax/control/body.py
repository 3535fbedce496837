"""Rules of loops and branches: their bodies are graphs of their own.

What a loop needs of its operands is a fixed point: a carried value must enter in the
box in which it leaves, and that box may grow until nothing more is asked. An axis that
the body maps index by index onto itself stays cut; any other ends up whole.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from shardmap._jax.types import AnyJaxpr, Aval
from shardmap.arrays.combining import identity
from shardmap.plan.engine.alike.affine import settled
from shardmap.plan.engine.emitting.emit import emit
from shardmap.plan.engine.factors import RuleTable
from shardmap.plan.engine.keys import is_key
from shardmap.plan.engine.nodes import Calls, Graph, Node, Value, flatten
from shardmap.plan.engine.recipe import (
    Intervals,
    Recipe,
    needed,
    trace_back,
)
from shardmap.plan.engine.slices import Box, hull_of, shape_of
from shardmap.plan.engine.work import AxisKey, Unions
from shardmap.plan.lax.control.parts import Partial, Sum, sum_over

Boxes: TypeAlias = Sequence[Box | None]
NO_INTERVALS: Intervals = {}


class InnerBody:
    """A jaxpr inside an equation, ready to be sliced."""

    def __init__(self, jaxpr: AnyJaxpr, table: RuleTable, calls: Calls) -> None:
        self.graph: Graph = flatten(jaxpr, calls)
        self.rules = {n.number: table.rule(n) for n in self.graph.nodes}
        self.nodes = {n.number: n for n in self.graph.nodes}
        outputs = self.graph.outputs
        self.stops = frozenset([*self.graph.inputs, *self.graph.constants])
        self.backwards, _ = needed(outputs, self.stops)

    def loops(self) -> tuple[Unions, dict[AxisKey, Node], list[Sum]]:
        """Which axes are one loop, what would break it there, and what is summed."""
        unions, sums = Unions(), list[Sum]()
        broken: dict[AxisKey, Node] = {}
        for node in self.graph.nodes:
            linked = set()
            for group in self.rules[node.number].links():
                keys = []
                sides = {link.side for link in group}
                for link in group:
                    operand = (node.ins if link.side == "in" else node.outs)[
                        link.number
                    ]
                    if isinstance(operand, Value):
                        keys.append((operand.number, link.axis))
                for key in keys[1:]:
                    unions.unite(keys[0], key)
                summed = None
                if keys and "in" in sides:
                    summed = sum_over(node, self.rules[node.number], group)
                    sums += [summed] if summed else []
                if summed or sides == {"in", "out"}:
                    linked.update(keys)
                elif keys and sides == {"in"}:
                    broken.setdefault(keys[0], node)
            for operand in node.ins:
                if isinstance(operand, Value):
                    for axis, size in enumerate(operand.shape):
                        if size != 1 and (operand.number, axis) not in linked:
                            broken.setdefault((operand.number, axis), node)
        return unions, broken, sums

    def trace(self, boxes: Boxes, intervals: Intervals = NO_INTERVALS) -> Recipe:
        """The recipe for boxes of the outputs.

        Its starts end with those of the constants' boxes.

        Args:
          boxes: of the outputs.
          intervals: node number -> contracted factor -> the part of it to run over.
        """
        demands = [
            None if box is None else (value, box)
            for value, box in zip(self.graph.outputs, boxes, strict=True)
        ]
        recipe = trace_back(
            self.backwards, self.rules, demands, self.stops, intervals, versions=1
        )
        for value, box in recipe.reads:
            if value in self.graph.constants:
                begin = tuple(start for start, _ in box)
                recipe = recipe._replace(starts=recipe.starts + begin)
        return recipe

    def needs(self, recipe: Recipe) -> list[Box | None]:
        """The boxes of the inputs that a recipe reads."""
        read = dict(recipe.reads)
        return [read.get(value) for value in self.graph.inputs]

    def run(
        self,
        recipe: Recipe,
        wanted: Boxes,
        inputs: Sequence[Any],
        starts: Sequence[jax.Array],
    ) -> list[Any]:
        """The wanted boxes of the outputs, from the boxes that `needs` said."""
        values = [
            value if box is not None else None
            for value, box in zip(self.graph.outputs, wanted, strict=True)
        ]
        given = dict(zip(self.graph.inputs, inputs, strict=True))
        given.update(self.graph.constants)
        place = sum(step.start_count for step in recipe.static.steps)
        reads = []
        for value, box in recipe.reads:
            read = given[value]
            if value in self.graph.constants:
                begin = [starts[place + k] for k in range(len(box))]
                place += len(box)
                read = lax.dynamic_slice(jnp.asarray(read), begin, shape_of(box))
            reads.append(read)
        return emit(recipe.static, self.nodes, self.rules, values)(reads, starts)


T = TypeVar("T")


class Frozen(Generic[T]):
    """The static part of a loop or branch: a key by which it is told, and its content.

    The content holds recipes with their positions, which differ from shard to shard.
    Those do not count: shards with equal keys run the function of the first of them,
    and get their own positions as arguments.
    """

    def __init__(self, key: Hashable, content: T) -> None:
        self.key, self.content = key, content

    def settled(self) -> "Frozen[T]":
        """As shards that are walked together share it, see `engine.alike`."""
        return Frozen(settled(self.key), settled(self.content, noted=False))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Frozen) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def hulls(a: Boxes, b: Boxes) -> list[Box | None]:
    return [hull_of(pair) for pair in zip(a, b, strict=True)]


def fit(values: list[Any], needs: Boxes, given: Boxes) -> list[Any]:
    """Cuts carried boxes down to what the body reads of them."""
    fitted = list(values)
    for k, outer in enumerate(given):
        inner = needs[k]
        if inner is not None and outer is not None and inner != outer:
            begin = [a[0] - b[0] for a, b in zip(inner, outer, strict=True)]
            stop = [a[1] - b[0] for a, b in zip(inner, outer, strict=True)]
            fitted[k] = lax.slice(values[k], begin, stop)
    return fitted


def shapes_of(boxes: Iterable[Box | None]) -> tuple[tuple[int, ...] | None, ...]:
    return tuple(None if box is None else shape_of(box) for box in boxes)


def as_carried(value: jax.Array, aval: Aval) -> jax.Array:
    """The value with the dtype of what is carried; literals may have another."""
    if is_key(aval):
        return value
    return lax.convert_element_type(value, aval.dtype)


def fits(needs: Boxes, carry: Boxes) -> tuple[Box | None, ...]:
    """Where the boxes that a body reads lie in those that are carried."""
    inner = needs[len(needs) - len(carry) :]
    return tuple(
        None
        if a is None or b is None
        else tuple((x[0] - y[0], x[1] - y[0]) for x, y in zip(a, b, strict=True))
        for a, b in zip(inner, carry, strict=True)
    )


def only_first(
    value: jax.Array, part: Partial | None, first: Mapping[Any, jax.Array]
) -> jax.Array:
    """What is complete, among parts that combine: in the first shard only.

    Args:
      value: what is complete.
      part: what it is to be a part of; None: it stays complete.
      first: loop -> whether the shard is the first along it.
    """
    mine = [here for name, here in first.items() if part and name in part.loops]
    if part is None or not mine:
        return value
    nothing = identity(part.combiner, value.dtype)
    return jnp.where(jnp.all(jnp.stack(mine)), value, nothing)
