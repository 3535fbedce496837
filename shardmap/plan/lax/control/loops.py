"""Rules of ``scan`` and ``while``."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
from jax import lax

from shardmap._jax.primitives import scan_counts
from shardmap.plan.engine.factors import Crops, RuleTable, crop, crops
from shardmap.plan.engine.nodes import Calls, Node, Value
from shardmap.plan.engine.recipe import Recipe
from shardmap.plan.engine.rules import Factor, Need
from shardmap.plan.engine.slices import Box, Interval, hull_of, whole
from shardmap.plan.lax.control.body import (
    ALONG,
    ELSEWHERE,
    Boxes,
    Frozen,
    Inner,
    InnerBody,
    as_carried,
    fit,
    fits,
    hulls,
    only_first,
    shapes_of,
)
from shardmap.plan.lax.control.written_out import (
    MOST_EQUATIONS,
    MOST_IN_STAGES,
    size_of_step,
)

Arrays: TypeAlias = list[jax.Array]


class Looped(NamedTuple):
    """What a shard computes of a loop.

    Attributes:
      recipe: what is computed in one step.
      made: the boxes of one step's results, carried ones first.
      needs: the boxes that one step reads.
      crops: what is taken of the results.
      limited: the loops that are summed over in part.
      length: how many steps a scan makes.
      test: what is computed of the condition of a ``while``.
      looked: the boxes that the condition reads.
      lead: the box of the condition's result.
    """

    recipe: Recipe
    made: Boxes
    needs: Boxes
    crops: Crops
    limited: tuple[Factor, ...]
    length: int = 0
    test: Any = None
    looked: Boxes = ()
    lead: Box = ()


class Scan(Inner):
    """``scan``: consts, carries, and a leading axis that is run along."""

    first_row = 0
    """Where in the operands that it runs along it begins."""

    def __init__(self, node: Node, table: RuleTable, calls: Calls) -> None:
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
        self.body = InnerBody(params["jaxpr"], table, calls, carried)
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
        carry = list(boxes[: self.carries])
        rows = boxes[self.carries :]
        along = (0, self.node.params["length"])
        if not self.carries:
            spans = [box[:1] for box in rows if box is not None]
            span = hull_of(spans)
            assert span is not None
            [along] = span
        inner: list[Box | None] = [None if box is None else box[1:] for box in rows]
        limited = self.limited(loops)
        intervals = self.intervals(0, limited)
        while True:
            recipe = self.body.trace([*carry, *inner], intervals)
            needs = self.body.needs(recipe)
            entering = needs[self.consts : self.consts + self.carries]
            grown = hulls(carry, entering)
            if grown == carry:
                break
            carry = grown
        # A carried box that the body does not read still enters as it leaves.
        needed = [*needs[: self.consts], *carry]
        read = along[0] + self.first_row, along[1] + self.first_row
        for box in needs[self.consts + self.carries :]:
            needed.append(None if box is None else (read, *box))
        made = [*carry, *[None if b is None else (along, *b) for b in inner]]
        shapes, begins = crops(boxes, made)
        length = along[1] - along[0]
        inside = fits(needs[: self.consts + self.carries], carry)
        key = (
            recipe.static,
            length,
            shapes_of(needed),
            shapes_of(made),
            inside,
            shapes,
            tuple(limited),
        )
        every = (*carry, *inner)
        content = Looped(recipe, every, needs, shapes, tuple(limited), length)
        starts = (*recipe.starts, *begins, *(start for start, _ in limited.values()))
        return Need(tuple(needed), Frozen(key, content), starts)

    def emit(
        self,
        values: Sequence[Any],
        static: Frozen[Looped],
        starts: Sequence[jax.Array],
    ) -> Sequence[Any]:
        recipe, wanted, needs, shapes, limited, length, *_ = static.content
        own = starts[: len(recipe.starts)]
        parts, here = self.first_ones(0, limited, starts)
        first = self.consts + self.carries
        consts, entering, rows = (
            values[: self.consts],
            values[self.consts : first],
            values[first:],
        )
        live = [k for k in range(self.carries) if wanted[k] is not None]

        def body(carried: Arrays, row: Arrays) -> tuple[Arrays, Arrays]:
            inputs: list[Any] = [None] * len(values)
            inputs[: self.consts] = consts
            for k, value in zip(live, carried, strict=True):
                inputs[self.consts + k] = value
            given = iter(row)
            for k in range(first, len(values)):
                if needs[k] is not None:
                    inputs[k] = next(given)
            inputs = fit(
                inputs, needs, [*needs[: self.consts], *wanted[: self.carries]]
            )
            outs = self.body.run(recipe, wanted, inputs, own)
            leaving = [as_carried(outs[k], avals[k]) for k in live]
            return leaving, [o for o in outs[self.carries :] if o is not None]

        avals = [out.aval for out in self.node.outs]
        initial = [
            only_first(as_carried(entering[k], avals[k]), parts[k], here) for k in live
        ]
        final, stacked = lax.scan(
            body,
            initial,
            [
                row
                for row, box in zip(rows, needs[first:], strict=True)
                if box is not None
            ],
            length=length,
            reverse=self.node.params["reverse"],
            unroll=self.node.params["unroll"],
        )
        found = iter([*final, *stacked])
        results = [None if box is None else next(found) for box in wanted]
        return crop(results, shapes, starts[len(recipe.starts) :])


class While(Inner):
    """``while``: the condition decides for all that is carried.

    A mapped loop has a condition with leading axes, which its carried values share; an
    element whose condition is false stays as it is.
    """

    remedy = (
        f"{ELSEWHERE}; a loop that sums over the cut becomes stages if its number of "
        "steps is known, as that of lax.fori_loop or lax.scan is"
    )

    def __init__(self, node: Node, table: RuleTable, calls: Calls) -> None:
        super().__init__(node)
        params = node.params
        self.test = InnerBody(params["cond_jaxpr"], table, calls)
        self.tests, self.consts = params["cond_nconsts"], params["body_nconsts"]
        self.front = self.tests + self.consts
        self.rank = len(self.test.graph.outputs[0].shape)
        carries = len(node.outs)
        consts = {k: (self.tests + k, None) for k in range(self.consts)}
        entering = {self.consts + k: (self.front + k, None) for k in range(carries)}
        shape = self.test.graph.outputs[0].shape
        self.looked = self.test.needs(self.test.trace([whole(shape)]))
        carried = [(k, self.consts + k) for k in range(carries)]
        looked = [b for k, b in carried if self.looked[self.tests + k] is not None]
        body = params["body_jaxpr"]
        self.body = InnerBody(body, table, calls, carried, looked)
        outs = {k: (k, None) for k in range(carries)}
        self.name_loops(self.body, consts | entering, outs)
        self._name_condition()

    def _name_condition(self) -> None:
        shared = {
            name: k for out in self.outs for k, name in enumerate(out[: self.rank])
        }
        gone = set()
        for k, out in enumerate(self.outs):
            if self.looked[self.tests + k] is not None:
                gone |= {*out[self.rank :]} - {None}
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
        """Names the axes of what only the condition takes, by those of its result."""
        unions, mixed = self.test.classes, self.test.broken
        inputs, [result] = self.test.graph.inputs, self.test.graph.outputs
        if not isinstance(result, Value):
            return
        roots = {unions.find((result.number, k)): k for k in range(self.rank)}
        for k, value in enumerate(inputs[: self.tests]):
            for axis in range(len(value.shape)):
                root = unions.find((value.number, axis))
                if root not in mixed and ("mapped", roots.get(root)) in known:
                    self.ins[k][axis] = "mapped", roots[root]

    def backward(self, boxes: Boxes, loops: Mapping[Factor, Interval]) -> Need:
        carry = list(boxes)
        limited = self.limited(loops)
        intervals = self.intervals(0, limited)
        while True:
            before = list(carry)
            lead = hull_of(box[: self.rank] for box in carry if box is not None)
            assert lead is not None
            test = self.test.trace([lead])
            looked = self.test.needs(test)
            carry = hulls(carry, looked[self.tests :])
            carry = [box and (*lead, *box[self.rank :]) for box in carry]
            recipe = self.body.trace(carry, intervals)
            needs = self.body.needs(recipe)
            carry = hulls(carry, needs[self.consts :])
            if carry == before:
                break
        needed = (*looked[: self.tests], *needs[: self.consts], *carry)
        shapes, begins = crops(boxes, carry)
        inside = fits(needs, carry), fits(looked, carry)
        names = tuple(limited)
        key = (test.static, recipe.static, shapes_of(needed), inside, shapes, names)
        content = Looped(
            *(recipe, tuple(carry), needs, shapes, names),
            test=test,
            looked=looked,
            lead=lead,
        )
        firsts = [start for start, _ in limited.values()]
        starts = (*test.starts, *recipe.starts, *begins, *firsts)
        return Need(needed, Frozen(key, content), starts)

    def emit(
        self,
        values: Sequence[Any],
        static: Frozen[Looped],
        starts: Sequence[jax.Array],
    ) -> Sequence[Any]:
        recipe, carry, needs, shapes, limited, _, test, looked, lead = static.content
        parts, here = self.first_ones(0, limited, starts)
        count = len(test.starts)
        first, second = starts[:count], starts[count : count + len(recipe.starts)]
        live = [k for k, box in enumerate(carry) if box is not None]
        avals = [out.aval for out in self.node.outs]

        def spread(
            carried: Arrays, consts: Sequence[jax.Array], boxes: Boxes
        ) -> list[Any]:
            inputs: list[Any] = [None] * len(carry)
            for k, value in zip(live, carried, strict=True):
                inputs[k] = value
            given = [*boxes[: len(consts)], *carry]
            return fit([*consts, *inputs], boxes, given)

        def goes_on(carried: Arrays) -> jax.Array:
            inputs = spread(carried, values[: self.tests], looked)
            return self.test.run(test, [lead], inputs, first)[0]

        def body(carried: Arrays) -> Arrays:
            inputs = spread(carried, values[self.tests : self.front], needs)
            outs = self.body.run(recipe, carry, inputs, second)
            new = [as_carried(outs[k], avals[k]) for k in live]
            if not self.rank:
                return new
            mask = goes_on(carried)
            return [
                lax.select(lax.broadcast_in_dim(mask, a.shape, range(self.rank)), a, b)
                for a, b in zip(new, carried, strict=True)
            ]

        final = lax.while_loop(
            lambda carried: goes_on(carried).any() if self.rank else goes_on(carried),
            body,
            [
                only_first(as_carried(values[self.front + k], avals[k]), parts[k], here)
                for k in live
            ],
        )
        results: list[Any] = [None] * len(carry)
        for k, value in zip(live, final, strict=True):
            results[k] = value
        return crop(results, shapes, starts[count + len(recipe.starts) :])
