"""From boxes of results back to boxes of inputs, and the code in between.

`trace_back` walks the nodes from last to first. Each box wanted of a node's results is
asked of the node's rule, which says what boxes of the operands it takes. What comes out
is a `Recipe`: which boxes to read, and the steps from there to the results. All in it
but positions is static; recipes with equal keys run the same compiled function.

A value may be wanted in several boxes, as ``x`` in ``x + x.T``. They become one box
where that costs nothing, else the value is computed or read once for each.
"""

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.source_info_util import user_context

from shardmap.plan.engine.nodes import Node, Operand, Scalar, Value
from shardmap.plan.engine.rules import Factor, Need, Rule
from shardmap.plan.engine.slices import (
    Box,
    Interval,
    contains,
    hull_of,
    merge,
    shape_of,
    volume,
)

MOST_VERSIONS = 4
"""The most boxes of one value that are computed apart; more become their hull."""

FEW_NODES = 64
"""The most values that are searched to see whether one is made of constants."""


class Ref(NamedTuple):
    """A part of a computed box.

    Attributes:
      slot: which one; -1 for an array without elements.
      starts: where the part starts in the box, None if it is all of it.
      shape: the part's shape.
    """

    slot: int
    starts: tuple[int, ...] | None
    shape: tuple[int, ...]


class Step(NamedTuple):
    """One equation for one shard. Results go to the slots from ``first`` on."""

    node: int
    ins: tuple[Ref | None, ...]
    static: Any
    start_count: int
    first: int


class _StaticRecipe(NamedTuple):
    read_values: tuple[Value, ...]
    read_shapes: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...]
    outs: tuple[Ref | None, ...]


class StaticRecipe(_StaticRecipe):
    """All of a recipe that a compiled function depends on."""

    # Thousands of steps, and each shard looks its function up by them.
    def __hash__(self) -> int:
        if "_hash" not in self.__dict__:
            self._hash = super().__hash__()
        return self._hash


class Recipe(NamedTuple):
    """How to compute boxes of some values.

    Attributes:
      reads: the boxes of inputs to read.
      starts: the positions to hand over.
      static: the rest.
    """

    reads: tuple[tuple[Value, Box], ...]
    starts: tuple[int, ...]
    static: StaticRecipe


Intervals: TypeAlias = Mapping[int, Mapping[Factor, Interval]]
"""Node number -> contracted factor -> the part of it to run over."""


def needed(
    outputs: Iterable[Operand], stops: Collection[Value]
) -> tuple[list[Node], frozenset[Value]]:
    """The nodes that outputs depend on, from last to first, and what these read.

    Args:
      outputs: the outputs.
      stops: values that are read, though nodes would give them.
    """
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
    backwards = sorted(nodes, key=lambda node: node.number, reverse=True)
    return backwards, frozenset(reads)


def trace_back(
    backwards: Sequence[Node],
    rules: Mapping[int, Rule],
    demands: Sequence[tuple[Operand, Box] | None],
    stops: Collection[Value],
    loops: Intervals,
    versions: int = MOST_VERSIONS,
) -> Recipe:
    """The recipe for the boxes of values in ``demands``.

    Args:
      backwards: the nodes, from last to first.
      rules: their rules, by node number.
      demands: the values and the boxes of them; None for one that is not wanted.
      stops: values that are read, though nodes would give them.
      loops: which contracted factors run over a part only.
      versions: how many boxes of one value to keep apart.
    """
    wanted = _Wanted(frozenset(stops), versions)
    for demand in demands:
        if demand is not None:
            wanted.add(*demand)
    visits: list[tuple[Node, Sequence[Box | None], Need]] = []
    for node in backwards:
        for boxes in wanted.of(node):
            need = rules[node.number].backward(boxes, loops.get(node.number, {}))
            visits.append((node, boxes, need))
            for value, box in zip(node.ins, need.boxes, strict=True):
                if box is not None:
                    wanted.add(value, box)

    reads = wanted.reads()
    made = _Made()
    for value, box in reads:
        made.add(value, box)
    # From here on first to last: the slots are numbered as the steps will run.
    steps = []
    starts: list[int] = []
    for node, boxes, need in reversed(visits):
        refs = tuple(map(made.find, node.ins, need.boxes))
        first = made.slots
        steps.append(Step(node.number, refs, need.static, len(need.starts), first))
        starts.extend(need.starts)
        for out, box in zip(node.outs, boxes, strict=True):
            made.add(out, box)
    outs = tuple(None if demand is None else made.find(*demand) for demand in demands)
    values = tuple(value for value, _ in reads)
    shapes = tuple(shape_of(box) for _, box in reads)
    static = StaticRecipe(values, shapes, tuple(steps), outs)
    return Recipe(reads, tuple(starts), static)


class _Wanted:
    """The boxes of values that are wanted so far.

    Args:
      stops: the values that are read, though nodes would give them.
      versions: how many boxes of one value to keep apart.
    """

    def __init__(self, stops: frozenset[Value], versions: int) -> None:
        self._stops, self._versions = stops, versions
        # By their intervals' ids: numbers that depend on the shard are not compared.
        self._boxes: dict[Value, dict[tuple[int, ...], Box]] = {}

    def add(self, value: Operand, box: Box) -> None:
        # A box without elements is not computed: zeros stand for it, see `take`.
        if isinstance(value, Value) and (volume(box) or not value.size):
            self._boxes.setdefault(value, {}).setdefault(tuple(map(id, box)), box)

    def of(self, node: Node) -> list[list[Box | None]]:
        """For each run of a node a box of each of its results."""
        if len(node.outs) == 1:
            (out,) = node.outs
            if out in self._stops or out not in self._boxes:
                return []
            # They are computed in the other order.
            return [[box] for box in self._apart(out)[::-1]] or [
                [box] for box in merge(self._boxes[out].values(), self._versions)
            ]
        # An equation with several results runs once for all of them, and so has one
        # box for each.
        boxes = [
            None if out in self._stops else hull_of(self._boxes.get(out, {}).values())
            for out in node.outs
        ]
        return [] if all(box is None for box in boxes) else [boxes]

    def reads(self) -> tuple[tuple[Value, Box], ...]:
        """The boxes of values that no node gives."""
        return tuple(
            (value, box)
            for value in sorted(self._boxes, key=lambda value: value.number)
            if value in self._stops or value.producer is None
            for box in self._apart(value)
            or merge(self._boxes[value].values(), self._versions)
        )

    def _apart(self, value: Value) -> list[Box]:
        """Boxes of a constant that are not merged, the smallest first."""
        boxes = self._boxes[value].values()
        # Where rows start in all of it would make a function for each shard.
        if len(boxes) == 1 or not self._is_constant(value):
            return []
        own = sorted(dict.fromkeys(boxes), key=volume)
        return own if len(own) <= self._versions else []

    def _is_constant(self, value: Value) -> bool:
        """Whether a value is made of constants, by few nodes."""
        stack, seen = [value], {value}
        while stack and len(seen) <= FEW_NODES:
            v = stack.pop()
            if v.constant is not None:
                continue
            if v in self._stops or v.producer is None:
                return False
            sources = {v for v in v.producer.ins if isinstance(v, Value)} - seen
            seen |= sources
            stack += sources
        return not stack


class _Made:
    """The boxes of values that are read or computed so far, each in a slot.

    Attributes:
      slots: how many there are.
    """

    def __init__(self) -> None:
        self._boxes: dict[Value, list[tuple[Box, int]]] = {}
        self.slots = 0

    def add(self, value: Value, box: Box | None) -> None:
        """Fills the next slot, or leaves it empty."""
        if box is not None:
            self._boxes.setdefault(value, []).append((box, self.slots))
        self.slots += 1

    def find(self, value: Operand, box: Box | None) -> Ref | None:
        """Where a box is."""
        if box is None or isinstance(value, Scalar):
            return None
        if not volume(box) and value.size:
            return Ref(-1, None, shape_of(box))
        shape = shape_of(box)
        for outer, slot in self._boxes[value]:
            # The very same intervals, without comparing numbers.
            if all(map(operator.is_, outer, box)):
                return Ref(slot, None, shape)
            if contains(outer, box):
                if shape == shape_of(outer):
                    return Ref(slot, None, shape)
                inside = zip(box, outer, strict=True)
                return Ref(slot, tuple(max(a[0] - b[0], 0) for a, b in inside), shape)
        raise AssertionError(f"no box of {value.number} holds {box}")


def take(values: Mapping[int, Any], ref: Ref, dtype: jax.typing.DTypeLike) -> Any:
    """The part of a computed box that ``ref`` means."""
    if ref.slot < 0:
        return jnp.zeros(ref.shape, dtype)
    value = values[ref.slot]
    if ref.starts is None:
        return value
    limits = [a + n for a, n in zip(ref.starts, ref.shape, strict=True)]
    return lax.slice(value, ref.starts, limits)


Starts: TypeAlias = Sequence[jax.Array] | jax.Array
"""Positions, traced."""


def emit(
    static: StaticRecipe,
    nodes: Mapping[int, Node],
    rules: Mapping[int, Rule],
    demanded: Sequence[Operand | None],
) -> Callable[[Sequence[Any], Starts], list[Any]]:
    """The function that runs a recipe: ``(boxes that were read, starts) -> results``.

    Args:
      static: the recipe.
      nodes: by number.
      rules: by node number.
      demanded: the values whose boxes were asked for.
    """

    def function(reads: Sequence[Any], starts: Starts) -> list[Any]:
        slots: dict[int, Any] = dict(enumerate(reads))

        def read(value: Operand | None, ref: Ref | None) -> Any:
            if isinstance(value, Scalar):
                return value.value
            if ref is None or value is None:
                return None
            return take(slots, ref, value.aval.dtype)

        position = 0
        for step in static.steps:
            node = nodes[step.node]
            own = [starts[position + k] for k in range(step.start_count)]
            position += step.start_count
            info = node.source_info
            with user_context(info and info.traceback):
                ins = [read(v, ref) for v, ref in zip(node.ins, step.ins, strict=True)]
                outs = rules[step.node].emit(ins, step.static, own)
            slots.update(enumerate(outs, step.first))
        return [read(v, ref) for v, ref in zip(demanded, static.outs, strict=True)]

    return function
