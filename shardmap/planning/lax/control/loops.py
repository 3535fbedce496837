"""Rules of ``scan`` and ``while``: which axes of a loop can be cut, and its shards."""

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from shardmap._jax.primitives import scan_counts
from shardmap.planning.engine.analysis import Pending
from shardmap.planning.engine.factors import Crops, RuleTable, crop, crops
from shardmap.planning.engine.nodes import Node, Value
from shardmap.planning.engine.rules import Factor, Need
from shardmap.planning.engine.slices import Box, Interval, hull_of, whole
from shardmap.planning.lax.control.body import (
    ALONG,
    ELSEWHERE,
    BodyShard,
    Boxes,
    Inner,
    InnerBody,
    as_carried,
    hulls,
    only_first,
)
from shardmap.planning.lax.control.rows import ROWS, conditions
from shardmap.planning.lax.control.unroll import (
    MOST_EQUATIONS,
    MOST_IN_STAGES,
    size_of_step,
)

Arrays: TypeAlias = list[jax.Array | None]


def _along(span: Interval, boxes: Boxes) -> list[Box | None]:
    """The boxes of one step, for a span of steps."""
    return [None if box is None else (span, *box) for box in boxes]


class Looped(NamedTuple):
    """What a shard computes of a loop.

    Attributes:
      step: the shard of the body.
      crops: the parts of the results that are wanted.
      limited: the summed loops that run over a part only.
      length: the number of steps of a scan.
      test: the shard of the condition of a ``while``.
    """

    step: BodyShard
    crops: Crops
    limited: tuple[Factor, ...]
    length: int = 0
    test: BodyShard | None = None


def _sums_nothing(parts: Sequence[Pending | None] | None) -> bool:
    """Whether a loop can be cut, and no output is a partial sum then."""
    return parts is not None and not any(parts)


class LoopRule(Inner):
    """The base of both rules: values that a step takes from the step before."""

    def carried(self, values: Sequence[Any]) -> list[Any]:
        """The values with the dtypes of the carried ones; None stays None."""
        return [
            as_carried(value, out.aval)
            for value, out in zip(values, self.node.outs, strict=False)
        ]

    def entering(
        self, values: Sequence[Any], static: Looped, starts: Sequence[jax.Array]
    ) -> list[Any]:
        """The carried values of the first step, None where no step needs one."""
        every = self.parts(static.limited)
        assert every is not None
        here = self.firsts(static.limited, starts)
        return [
            only_first(value, part, here) if is_wanted else None
            for value, part, is_wanted in zip(
                self.carried(values), *every, static.step.wanted, strict=False
            )
        ]


class Scan(LoopRule):
    """``scan``: its operands are constants, carried values, and rows for each step."""

    first_row = 0
    """The row of the operands with which it begins."""

    def __init__(self, node: Node, table: RuleTable) -> None:
        super().__init__(node)
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
        self.name_loops(
            self.body,
            {k: (k, 0 if k >= first else None) for k in range(len(node.ins))},
            {k: (k, 0 if k >= self.carries else None) for k in range(len(node.outs))},
        )
        if not self.carries:
            for axes in (*self.ins[first:], *self.outs):
                axes[0] = "along"
        else:
            self.why.update(((k, 0), ALONG) for k in range(first, len(node.ins)))

    def backward(self, boxes: Boxes, loops: Mapping[Factor, Interval]) -> Need:
        carry, rows = list(boxes[: self.carries]), boxes[self.carries :]
        first = self.consts + self.carries
        along = (0, self.node.params["length"])
        if not self.carries:
            span = hull_of(box[:1] for box in rows if box is not None)
            assert span is not None
            [along] = span
        inner: list[Box | None] = [None if box is None else box[1:] for box in rows]
        limited = self.limited(loops)
        while True:
            intervals = self.intervals(0, limited, [*carry, *_along(along, inner)])
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
        shapes, begins = crops(boxes, computed)
        static = Looped(
            self.body.shard(recipe, [*carry, *inner], given),
            crops=shapes,
            limited=tuple(limited),
            length=along[1] - along[0],
        )
        starts = (*recipe.starts, *begins, *(start for start, _ in limited.values()))
        return Need(tuple(needed), static, starts)

    def emit(
        self, values: Sequence[Any], static: Looped, starts: Sequence[jax.Array]
    ) -> Sequence[Any]:
        step, first = static.step, self.consts + self.carries
        consts, carries = values[: self.consts], values[self.consts : first]

        # JAX's loops take None, for unwanted values, as a tree without leaves.
        def body(carried: Arrays, rows: Arrays) -> tuple[Arrays, Arrays]:
            outs = self.body.run(step, [*consts, *carried, *rows], starts)
            return self.carried(outs[: self.carries]), outs[self.carries :]

        final, stacked = lax.scan(
            body,
            self.entering(carries, static, starts),
            list(values[first:]),
            length=static.length,
            reverse=self.node.params["reverse"],
            unroll=self.node.params["unroll"],
        )
        return crop([*final, *stacked], static.crops, starts[step.starts :])


class While(LoopRule):
    """``while``: carried values, and a condition that may look at all of them.

    The condition of a vectorized loop has leading axes, which the carried values share.
    An element whose condition is false stays as it is. So do the rows of a loop `ROWS`,
    whose condition is made of one truth value for each, and of some for all.
    """

    remedy = (
        f"{ELSEWHERE}; a loop that sums over the cut becomes stages if its number of "
        "steps is known, as that of lax.fori_loop or lax.scan is"
    )

    def __init__(self, node: Node, table: RuleTable) -> None:
        super().__init__(node)
        params = node.params
        is_rows = node.primitive is ROWS
        split = conditions if is_rows else None
        self.test = InnerBody(node, params["cond_jaxpr"], table, outputs=split)
        self.tests, self.consts = params["cond_nconsts"], params["body_nconsts"]
        self.front = self.tests + self.consts
        self.shapes = [result.shape for result in self.test.graph.outputs]
        self.rank = 0 if is_rows else len(self.shapes[0])
        carries = len(node.outs)
        consts = {k: (self.tests + k, None) for k in range(self.consts)}
        entering = {self.consts + k: (self.front + k, None) for k in range(carries)}
        self.looked = self.test.needs(self.test.trace(list(map(whole, self.shapes))))
        carried = [(k, self.consts + k) for k in range(carries)]
        looked = [b for k, b in carried if self.looked[self.tests + k] is not None]
        body = params["body_jaxpr"]
        self.body = InnerBody(node, body, table, carried, looked)
        outs = {k: (k, None) for k in range(carries)}
        self.name_loops(self.body, consts | entering, outs)
        shared, gone = self._rows() if is_rows else self._leading()
        self._name_condition(shared, gone)
        self.along = [
            [
                name[1] if isinstance(name, tuple) and name[0] == "mapped" else None
                for name in axes
            ]
            if is_rows
            else [axis if axis < self.rank else None for axis in range(len(axes))]
            for axes in self.outs
        ]

    def _leading(self) -> tuple[dict[Any, int], set[Any]]:
        """The names of the leading axes, and of those that the condition mixes."""
        shared = {
            name: k for out in self.outs for k, name in enumerate(out[: self.rank])
        }
        looked = (
            out
            for k, out in enumerate(self.outs)
            if self.looked[self.tests + k] is not None
        )
        return shared, {name for out in looked for name in out[self.rank :]}

    def _rows(self) -> tuple[dict[Any, int], set[Any]]:
        """The names of the axes of rows, and of those that the condition mixes."""
        test, rows = self.test, self.test.graph.outputs[0]
        assert isinstance(rows, Value)
        roots: dict[Any, int] = {}
        for k in range(len(rows.shape)):
            root = test.classes.find((rows.number, k))
            if root not in test.broken and _sums_nothing(test.parts([root])):
                roots[root] = k
        pairs = {
            (name, roots.get(test.classes.find((value.number, axis))))
            for number, out in enumerate(self.outs)
            if self.looked[self.tests + number] is not None
            for value in [test.graph.inputs[self.tests + number]]
            for axis, name in enumerate(out)
        }
        names, places = (Counter(column) for column in zip(*pairs, strict=True))
        shared = {
            name: k
            for name, k in pairs
            if name is not None and k is not None
            if names[name] == places[k] == 1
            if _sums_nothing(next(iter(self.parts([name]) or []), None))
            if all(name in self.outs[used] for used in self.node.params["used"])
        }
        return shared, {*names} - shared.keys()

    def _name_condition(self, shared: dict[Any, int], gone: set[Any]) -> None:
        for axes in (*self.ins, *self.outs):
            axes[:] = [
                None
                if name in gone or name is None
                else ("mapped", shared[name])
                if name in shared
                else name
                for name in axes
            ]
        self._name_what_it_takes({name for out in self.outs for name in out})

    def _name_what_it_takes(self, known: set[Any]) -> None:
        """Names the axes of the condition's constants, by those of its result."""
        unions, mixed = self.test.classes, self.test.broken
        inputs, result = self.test.graph.inputs, self.test.graph.outputs[0]
        if not isinstance(result, Value):
            return
        roots = {unions.find((result.number, k)): k for k in range(len(result.shape))}
        for k, value in enumerate(inputs[: self.tests]):
            for axis in range(len(value.shape)):
                root = unions.find((value.number, axis))
                if root not in mixed and ("mapped", roots.get(root)) in known:
                    self.ins[k][axis] = "mapped", roots[root]

    def _rows_of(self, carry: Boxes) -> list[Box]:
        """The boxes of the results of the condition, for boxes of carried values."""
        spans: dict[int, list[Interval]] = {}
        for along, box in zip(self.along, carry, strict=True):
            for k, span in zip(along, box or [], strict=False):
                if k is not None:
                    spans.setdefault(k, []).append(span)
        first, *others = map(whole, self.shapes)
        rows = [
            (min(a for a, _ in spans[k]), max(b for _, b in spans[k]))
            if k in spans
            else span
            for k, span in enumerate(first)
        ]
        return [tuple(rows), *others]

    def backward(self, boxes: Boxes, loops: Mapping[Factor, Interval]) -> Need:
        carry = list(boxes)
        limited = self.limited(loops)
        while True:
            before = list(carry)
            rows = self._rows_of(carry)
            test = self.test.trace(rows)
            looked = self.test.needs(test)
            carry = hulls(carry, looked[self.tests :])
            carry = [
                box
                and tuple(
                    span if k is None else rows[0][k]
                    for k, span in zip(along, box, strict=True)
                )
                for along, box in zip(self.along, carry, strict=True)
            ]
            recipe = self.body.trace(carry, self.intervals(0, limited, carry))
            needs = self.body.needs(recipe)
            carry = hulls(carry, needs[self.consts :])
            if carry == before:
                break
        needed = (*looked[: self.tests], *needs[: self.consts], *carry)
        shapes, begins = crops(boxes, carry)
        static = Looped(
            self.body.shard(recipe, carry, [*needs[: self.consts], *carry]),
            crops=shapes,
            limited=tuple(limited),
            test=self.test.shard(test, rows, [*looked[: self.tests], *carry]),
        )
        firsts = [start for start, _ in limited.values()]
        starts = (*test.starts, *recipe.starts, *begins, *firsts)
        return Need(needed, static, starts)

    def emit(
        self, values: Sequence[Any], static: Looped, starts: Sequence[jax.Array]
    ) -> Sequence[Any]:
        step, test = static.step, static.test
        assert test is not None
        tested, consts = values[: self.tests], values[self.tests : self.front]
        starts_of_body = starts[test.starts :]

        def goes_on(carried: Arrays) -> jax.Array:
            results = self.test.run(test, [*tested, *carried], starts)
            if self.rank:
                return results[0]
            return functools.reduce(jnp.logical_and, [x.any() for x in results])

        def body(carried: Arrays) -> Arrays:
            new = self.carried(self.body.run(step, [*consts, *carried], starts_of_body))
            if not self.rank:
                return new
            mask = goes_on(carried)

            def chosen(a: jax.Array, b: jax.Array) -> jax.Array:
                here = lax.broadcast_in_dim(mask, a.shape, range(self.rank))
                return lax.select(here, a, b)

            result: Arrays = jax.tree.map(chosen, new, carried)
            return result

        final = lax.while_loop(
            lambda carried: goes_on(carried).any(),
            body,
            self.entering(values[self.front :], static, starts),
        )
        return crop(final, static.crops, starts_of_body[step.starts :])
