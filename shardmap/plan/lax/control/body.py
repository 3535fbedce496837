"""Rules of loops and branches: their bodies are programs of their own.

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
from shardmap.plan.engine.combiners import identity
from shardmap.plan.engine.factors import RuleTable
from shardmap.plan.engine.keys import is_key
from shardmap.plan.engine.nodes import Calls, Node, Program, Value, flatten
from shardmap.plan.engine.recipe import Recipe, emit, relevant_nodes, trace_back
from shardmap.plan.engine.rules import (
    UNCUT,
    Contraction,
    Cut,
    Factor,
    Forward,
    Link,
    Lost,
    Reason,
    Rule,
    meet,
)
from shardmap.plan.engine.slices import Box, Interval, hull_of, shape_of
from shardmap.plan.engine.work import Unions
from shardmap.plan.lax.control.parts import Part, Sum, Sums, sum_over

MIXED = Reason(
    "the body of the loop or branch mixes this axis",
    "cut an axis that the body treats index by index",
)
Boxes: TypeAlias = Sequence[Box | None]
Intervals: TypeAlias = Mapping[int, Mapping[Factor, Interval]]
NO_INTERVALS: Intervals = {}


class Body:
    """A jaxpr inside an equation, ready to be sliced."""

    def __init__(self, jaxpr: AnyJaxpr, table: RuleTable, calls: Calls) -> None:
        self.program: Program = flatten(jaxpr, calls)
        self.rules = {n.number: table.rule(n) for n in self.program.nodes}
        self.nodes = {n.number: n for n in self.program.nodes}
        outputs = self.program.outputs
        self.stops = frozenset([*self.program.inputs, *self.program.constants])
        self.backwards = relevant_nodes(self.program.nodes, outputs, self.stops)

    def loops(self) -> tuple[Unions, set[Any], list[Sum]]:
        """Which axes are one loop, where a loop would break, and what is summed."""
        unions, broken, sums = Unions(), set(), []
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
                summed = None
                if keys and "in" in sides:
                    summed = sum_over(node, self.rules[node.number], group)
                    sums += [summed] if summed else []
                if summed or sides == {"in", "out"}:
                    linked.update(keys)
                elif keys and sides == {"in"}:
                    broken.add(keys[0])
            for operand in node.ins:
                if isinstance(operand, Value):
                    for axis, size in enumerate(operand.shape):
                        if size != 1 and (operand.number, axis) not in linked:
                            broken.add((operand.number, axis))
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
            for value, box in zip(self.program.outputs, boxes, strict=True)
        ]
        recipe = trace_back(
            self.backwards, self.rules, demands, self.stops, intervals, versions=1
        )
        for value, box in recipe.reads:
            if value in self.program.constants:
                begin = tuple(start for start, _ in box)
                recipe = recipe._replace(starts=recipe.starts + begin)
        return recipe

    def needs(self, recipe: Recipe) -> list[Box | None]:
        """The boxes of the inputs that a recipe reads."""
        read = dict(recipe.reads)
        return [read.get(value) for value in self.program.inputs]

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
            for value, box in zip(self.program.outputs, wanted, strict=True)
        ]
        given = dict(zip(self.program.inputs, inputs, strict=True))
        given.update(self.program.constants)
        place = sum(step.start_count for step in recipe.static.steps)
        reads = []
        for value, box in recipe.reads:
            read = given[value]
            if value in self.program.constants:
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

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Frozen) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


Names: TypeAlias = list[list[Hashable | None]]
"""Per operand or result, and axis: which loop it is, None where it is needed whole."""


Place: TypeAlias = tuple[str, int, int]
"""An axis: "in" or "out", the number of the operand or result, and which it is."""


class Inner(Rule):
    """What the rules of loops and branches share: the names of their loops.

    Attributes:
      ins: of the operands' axes.
      outs: of the results' axes.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        self.ins: Names = [[None] * len(s) for s in node.in_shapes]
        self.outs: Names = [[None] * len(s) for s in node.out_shapes]
        # Per body: its sums, and what it calls the loop of each place.
        self._inside: list[tuple[Sums, dict[Place, Any]]] = []

    def name_loops(
        self,
        body: Body,
        pairs: Sequence[tuple[int, int]],
        ins: Mapping[int, tuple[int, int | None]],
        outs: Mapping[int, tuple[int, int | None]],
        looked: Iterable[int] = (),
    ) -> None:
        """Names the axes that the body treats index by index, or sums over.

        Args:
          body: the body.
          pairs: (output, input) of the body that are carried.
          ins: input of the body -> (operand, its axis that the input has not).
          outs: output of the body -> (result, its axis that the output has not).
          looked: inputs of the body that something else needs complete.
        """
        unions, broken, found = body.loops()
        inputs, outputs = body.program.inputs, body.program.outputs
        for out, into in pairs:
            value = outputs[out]
            for axis in range(len(inputs[into].shape)):
                key = inputs[into].number, axis
                if isinstance(value, Value):
                    unions.unite((value.number, axis), key)
        bad = {unions.find(key) for key in broken}
        sums = Sums(body.program, body.rules, unions, found, pairs, looked)
        lengths = sums.loops
        bad |= {loop for loop in lengths if sums.parts(frozenset({loop})) is None}
        places: dict[Place, Any] = {}
        for side, operands, numbers, names in (
            ("in", inputs, ins, self.ins),
            ("out", outputs, outs, self.outs),
        ):
            for k, (number, without) in numbers.items():
                operand = operands[k]
                if not isinstance(operand, Value):
                    continue
                for axis in range(len(operand.shape)):
                    root = unions.find((operand.number, axis))
                    size = operand.shape[axis]
                    if lengths.get(root, {size}) != {size}:
                        bad.add(root)
                    if root not in bad:
                        place = axis + (without is not None and axis >= without)
                        names[number][place] = root
                        places[side, number, place] = root
        self._inside.append((sums, places))

    def _inner(self, body: int, names: Iterable[Any]) -> dict[Any, Any]:
        """What a body calls some loops -> their names here."""
        wanted = set(names)
        found = {}
        for (side, number, axis), root in self._inside[body][1].items():
            name = (self.ins if side == "in" else self.outs)[number][axis]
            if name in wanted:
                found[root] = name
        return found

    def parts(self, names: Iterable[Any]) -> list[list[Part | None]] | None:
        """Per body, what its outputs are parts of if these are cut; None: they cannot.

        Bodies are branches of which one runs: what is a part in one of them is one in
        all.
        """
        names = list(names)
        found = []
        for k, (sums, _) in enumerate(self._inside):
            inner = self._inner(k, names)
            parts = sums.parts(frozenset(inner) & frozenset(sums.loops))
            if parts is None:
                return None
            row: list[Part | None] = []
            for part in parts:
                if part is None:
                    row.append(None)
                    continue
                loops = frozenset(inner[loop] for loop in part.loops)
                # Two loops of the body that are one outside: pieces of one would
                # meet only the same pieces of the other.
                if len(loops) < len(part.loops):
                    return None
                row.append(Part(part.combiner, loops))
            found.append(row)
        for column in zip(*found, strict=True):
            if len({part for part in column if part is not None}) > 1:
                return None
        return found

    def limited(self, loops: Mapping[Factor, Interval]) -> dict[Factor, Interval]:
        """The loops that run over a part only."""
        sizes = {
            name: size
            for axes, shape in zip(self.ins, self.node.in_shapes, strict=True)
            for name, size in zip(axes, shape, strict=True)
        }
        return {name: part for name, part in loops.items() if part != (0, sizes[name])}

    def intervals(self, body: int, loops: Mapping[Factor, Interval]) -> Intervals:
        """Which parts of a body's contracted factors run, for parts of the loops."""
        inner = self._inner(body, loops)
        named = {root: loops[name] for root, name in inner.items()}
        return self._inside[body][0].intervals(named)

    def first_ones(
        self, body: int, limited: Sequence[Factor], starts: Sequence[jax.Array]
    ) -> tuple[list[Part | None], dict[Factor, jax.Array]]:
        """What a body's results are parts of, and along which loops a shard is first.

        Args:
          body: which.
          limited: the loops that run over a part only.
          starts: positions that end with where these parts start.
        """
        parts = self.parts(limited)
        assert parts is not None
        behind = starts[len(starts) - len(limited) :]
        here = {name: at == 0 for name, at in zip(limited, behind, strict=True)}
        return parts[body], here

    def _joint(self, names: Iterable[Any]) -> list[Any]:
        """Those of the cut loops that can be cut together."""
        found: list[Any] = []
        for name in names:
            if self.parts([*found, name]) is not None:
                found.append(name)
        return found

    def forward(self, cuts: Sequence[Sequence[Cut]]) -> Forward:
        found: dict[Any, list[Cut]] = {}
        at: dict[Any, tuple[int, int]] = {}
        lost = []
        for k, (axes, row) in enumerate(zip(self.ins, cuts, strict=True)):
            for axis, (name, cut) in enumerate(zip(axes, row, strict=True)):
                if name is not None:
                    found.setdefault(name, []).append(cut)
                    at.setdefault(name, (k, axis))
                elif cut.at:
                    lost.append(Lost(cut.origins, MIXED))
        met = {name: cut for name, row in found.items() if (cut := meet(row)).at}
        kept = self._joint(met)
        lost += [Lost(c.origins, MIXED) for name, c in met.items() if name not in kept]
        met = {name: met[name] for name in kept}
        outs = [[met.get(name, UNCUT) for name in axes] for axes in self.outs]
        parts: dict[Any, dict[int, str]] = {}
        for row_of_parts in self.parts(met) or []:
            for number, part in enumerate(row_of_parts):
                if part is not None:
                    for name in part.loops:
                        parts.setdefault(name, {})[number] = part.combiner
        contracted = [
            Contraction(
                name,
                min(parts[name].values()),
                self.node.in_shapes[at[name][0]][at[name][1]],
                *at[name],
                met[name],
                parts[name],
            )
            for name in met
            if name in parts
        ]
        return Forward(outs, contracted, lost)

    def links(self) -> list[list[Link]]:
        groups: dict[Any, list[Link]] = {}
        for side, operands in (("in", self.ins), ("out", self.outs)):
            for k, axes in enumerate(operands):
                for axis, name in enumerate(axes):
                    if name is not None:
                        groups.setdefault(name, []).append(Link(side, k, axis))
        return list(groups.values())


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
    value: jax.Array, part: Part | None, first: Mapping[Any, jax.Array]
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
