"""Rules of the primitives that move elements: transpose, slice, pad, concatenate."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from shardmap._jax.types import Params
from shardmap.planning.engine.factors import Factors, Local, out_size
from shardmap.planning.engine.nodes import (
    Graph,
    Node,
    Operand,
    Rewrite,
    Scalar,
)
from shardmap.planning.engine.rules import (
    UNCUT,
    Cut,
    Factor,
    Forward,
    Link,
    Need,
    Reason,
    Rule,
    RuleMaker,
    Windowed,
    first_passes,
    linked,
    meet,
)
from shardmap.planning.engine.slices import Box, Interval, Window, refine
from shardmap.planning.lax.primitives import (
    OPTIMIZATION_BARRIER,
    SPLIT,
    STACK,
    TILE,
    UNSTACK,
)


def broadcast_in_dim(node: Node) -> Factors:
    shape = node.out_shapes[0]
    axes = node.params["broadcast_dimensions"]
    operand = [
        axis if size == shape[axis] else None
        for axis, size in zip(axes, node.in_shapes[0], strict=True)
    ]
    everything = range(len(shape))

    def emitter(local: Local) -> Sequence[Any]:
        return [
            lax.broadcast_in_dim(local.values[0], out_size(local, everything), axes)
        ]

    return Factors(node, [operand], [everything], emitter=emitter, passes=first_passes)


def squeeze(node: Node) -> Factors:
    gone = {d % len(node.in_shapes[0]) for d in node.params["dimensions"]}
    axes = [None if d in gone else d for d in range(len(node.in_shapes[0]))]
    out = [axis for axis in axes if axis is not None]
    return Factors(node, [axes], [out], passes=first_passes)


def transpose(node: Node) -> Factors:
    permutation = node.params["permutation"]
    axes = range(len(permutation))
    return Factors(node, [axes], [permutation], passes=first_passes)


def rev(node: Node) -> Factors:
    shape = node.in_shapes[0]
    axes = [
        Windowed(axis, Window(size, reverse=True))
        if axis in node.params["dimensions"]
        else axis
        for axis, size in enumerate(shape)
    ]
    return Factors(node, [axes], [range(len(shape))], passes=first_passes)


def slice_rule(node: Node) -> Factors:
    shape = node.in_shapes[0]
    starts = node.params["start_indices"]
    strides = node.params["strides"] or (1,) * len(shape)
    axes = [
        axis
        if size == node.out_shapes[0][axis]
        else Windowed(axis, Window(size, stride=strides[axis], pad=-starts[axis]))
        for axis, size in enumerate(shape)
    ]

    def emitter(local: Local) -> Sequence[Any]:
        [operand] = local.values
        steps = [
            1 if axis == factor else strides[factor] for factor, axis in enumerate(axes)
        ]
        if all(step == 1 for step in steps):
            return [operand]
        return [lax.slice(operand, (0,) * operand.ndim, operand.shape, steps)]

    return Factors(
        node, [axes], [range(len(shape))], emitter=emitter, passes=first_passes
    )


def pad(node: Node) -> Factors:
    shape = node.in_shapes[0]
    config = node.params["padding_config"]
    axes = [
        axis
        if padding == (0, 0, 0)
        else Windowed(axis, Window(size, pad=padding[0], dilation=padding[2] + 1))
        for axis, (size, padding) in enumerate(zip(shape, config, strict=True))
    ]

    def emitter(local: Local) -> Sequence[Any]:
        operand, value = local.values
        around = []
        for axis in range(len(shape)):
            before, after = local.holes.get((0, axis), (0, 0))
            around.append((before, after, config[axis][2]))
        return [lax.pad(operand, value, around)]

    # Padding of partial sums would be added once per part.
    zero = _is_zero(node.ins[1])
    return Factors(
        node,
        [axes, []],
        [range(len(shape))],
        emitter=emitter,
        passes=lambda combiner, pending: (
            combiner if pending == {0} and zero and combiner == "add" else None
        ),
    )


def _is_zero(operand: Operand) -> bool:
    return isinstance(operand, Scalar) and bool(np.all(np.asarray(operand.value) == 0))


def iota(node: Node) -> Factors:
    shape, dimension = node.out_shapes[0], node.params["dimension"]
    dtype = node.params["dtype"]
    axes = range(len(shape))

    def emitter(local: Local) -> Sequence[Any]:
        local_shape = out_size(local, axes)
        # Counted as integers: short floats would be rounded twice.
        count = lax.broadcasted_iota(jnp.int32, local_shape, dimension)
        return [(count + local.starts[dimension]).astype(dtype)]

    return Factors(node, [], [axes], starts=(dimension,), emitter=emitter)


class Concatenate(Rule):
    """``concatenate``: along its axis the operands follow each other."""

    cheap = True

    def __init__(self, node: Node) -> None:
        self.node = node
        self.axis = node.params["dimension"]
        self.lengths = [shape[self.axis] for shape in node.in_shapes]
        self.begins = [sum(self.lengths[:k]) for k in range(len(self.lengths))]
        self.rank = len(node.out_shapes[0])

    def forward(self, cuts: Sequence[Sequence[Cut]]) -> Forward:
        out = [meet([cut[axis] for cut in cuts]) for axis in range(self.rank)]
        along = [cut[self.axis] for cut in cuts]
        out[self.axis] = UNCUT
        # Without cuts, seams alone would make pieces that nobody asked for.
        if any(cut.at for cut in along):
            seams = [begin for begin in self.begins if 0 < begin < sum(self.lengths)]
            moved = [
                [point + begin for point in cut.at]
                for cut, begin in zip(along, self.begins, strict=True)
            ]
            origins = frozenset().union(*(cut.origins for cut in along))
            out[self.axis] = Cut(refine([seams, *moved]), True, origins)
        return Forward([out])

    def links(self) -> list[list[Link]]:
        names = [k if k != self.axis else None for k in range(self.rank)]
        return linked([names] * len(self.node.ins), [names])

    def backward(
        self, boxes: Sequence[Box | None], loops: Mapping[Factor, Interval]
    ) -> Need:
        [box] = boxes
        assert box is not None
        start, stop = box[self.axis]
        needed: list[Box | None] = []
        for begin, length in zip(self.begins, self.lengths, strict=True):
            low, high = max(start, begin), min(stop, begin + length)
            needed.append(
                (*box[: self.axis], (low - begin, high - begin), *box[self.axis + 1 :])
                if low < high
                else None
            )
        # An empty box takes its dtype and other sizes from an operand.
        if all(part is None for part in needed):
            needed[0] = (*box[: self.axis], (0, 0), *box[self.axis + 1 :])
        return Need(tuple(needed), tuple(part is not None for part in needed))

    def emit(
        self,
        values: Sequence[Any],
        static: tuple[bool, ...],
        starts: Sequence[jax.Array],
    ) -> Sequence[Any]:
        present = [value for value, here in zip(values, static, strict=True) if here]
        return [lax.concatenate(present, self.axis)]

    def passes(self, combiner: str, pending: frozenset[int]) -> str | None:
        return combiner if len(pending) == len(self.node.ins) else None


def split(graph: Graph, node: Node) -> list[Operand]:
    """Writes a split as slices, so that each result has boxes of its own."""
    axis, sizes = node.params["axis"], node.params["sizes"]
    edges = list(itertools.accumulate(sizes, initial=0))

    def parts(x: jax.Array) -> list[jax.Array]:
        return [
            lax.slice_in_dim(x, *ends, axis=axis) for ends in itertools.pairwise(edges)
        ]

    return graph.call(parts, node.ins)


def known_slice(graph: Graph, node: Node) -> list[Operand] | None:
    """A ``dynamic_slice`` with literal starts is a slice."""
    operand, *begins = node.ins
    places = [int(begin.value) for begin in begins if isinstance(begin, Scalar)]
    if len(places) < len(begins):
        return None
    taken = node.out_shapes[0]
    # As in `lax.dynamic_slice`: one that would end outside starts earlier.
    starts = [
        min(max(place, 0), size - n)
        for place, size, n in zip(places, operand.shape, taken, strict=True)
    ]
    params = {
        "start_indices": tuple(starts),
        "limit_indices": tuple(a + n for a, n in zip(starts, taken, strict=True)),
        "strides": None,
    }
    return list(graph.add(p.slice_p, params, [operand], [node.outs[0].aval]))


MOST_COPIES = 16
"""The most copies that a tile concatenates. Each can be cut like the operand.

More copies would make a large graph. They become a broadcast and a reshape, which are
cut between copies.
"""


def stack(graph: Graph, node: Node) -> list[Operand]:
    """Writes a stack as a concatenation of operands with a new axis."""
    axis, [out] = node.params["axis"], node.outs
    shape = (*out.shape[:axis], 1, *out.shape[axis + 1 :])
    params: Params = {
        "shape": shape,
        "broadcast_dimensions": tuple(k for k in range(len(shape)) if k != axis),
        "sharding": None,
    }
    # Added one by one: tracing thousands of them would take seconds.
    avals = [out.aval.update(shape=shape)]
    rows = [graph.add(p.broadcast_in_dim_p, params, [x], avals)[0] for x in node.ins]
    return list(graph.add(p.concatenate_p, {"dimension": axis}, rows, [out.aval]))


def unstack(graph: Graph, node: Node) -> list[Operand]:
    """Writes an unstack as slices."""
    axis = node.params["axis"]

    def parts(x: jax.Array) -> Any:
        every = range(x.shape[axis])
        return [lax.index_in_dim(x, k, axis, keepdims=False) for k in every]

    return graph.call(parts, node.ins)


def tile(graph: Graph, node: Node) -> list[Operand]:
    """Writes a tile as concatenations, or as a broadcast if there are many copies."""

    def copies(x: jax.Array) -> Any:
        for axis, count in enumerate(node.params["reps"]):
            if 1 < count <= MOST_COPIES:
                x = lax.concatenate([x] * count, axis)
            elif count != 1:
                shape = (*x.shape[:axis], count, *x.shape[axis:])
                kept = [k for k in range(len(shape)) if k != axis]
                wide = lax.broadcast_in_dim(x, shape, kept)
                joint = [*x.shape[:axis], count * x.shape[axis], *x.shape[axis + 1 :]]
                x = lax.reshape(wide, joint)
        return x

    return graph.call(copies, node.ins)


REWRITES: dict[Any, Rewrite] = {
    OPTIMIZATION_BARRIER: lambda graph, node: node.ins,
    SPLIT: split,
    STACK: stack,
    TILE: tile,
    UNSTACK: unstack,
    p.dynamic_slice_p: known_slice,
}
"""The primitives that are always written as others."""


def bitcast(node: Node) -> Factors:
    """A change of width adds or removes a last axis, which is whole."""
    return in_parts(node, Reason("these are the parts of one element"))


def in_parts(node: Node, reason: Reason) -> Factors:
    """``i -> i *`` or ``i * -> i``: a last axis that only one side has is whole."""
    before, after = len(node.in_shapes[0]), len(node.out_shapes[0])
    every: list[Factor] = [*range(min(before, after)), "parts"]
    ins, outs = [every[:before]], [every[:after]]
    return Factors(node, ins, outs, wholes={"parts": reason})


def empty(node: Node) -> Factors:
    axes = range(len(node.out_shapes[0]))
    dtype = node.outs[0].aval.dtype

    def emitter(local: Local) -> Sequence[Any]:
        return [lax.full(out_size(local, axes), 0, dtype)]

    return Factors(node, [], [axes], emitter=emitter)


RULES: dict[Any, RuleMaker] = {
    p.bitcast_convert_type_p: bitcast,
    p.broadcast_in_dim_p: broadcast_in_dim,
    p.concatenate_p: Concatenate,
    p.empty2_p: empty,
    p.iota_p: iota,
    p.pad_p: pad,
    p.rev_p: rev,
    p.slice_p: slice_rule,
    p.squeeze_p: squeeze,
    p.transpose_p: transpose,
}
