"""The rule of ``scatter``: updates that go to given places."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from shardmap._jax.lax_primitives import SCATTER_SUB
from shardmap.arrays.combining import identity
from shardmap.plan.engine.factors import Factors, Local, bind
from shardmap.plan.engine.nodes import Node
from shardmap.plan.engine.rules import MANY, Axis, Factor, Reason, RuleMaker, Windowed
from shardmap.plan.lax.indexed.known import counted
from shardmap.plan.lax.indexed.places import ALL_OVER, WRITTEN, moved
from shardmap.plan.lax.indexed.ranges import landing, lines


class _Named(NamedTuple):
    """What the axes of a scatter are called.

    Attributes:
      operand, indices, updates: the factor of each axis.
      wholes: the factors that are needed whole.
      contracted: those that give parts.
      windows: the operand's axes that have an axis in the updates.
    """

    operand: list[Factor]
    indices: list[Axis]
    updates: list[Axis]
    wholes: dict[Factor, Reason]
    contracted: dict[Factor, str]
    windows: list[int]

    def unite(self, index_axis: int, new: Axis) -> None:
        """Makes an axis of indices and updates one loop with one of the operand."""
        old = self.indices[index_axis]
        self.wholes.pop(old, None)
        self.contracted.pop(old, None)
        self.indices[index_axis] = new
        self.updates[:] = [new if each == old else each for each in self.updates]


def _named(node: Node) -> _Named:
    numbers = node.params["dimension_numbers"]
    shape, indices_shape, updates_shape = node.in_shapes
    indices: list[Axis] = [f"i{k}" for k in range(len(indices_shape))]
    updates: list[Axis] = [None] * len(updates_shape)
    batch_axes = [k for k in range(len(updates)) if k not in numbers.update_window_dims]
    for place, factor in zip(batch_axes, indices[:-1], strict=True):
        updates[place] = factor
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    named = _Named(
        operand=list(range(len(shape))),
        indices=indices,
        updates=updates,
        wholes={indices[-1]: WRITTEN},
        contracted={},
        windows=[axis for axis in range(len(shape)) if axis not in gone],
    )
    if combiner := COMBINERS.get(node.primitive):
        named.contracted.update(dict.fromkeys(indices[:-1], combiner))
    else:
        named.wholes.update(dict.fromkeys(indices, WRITTEN))
    _unite(node, named)
    for axis, place in zip(named.windows, numbers.update_window_dims, strict=True):
        updates[place] = axis
        if updates_shape[place] != shape[axis]:
            updates[place] = f"u{axis}"
            named.wholes.update({f"u{axis}": WRITTEN, axis: WRITTEN})
    return named


def _unite(node: Node, named: _Named) -> None:
    """Finds the axes of the indices that are one loop with one of the operand."""
    numbers = node.params["dimension_numbers"]
    taken = set()
    for axis, index_axis in zip(
        numbers.operand_batching_dims,
        numbers.scatter_indices_batching_dims,
        strict=True,
    ):
        taken.add(index_axis)
        named.unite(index_axis, named.operand[axis])
    for axis, index_axis in counted(node, numbers.scatter_dims_to_operand_dims).items():
        if axis in numbers.inserted_window_dims and index_axis not in taken:
            taken.add(index_axis)
            named.unite(index_axis, named.operand[axis])
    # Where they are known to go, a piece sees the updates that go there.
    for line in lines(node, numbers.scatter_dims_to_operand_dims) or ():
        axis, index_axis = line.axis, line.along
        if axis not in numbers.inserted_window_dims or index_axis in taken:
            continue
        is_sorted = node.params["indices_are_sorted"]
        if node.primitive in COMBINERS and not is_sorted:
            if _together(line.places) > MOST_TOGETHER:
                continue
        window = landing(line, node.in_shapes[0][axis])
        if window is not None:
            taken.add(index_axis)
            named.unite(index_axis, Windowed(named.operand[axis], window))
        elif named.indices[index_axis] in named.wholes:
            named.wholes[named.indices[index_axis]] = ALL_OVER


def _together(places: np.ndarray) -> int:
    """How many go to the place to which most do."""
    _, counts = np.unique(places, return_counts=True)
    return int(np.max(counts))


def scatter(node: Node) -> Factors:
    """The operand's axes pass: each shard drops the updates that go elsewhere.

    Updates that combine give parts, of which one has the operand.
    """
    numbers = node.params["dimension_numbers"]
    named = _named(node)
    # Axes of which an update takes one place: a shard counts from where its box starts.
    shifted = [
        axis
        for axis in numbers.inserted_window_dims
        if axis in numbers.scatter_dims_to_operand_dims
    ]
    return Factors(
        node,
        [named.operand, named.indices, named.updates],
        [named.operand],
        contracted=named.contracted,
        wholes=named.wholes,
        starts=[*shifted, *named.contracted],
        emitter=functools.partial(_emitted, node, named, shifted),
        cheap=False,
        each=MANY // 16,
    )


def _emitted(
    node: Node, named: _Named, shifted: Sequence[int], local: Local
) -> Sequence[Any]:
    """The equation for one shard."""
    shape, indices_shape, _ = node.in_shapes
    values = list(local.values)
    params = dict(node.params)
    first: Any = True
    for factor in named.contracted:
        if local.sizes[factor] != indices_shape[named.indices.index(factor)]:
            first = first & (local.starts[factor] == 0)
    combiner = COMBINERS.get(node.primitive)
    if combiner and first is not True:
        # One shard updates the operand, the others what changes nothing when the parts
        # are combined.
        nothing = identity(combiner, values[0].dtype)
        values[0] = jnp.where(first, values[0], nothing)
    if any(local.sizes[axis] != shape[axis] for axis in shifted):
        starts = {axis: local.starts[axis] for axis in shifted}
        numbers, last = node.params["dimension_numbers"], None
        if params["mode"] == lax.GatherScatterMode.CLIP:
            last = [size - 1 for size in shape]
            places = zip(named.windows, numbers.update_window_dims, strict=True)
            for axis, place in places:
                last[axis] = shape[axis] - node.in_shapes[2][place]
        axes = numbers.scatter_dims_to_operand_dims
        values[1] = moved(values[1], axes, starts, last)
        # Updates of other boxes are dropped: their places are negative or too large.
        params["mode"] = lax.GatherScatterMode.FILL_OR_DROP
        params["indices_are_sorted"] = False
    return bind(node, values, params)


MOST_TOGETHER = 16
"""Up to how many updates that combine go to one place, if cuts are to follow them:
those of one place are in one piece."""


COMBINERS = {
    p.scatter_add_p: "add",
    p.scatter_max_p: "max",
    p.scatter_min_p: "min",
    p.scatter_mul_p: "mul",
    SCATTER_SUB: "add",
}

RULES: dict[Any, RuleMaker] = {
    **dict.fromkeys([p.scatter_p, *COMBINERS], scatter),
}
