"""Analyses the bodies of loops and branches, which are graphs of their own.

The boxes that a loop needs are a fixed point: the box of a carried value that leaves a
step enters the next one, and it grows until nothing more is needed. An axis that the
body maps index by index onto itself stays cut. Any other becomes whole.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardmap._jax.types import AnyJaxpr, Aval
from shardmap.planning.engine.analysis import Analysis, Pending, ReducedLoop
from shardmap.planning.engine.factors import RuleTable
from shardmap.planning.engine.keys import is_key
from shardmap.planning.engine.loop_classes import AxisKey, UnionFind
from shardmap.planning.engine.monoids import Combiner, start
from shardmap.planning.engine.nodes import Graph, Node, Operand, Value, flatten
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
    UNCUT,
    Contraction,
    Cut,
    Factor,
    Forward,
    Link,
    Lost,
    Reason,
    Rule,
    linked,
    meet,
)
from shardmap.planning.engine.slices import Box, Interval, hull_of, join, shape_of
from shardmap.planning.lax.control.rows import UNVMAPPED, by_rows
from shardmap.planning.lax.indexed.known import fold

Boxes: TypeAlias = Sequence[Box | None]
NO_INTERVALS: Intervals = {}


class InnerBody:
    """A jaxpr inside of an equation, analysed as the function around it is.

    Args:
      node: the equation.
      jaxpr: the jaxpr.
      table: the rules of its equations.
      carried: (output, input) of a loop: the output becomes the input of the next step.
      looked: the inputs that the condition of a loop needs complete.
      partial: whether loops that it sums over can be cut.
      outputs: what of its graph is analysed in place of its outputs.

    Attributes:
      classes: which axes are the same loop.
      broken: the loops that cannot be cut, and the node that needs each whole.
    """

    def __init__(
        self,
        node: Node,
        jaxpr: AnyJaxpr,
        table: RuleTable,
        carried: Sequence[tuple[int, int]] = (),
        looked: Iterable[int] = (),
        partial: bool = True,
        outputs: Callable[[Graph], list[Operand]] | None = None,
    ) -> None:
        self.graph: Graph = flatten(jaxpr, table.calls, node.source)
        fold(self.graph)
        by_rows(self.graph)
        if outputs is not None:
            self.graph.outputs = outputs(self.graph)
            self.graph.drop_unused()
        self.rules = {n.number: table.rule(n) for n in self.graph.nodes}
        self.nodes = {n.number: n for n in self.graph.nodes}
        self.stops = frozenset([*self.graph.inputs, *self.graph.constants])
        self.backwards, _ = needed(self.graph.outputs, self.stops)
        self._carried, self._looked = carried, frozenset(looked)
        self._partial = partial
        every = [(v.number, k) for v in self.graph.inputs for k in range(len(v.shape))]
        analysis = self._analysed(every)
        self.classes = analysis.classes
        self._sums: dict[AxisKey, list[ReducedLoop]] = {}
        for each in analysis.reductions:
            self._sums.setdefault(self.classes.find(each.key), []).append(each)
        self._of_rows = {
            loop
            for loop, each in self._sums.items()
            if any(self.nodes[k.node].primitive in UNVMAPPED for k in each)
        }
        # The loops that each result is a partial sum over, and how its parts combine.
        self._made_parts: dict[Value, dict[AxisKey, Combiner]] = {
            out: {
                self.classes.find(analysis.reductions[k].key): pending.combiner
                for k in pending.reductions
                if analysis.reductions[k].node == node.number
            }
            for node in self.graph.nodes
            for out in node.outs
            if (pending := analysis.pending.get(out))
        }
        self._known: dict[frozenset[AxisKey], list[Pending | None] | None] = {}
        self.broken = self._ended(analysis) | self._not_summed()

    def _analysed(
        self,
        axes: Iterable[AxisKey],
        classes: UnionFind | None = None,
        entering: Mapping[int, Pending] = MappingProxyType({}),
    ) -> Analysis:
        """The analysis with these axes of inputs cut; each is the origin of its cut."""
        inputs = self.graph.inputs
        cuts = {value: [UNCUT] * len(value.shape) for value in inputs}
        values = {value.number: value for value in inputs}
        for key in axes:
            number, axis = key
            if values[number].shape[axis] > 1:
                cuts[values[number]][axis] = Cut((1,), False, frozenset({key}))
        return propagate(
            self.graph,
            lambda node: self.rules[node.number],
            list(cuts.values()),
            partial=self._partial,
            may_recompute=False,
            classes=classes,
            carried=self._carried,
            entering={inputs[k]: part for k, part in entering.items()},
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
                    # Another loop sees this one through a window, with its neighbours.
                    origins |= {key for key in cut.origins if find(key) != here}
            # So does a later step of the same loop.
            for seen, _, by in self.rules[node.number].windows():
                if isinstance(value := node.ins[seen.number], Value):
                    here = find((node.outs[by.number].number, by.axis))
                    origins |= {here} & {find((value.number, seen.axis))}
            for key in origins:
                ends.setdefault(find(key), node)
        return ends

    def _not_summed(self) -> dict[AxisKey, Node]:
        """The summed loops that cannot be cut, and the nodes that sum over them."""
        sizes = {
            loop: {each.size for each in reductions}
            for loop, reductions in self._sums.items()
        }
        for value in (*self.graph.inputs, *self.graph.outputs):
            if isinstance(value, Value):
                for axis, size in enumerate(value.shape):
                    loop = self.classes.find((value.number, axis))
                    sizes.get(loop, set()).add(size)
        return {
            loop: self.nodes[reductions[0].node]
            for loop, reductions in self._sums.items()
            if len(sizes[loop]) > 1
            or self.parts([loop]) is None
            or (loop in self._of_rows and not self._only_of_rows(loop))
        }

    def is_of_rows(self, loop: AxisKey) -> bool:
        return loop in self._of_rows

    def _only_of_rows(self, loop: AxisKey) -> bool:
        """Whether what is known of all rows of a loop is all that is summed over it."""
        nodes = (self.nodes[each.node] for each in self._sums[loop])
        return all(node.primitive in UNVMAPPED for node in nodes)

    def intervals(self, loops: Mapping[AxisKey, Interval]) -> Intervals:
        """The part of each contracted factor that runs, for parts of loops."""
        running: dict[int, dict[Factor, Interval]] = {}
        for loop, interval in loops.items():
            for each in self._sums.get(loop, ()):
                running.setdefault(each.node, {})[each.factor] = interval
        return running

    def parts(self, loops: Iterable[AxisKey]) -> list[Pending | None] | None:
        """For each output, the partial sum that it becomes if these loops are cut.

        A carried value that is a partial sum enters as one.

        Returns:
          None if the loops cannot be cut; None for an output that is complete.
        """
        summed = frozenset(loop for loop in loops if loop in self._sums)
        if not summed:
            return [None] * len(self.graph.outputs)
        if summed not in self._known:
            self._known[summed] = self._parts(summed)
        return self._known[summed]

    def _parts(self, loops: frozenset[AxisKey]) -> list[Pending | None] | None:
        """As `parts`, for loops that are all summed over."""
        entering = self._entering(loops)
        if not self._looked.isdisjoint(entering):
            return None
        axes = [
            (value.number, axis)
            for value in self.graph.inputs
            for axis in range(len(value.shape))
            if self.classes.find((value.number, axis)) in loops
        ]
        analysis = self._analysed(axes, self.classes, entering)
        # A partial sum that is needed complete would end a stage.
        if any(x.origins for x in analysis.ended) or {*analysis.pending} & {
            *analysis.kept
        }:
            return None
        parts: list[Pending | None] = []
        for output in self.graph.outputs:
            pending = analysis.pending.get(output)
            if pending is None:
                parts.append(None)
                continue
            keys = [analysis.reductions[k].key for k in pending.reductions]
            summed = frozenset(map(self.classes.find, keys))
            # In a double sum over one loop, a piece would meet only itself.
            if len(summed) < len(keys):
                return None
            parts.append(Pending(pending.combiner, summed))
        leaving = {into: parts[out] for out, into in self._carried}
        return parts if all(entering.get(k) == leaving[k] for k in leaving) else None

    def _entering(self, loops: frozenset[AxisKey]) -> dict[int, Pending]:
        """The carried inputs that are partial sums: a sum reaches them in some step."""
        inputs, outputs = self.graph.inputs, self.graph.outputs
        sums: dict[Operand, dict[AxisKey, Combiner]] = {}
        count = -1
        while count < (count := sum(map(len, sums.values()))):
            for node in self.graph.nodes:
                reached: dict[AxisKey, Combiner] = {}
                for v in node.ins:
                    reached |= sums.get(v, {})
                for out in node.outs:
                    summed = self._made_parts.get(out, {}).items()
                    sums[out] = reached | {k: how for k, how in summed if k in loops}
            for number, into in self._carried:
                entered = sums.get(inputs[into], {})
                sums[inputs[into]] = entered | sums.get(outputs[number], {})
        return {
            k: Pending(next(iter(entering_sums.values())), frozenset(entering_sums))
            for k, value in enumerate(inputs)
            if (entering_sums := sums.get(value))
        }

    def trace(self, boxes: Boxes, intervals: Intervals = NO_INTERVALS) -> Recipe:
        """The recipe for boxes of the outputs.

        Its starts end with those of the constants' boxes.

        Args:
          boxes: of the outputs, None where one is not wanted.
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

    def shard(self, recipe: Recipe, wanted: Boxes, given: Boxes) -> "BodyShard":
        """The `BodyShard` of a recipe.

        Args:
          recipe: of the wanted boxes.
          wanted: the boxes of the outputs.
          given: the boxes of the inputs, which contain those that the recipe reads.
        """
        inside = tuple(
            None
            if a is None or b is None
            else tuple((x[0] - y[0], x[1] - y[0]) for x, y in zip(a, b, strict=True))
            for a, b in zip(self.needs(recipe), given, strict=True)
        )
        return BodyShard(
            recipe.static,
            starts=len(recipe.starts),
            inside=inside,
            wanted=tuple(box is not None for box in wanted),
        )

    def run(
        self, shard: "BodyShard", inputs: Sequence[Any], starts: Sequence[jax.Array]
    ) -> list[Any]:
        """The outputs of a shard, None where they are not wanted.

        Args:
          shard: the result of `shard`.
          inputs: the given boxes of the inputs.
          starts: positions; those of the recipe come first.
        """
        given: dict[Value, Any] = dict(self.graph.constants)
        for value, whole, inside in zip(
            self.graph.inputs, inputs, shard.inside, strict=True
        ):
            given[value] = whole
            if inside is not None and shape_of(inside) != np.shape(whole):
                given[value] = lax.slice(whole, *zip(*inside, strict=True))
        static = shard.recipe
        place = sum(step.start_count for step in static.steps)
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
        return emit(static, self.nodes, self.rules, outputs)(reads, starts)


class BodyShard(NamedTuple):
    """What a shard computes of a body, without positions: equal shards share it.

    Attributes:
      recipe: the recipe.
      starts: the number of positions that it takes.
      inside: per input, the box that is read, relative to the given one.
      wanted: whether each output is wanted.
    """

    recipe: StaticRecipe
    starts: int
    inside: tuple[Box | None, ...]
    wanted: tuple[bool, ...]


def hulls(a: Boxes, b: Boxes) -> list[Box | None]:
    return [hull_of(pair) for pair in zip(a, b, strict=True)]


def as_carried(value: Any, aval: Aval) -> Any:
    """The value with the dtype of the carried one; that of a literal may differ."""
    if value is None or is_key(aval):
        return value
    return lax.convert_element_type(value, aval.dtype)


def only_first(value: Any, part: Pending | None, first: Mapping[Any, jax.Array]) -> Any:
    """A complete value among partial sums: only the first shard adds it.

    Args:
      value: the value.
      part: the partial sum that it becomes; None: it stays complete.
      first: loop -> whether the shard is the first along it.
    """
    mine = [here for name, here in first.items() if part and name in part.reductions]
    if value is None or part is None or not mine:
        return value
    nothing = start(part.combiner, value.dtype)
    return jnp.where(jnp.all(jnp.stack(mine)), value, nothing)


ALONG = Reason(
    "each step of the loop needs the one before it", "cut an axis inside of a step"
)
ELSEWHERE = (
    "cut an axis that the body treats index by index, or map over the elements with "
    "spmap(batch_size=)"
)
MIXED = Reason("the body of the loop or branch mixes this axis", ELSEWHERE)
Names: TypeAlias = list[list[Hashable | None]]
"""The loop of each axis of each operand or result, None where it is needed whole."""

Inside: TypeAlias = tuple[
    InnerBody, Sequence[tuple[int, int]], Sequence[tuple[int, int]]
]
"""A body, the operand of each input, and the result of each output: their numbers, and
which axis of them is the first one inside."""


class Inner(Rule):
    """The base of the rules of loops and branches, which names their loops.

    Attributes:
      ins: the loops of the operands' axes.
      outs: the loops of the results' axes.
      rows: those of the axes of a condition, of which each has its own steps.
      why: (operand, axis) -> why it is needed whole.
    """

    remedy = ELSEWHERE
    """What makes an axis cuttable that the body mixes."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.ins: Names = [[None] * len(s) for s in node.in_shapes]
        self.outs: Names = [[None] * len(s) for s in node.out_shapes]
        self.rows: list[Hashable | None] = []
        # A place is an axis of an operand or a result; results are numbered behind the
        # operands. Per body: the loop of each place inside of it.
        self._inside: list[tuple[InnerBody, dict[AxisKey, AxisKey]]] = []
        self.why: dict[tuple[int, int], Reason] = {}

    def name_loops(
        self, bodies: Sequence[Inside], condition: Inside | None = None
    ) -> None:
        """Names the axes that all bodies map index by index or sum.

        Args:
          bodies: the bodies.
          condition: that of a ``while``, whose result is `rows`.
        """
        every, results = [*self.ins, *self.outs, self.rows], len(self.ins)
        loops, broken = UnionFind(), set[AxisKey]()
        for body, ins, outs in bodies if condition is None else (*bodies, condition):
            places: dict[AxisKey, AxisKey] = {}
            first: dict[AxisKey, AxisKey] = {}
            numbers = [*ins, *((results + k, axis) for k, axis in outs)]
            # A condition has other results behind the rows: scalars.
            for value, (number, begin) in zip(
                (*body.graph.inputs, *body.graph.outputs), numbers, strict=False
            ):
                for axis in range(len(value.shape)):
                    assert isinstance(value, Value)  # Scalars have no axes.
                    root = body.classes.find((value.number, axis))
                    place = number, begin + axis
                    places[place] = root
                    loops.unite(first.setdefault(root, place), place)
                    if node := body.broken.get(root):
                        broken.add(place)
                        at = f"{node.name} ({node.source})"
                        why = Reason(f"{MIXED.why} at {at}", self.remedy)
                        self.why.setdefault(place, why)
            self._inside.append((body, places))
        broken = set(map(loops.find, broken))
        for _, places in self._inside:
            for number, axis in places:
                loop = loops.find((number, axis))
                every[number][axis] = None if loop in broken else loop
        del self._inside[len(bodies) :]

    def _inner(self, body: int, names: Iterable[Any]) -> dict[Any, Any]:
        """Loop inside of a body -> its name outside, for some names."""
        wanted, every = set(names), [*self.ins, *self.outs]
        return {
            root: name
            for (number, axis), root in self._inside[body][1].items()
            if (name := every[number][axis]) in wanted
        }

    def parts(self, names: Iterable[Any]) -> list[list[Pending | None]] | None:
        """The partial sums that the outputs of each body are if these loops are cut.

        Only one branch runs: a partial sum in one of them is one in all.

        Returns:
          None if the loops cannot be cut.
        """
        names = list(names)
        rows = []
        for k, (body, _) in enumerate(self._inside):
            inner = self._inner(k, names)
            parts = body.parts(inner)
            if parts is None:
                return None
            row = [
                part
                and Pending(part.combiner, frozenset(inner[k] for k in part.reductions))
                for part in parts
            ]
            # Two loops of the body that are one outside: a piece of one would meet only
            # the same piece of the other.
            for part, whole_part in zip(row, parts, strict=True):
                if (
                    part
                    and whole_part
                    and len(part.reductions) < len(whole_part.reductions)
                ):
                    return None
            rows.append(row)
        for column in zip(*rows, strict=True):
            if len({part for part in column if part is not None}) > 1:
                return None
        return rows

    def limited(self, loops: Mapping[Factor, Interval]) -> dict[Factor, Interval]:
        """The loops that run over a part only."""
        sizes = {
            name: size
            for axes, shape in zip(self.ins, self.node.in_shapes, strict=True)
            for name, size in zip(axes, shape, strict=True)
        }
        return {name: part for name, part in loops.items() if part != (0, sizes[name])}

    def spans(self, boxes: Boxes) -> dict[Any, Interval]:
        """The part of each loop that boxes of results have."""
        spans: dict[Any, Interval] = {}
        for axes, box in zip(self.outs, boxes, strict=False):
            for name, span in zip(axes, box or (), strict=False):
                if name is not None:
                    spans[name] = join(spans[name], span) if name in spans else span
        return spans

    def intervals(
        self, body: int, loops: Mapping[Factor, Interval], boxes: Boxes = ()
    ) -> Intervals:
        """The parts of a body's contracted factors that run.

        Args:
          body: its number.
          loops: the parts of the loops that are summed over.
          boxes: what is wanted of the results, whose rows are those of the shard.
        """
        spans = self.spans(boxes)
        graph = self._inside[body][0]
        inner = self._inner(body, {*spans, *loops})
        return graph.intervals(
            {
                root: loops[name] if name in loops else spans[name]
                for root, name in inner.items()
                if name in loops or graph.is_of_rows(root)
            }
        )

    def firsts(
        self, limited: Sequence[Factor], starts: Sequence[jax.Array]
    ) -> dict[Factor, jax.Array]:
        """Whether a shard is the first along each loop that runs over a part only.

        Args:
          limited: the loops.
          starts: positions that end with the starts of these parts.
        """
        behind = starts[len(starts) - len(limited) :]
        return {name: at == 0 for name, at in zip(limited, behind, strict=True)}

    def _joint(self, names: Iterable[Any]) -> list[Any]:
        """The loops that can be cut together, the first ones first."""
        together: list[Any] = []
        for name in names:
            if self.parts([*together, name]) is not None:
                together.append(name)
        return together

    def forward(self, cuts: Sequence[Sequence[Cut]]) -> Forward:
        cuts_of: dict[Any, list[Cut]] = {}
        at: dict[Any, tuple[int, int]] = {}
        lost = []
        for k, (axes, row) in enumerate(zip(self.ins, cuts, strict=True)):
            for axis, (name, cut) in enumerate(zip(axes, row, strict=True)):
                if name is not None:
                    cuts_of.setdefault(name, []).append(cut)
                    at.setdefault(name, (k, axis))
                elif cut.at:
                    lost.append(Lost(cut.origins, self.why.get((k, axis), MIXED)))
        met = {name: cut for name, row in cuts_of.items() if (cut := meet(row)).at}
        kept = self._joint(met)
        lost += [Lost(c.origins, MIXED) for name, c in met.items() if name not in kept]
        met = {name: met[name] for name in kept}
        outs = [[met.get(name, UNCUT) for name in axes] for axes in self.outs]
        parts: dict[Any, dict[int, Combiner]] = {}
        for row_of_parts in self.parts(met) or []:
            for number, part in enumerate(row_of_parts):
                if part is not None:
                    for name in part.reductions:
                        parts.setdefault(name, {})[number] = part.combiner
        contracted = [
            Contraction(
                name,
                next(iter(parts[name].values())),
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
        return linked(self.ins, self.outs)
