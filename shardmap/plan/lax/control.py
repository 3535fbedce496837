"""Rules of loops and branches: their bodies are programs of their own.

What a loop needs of its operands is a fixed point: a carried value must enter in the
box in which it leaves, and that box may grow until nothing more is asked. An axis that
the body maps index by index onto itself stays cut; any other ends up whole.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jax import lax
from jax.extend.core import primitives as p

from shardmap.plan.keys import is_key
from shardmap.plan.program import Calls, Node, Program, Value, flatten
from shardmap.plan.propagate import Unions
from shardmap.plan.recipe import Recipe, emit, relevant_nodes, trace_back
from shardmap.plan.rules import (
    UNCUT,
    Factor,
    Forward,
    Link,
    Lost,
    Need,
    Points,
    Reason,
    RuleMaker,
    RuleTable,
    meet,
    nothing_passes,
)
from shardmap.plan.slices import Box, Interval, Window, hull, hull_of, shape_of, whole

MIXED = Reason(
    "the body of the loop or branch mixes this axis",
    "cut an axis that the body treats index by index",
)
Boxes = Sequence[Box | None]


class Body:
    """A jaxpr inside an equation, ready to be sliced."""

    def __init__(self, jaxpr: Any, table: RuleTable, calls: Calls) -> None:
        self.program: Program = flatten(jaxpr, calls)
        self.rules = {n.number: table.rule(n) for n in self.program.nodes}
        self.nodes = {n.number: n for n in self.program.nodes}
        outputs = self.program.outputs
        self.stops = frozenset([*self.program.inputs, *self.program.constants])
        self.backwards = relevant_nodes(self.program.nodes, outputs, self.stops)

    def loops(self) -> tuple[Unions, set[Any]]:
        """Which axes are one loop, and the axes at which a loop would break."""
        unions, broken = Unions(), set()
        for node in self.program.nodes:
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
                if sides == {"in", "out"}:
                    linked.update(keys)
                elif keys and sides == {"in"}:
                    broken.add(keys[0])
            for operand in node.ins:
                if isinstance(operand, Value):
                    for axis, size in enumerate(operand.shape):
                        if size != 1 and (operand.number, axis) not in linked:
                            broken.add((operand.number, axis))
        return unions, broken

    def trace(self, boxes: Boxes) -> Recipe:
        demands = [
            None if box is None else (value, box)
            for value, box in zip(self.program.outputs, boxes, strict=True)
        ]
        return trace_back(
            self.backwards, self.rules, demands, self.stops, {}, versions=1
        )

    def needs(self, recipe: Recipe) -> list[Box | None]:
        """The boxes of the inputs that a recipe reads."""
        read = dict(recipe.reads)
        return [read.get(value) for value in self.program.inputs]

    def run(
        self, recipe: Recipe, wanted: Boxes, inputs: Sequence[Any], starts: Any
    ) -> list[Any]:
        """The wanted boxes of the outputs, from the boxes that `needs` said."""
        values = [
            value if box is not None else None
            for value, box in zip(self.program.outputs, wanted, strict=True)
        ]
        given = dict(zip(self.program.inputs, inputs, strict=True))
        given.update(self.program.constants)
        reads = [
            given[value]
            if value not in self.program.constants
            else lax.slice(given[value], [a for a, _ in box], [b for _, b in box])
            for value, box in recipe.reads
        ]
        return emit(recipe.static, self.nodes, self.rules, values)(reads, starts)


class Frozen:
    """A static part that equal recipes share, and a recipe to run it with."""

    def __init__(self, key: Any, content: Any) -> None:
        self.key, self.content = key, content

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Frozen) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


class Inner:
    """What the rules of loops and branches share.

    ``signature`` names, per operand and result, the axes that are one loop.
    """

    cheap = False

    def __init__(self, node: Node) -> None:
        self.node = node
        self.ins: list[list[Any]] = [[None] * len(s) for s in node.in_shapes]
        self.outs: list[list[Any]] = [[None] * len(s) for s in node.out_shapes]

    def name_loops(
        self,
        body: Body,
        pairs: Sequence[tuple[int, int]],
        ins: Mapping[int, tuple[int, int]],
        outs: Mapping[int, tuple[int, int]],
    ) -> None:
        """Names the axes that the body treats index by index.

        Args:
          body: the body.
          pairs: (output, input) of the body that are carried.
          ins: input of the body -> (operand, axes that the operand has in front).
          outs: output of the body -> (result, axes that the result has in front).
        """
        unions, broken = body.loops()
        inputs, outputs = body.program.inputs, body.program.outputs
        for out, into in pairs:
            value = outputs[out]
            for axis in range(len(inputs[into].shape)):
                key = inputs[into].number, axis
                if isinstance(value, Value):
                    unions.unite((value.number, axis), key)
        bad = {unions.find(key) for key in broken}
        for operands, places, names in (
            (inputs, ins, self.ins),
            (outputs, outs, self.outs),
        ):
            for k, (number, front) in places.items():
                operand = operands[k]
                if not isinstance(operand, Value):
                    continue
                for axis in range(len(operand.shape)):
                    root = unions.find((operand.number, axis))
                    if root not in bad:
                        names[number][axis + front] = root

    def forward(self, cuts: Sequence[Sequence[Points]]) -> Forward:
        found: dict[Any, list[Points]] = {}
        lost = []
        for axes, row in zip(self.ins, cuts, strict=True):
            for name, cut in zip(axes, row, strict=True):
                if name is not None:
                    found.setdefault(name, []).append(cut)
                elif cut.at:
                    lost.append(Lost(cut.origins, MIXED))
        met = {name: meet(row) for name, row in found.items()}
        return Forward(
            [[met.get(name, UNCUT) for name in axes] for axes in self.outs], {}, lost
        )

    def links(self) -> list[list[Link]]:
        groups: dict[Any, list[Link]] = {}
        for side, operands in (("in", self.ins), ("out", self.outs)):
            for k, axes in enumerate(operands):
                for axis, name in enumerate(axes):
                    if name is not None:
                        groups.setdefault(name, []).append(Link(side, k, axis))
        return list(groups.values())

    def windows(self) -> list[tuple[Link, Window, Link]]:
        return []

    def passes(self, combiner: str, pending: frozenset[int]) -> str | None:
        return nothing_passes(combiner, pending)


class Scan(Inner):
    """``scan``: consts, carries, and a leading axis that is run along."""

    def __init__(self, node: Node, table: RuleTable, calls: Calls) -> None:
        super().__init__(node)
        params = node.params
        if "num_consts" in params:
            self.consts, self.carries = params["num_consts"], params["num_carry"]
        else:
            parts = params["ft_in"].unpack()
            self.consts, self.carries = (len(list(part.vals)) for part in parts[:2])
        self.body = Body(params["jaxpr"], table, calls)
        first = self.consts + self.carries
        self.name_loops(
            self.body,
            [(k, self.consts + k) for k in range(self.carries)],
            {k: (k, int(k >= first)) for k in range(len(node.ins))},
            {k: (k, int(k >= self.carries)) for k in range(len(node.outs))},
        )
        if not self.carries:
            for axes in (*self.ins[first:], *self.outs):
                axes[0] = "along"

    def backward(self, boxes: Boxes, loops: Mapping[Factor, Interval]) -> Need:
        length = self.node.params["length"]
        carry = list(boxes[: self.carries])
        rows = boxes[self.carries :]
        along = (0, length)
        if not self.carries:
            spans = [box[:1] for box in rows if box is not None]
            span = hull_of(spans)
            assert span is not None
            [along] = span
        inner: list[Box | None] = [None if box is None else box[1:] for box in rows]
        while True:
            recipe = self.body.trace([*carry, *inner])
            needs = self.body.needs(recipe)
            entering = needs[self.consts : self.consts + self.carries]
            grown = [hull_of([a, b]) for a, b in zip(carry, entering, strict=True)]
            if grown == carry:
                break
            carry = grown
        # A carried box that the body does not read still enters as it leaves.
        needed = [*needs[: self.consts], *carry]
        for box in needs[self.consts + self.carries :]:
            needed.append(None if box is None else (along, *box))
        parts = []
        starts = list(recipe.starts)
        made = [*carry, *[None if b is None else (along, *b) for b in inner]]
        for asked, full in zip(boxes, made, strict=True):
            part = None
            if asked is not None and full is not None and asked != full:
                part = shape_of(asked)
                starts += [a[0] - b[0] for a, b in zip(asked, full, strict=True)]
            parts.append(part)
        shapes = tuple(None if box is None else shape_of(box) for box in needed)
        kept = tuple(None if box is None else shape_of(box) for box in made)
        key = (recipe.static, along[1] - along[0], shapes, kept, tuple(parts))
        inside = [(*carry, *inner), needs]
        return Need(tuple(needed), Frozen(key, (recipe, inside)), tuple(starts))

    def emit(
        self, values: Sequence[Any], static: Any, starts: Sequence[Any]
    ) -> Sequence[Any]:
        _, length, _, _, parts = static.key
        recipe, (wanted, needs) = static.content
        own = starts[: len(recipe.starts)]
        first = self.consts + self.carries
        consts, entering, rows = (
            values[: self.consts],
            values[self.consts : first],
            values[first:],
        )
        live = [k for k in range(self.carries) if wanted[k] is not None]

        def body(carried: Any, row: Any) -> Any:
            inputs: list[Any] = [None] * len(values)
            inputs[: self.consts] = consts
            for k, value in zip(live, carried, strict=True):
                inputs[self.consts + k] = value
            given = iter(row)
            for k in range(first, len(values)):
                if needs[k] is not None:
                    inputs[k] = next(given)
            inputs = _fit(
                inputs, needs, [*needs[: self.consts], *wanted[: self.carries]]
            )
            outs = self.body.run(recipe, wanted, inputs, own)
            leaving = [_as(outs[k], avals[k]) for k in live]
            return leaving, [o for o in outs[self.carries :] if o is not None]

        avals = [out.aval for out in self.node.outs]
        initial = [_as(entering[k], avals[k]) for k in live]
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
        results: list[Any] = [None] * len(wanted)
        for k, value in zip(live, final, strict=True):
            results[k] = value
        rest = iter(stacked)
        for k in range(self.carries, len(wanted)):
            if wanted[k] is not None:
                results[k] = next(rest)
        return _parts(results, parts, starts[len(recipe.starts) :])


def _fit(values: list[Any], needs: Boxes, given: Boxes) -> list[Any]:
    """Cuts carried boxes down to what the body reads of them."""
    fitted = list(values)
    for k, outer in enumerate(given):
        inner = needs[k]
        if inner is not None and outer is not None and inner != outer:
            begin = [a[0] - b[0] for a, b in zip(inner, outer, strict=True)]
            stop = [a[1] - b[0] for a, b in zip(inner, outer, strict=True)]
            fitted[k] = lax.slice(values[k], begin, stop)
    return fitted


def _parts(
    results: list[Any], parts: Sequence[Any], starts: Sequence[Any]
) -> list[Any]:
    rest = iter(starts)
    for k, part in enumerate(parts):
        if part is not None:
            offsets = [next(rest) for _ in part]
            results[k] = lax.dynamic_slice(results[k], offsets, part)
    return results


class While(Inner):
    """``while``: the condition decides for all that is carried.

    A mapped loop has a condition with leading axes, which its carried values share; an
    element whose condition is false stays as it is.
    """

    def __init__(self, node: Node, table: RuleTable, calls: Calls) -> None:
        super().__init__(node)
        params = node.params
        self.test = Body(params["cond_jaxpr"], table, calls)
        self.body = Body(params["body_jaxpr"], table, calls)
        self.tests, self.consts = params["cond_nconsts"], params["body_nconsts"]
        self.front = self.tests + self.consts
        self.rank = len(self.test.program.outputs[0].shape)
        carries = len(node.outs)
        consts = {k: (self.tests + k, 0) for k in range(self.consts)}
        entering = {self.consts + k: (self.front + k, 0) for k in range(carries)}
        self.name_loops(
            self.body,
            [(k, self.consts + k) for k in range(carries)],
            consts | entering,
            {k: (k, 0) for k in range(carries)},
        )
        self._name_condition()

    def _name_condition(self) -> None:
        shape = self.test.program.outputs[0].shape
        looked = self.test.needs(self.test.trace([whole(shape)]))
        shared = {
            name: k for out in self.outs for k, name in enumerate(out[: self.rank])
        }
        gone = set()
        for k, out in enumerate(self.outs):
            if looked[self.tests + k] is not None:
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

    def backward(self, boxes: Boxes, loops: Mapping[Factor, Interval]) -> Need:
        carry = list(boxes)
        while True:
            before = list(carry)
            lead = hull_of(box[: self.rank] for box in carry if box is not None)
            assert lead is not None
            test = self.test.trace([lead])
            looked = self.test.needs(test)
            carry = [
                hull_of([a, b])
                for a, b in zip(carry, looked[self.tests :], strict=True)
            ]
            carry = [
                None
                if box is None
                else (*hull(box[: self.rank], lead), *box[self.rank :])
                for box in carry
            ]
            recipe = self.body.trace(carry)
            needs = self.body.needs(recipe)
            carry = [
                hull_of([a, b])
                for a, b in zip(carry, needs[self.consts :], strict=True)
            ]
            if carry == before:
                break
        needed = (*looked[: self.tests], *needs[: self.consts], *carry)
        parts = []
        starts = [*test.starts, *recipe.starts]
        for asked, full in zip(boxes, carry, strict=True):
            part = None
            if asked is not None and full is not None and asked != full:
                part = shape_of(asked)
                starts += [a[0] - b[0] for a, b in zip(asked, full, strict=True)]
            parts.append(part)
        shapes = tuple(None if box is None else shape_of(box) for box in needed)
        fits = _fits(needs, carry), _fits(looked, carry)
        key = (test.static, recipe.static, shapes, tuple(parts), fits)
        content = (test, recipe, tuple(carry), looked, needs, lead)
        return Need(needed, Frozen(key, content), tuple(starts))

    def emit(
        self, values: Sequence[Any], static: Any, starts: Sequence[Any]
    ) -> Sequence[Any]:
        parts = static.key[3]
        test, recipe, carry, looked, needs, lead = static.content
        count = len(test.starts)
        first, second = starts[:count], starts[count : count + len(recipe.starts)]
        live = [k for k, box in enumerate(carry) if box is not None]
        avals = [out.aval for out in self.node.outs]

        def spread(carried: Any, consts: Sequence[Any], boxes: Any) -> list[Any]:
            inputs: list[Any] = [None] * len(carry)
            for k, value in zip(live, carried, strict=True):
                inputs[k] = value
            given = [*boxes[: len(consts)], *carry]
            return _fit([*consts, *inputs], boxes, given)

        def goes_on(carried: Any) -> Any:
            inputs = spread(carried, values[: self.tests], looked)
            return self.test.run(test, [lead], inputs, first)[0]

        def body(carried: Any) -> Any:
            inputs = spread(carried, values[self.tests : self.front], needs)
            outs = self.body.run(recipe, carry, inputs, second)
            new = [_as(outs[k], avals[k]) for k in live]
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
            [_as(values[self.front + k], avals[k]) for k in live],
        )
        results: list[Any] = [None] * len(carry)
        for k, value in zip(live, final, strict=True):
            results[k] = value
        return _parts(results, parts, starts[count + len(recipe.starts) :])


def _as(value: Any, aval: Any) -> Any:
    """The value with the dtype of what is carried; literals may have another."""
    if is_key(aval):
        return value
    return lax.convert_element_type(value, aval.dtype)


def _fits(needs: Boxes, carry: Boxes) -> Any:
    """Where the boxes that a body reads lie in those that are carried."""
    inner = needs[len(needs) - len(carry) :]
    return tuple(
        None
        if a is None or b is None
        else tuple((x[0] - y[0], x[1] - y[0]) for x, y in zip(a, b, strict=True))
        for a, b in zip(inner, carry, strict=True)
    )


class Cond(Inner):
    """``cond``: each operand in the hull of what the branches need."""

    def __init__(self, node: Node, table: RuleTable, calls: Calls) -> None:
        super().__init__(node)
        self.bodies = [Body(jaxpr, table, calls) for jaxpr in node.params["branches"]]
        named = []
        for body in self.bodies:
            self.name_loops(
                body,
                [],
                {k: (k + 1, 0) for k in range(len(node.ins) - 1)},
                {k: (k, 0) for k in range(len(node.outs))},
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
        recipes = [body.trace(boxes) for body in self.bodies]
        each = [b.needs(r) for b, r in zip(self.bodies, recipes, strict=True)]
        needed = [hull_of(row) for row in zip(*each, strict=True)]
        starts = [start for recipe in recipes for start in recipe.starts]
        key = (
            tuple(recipe.static for recipe in recipes),
            tuple(None if box is None else shape_of(box) for box in needed),
            tuple(_fits(row, needed) for row in each),
        )
        content = (recipes, each, needed, boxes)
        index: Box = whole(self.node.in_shapes[0])
        return Need((index, *needed), Frozen(key, content), tuple(starts))

    def emit(
        self, values: Sequence[Any], static: Any, starts: Sequence[Any]
    ) -> Sequence[Any]:
        recipes, each, needed, boxes = static.content
        index, *operands = values
        position = 0
        branches = []
        for body, recipe, needs in zip(self.bodies, recipes, each, strict=True):
            own = starts[position : position + len(recipe.starts)]
            position += len(recipe.starts)

            def branch(
                *operands: Any,
                body: Body = body,
                recipe: Recipe = recipe,
                needs: Boxes = needs,
                own: Sequence[Any] = own,
            ) -> list[Any]:
                inputs = _fit(list(operands), needs, needed)
                outs = body.run(recipe, boxes, inputs, own)
                return [
                    _as(o, out.aval)
                    for o, out in zip(outs, self.node.outs, strict=True)
                    if o is not None
                ]

            branches.append(branch)
        made = iter(lax.switch(index, branches, *operands))
        return [None if box is None else next(made) for box in boxes]


def rules(table: RuleTable, calls: Calls) -> dict[Any, RuleMaker]:
    """The rules, which look into bodies with a table and calls of their own."""
    return {
        p.cond_p: lambda node: Cond(node, table, calls),
        p.scan_p: lambda node: Scan(node, table, calls),
        p.while_p: lambda node: While(node, table, calls),
    }
