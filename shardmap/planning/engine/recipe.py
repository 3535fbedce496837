"""Traces boxes of results back to boxes of inputs, and emits the code of a shard.

`trace_back` visits the nodes from last to first. For each box of a node's results that
is wanted, the node's rule returns the boxes of the operands that it depends on. The
outcome is a `Recipe`: the boxes to read, and the steps from these to the results.
Everything in it except positions is static. Recipes with equal static parts run the
same compiled function.

Several boxes of one value may be wanted, as of ``x`` in ``x + x.T``. They are merged
where that costs nothing; otherwise the value is computed or read once per box.
"""

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.source_info_util import user_context

from shardmap.planning.engine.nodes import Graph, Node, Operand, Scalar, Value
from shardmap.planning.engine.rules import Factor, Need, Rule
from shardmap.planning.engine.slices import (
    Box,
    Interval,
    contains,
    hull_of,
    merge,
    shape_of,
    volume,
)

MOST_VERSIONS = 16
"""The most boxes of one value that are computed separately; more become one hull."""


class Ref(NamedTuple):
    """A part of a computed box.

    Attributes:
      slot: the slot of the box; -1 for an array without elements.
      starts: where the part starts in the box, None if it is all of it.
      shape: the part's shape.
    """

    slot: int
    starts: tuple[int, ...] | None
    shape: tuple[int, ...]


class Step(NamedTuple):
    """One equation for one shard.

    Attributes:
      node: its node.
      ins: its operands; None for a scalar, or one that is not read.
      static: see `Need`.
      start_count: the number of its starts.
      first: results go to the slots from this one on.
      shapes: of the results' boxes; None where one is not wanted.
      cropped: whether each result is a part of what its rule computes. Where this part
        begins stands behind the starts.
    """

    node: Node
    ins: tuple[Ref | None, ...]
    static: Any
    start_count: int
    first: int
    shapes: tuple[tuple[int, ...] | None, ...]
    cropped: tuple[bool, ...]


class _StaticRecipe(NamedTuple):
    read_values: tuple[Value, ...]
    read_shapes: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...]
    outs: tuple[Ref | None, ...]


class StaticRecipe(_StaticRecipe):
    """All of a recipe that a compiled function depends on."""

    # Cached: there may be thousands of steps, and each shard looks its function up.
    def __hash__(self) -> int:
        if "_hash" not in self.__dict__:
            self._hash = super().__hash__()
        return self._hash


class Recipe(NamedTuple):
    """How to compute boxes of some values.

    Attributes:
      reads: the boxes of inputs to read.
      starts: the positions, which the compiled function gets as arguments.
      static: the rest.
    """

    reads: tuple[tuple[Value, Box], ...]
    starts: tuple[int, ...]
    static: StaticRecipe


Intervals: TypeAlias = Mapping[Node, Mapping[Factor, Interval]]
"""Node -> contracted factor -> the part of it to run over."""


def needed(
    graph: Graph, outputs: Iterable[Operand], stops: Collection[Value]
) -> tuple[list[Node], frozenset[Value]]:
    """The nodes that outputs depend on, from last to first, and the stops they read."""
    nodes: set[Node] = set()
    reads: set[Value] = set()
    stack = list(outputs)
    while stack:
        value = stack.pop()
        if not isinstance(value, Value):
            continue
        if value in stops:
            reads.add(value)
            continue
        node = value.producer
        if node is not None and node not in nodes:
            nodes.add(node)
            stack += node.ins
    backwards = sorted(nodes, key=graph.places.__getitem__, reverse=True)
    return backwards, frozenset(reads)


def trace_back(
    backwards: Sequence[Node],
    rules: Mapping[Node, Rule],
    demands: Sequence[tuple[Operand, Box] | None],
    stops: Collection[Value],
    loops: Intervals,
    versions: int = MOST_VERSIONS,
) -> Recipe:
    """The recipe for the boxes of values in ``demands``.

    Args:
      backwards: the nodes, from last to first.
      rules: their rules.
      demands: the values and their boxes; None for one that is not wanted.
      stops: values that are read, even if a node computes them.
      loops: the contracted factors that run over a part only.
      versions: the most boxes of one value; more are merged.
    """
    wanted = _Wanted(frozenset(stops), versions)
    for demand in demands:
        if demand is not None:
            wanted.add(*demand)
    visits: list[tuple[Node, Sequence[Box | None], Need]] = []
    for node in backwards:
        for boxes in wanted.of(node):
            need = rules[node].backward(boxes, loops.get(node, {}))
            visits.append((node, boxes, need))
            for value, box in zip(node.ins, need.boxes, strict=True):
                if box is not None:
                    wanted.add(value, box)

    reads = wanted.reads()
    slots = _Slots()
    for value, box in reads:
        slots.add(value, box)
    # Now first to last: the slots are numbered in the order in which steps run.
    steps = []
    starts: list[int] = []
    for node, boxes, need in reversed(visits):
        refs = tuple(map(slots.find, node.ins, need.boxes))
        first = slots.slots
        made_shapes = tuple(None if box is None else shape_of(box) for box in boxes)
        starts += need.starts
        cropped = []
        for box, whole in zip(boxes, need.computed or boxes, strict=True):
            cropped.append(box is not None and whole is not None and box != whole)
            if cropped[-1] and box and whole:
                starts += [a[0] - b[0] for a, b in zip(box, whole, strict=True)]
        step = node, refs, need.static, len(need.starts), first, made_shapes
        steps.append(Step(*step, tuple(cropped)))
        for out, box in zip(node.outs, boxes, strict=True):
            slots.add(out, box)
    outs = tuple(None if demand is None else slots.find(*demand) for demand in demands)
    values = tuple(value for value, _ in reads)
    shapes = tuple(shape_of(box) for _, box in reads)
    static = StaticRecipe(values, shapes, tuple(steps), outs)
    return Recipe(reads, tuple(starts), static)


class _Wanted:
    """The boxes of values that are wanted so far. See `trace_back`."""

    def __init__(self, stops: frozenset[Value], versions: int) -> None:
        self._stops, self._versions = stops, versions
        # By the ids of their intervals: to compare affine numbers would add guards.
        self._boxes: dict[Value, dict[tuple[int, ...], Box]] = {}

    def add(self, value: Operand, box: Box) -> None:
        # A box without elements is not computed: zeros stand for it, see `emit`.
        if isinstance(value, Value) and (volume(box) or not value.size):
            self._boxes.setdefault(value, {}).setdefault(tuple(map(id, box)), box)

    def of(self, node: Node) -> list[list[Box | None]]:
        """For each time that a node runs, the box of each of its results."""
        if len(node.outs) == 1:
            (out,) = node.outs
            if out in self._stops or out not in self._boxes:
                return []
            wanted = self._boxes[out].values()
            return [[box] for box in merge(wanted, self._versions, parts=True)]
        # An equation with several results runs once, with one box for each.
        boxes = [
            None if out in self._stops else hull_of(self._boxes.get(out, {}).values())
            for out in node.outs
        ]
        return [] if all(box is None for box in boxes) else [boxes]

    def reads(self) -> tuple[tuple[Value, Box], ...]:
        """The boxes of values that are read, not computed."""
        return tuple(
            (value, box)
            for value in sorted(self._boxes, key=lambda value: value.number)
            if value in self._stops or value.producer is None
            for box in merge(
                self._boxes[value].values(), self._versions, value.constant is not None
            )
        )


class _Slots:
    """The boxes of values that are read or computed so far, each in a slot."""

    def __init__(self) -> None:
        self._boxes: dict[Value, list[tuple[Box, int]]] = {}
        self.slots = 0

    def add(self, value: Value, box: Box | None) -> None:
        """Fills the next slot, or leaves it empty."""
        if box is not None:
            self._boxes.setdefault(value, []).append((box, self.slots))
        self.slots += 1

    def find(self, value: Operand, box: Box | None) -> Ref | None:
        """The reference to a box; None for a scalar, or without a box."""
        if box is None or isinstance(value, Scalar):
            return None
        if not volume(box) and value.size:
            return Ref(-1, None, shape_of(box))
        shape = shape_of(box)
        for outer, slot in self._boxes[value]:
            # The very same intervals, without comparing numbers.
            if all(map(operator.is_, outer, box)):
                return Ref(slot, None, shape)
        for outer, slot in self._boxes[value]:
            if contains(outer, box):
                if shape == shape_of(outer):
                    return Ref(slot, None, shape)
                inside = zip(box, outer, strict=True)
                return Ref(slot, tuple(max(a[0] - b[0], 0) for a, b in inside), shape)
        raise AssertionError(f"no box of {value.number} holds {box}")


Starts: TypeAlias = Sequence[jax.Array] | jax.Array
"""Traced positions."""


def emit(
    static: StaticRecipe,
    rules: Mapping[Node, Rule],
    demanded: Sequence[Operand | None],
) -> Callable[[Sequence[Any], Starts], list[Any]]:
    """Returns the function that runs a recipe: ``(boxes read, starts) -> results``."""

    def function(reads: Sequence[Any], starts: Starts) -> list[Any]:
        slots: dict[int, Any] = dict(enumerate(reads))

        def read(value: Operand | None, ref: Ref | None) -> Any:
            if isinstance(value, Scalar):
                return value.value
            if ref is None or value is None:
                return None
            if ref.slot < 0:
                return jnp.zeros(ref.shape, value.aval.dtype)
            if ref.starts is None:
                return slots[ref.slot]
            limits = [a + n for a, n in zip(ref.starts, ref.shape, strict=True)]
            return lax.slice(slots[ref.slot], ref.starts, limits)

        positions = map(starts.__getitem__, itertools.count())
        for step in static.steps:
            node = step.node
            of_step = list(itertools.islice(positions, step.start_count))
            info = node.source_info
            with user_context(info and info.traceback):
                ins = [read(v, ref) for v, ref in zip(node.ins, step.ins, strict=True)]
                outs = rules[node].emit(ins, step.static, of_step)
                results = zip(outs, step.shapes, step.cropped, strict=True)
                for slot, (out, shape, is_part) in enumerate(results, step.first):
                    if is_part and shape is not None:
                        begin = list(itertools.islice(positions, len(shape)))
                        out = lax.dynamic_slice(out, begin, shape)
                    slots[slot] = out
        return [read(v, ref) for v, ref in zip(demanded, static.outs, strict=True)]

    return function
