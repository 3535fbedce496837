"""Analyses the bodies of loops and branches, which are graphs of their own.

The boxes that a loop needs are a fixed point: the box of a carried value that leaves a
step enters the next one, and it grows until nothing more is needed. An axis that the
body maps index by index onto itself stays cut. Any other becomes whole.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardmap._jax.types import AnyJaxpr
from shardmap.planning.engine.analysis import (
    Analysis,
    AxisKey,
    Pending,
    ReducedLoop,
    UnionFind,
    loop_classes,
)
from shardmap.planning.engine.factors import Factors
from shardmap.planning.engine.monoids import Combiner, start
from shardmap.planning.engine.nodes import Graph, Node, Operand, Value, flatten, is_key
from shardmap.planning.engine.propagate import propagate
from shardmap.planning.engine.recipe import (
    Intervals,
    Recipe,
    StaticRecipe,
    emit,
    needed,
    trace_back,
)
from shardmap.planning.engine.rules import (
    MANY,
    UNCUT,
    Cut,
    Factor,
    Reason,
    Rule,
    RuleTable,
)
from shardmap.planning.engine.slices import Box, Interval, hull_of, join, shape_of
from shardmap.planning.lax.control.rows import UNVMAPPED, by_rows
from shardmap.planning.lax.indexed.known import fold

Boxes: TypeAlias = Sequence[Box | None]


class InnerBody:
    """A jaxpr inside of an equation, analysed as the function around it is.

    Args:
      node, jaxpr, table: the equation, the jaxpr, and the rules of its equations.
      carried: (output, input) of a loop: the output becomes the input of the next step.
      partial: whether loops that it sums over can be cut.
      outputs: what of its graph is analysed in place of its outputs.

    Attributes:
      classes: which axes are the same loop.
      broken: the loops that cannot be cut, and the node that needs each whole.
      sums: summed loop -> where the body sums over it.
      parts: summed loop -> output -> how it combines, if it is a sum over the loop.
      of_rows: the loops of which all rows of a shard are looked at, see `rows`.
    """

    def __init__(
        self,
        node: Node,
        jaxpr: AnyJaxpr,
        table: RuleTable,
        carried: Sequence[tuple[int, int]] = (),
        partial: bool = True,
        outputs: Callable[[Graph], list[Operand]] | None = None,
    ) -> None:
        graph = by_rows(fold(flatten(jaxpr, table, node.source)))
        if outputs is not None:
            graph.outputs = outputs(graph)
            graph.drop_unused()
        self.graph = graph
        self.rules = {n: table.rule(n) for n in graph.nodes}
        self.stops = frozenset([*graph.inputs, *graph.constants])
        self.backwards, _ = needed(graph, graph.outputs, self.stops)
        self.classes = loop_classes(graph, self.rules, carried)
        self._carried = carried
        self._partial = partial
        analysis = self._analysed(lambda key: True, {})
        self.sums: dict[AxisKey, list[ReducedLoop]] = {}
        for each in itertools.chain(*analysis.reductions.values()):
            self.sums.setdefault(each.loop[0], []).append(each)
        self.parts: dict[AxisKey, dict[int, Combiner]] = {}
        self.of_rows: set[AxisKey] = set()
        self.broken = self._ended(analysis)
        for loop, reductions in self.sums.items():
            nodes = [each.node for each in reductions]
            of_rows = [each.primitive in UNVMAPPED for each in nodes]
            parts = self._parts(loop, analysis)
            if parts is None or any(of_rows) > all(of_rows):
                self.broken[loop] = nodes[0]
            else:
                self.parts[loop] = parts
                self.of_rows |= {loop} if any(of_rows) else set()

    def _analysed(
        self,
        is_cut: Callable[[AxisKey], bool],
        entering: Mapping[Operand, Pending],
    ) -> Analysis:
        """The analysis with these axes of inputs cut; each is the origin of its cut."""
        cuts = [
            [
                Cut((1,), False, frozenset({(value.number, axis)}))
                if size > 1 and is_cut((value.number, axis))
                else UNCUT
                for axis, size in enumerate(value.shape)
            ]
            for value in self.graph.inputs
        ]
        return propagate(
            self.graph,
            self.rules,
            cuts,
            partial=self._partial,
            keeps=False,
            classes=self.classes,
            entering=entering,
        )

    def _ended(self, analysis: Analysis) -> dict[AxisKey, Node]:
        """The loops whose cuts end inside of the body, and the nodes where they end."""
        find, ends = self.classes.find, dict[AxisKey, Node]()
        ended: dict[Node, set[AxisKey]] = {}
        for each in analysis.ended:
            ended.setdefault(each.node, set()).update(each.origins)
        for node in self.graph.nodes:
            origins = ended.get(node, set())
            for out in node.outs:
                for axis, cut in enumerate(analysis.cuts[out]):
                    here = find((out.number, axis))
                    # Another loop sees this one through a window, with its neighbours,
                    # or a later step of the same loop does.
                    seen = (k for k in cut.origins if cut.soft or find(k) != here)
                    origins |= {*seen}
            for key in origins:
                ends.setdefault(find(key), node)
        return ends

    def _parts(self, loop: AxisKey, all_cut: Analysis) -> dict[int, Combiner] | None:
        """The outputs that are sums over a loop; None if it cannot be cut.

        A carried value that is one enters as a partial sum.
        """
        inputs, outputs = self.graph.inputs, self.graph.outputs
        # What a sum reaches, in this step or a later one, is a partial sum.
        sums: dict[Operand, Combiner] = {
            out: pending.combiner
            for each in self.sums[loop]
            for out in each.node.outs
            if (pending := all_cut.pending.get(out)) and each.loop in pending.reductions
        }
        count = -1
        while count < (count := len(sums)):
            for node in self.graph.nodes:
                for how in [sums[v] for v in node.ins if v in sums]:
                    sums |= {out: sums.get(out, how) for out in node.outs}
            for number, into in self._carried:
                if outputs[number] in sums:
                    sums.setdefault(inputs[into], sums[outputs[number]])
        entering: dict[Operand, Pending] = {
            v: Pending(sums[v], ((loop, 0),)) for v in inputs if v in sums
        }
        analysis = self._analysed(lambda key: self.classes.find(key) == loop, entering)
        partial = analysis.pending
        states = {k: partial[x] for k, x in enumerate(outputs) if x in partial}
        if (
            any(each.origins for each in analysis.ended)
            # It would end a stage, as it is needed complete.
            or not partial.keys().isdisjoint(analysis.kept)
            # In a double sum over one loop, a piece would meet only itself.
            or any(len(state.reductions) > 1 for state in states.values())
        ):
            return None
        parts = {k: state.combiner for k, state in states.items()}
        for number, into in self._carried:
            if parts.get(number) != sums.get(inputs[into]):
                return None
        return parts

    def trace(self, boxes: Boxes, intervals: Intervals) -> Recipe:
        """The recipe for boxes of the outputs that are wanted.

        Its starts begin with those of the constants' boxes.
        """
        demands = [
            None if box is None else (value, box)
            for value, box in zip(self.graph.outputs, boxes, strict=True)
        ]
        recipe = trace_back(
            self.backwards, self.rules, demands, self.stops, intervals, versions=1
        )
        begins = (
            start
            for value, box in recipe.reads
            if value in self.graph.constants
            for start, _ in box
        )
        return recipe._replace(starts=(*begins, *recipe.starts))

    def needs(self, recipe: Recipe) -> list[Box | None]:
        """The boxes of the inputs that a recipe reads."""
        read = dict(recipe.reads)
        return [read.get(value) for value in self.graph.inputs]

    def shard(self, recipe: Recipe, wanted: Boxes, given: Boxes) -> "BodyShard":
        """A recipe of wanted boxes, which reads from given boxes of inputs."""
        inside = tuple(
            None
            if a is None or b is None
            else tuple((x[0] - y[0], x[1] - y[0]) for x, y in zip(a, b, strict=True))
            for a, b in zip(self.needs(recipe), given, strict=True)
        )
        are_wanted = tuple(box is not None for box in wanted)
        return BodyShard(recipe.static, len(recipe.starts), inside, are_wanted)

    def run(
        self, shard: "BodyShard", inputs: Sequence[Any], starts: Sequence[jax.Array]
    ) -> list[Any]:
        """The wanted outputs of a shard; its positions are the first ones."""
        given: dict[Value, Any] = dict(self.graph.constants)
        for value, whole, inside in zip(
            self.graph.inputs, inputs, shard.inside, strict=True
        ):
            given[value] = whole
            if inside is not None and shape_of(inside) != np.shape(whole):
                given[value] = lax.slice(whole, *zip(*inside, strict=True))
        static = shard.recipe
        place = 0
        reads = []
        for value, shape in zip(static.read_values, static.read_shapes, strict=True):
            read = given[value]
            if value in self.graph.constants:
                begin = [starts[place + k] for k in range(len(shape))]
                place += len(shape)
                read = lax.dynamic_slice(jnp.asarray(read), begin, shape)
            reads.append(read)
        outputs = [
            value if is_wanted else None
            for value, is_wanted in zip(self.graph.outputs, shard.wanted, strict=True)
        ]
        return emit(static, self.rules, outputs)(reads, starts[place:])


class BodyShard(NamedTuple):
    """What a shard computes of a body, without positions: equal shards share it.

    Attributes:
      inside: per input, the box that is read, relative to the given one.
    """

    recipe: StaticRecipe
    starts: int
    inside: tuple[Box | None, ...]
    wanted: tuple[bool, ...]


def hulls(a: Boxes, b: Boxes) -> list[Box | None]:
    return [hull_of(pair) for pair in zip(a, b, strict=True)]


ALONG = Reason(
    "each step of the loop needs the one before it", "cut an axis inside of a step"
)
ELSEWHERE = (
    "cut an axis that the body treats index by index, or map over the elements with "
    "spmap(batch_size=)"
)
MIXED = "the body of the loop or branch mixes this axis"

Inside: TypeAlias = tuple[
    InnerBody, Sequence[tuple[int, int]], Sequence[tuple[int, int]]
]
"""A body, the operand of each input, and the result of each output: their numbers, and
which axis of them is the first one inside."""


class Inner(Factors):
    """The base of the rules of loops and branches: their factors are loops of bodies.

    A factor is named by its first place. A place is an axis of an operand or a result;
    results are numbered behind the operands. An axis that is outside of the bodies has
    a row for each step, and is named by their number.
    """

    contracted: Mapping[Factor, Mapping[int, Combiner]]
    wholes: dict[Factor, Reason]

    remedy = ELSEWHERE
    """What makes an axis cuttable that the body mixes."""

    def __init__(self, node: Node, *bodies: Inside) -> None:
        results, loops = len(node.in_shapes), UnionFind()
        places: list[AxisKey] = []
        firsts: list[dict[AxisKey, AxisKey]] = []
        for body, ins, outs in bodies:
            first: dict[AxisKey, AxisKey] = {}
            numbers = [*ins, *((results + k, axis) for k, axis in outs)]
            # A condition has other results behind the rows: scalars.
            for value, (number, begin) in zip(
                (*body.graph.inputs, *body.graph.outputs), numbers, strict=False
            ):
                for axis in range(len(value.shape)):
                    assert isinstance(value, Value)  # Scalars have no axes.
                    root = body.classes.find((value.number, axis))
                    places.append((number, begin + axis))
                    loops.unite(first.setdefault(root, places[-1]), places[-1])
            firsts.append(first)
        self.names = {place: loops.find(place) for place in places}
        # Per body, the factors of the loops inside of it.
        self._inside = [
            (body, {root: loops.find(place) for root, place in first.items()})
            for (body, *_), first in zip(bodies, firsts, strict=True)
        ]
        wholes: dict[Factor, Reason] = {}
        for body, names in self._inside:
            for root, at in body.broken.items():
                if root in names:
                    why = Reason(f"{MIXED} at {at.name} ({at.source})", self.remedy)
                    wholes.setdefault(names[root], why)
        contracted: dict[Factor, dict[int, Combiner]] = {}
        for name in dict.fromkeys(self.names.values()):
            # Only one branch runs: a sum in one of them is one in all.
            joint = contracted[name] = {}
            for sums in (self._sums_of(k, name) for k in range(len(bodies))):
                # In a double sum a piece of one loop would meet only that of the other.
                is_double = len({k for k, _ in sums}) < len(sums)
                if is_double or any(joint.get(k, how) != how for k, how in sums):
                    wholes.setdefault(name, Reason(MIXED, self.remedy))
                joint.update(sums)
        named: list[list[Factor]] = [
            [self.names.get((k, axis), size) for axis, size in enumerate(shape)]
            for k, shape in enumerate([*node.in_shapes, *node.out_shapes])
        ]
        sides = named[:results], named[results:]
        super().__init__(node, *sides, contracted, wholes, cheap=False, each=MANY)

    def _sums_of(self, body: int, name: Any) -> list[tuple[int, Combiner]]:
        """The results of a body that sum over a loop, and how they combine."""
        inner, names = self._inside[body]
        roots = [root for root, loop in names.items() if loop == name]
        return [each for root in roots for each in inner.parts.get(root, {}).items()]

    def spans(self, boxes: Boxes) -> dict[Any, Interval]:
        """The part of each loop that boxes of results have."""
        spans: dict[Any, Interval] = {}
        for axes, box in zip(self.outs, boxes, strict=False):
            for name, span in zip(axes, box or (), strict=False):
                if name not in self.wholes:
                    spans[name] = join(spans[name], span) if name in spans else span
        return spans

    def intervals(
        self, body: int, loops: Mapping[Factor, Interval], boxes: Boxes = ()
    ) -> Intervals:
        """The parts of a body's contracted factors that run, for boxes of results."""
        parts, (inner, names) = {**self.spans(boxes), **loops}, self._inside[body]
        running: dict[Node, dict[Factor, Interval]] = {}
        for root, name in names.items():
            if name in loops or (name in parts and root in inner.of_rows):
                for each in inner.sums.get(root, ()):
                    factors = running.setdefault(each.node, {})
                    factors[each.contraction.factor] = parts[name]
        return running

    def typed(self, values: Sequence[Any]) -> list[Any]:
        """Values with the types of the first results: those of literals may differ."""
        return [
            value
            if value is None or is_key(out.aval)
            else lax.convert_element_type(value, out.aval.dtype)
            for value, out in zip(values, self.node.outs, strict=False)
        ]

    def entering(self, values: Sequence[Any], step: BodyShard) -> list[Any]:
        """The carried values of the first step, None where no step needs one."""
        pairs = zip(values, step.wanted, strict=False)
        return self.typed([x if is_wanted else None for x, is_wanted in pairs])

    def only_first(
        self,
        values: Sequence[Any],
        summed: Sequence[Factor],
        starts: Sequence[jax.Array],
        body: int | None = None,
    ) -> list[Any]:
        """Complete values among sums over loops: the first shard alone adds them.

        The starts end with those of the loops. Sums of the body are not complete.
        """
        behind = starts[len(starts) - len(summed) :]
        results = list(values)
        for name, at in zip(summed, behind, strict=True):
            sums = {} if body is None else dict(self._sums_of(body, name))
            for k, how in self.contracted[name].items():
                if k < len(values) and values[k] is not None and k not in sums:
                    nothing = start(how, results[k].dtype)
                    results[k] = jnp.where(at == 0, results[k], nothing)
        return results

    operations = Rule.operations
    __str__ = Rule.__str__
