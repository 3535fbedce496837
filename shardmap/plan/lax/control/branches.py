"""The rule of ``cond``."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from shardmap.plan.engine.factors import RuleTable
from shardmap.plan.engine.nodes import Calls, Node
from shardmap.plan.engine.propagate import Partial
from shardmap.plan.engine.recipe import Recipe
from shardmap.plan.engine.rules import Factor, Need
from shardmap.plan.engine.slices import Box, Interval, hull_of, whole
from shardmap.plan.engine.work import Unions
from shardmap.plan.lax.control.body import (
    Boxes,
    Frozen,
    Inner,
    InnerBody,
    as_carried,
    fit,
    fits,
    only_first,
    shapes_of,
)


class Branches(NamedTuple):
    """What a shard computes of each branch.

    Attributes:
      recipes: per branch.
      each: the boxes of the operands that each branch reads.
      given: the boxes of the operands, which hold those of all branches.
      asked: the boxes of the results.
      limited: the loops that are summed over in part.
    """

    recipes: Sequence[Recipe]
    each: Sequence[Boxes]
    given: Boxes
    asked: Boxes
    limited: tuple[Factor, ...]


class Cond(Inner):
    """``cond``: each operand in the hull of what the branches need."""

    def __init__(self, node: Node, table: RuleTable, calls: Calls) -> None:
        super().__init__(node)
        self.bodies = [
            InnerBody(jaxpr, table, calls) for jaxpr in node.params["branches"]
        ]
        named = []
        for body in self.bodies:
            self.name_loops(
                body,
                {k: (k + 1, None) for k in range(len(node.ins) - 1)},
                {k: (k, None) for k in range(len(node.outs))},
            )
            named.append((self.ins, self.outs))
            self.ins = [[None] * len(s) for s in node.in_shapes]
            self.outs = [[None] * len(s) for s in node.out_shapes]
        self._agree(named)

    def _agree(self, named: Sequence[Any]) -> None:
        """Keeps the loops that are named in every branch."""
        unions = Unions()
        broken = set()
        for ins, outs in named:
            first: dict[Any, Any] = {}
            for k, axes in enumerate([*ins, *outs]):
                for axis, name in enumerate(axes):
                    key = (k, axis)
                    if name is None:
                        broken.add(key)
                    else:
                        unions.unite(first.setdefault(name, key), key)
        bad = {unions.find(key) for key in broken if key[0] > 0}
        count = len(self.ins)
        for k, axes in enumerate([*self.ins, *self.outs]):
            target = self.ins[k] if k < count else self.outs[k - count]
            for axis in range(len(axes)):
                root = unions.find((k, axis))
                if k and root not in bad:
                    target[axis] = root

    def backward(self, boxes: Boxes, loops: Mapping[Factor, Interval]) -> Need:
        limited = self.limited(loops)
        recipes = [
            body.trace(boxes, self.intervals(k, limited))
            for k, body in enumerate(self.bodies)
        ]
        each = [b.needs(r) for b, r in zip(self.bodies, recipes, strict=True)]
        needed = [hull_of(row) for row in zip(*each, strict=True)]
        starts = [start for recipe in recipes for start in recipe.starts]
        key = (
            tuple(recipe.static for recipe in recipes),
            shapes_of(needed),
            tuple(fits(row, needed) for row in each),
            tuple(limited),
        )
        starts += [start for start, _ in limited.values()]
        index: Box = whole(self.node.in_shapes[0])
        content = Branches(recipes, each, needed, boxes, tuple(limited))
        static = Frozen(key, content)
        return Need((index, *needed), static, tuple(starts))

    def emit(
        self,
        values: Sequence[Any],
        static: Frozen[Branches],
        starts: Sequence[jax.Array],
    ) -> Sequence[Any]:
        recipes, each, needed, boxes, limited = static.content
        index, *operands = values
        position = 0
        branches = []
        # What is a part in one branch is combined, whichever branch runs.
        every = [self.first_ones(k, limited, starts) for k in range(len(recipes))]
        joint = [
            next((part for part in column if part is not None), None)
            for column in zip(*(parts for parts, _ in every), strict=True)
        ]
        for (parts, here), body, recipe, needs in zip(
            every, self.bodies, recipes, each, strict=True
        ):
            own = starts[position : position + len(recipe.starts)]
            position += len(recipe.starts)

            def branch(
                *operands: jax.Array,
                body: InnerBody = body,
                recipe: Recipe = recipe,
                needs: Boxes = needs,
                own: Sequence[Any] = own,
                lacking: Sequence[Partial | None] = [
                    None if part else combined
                    for part, combined in zip(parts, joint, strict=True)
                ],
                here: Any = here,
            ) -> list[Any]:
                inputs = fit(list(operands), needs, needed)
                outs = body.run(recipe, boxes, inputs, own)
                return [
                    only_first(as_carried(o, out.aval), part, here)
                    for o, out, part in zip(outs, self.node.outs, lacking, strict=True)
                    if o is not None
                ]

            branches.append(branch)
        made = iter(lax.switch(index, branches, *operands))
        return [None if box is None else next(made) for box in boxes]
