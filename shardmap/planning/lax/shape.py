"""Rules of the primitives that move elements: transpose, slice, pad, concatenate."""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from shardmap.planning.engine.factors import Factors, Local, out_size, taken_whole
from shardmap.planning.engine.nodes import Graph, Node, Operand, Rewrite, Scalar, Value
from shardmap.planning.engine.rules import (
    Cut,
    Forward,
    Reason,
    RuleMaker,
    Windowed,
    first_passes,
)
from shardmap.planning.engine.slices import Window, refine
from shardmap.planning.lax.primitives import (
    OPTIMIZATION_BARRIER,
    RESHARD,
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
    begins = node.params["start_indices"]
    strides = node.params["strides"] or (1,) * len(shape)
    axes = [
        axis
        if size == node.out_shapes[0][axis]
        else Windowed(axis, Window(size, stride=strides[axis], pad=-begins[axis]))
        for axis, size in enumerate(shape)
    ]

    def emitter(local: Local) -> Sequence[Any]:
        [x] = local.values
        if all(step == 1 for step in strides):
            return [x]
        return [lax.slice(x, (0,) * x.ndim, x.shape, strides)]

    outs = [range(len(shape))]
    return Factors(node, [axes], outs, emitter=emitter, passes=first_passes)


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
    around = node.ins[1]
    is_zero = isinstance(around, Scalar) and not np.any(np.asarray(around.value))
    return Factors(
        node,
        [axes, []],
        [range(len(shape))],
        emitter=emitter,
        passes=lambda combiner, pending: (
            combiner if pending == {0} and is_zero and combiner == "add" else None
        ),
    )


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


class Concatenate(Factors):
    """``concatenate``: each operand lies in a window of the result."""

    def __init__(self, node: Node) -> None:
        self.axis = node.params["dimension"]
        lengths = [shape[self.axis] for shape in node.in_shapes]
        self.begins = list(itertools.accumulate(lengths[:-1], initial=0))
        axes = range(len(node.out_shapes[0]))
        windows = [
            Windowed(self.axis, Window(length, pad=begin))
            for length, begin in zip(lengths, self.begins, strict=True)
        ]
        ins = [[w if k == self.axis else k for k in axes] for w in windows]
        super().__init__(node, ins, [axes], emitter=self._joined, passes=self._all_pass)

    def _joined(self, local: Local) -> Sequence[Any]:
        present = [x for x in local.values if x.shape[self.axis]]
        return [lax.concatenate(present or local.values[:1], self.axis)]

    def forward(self, cuts: Sequence[Sequence[Cut]]) -> Forward:
        [out] = super().forward(cuts).outs
        along = [row[self.axis] for row in cuts]
        # Without cuts, seams alone would make pieces that nobody asked for.
        if any(cut.at for cut in along):
            size = self.node.out_shapes[0][self.axis]
            points = [
                (begin, *(point + begin for point in cut.at))
                for cut, begin in zip(along, self.begins, strict=True)
            ]
            at = tuple(point for point in refine(points) if 0 < point < size)
            origins = frozenset().union(*(cut.origins for cut in along))
            out[self.axis] = Cut(at, True, origins)
        return Forward([out])

    def _all_pass(self, combiner: str, pending: frozenset[int]) -> str | None:
        return combiner if len(pending) == len(self.node.ins) else None


MOST_COPIES = 16
"""The most copies that a tile concatenates: each can be cut like the operand."""


def split(x: jax.Array, axis: int, sizes: Sequence[int]) -> list[jax.Array]:
    ends = itertools.pairwise(itertools.accumulate(sizes, initial=0))
    return [lax.slice_in_dim(x, *edges, axis=axis) for edges in ends]


def stack(*operands: jax.Array, axis: int) -> jax.Array:
    return lax.concatenate([lax.expand_dims(x, (axis,)) for x in operands], axis)


def unstack(x: jax.Array, axis: int) -> list[jax.Array]:
    every = range(x.shape[axis])
    return [lax.index_in_dim(x, k, axis, keepdims=False) for k in every]


def tile(x: jax.Array, reps: Sequence[int]) -> jax.Array:
    for axis, count in enumerate(reps):
        if 1 < count <= MOST_COPIES:
            x = lax.concatenate([x] * count, axis)
        elif count != 1:
            shape = (*x.shape[:axis], count, *x.shape[axis:])
            kept = [k for k in range(len(shape)) if k != axis]
            joint = [*x.shape[:axis], count * x.shape[axis], *x.shape[axis + 1 :]]
            x = lax.reshape(lax.broadcast_in_dim(x, shape, kept), joint)
    return x


def empty(graph: Graph, node: Node) -> list[Operand]:
    [out] = node.outs
    return graph.call(lambda: lax.full(out.shape, 0, out.aval.dtype), [])


def as_function(function: Callable[..., Any]) -> Rewrite:
    """Writes an equation as a function of its operands and parameters."""

    def written(graph: Graph, node: Node) -> list[Operand]:
        return graph.call(functools.partial(function, **node.params), node.ins)

    return written


def converted(graph: Graph, node: Node) -> Sequence[Operand] | None:
    """Leaves out a conversion to the type that a value has."""
    [x], [out] = node.ins, node.outs
    is_same = isinstance(x, Value) and x.aval.dtype == out.aval.dtype
    return [x] if is_same else None


UNCHANGED = [
    *(OPTIMIZATION_BARRIER, RESHARD, p.copy_p, p.device_put_p, p.name_p),
    *(p.sharding_constraint_p, p.stop_gradient_p),
]
"""What copies or names a value, or says where it lies, which holds for no shard."""

REWRITES: dict[Any, Rewrite] = {
    **dict.fromkeys(UNCHANGED, lambda graph, node: node.ins),
    SPLIT: as_function(split),
    p.convert_element_type_p: converted,
    STACK: as_function(stack),
    TILE: as_function(tile),
    UNSTACK: as_function(unstack),
    p.empty2_p: empty,
}
"""The primitives that are always written as others."""


def in_parts(node: Node, reason: Reason) -> Factors:
    """``i -> i *`` or ``i * -> i``: a last axis that only one side has is whole."""
    passing = range(min(map(len, (*node.in_shapes, *node.out_shapes))))
    return replace(taken_whole(node, reason, passing), cheap=True)


RULES: dict[Any, RuleMaker] = {
    p.bitcast_convert_type_p: functools.partial(
        in_parts, reason=Reason("these are the parts of one element")
    ),
    p.broadcast_in_dim_p: broadcast_in_dim,
    p.concatenate_p: Concatenate,
    p.iota_p: iota,
    p.pad_p: pad,
    p.rev_p: rev,
    p.slice_p: slice_rule,
    p.squeeze_p: squeeze,
    p.transpose_p: transpose,
}
