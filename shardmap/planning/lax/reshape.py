"""The rule of ``reshape``: boxes of merged and split axes.

The axes fall into groups: ``(4, 6, 5) -> (24, 5)`` into ``(4, 6) -> (24)`` and
``(5) -> (5)``. A group with one axis on each side passes cuts as they are. In any
other, a box of the result is widened until its elements are contiguous in memory. The
shard reads the smallest contiguous box of the operand that contains them.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from shardmap.planning.engine.nodes import Graph, Node, Operand, Rewrite
from shardmap.planning.engine.rules import (
    UNCUT,
    Cut,
    Factor,
    Forward,
    Lost,
    Names,
    Need,
    Reason,
    Rule,
    RuleMaker,
    first_passes,
)
from shardmap.planning.engine.slices import Box, Interval, shape_of

INNER = Reason(
    "reshape merges or splits this axis behind another one, so that a piece of it is "
    "scattered over the result",
    "cut the first of the merged axes instead",
)


class AxisGroup(NamedTuple):
    """Axes of the operand and of the result that hold the same elements."""

    ins: tuple[int, ...]
    outs: tuple[int, ...]


def groups(before: Sequence[int], after: Sequence[int]) -> list[AxisGroup]:
    """The smallest groups, without axes of size 1.

    >>> groups((4, 6, 5, 1), (24, 5))
    [AxisGroup(ins=(0, 1), outs=(0,)), AxisGroup(ins=(2,), outs=(1,))]
    """
    if 0 in before:
        return [AxisGroup(tuple(range(len(before))), tuple(range(len(after))))]
    axis_groups = []
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
        axis_groups.append(AxisGroup(tuple(ins), tuple(outs)))
    return axis_groups


def widen(intervals: Sequence[Interval], sizes: Sequence[int]) -> list[Interval]:
    """The smallest contiguous box that contains a box."""
    wide = list(intervals)
    for k, (start, stop) in enumerate(intervals):
        if stop - start != 1:
            wide[k + 1 :] = [(0, size) for size in sizes[k + 1 :]]
            break
    return wide


def flat(intervals: Sequence[Interval], sizes: Sequence[int]) -> Interval:
    """The start and the end of a contiguous box in memory."""
    first = last = 0
    for (start, stop), size in zip(intervals, sizes, strict=True):
        first, last = first * size + start, last * size + stop - 1
    return first, last + 1


def around(span: Interval, sizes: Sequence[int]) -> list[Interval]:
    """The smallest contiguous box that contains a range of memory."""
    first, last = span[0], span[1] - 1
    box: list[Interval] = []
    for k, size in enumerate(sizes):
        if box and box[-1][1] - box[-1][0] != 1:
            box.append((0, size))
            continue
        below = math.prod(sizes[k + 1 :])
        a, first = divmod(first, below)
        b, last = divmod(last, below)
        box.append((a, b + 1))
    return box


class Reshape(Rule):
    """See the module."""

    cheap = True

    def __init__(self, node: Node) -> None:
        self.node = node
        [self.before], [self.after] = node.in_shapes, node.out_shapes
        self.groups = groups(self.before, self.after)

    def forward(self, cuts: Sequence[Sequence[Cut]]) -> Forward:
        out = [UNCUT] * len(self.after)
        lost: list[Lost] = []
        if 0 in self.after:
            return Forward([out], lost=lost)
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
        return Forward([out], lost=lost)

    def _place(
        self, at: list[int], cut: Cut, axes: Sequence[int], out: list[Cut]
    ) -> None:
        """Turns cuts of a group's memory into cuts of the result's axes."""
        for k, axis in enumerate(axes):
            below = math.prod(self.after[inner] for inner in axes[k + 1 :])
            size = self.after[axis]
            points = sorted({point // below for point in at} - {0, size})
            inside = sorted({point % below for point in at} - {0})
            if inside and len(points) == size - 1:
                # Pieces shorter than one step of this axis also cut the next axis.
                out[axis] = Cut(tuple(range(1, size)), True, cut.origins)
                at = inside
                continue
            out[axis] = Cut(tuple(points), bool(inside), cut.origins)
            return

    def links(self) -> tuple[Names, Names]:
        before: list[Any] = [None] * len(self.before)
        after: list[Any] = [None] * len(self.after)
        for group in self.groups:
            if len(group.ins) == len(group.outs) == 1:
                before[group.ins[0]] = after[group.outs[0]] = group
        return [before], [after]

    def backward(
        self, boxes: Sequence[Box | None], loops: Mapping[Factor, Interval]
    ) -> Need:
        [box] = boxes
        assert box is not None
        needed: list[Interval] = [(0, size) for size in self.before]
        wide = list(box)
        # Per group: how many elements of the memory that is read are taken, if not all.
        lengths: list[int | None] = []
        starts: list[int] = []
        for group in self.groups:
            asked = [box[k] for k in group.outs]
            length = None
            if len(group.ins) == len(group.outs) == 1:
                needed[group.ins[0]] = asked[0]
            elif 0 in shape_of(tuple(asked)):
                for k in group.ins:
                    needed[k] = (0, 0)
            else:
                before = [self.before[k] for k in group.ins]
                after = [self.after[k] for k in group.outs]
                contiguous = widen(asked, after)
                span = flat(contiguous, after)
                source = around(span, before)
                for k, interval in zip(group.outs, contiguous, strict=True):
                    wide[k] = interval
                for k, interval in zip(group.ins, source, strict=True):
                    needed[k] = interval
                memory = flat(source, before)
                if memory != span:
                    length = span[1] - span[0]
                    starts.append(span[0] - memory[0])
            lengths.append(length)
        static = tuple(lengths), shape_of(tuple(wide))
        return Need((tuple(needed),), static, tuple(starts), [tuple(wide)])

    def emit(
        self,
        values: Sequence[Any],
        static: tuple[tuple[int | None, ...], tuple[int, ...]],
        starts: Sequence[jax.Array],
    ) -> Sequence[Any]:
        [result], [lengths, wide] = values, static
        positions = iter(starts)
        if any(length is not None for length in lengths):
            # One axis per group: the elements that were read, in the order of memory.
            sizes = result.shape
            merged = [math.prod(sizes[k] for k in group.ins) for group in self.groups]
            # Of the same type as the others: a Python integer may have 64 bits.
            zero = np.zeros((), starts[0].dtype)
            result = lax.dynamic_slice(
                lax.reshape(result, merged),
                [zero if length is None else next(positions) for length in lengths],
                [n if k is None else k for n, k in zip(merged, lengths, strict=True)],
            )
        return [lax.reshape(result, wide)]

    def passes(self, combiner: str, pending: frozenset[int]) -> str | None:
        return first_passes(combiner, pending)


def permuted(graph: Graph, node: Node) -> list[Operand] | None:
    """A ``lax.reshape`` with ``dimensions`` is written as a transpose and a reshape."""
    order, sizes = node.params["dimensions"], node.params["new_sizes"]
    if order is None:
        return None
    return graph.call(lambda x: lax.reshape(lax.transpose(x, order), sizes), node.ins)


REWRITES: dict[Any, Rewrite] = {p.reshape_p: permuted}
RULES: dict[Any, RuleMaker] = {p.reshape_p: Reshape}
