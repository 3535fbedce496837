"""The rule of a map inside a plan.

Without collectives over its axis the elements of a map are independent, and each shard
maps its own. With them, every shard maps all elements and cuts what else it can.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from shardmap.map.collectives.split import uses_axis
from shardmap.map.primitives.map_primitive import remove_axis
from shardmap.map.tracing import Batch, trace_body
from shardmap.plan.engine.crop import Crops, crop, crops
from shardmap.plan.engine.factors import RuleTable
from shardmap.plan.engine.nodes import Calls, Node
from shardmap.plan.engine.recipe import Recipe
from shardmap.plan.engine.rules import Factor, Need
from shardmap.plan.engine.slices import Box, Interval, hull_of
from shardmap.plan.lax.control.body import Boxes, Frozen, InnerBody, shapes_of
from shardmap.plan.lax.control.inner import Inner


class Elements(NamedTuple):
    """What a shard maps.

    Attributes:
      size: how many elements.
      recipe: what is computed of one element.
      boxes: the boxes of one element's results.
      crops: what is taken of the mapped results.
    """

    size: int
    recipe: Recipe
    boxes: Boxes
    crops: Crops


class Map(Inner):
    """``spmap``: the mapped axis, and the axes of its body."""

    def __init__(self, node: Node, table: RuleTable, calls: Calls) -> None:
        super().__init__(node)
        params = node.params
        self.in_axes, self.out_axes = params["in_axes"], params["out_axes"]
        self.size, self.name = params["axis_size"], params["axis_name"]
        # Some of JAX's collectives have no effect by which the axis could be told.
        self.independent = not (
            params["call_jaxpr"].effects or uses_axis(params["call_jaxpr"], self.name)
        )
        self.body = InnerBody(params["call_jaxpr"], table, calls)
        self.name_loops(
            self.body,
            {k: (k, axis) for k, axis in enumerate(self.in_axes)},
            {k: (k, axis) for k, axis in enumerate(self.out_axes)},
        )
        for names, axes in ((self.ins, self.in_axes), (self.outs, self.out_axes)):
            for row, axis in zip(names, axes, strict=True):
                if axis is not None:
                    row[axis] = "elements" if self.independent else None

    def backward(self, boxes: Boxes, loops: Mapping[Factor, Interval]) -> Need:
        along = (0, self.size)
        if self.independent:
            spans = [
                (box[axis],)
                for box, axis in zip(boxes, self.out_axes, strict=True)
                if box is not None and axis is not None
            ]
            [along] = hull_of(spans) or [(0, 1)]
        inner = [
            None if box is None else _without(box, axis)
            for box, axis in zip(boxes, self.out_axes, strict=True)
        ]
        recipe = self.body.trace(inner, self.intervals(0, self.limited(loops)))
        needs = self.body.needs(recipe)
        needed = tuple(
            None if box is None else _with(box, axis, along)
            for box, axis in zip(needs, self.in_axes, strict=True)
        )
        made = [
            None if box is None else _with(box, axis, along)
            for box, axis in zip(inner, self.out_axes, strict=True)
        ]
        shapes, begins = crops(boxes, made)
        size = along[1] - along[0]
        key = recipe.static, size, shapes_of(needed), shapes
        static = Frozen(key, Elements(size, recipe, inner, shapes))
        return Need(needed, static, (*recipe.starts, *begins))

    def emit(
        self,
        values: Sequence[Any],
        static: Frozen[Elements],
        starts: Sequence[jax.Array],
    ) -> Sequence[Any]:
        size, recipe, inner, shapes = static.content
        own = starts[: len(recipe.starts)]

        def element(*inputs: jax.Array) -> list[jax.Array]:
            outs = self.body.run(recipe, inner, inputs, own)
            return [out for out in outs if out is not None]

        axes = [
            None if value is None else axis
            for value, axis in zip(values, self.in_axes, strict=True)
        ]
        map_ = jax.vmap if self.independent else _vmap_with_collectives
        made = iter(
            map_(element, axes, 0, axis_name=self.name, axis_size=size)(*values)
        )
        results: list[Any] = []
        for box, axis in zip(inner, self.out_axes, strict=True):
            if box is None:
                results.append(None)
            elif axis is None:
                results.append(lax.index_in_dim(next(made), 0, keepdims=False))
            else:
                results.append(jax.numpy.moveaxis(next(made), 0, axis))
        return crop(results, shapes, starts[len(recipe.starts) :])


def _vmap_with_collectives(
    fun: Callable[..., list[Any]],
    in_axes: Sequence[int | None],
    out_axes: int,
    *,
    axis_name: Hashable,
    axis_size: int,
) -> Callable[..., list[Any]]:
    """`jax.vmap`, which does not know all collectives in all their forms.

    What the function is given is an array or None.
    """

    def mapped(*values: Any) -> list[Any]:
        live = [k for k, value in enumerate(values) if value is not None]

        def of_live(*arrays: jax.Array) -> list[Any]:
            given = dict(zip(live, arrays, strict=True))
            return fun(*map(given.get, range(len(values))))

        arrays, axes = ([each[k] for k in live] for each in (values, in_axes))
        avals = [
            remove_axis(jax.typeof(a), k) for a, k in zip(arrays, axes, strict=True)
        ]
        body = trace_body(of_live, avals, axis_name, axis_size)
        batch, dims = Batch(axis_name, axis_size), [None] * len(body.constants)
        vectorised = batch.vectorize(body.jaxpr, [*dims, *axes], out_axes)
        return vectorised(*body.constants, *arrays)

    return mapped


def _without(box: Box, axis: int | None) -> Box:
    return box if axis is None else (*box[:axis], *box[axis + 1 :])


def _with(box: Box, axis: int | None, interval: Interval) -> Box:
    return box if axis is None else (*box[:axis], interval, *box[axis:])
