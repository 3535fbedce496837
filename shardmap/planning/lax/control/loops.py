"""Rules of ``scan``, ``while`` and ``cond``, and what shards compute of them.

A loop of known length at which a cut ends becomes its steps, so that a sum inside of a
step ends a stage (`unrolled`).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardmap._jax.primitives import scan_counts
from shardmap._jax.walk import equations
from shardmap.planning.engine.nodes import Graph, Node, Operand
from shardmap.planning.engine.rules import Factor, Need, Reason, RuleTable
from shardmap.planning.engine.slices import Box, Interval, hull_of, whole
from shardmap.planning.lax.control.body import (
    ALONG,
    ELSEWHERE,
    MIXED,
    BodyShard,
    Boxes,
    Inner,
    InnerBody,
    hulls,
)
from shardmap.planning.lax.control.rows import ROWS, conditions, has_unvmapped
from shardmap.planning.lax.primitives import OPTIMIZATION_BARRIER

MOST_EQUATIONS = 2048
"""The most equations of an unrolled loop, where its steps are compiled together."""

MOST_IN_STAGES = 2**16
"""The most equations if each step is a stage: all steps share their functions."""

SAMPLE = 3
"""So many steps show how a longer loop is cut."""

Arrays: TypeAlias = list[jax.Array | None]


def _along(span: Interval, boxes: Boxes) -> list[Box | None]:
    """The boxes of one step, for a span of steps."""
    return [None if box is None else (span, *box) for box in boxes]


class Looped(NamedTuple):
    """What a shard computes of a scan.

    Attributes:
      summed: the loops that it sums over.
    """

    step: BodyShard
    summed: tuple[Factor, ...]
    length: int


Repeated: TypeAlias = tuple[BodyShard, BodyShard]
"""What a shard computes of a ``while``: its condition, and a step."""


class Scan(Inner):
    """``scan``: its operands are constants, carried values, and rows for each step."""

    first_row = 0
    """The row of the operands with which it begins."""

    def __init__(self, node: Node, table: RuleTable) -> None:
        params = node.params
        self.consts, self.carries = scan_counts(params)
        if (size := params["length"] * size_of_step(node)) > MOST_EQUATIONS:
            self.remedy += (
                f"; a loop that sums over the cut becomes stages of up to "
                f"{MOST_IN_STAGES:,} operations in all, {MOST_EQUATIONS:,} where they "
                f"are one function, and this one has {size:,}"
            )
        carried = [(k, self.consts + k) for k in range(self.carries)]
        self.body = InnerBody(node, params["jaxpr"], table, carried)
        first = self.consts + self.carries
        ins = [(k, int(k >= first)) for k in range(len(node.ins))]
        outs = [(k, int(k >= self.carries)) for k in range(len(node.outs))]
        super().__init__(node, (self.body, ins, outs))
        if self.carries:
            rows = *self.ins[first:], *self.outs[self.carries :]
            self.wholes.update((steps, ALONG) for steps, *_ in rows)

    def backward(self, boxes: Boxes, loops: Mapping[Factor, Interval]) -> Need:
        carry, rows = list(boxes[: self.carries]), boxes[self.carries :]
        first = self.consts + self.carries
        along = (0, self.node.params["length"])
        if not self.carries:
            span = hull_of(box[:1] for box in rows if box is not None)
            assert span is not None
            [along] = span
        inner: list[Box | None] = [None if box is None else box[1:] for box in rows]
        while True:
            intervals = self.intervals(0, loops, [*carry, *_along(along, inner)])
            recipe = self.body.trace([*carry, *inner], intervals)
            needs = self.body.needs(recipe)
            grown = hulls(carry, needs[self.consts : first])
            if grown == carry:
                break
            carry = grown
        # A box is carried even if the body does not read it.
        given = [*needs[: self.consts], *carry, *needs[first:]]
        read = along[0] + self.first_row, along[1] + self.first_row
        needed = [*given[:first], *_along(read, given[first:])]
        computed = [*carry, *_along(along, inner)]
        static = Looped(
            self.body.shard(recipe, [*carry, *inner], given),
            summed=tuple(loops),
            length=along[1] - along[0],
        )
        starts = (*recipe.starts, *(start for start, _ in loops.values()))
        return Need(tuple(needed), static, starts, computed)

    def emit(
        self, values: Sequence[Any], static: Looped, starts: Sequence[jax.Array]
    ) -> Sequence[Any]:
        step, first = static.step, self.consts + self.carries
        consts, carries = values[: self.consts], values[self.consts : first]

        # JAX's loops take None, for unwanted values, as a tree without leaves.
        def body(carried: Arrays, rows: Arrays) -> tuple[Arrays, Arrays]:
            outs = self.body.run(step, [*consts, *carried, *rows], starts)
            return self.typed(outs[: self.carries]), outs[self.carries :]

        final, stacked = lax.scan(
            body,
            self.only_first(self.entering(carries, step), static.summed, starts),
            list(values[first:]),
            length=static.length,
            reverse=self.node.params["reverse"],
            unroll=self.node.params["unroll"],
        )
        return [*final, *stacked]


class While(Inner):
    """``while``: carried values, and a condition that may look at all of them.

    The condition of a loop `ROWS` is made of one truth value for each row, and of some
    for all: each row stays as it is once its own is false. Loops that a step sums over
    are whole: the next step, or the condition, needs the sum.
    """

    remedy = (
        f"{ELSEWHERE}; a loop that sums over the cut becomes stages if its number of "
        "steps is known, as that of lax.fori_loop or lax.scan is"
    )

    def __init__(self, node: Node, table: RuleTable) -> None:
        params, count = node.params, len(node.outs)
        split = conditions if node.primitive is ROWS else None
        self.tests, self.consts = params["cond_nconsts"], params["body_nconsts"]
        self.front = self.tests + self.consts
        # No piece of what the condition sums over knows when to stop.
        test = params["cond_jaxpr"]
        self.test = InnerBody(node, test, table, partial=False, outputs=split)
        self.shapes = [result.shape for result in self.test.graph.outputs]
        carried = [(k, self.consts + k) for k in range(count)]
        self.body = InnerBody(node, params["body_jaxpr"], table, carried)
        ins = [(k, 0) for k in range(len(node.ins))]
        outs = [(k, 0) for k in range(count)]
        super().__init__(
            node,
            (self.body, ins[self.tests :], outs),
            (self.test, ins[: self.tests] + ins[self.front :], [(count, 0)]),
        )
        # The result of the condition stands behind the others.
        row = len(node.ins) + count
        axes = range(len(self.shapes[0]))
        self.rows: list[Factor] = [self.names[row, axis] for axis in axes]
        used = [self.outs[k] for k in params.get("used", ())]
        for name, parts in self.contracted.items():
            is_used = name in self.rows and any(name not in axes for axes in used)
            if parts or is_used or self.rows.count(name) > 1:
                self.wholes.setdefault(name, Reason(MIXED, self.remedy))

    def backward(self, boxes: Boxes, loops: Mapping[Factor, Interval]) -> Need:
        carry, before = list(boxes), None
        while carry != before:
            before, spans = carry, self.spans(carry)
            first, *others = map(whole, self.shapes)
            rows = [
                spans.get(k, span) for k, span in zip(self.rows, first, strict=True)
            ]
            results = [tuple(rows), *others]
            test = self.test.trace(results, {})
            looked = self.test.needs(test)
            recipe = self.body.trace(carry, self.intervals(0, {}, carry))
            needs = self.body.needs(recipe)
            carry = hulls(hulls(carry, looked[self.tests :]), needs[self.consts :])
            # The condition is that of these rows: all that is carried has them.
            spans = {k: v for k, v in self.spans(carry).items() if k in self.rows}
            carry = [
                box and tuple(map(spans.get, axes, box))
                for axes, box in zip(self.outs, carry, strict=True)
            ]
        needed = (*looked[: self.tests], *needs[: self.consts], *carry)
        static: Repeated = (
            self.test.shard(test, results, [*looked[: self.tests], *carry]),
            self.body.shard(recipe, carry, [*needs[: self.consts], *carry]),
        )
        return Need(needed, static, (*test.starts, *recipe.starts), carry)

    def emit(
        self, values: Sequence[Any], static: Repeated, starts: Sequence[jax.Array]
    ) -> Sequence[Any]:
        test, step = static
        tested, consts = values[: self.tests], values[self.tests : self.front]
        starts_of_body = starts[test.starts :]

        def goes_on(carried: Arrays) -> jax.Array:
            results = self.test.run(test, [*tested, *carried], starts)
            return functools.reduce(jnp.logical_and, [x.any() for x in results])

        def body(carried: Arrays) -> Arrays:
            return self.typed(self.body.run(step, [*consts, *carried], starts_of_body))

        return lax.while_loop(goes_on, body, self.entering(values[self.front :], step))


Branches: TypeAlias = tuple[tuple[BodyShard, ...], tuple[Factor, ...]]
"""The shard of each branch, and the loops that they sum over."""


class Cond(Inner):
    """``cond``: a shard reads the hull of the boxes that the branches need."""

    remedy = f"{ELSEWHERE}; or compute all branches, and choose with jnp.where"

    def __init__(self, node: Node, table: RuleTable) -> None:
        self.bodies = [
            InnerBody(node, jaxpr, table) for jaxpr in node.params["branches"]
        ]
        ins = [(k, 0) for k in range(1, len(node.ins))]
        outs = [(k, 0) for k in range(len(node.outs))]
        super().__init__(node, *((body, ins, outs) for body in self.bodies))

    def backward(self, boxes: Boxes, loops: Mapping[Factor, Interval]) -> Need:
        recipes = [
            body.trace(boxes, self.intervals(k, loops, boxes))
            for k, body in enumerate(self.bodies)
        ]
        each = [b.needs(r) for b, r in zip(self.bodies, recipes, strict=True)]
        needed = [hull_of(row) for row in zip(*each, strict=True)]
        bodies = tuple(
            body.shard(recipe, boxes, needed)
            for body, recipe in zip(self.bodies, recipes, strict=True)
        )
        starts = [start for recipe in recipes for start in recipe.starts]
        starts += [start for start, _ in loops.values()]
        index: Box = whole(self.node.in_shapes[0])
        static: Branches = bodies, tuple(loops)
        return Need((index, *needed), static, tuple(starts))

    def emit(
        self, values: Sequence[Any], static: Branches, starts: Sequence[jax.Array]
    ) -> Sequence[Any]:
        [index, *operands], [shards, summed] = values, static

        def branch(k: int) -> Callable[..., list[Any]]:
            starts_of_body = starts[sum(each.starts for each in shards[:k]) :]

            def run(*operands: Any) -> list[Any]:
                outs = self.bodies[k].run(shards[k], operands, starts_of_body)
                return self.only_first(self.typed(outs), summed, starts, k)

            return run

        branches = [branch(k) for k in range(len(self.bodies))]
        return lax.switch(index, branches, *operands)


def unrolled(
    graph: Graph, node: Node, most: int, steps: int | None = None
) -> list[Operand] | None:
    """The results of a loop's first steps, whose rows are repeated for the others.

    Returns:
      None, and adds nothing, if there would be more than ``most`` equations.
    """
    if has_unvmapped(node.params["jaxpr"]):
        return None  # Bounds of hundreds of steps, of which most are never run.
    params, ins = node.params, node.ins
    length, body = params["length"], params["jaxpr"]
    consts, carries = scan_counts(params)
    first = consts + carries
    count = length if steps is None else min(length, steps)
    if not length or count * size_of_step(node) > most:
        return None
    carry = list(ins[consts:first])

    def rows_of(x: jax.Array) -> list[jax.Array]:
        return [lax.index_in_dim(x, k, 0, keepdims=False) for k in range(count)]

    def stacked(*rows: jax.Array) -> jax.Array:
        counts = [len(part) for part in np.array_split(range(length), count)]
        pairs = zip(rows, counts, strict=True)
        return lax.concatenate([lax.broadcast(row, (n,)) for row, n in pairs], 0)

    def carried(x: Operand) -> Operand:
        # Fused with the next step, what that takes twice would be computed twice.
        return graph.add(OPTIMIZATION_BARRIER, {}, [x], [x.aval])[0]

    rows = [graph.call(rows_of, [x]) for x in ins[first:]]
    outs_of: dict[int, list[Operand]] = {}
    order = range(count)
    for k in reversed(order) if params["reverse"] else order:
        operands = [*ins[:consts], *carry, *(row[k] for row in rows)]
        outs = graph.inline(body, operands)
        carry, outs_of[k] = list(map(carried, outs[:carries])), outs[carries:]
    columns = zip(*(outs_of[k] for k in range(count)), strict=True)
    return [*carry, *(x for column in columns for x in graph.call(stacked, column))]


def size_of_step(node: Node) -> int:
    """The number of equations of a step of a scan; inner loops count once."""
    return sum(1 for _ in equations(node.params["jaxpr"])) + 3 * len(node.ins)
