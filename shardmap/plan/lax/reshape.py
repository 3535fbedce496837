"""The rule of ``reshape``: axes merged and split.

The axes fall into groups, ``(4, 6, 5) -> (24, 5)`` into ``(4, 6) -> (24)`` and
``(5) -> (5)``. A group of one axis on each side is a plain factor. In any other a box
of the result is widened until its elements are neighbours in memory, and the smallest
such box of the operand is taken that holds them.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax import lax
from jax.extend.core import primitives as p

from shardmap.plan.engine.nodes import Node, Operand, Program, Rewrite, traced
from shardmap.plan.engine.rules import (
    UNCUT,
    Factor,
    Forward,
    Link,
    Lost,
    Need,
    Points,
    Reason,
    RuleMaker,
    first_passes,
)
from shardmap.plan.engine.slices import Box, Interval, Window

INNER = Reason(
    "reshape merges or splits this axis behind another one, so that a piece of it is "
    "scattered over the result",
    "cut the first of the merged axes instead",
)


class Group(NamedTuple):
    """Axes of the operand and of the result that hold the same elements."""

    ins: tuple[int, ...]
    outs: tuple[int, ...]


def groups(before: Sequence[int], after: Sequence[int]) -> list[Group]:
    """The finest groups, axes of size 1 left out.

    >>> groups((4, 6, 5, 1), (24, 5))
    [Group(ins=(0, 1), outs=(0,)), Group(ins=(2,), outs=(1,))]
    """
    if 0 in before:
        return [Group(tuple(range(len(before))), tuple(range(len(after))))]
    found = []
    left = [axis for axis, size in enumerate(before) if size != 1]
    right = [axis for axis, size in enumerate(after) if size != 1]
    while left:
        ins, outs = [left.pop(0)], [right.pop(0)]
        a, b = before[ins[0]], after[outs[0]]
        while a != b:
            if a < b:
                ins.append(left.pop(0))
                a *= before[ins[-1]]
            else:
                outs.append(right.pop(0))
                b *= after[outs[-1]]
        found.append(Group(tuple(ins), tuple(outs)))
    return found


def widen(intervals: Sequence[Interval], sizes: Sequence[int]) -> list[Interval]:
    """The smallest box around one whose elements are neighbours in memory."""
    wide = list(intervals)
    for k, (start, stop) in enumerate(intervals):
        if stop - start != 1:
            wide[k + 1 :] = [(0, size) for size in sizes[k + 1 :]]
            break
    return wide


def flat(intervals: Sequence[Interval], sizes: Sequence[int]) -> Interval:
    """Where a box of neighbours starts and stops in memory."""
    first = last = 0
    for (start, stop), size in zip(intervals, sizes, strict=True):
        first, last = first * size + start, last * size + stop - 1
    return first, last + 1


def around(span: Interval, sizes: Sequence[int]) -> list[Interval]:
    """The smallest box of neighbours that holds a part of memory."""
    first, last = span[0], span[1] - 1
    inner = list(
        itertools.accumulate(reversed(sizes[1:]), lambda a, b: a * b, initial=1)
    )
    found: list[Interval] = []
    for size, below in zip(sizes, reversed(inner), strict=True):
        if found and found[-1][1] - found[-1][0] != 1:
            found.append((0, size))
            continue
        a, first = divmod(first, below)
        b, last = divmod(last, below)
        found.append((a, b + 1))
    return found


class Reshape:
    """See the module."""

    cheap = True
    complete: frozenset[int] = frozenset()

    def __init__(self, node: Node) -> None:
        self.node = node
        [self.before, *_], [self.after] = node.in_shapes, node.out_shapes
        self.groups = groups(self.before, self.after)

    def forward(self, cuts: Sequence[Sequence[Points]]) -> Forward:
        out = [UNCUT] * len(self.after)
        lost: list[Lost] = []
        if 0 in self.after:
            return Forward([out], {}, lost)
        for group in self.groups:
            first, *others = group.ins
            cut = cuts[0][first]
            lost += [Lost(cuts[0][k].origins, INNER) for k in others if cuts[0][k].at]
            if cut.at and len(group.outs) == len(group.ins) == 1:
                out[group.outs[0]] = cut
            elif cut.at:
                step = math.prod(self.before[k] for k in others)
                self._place([at * step for at in cut.at], cut, group.outs, out)
                if not any(out[k].at for k in group.outs):
                    lost.append(Lost(cut.origins, INNER))
        return Forward([out], {}, lost)

    def _place(
        self, at: list[int], cut: Points, axes: Sequence[int], out: list[Points]
    ) -> None:
        """Puts cuts of a group's memory on the result's axes."""
        for k, axis in enumerate(axes):
            below = math.prod(self.after[inner] for inner in axes[k + 1 :])
            size = self.after[axis]
            points = sorted({point // below for point in at} - {0, size})
            inside = sorted({point % below for point in at} - {0})
            if inside and len(points) == size - 1:
                # Pieces shorter than one step of this axis go on inside each.
                out[axis] = Points(tuple(range(1, size)), True, cut.origins)
                at = inside
                continue
            out[axis] = Points(tuple(points), bool(inside), cut.origins)
            return

    def links(self) -> list[list[Link]]:
        return [
            [Link("in", 0, group.ins[0]), Link("out", 0, group.outs[0])]
            for group in self.groups
            if len(group.ins) == len(group.outs) == 1
        ]

    def windows(self) -> list[tuple[Link, Window, Link]]:
        return []

    def backward(
        self, boxes: Sequence[Box | None], loops: Mapping[Factor, Interval]
    ) -> Need:
        [box] = boxes
        assert box is not None
        needed: list[Interval] = [(0, size) for size in self.before]
        static: list[Any] = []
        starts: list[int] = []
        for group in self.groups:
            sizes = [self.after[k] for k in group.outs]
            asked = [box[k] for k in group.outs]
            if len(group.ins) == len(group.outs) == 1:
                needed[group.ins[0]] = asked[0]
                static.append(asked[0][1] - asked[0][0])
                continue
            if any(start == stop for start, stop in asked):
                static.append(tuple(stop - start for start, stop in asked))
                for k in group.ins:
                    needed[k] = (0, 0)
                continue
            wide = widen(asked, sizes)
            span = flat(wide, sizes)
            source = around(span, [self.before[k] for k in group.ins])
            for k, interval in zip(group.ins, source, strict=True):
                needed[k] = interval
            memory = flat(source, [self.before[k] for k in group.ins])
            part = None
            if memory != span:
                part = span[1] - span[0]
                starts.append(span[0] - memory[0])
            inner = None
            if wide != asked:
                inner = tuple(stop - start for start, stop in asked)
                starts += [a[0] - b[0] for a, b in zip(asked, wide, strict=True)]
            shape = tuple(stop - start for start, stop in wide)
            static.append((part, shape, inner))
        rest: list[Box | None] = [() for _ in self.node.ins[1:]]
        return Need((tuple(needed), *rest), tuple(static), tuple(starts))

    def emit(
        self, values: Sequence[Any], static: Any, starts: Sequence[Any]
    ) -> Sequence[Any]:
        positions = iter(starts)
        merged = [
            math.prod(values[0].shape[k] for k in group.ins) for group in self.groups
        ]
        result = lax.reshape(values[0], merged)
        offsets: list[Any] = [0] * len(self.groups)
        lengths = list(merged)
        later: list[tuple[list[Any], tuple[int, ...]]] = []
        shape: list[int] = []
        for k, entry in enumerate(static):
            if isinstance(entry, int):
                later.append(([0], (entry,)))
                shape.append(entry)
                continue
            if len(entry) != 3 or not isinstance(entry[1], tuple):
                later.append(([0] * len(entry), entry))
                shape += entry
                continue
            part, wide, inner = entry
            if part is not None:
                offsets[k], lengths[k] = next(positions), part
            begin = (
                [0] * len(wide) if inner is None else [next(positions) for _ in wide]
            )
            later.append((begin, inner or wide))
            shape += wide
        if lengths != merged:
            result = lax.dynamic_slice(result, offsets, lengths)
        result = lax.reshape(result, shape)
        asked = [size for _, sizes in later for size in sizes]
        if asked != shape:
            begins = [start for begin, _ in later for start in begin]
            result = lax.dynamic_slice(result, begins, asked)
        final = [1] * len(self.after)
        axes = [axis for group in self.groups for axis in group.outs]
        for axis, size in zip(axes, asked, strict=True):
            final[axis] = size
        return [lax.reshape(result, final)]

    def passes(self, combiner: str, pending: frozenset[int]) -> str | None:
        return first_passes(combiner, pending)


def permuted(
    program: Program, equation: Any, ins: Sequence[Operand], source: str
) -> list[Operand] | None:
    """``lax.reshape`` may read its axes in another order: written as a transpose."""
    order = equation.params["dimensions"]
    if order is None:
        return None

    def transposed(x: Any) -> Any:
        return lax.reshape(lax.transpose(x, order), equation.params["new_sizes"])

    return program.inline(traced(transposed, ins), ins, source)


REWRITES: dict[Any, Rewrite] = {p.reshape_p: permuted}
RULES: dict[Any, RuleMaker] = {p.reshape_p: Reshape}
