"""Rules of convolutions and poolings: spatial axes are cut with a halo."""

import functools
import math
from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.extend.core import primitives as p

from shardmap.planning.engine.factors import Factors, Local, bind, out_size, taken_whole
from shardmap.planning.engine.nodes import Node
from shardmap.planning.engine.rules import Axis, Factor, Reason, RuleMaker, Windowed
from shardmap.planning.engine.slices import Window
from shardmap.planning.lax.on_cpu import convolved
from shardmap.planning.lax.pointwise import product

KERNEL = Reason("every window needs the whole kernel", "cut its output features")
PLACES = Reason(
    "each piece of so large a kernel is a part of all of it", "cut the kernel"
)
GROUPED = Reason(
    "features are in groups", "cut the batch axis or a spatial axis instead"
)
POOLED = Reason(
    "windows of one piece select elements of the next one",
    "cut the batch or the features instead",
)
SELECTED = Reason("what windows select is put together by a function of its own")


def windowed(
    size: int, extent: int, stride: int, pad: int, base: int, dilation: int
) -> Window:
    reach = (extent - 1) * dilation + 1
    return Window(size, stride=stride, pad=pad, extent=reach, dilation=base)


def conv(node: Node) -> Factors:
    params = node.params
    numbers = params["dimension_numbers"]
    wholes: dict[Factor, Reason] = {}
    contracted: dict[Factor, str] = {"c": "add"}
    lhs: list[Axis] = ["n", "c"]
    rhs: list[Axis] = ["o", "c"]
    out: list[Factor] = ["n", "o"]
    groups = params["feature_group_count"]
    # As under `jax.vmap` with a filter for each sample.
    is_one_each = 1 < groups == node.out_shapes[0][numbers.out_spec[1]]
    if groups > 1:
        lhs[1], rhs[1] = "groups", "inner"
        wholes |= dict.fromkeys(["o", "groups", "inner"], GROUPED)
        del contracted["c"]
    if is_one_each:
        of_group = node.in_shapes[1][numbers.rhs_spec[1]]
        size = node.in_shapes[0][numbers.lhs_spec[1]]
        lhs[1] = Windowed("o", Window(size, stride=of_group, extent=of_group))
        del wholes["o"], wholes["groups"]
    if params["batch_group_count"] > 1:
        lhs[0] = "batches"
        wholes |= dict.fromkeys(["n", "o", "batches"], GROUPED)
    extents = [node.in_shapes[1][axis] for axis in numbers.rhs_spec[2:]]
    counts = [node.out_shapes[0][axis] for axis in numbers.out_spec[2:]]
    for k, (extent, count) in enumerate(zip(extents, counts, strict=True)):
        places, inner = f"s{k}", f"k{k}"
        # In the gradient of a kernel the image is the kernel: the larger one is summed.
        is_summed = extent > count
        along = inner if is_summed else places
        lhs.append(Windowed(along, _window_of(node, k, is_summed)))
        rhs.append(inner)
        out.append(places)
        if is_summed:
            wholes[places] = PLACES
            contracted[inner] = "add"
        else:
            wholes[inner] = KERNEL
    out_axes = _placed(out, numbers.out_spec)

    def emitter(local: Local) -> Sequence[Any]:
        shape = out_size(local, out_axes)
        if 0 in (*local.values[0].shape, *shape):
            return [lax.full(shape, 0, node.outs[0].aval.dtype)]
        padding = tuple(local.holes[0, axis] for axis in numbers.lhs_spec[2:])
        changed: dict[str, Any] = {"padding": padding}
        if is_one_each:
            changed["feature_group_count"] = local.sizes["o"]
        return [convolved({**params, **changed}, *local.values)]

    return Factors(
        node,
        [_placed(lhs, numbers.lhs_spec), _placed(rhs, numbers.rhs_spec)],
        [out_axes],
        contracted=contracted,
        wholes=wholes,
        emitter=emitter,
        passes=functools.partial(product, node),
        cheap=False,
    )


def _placed(names: Sequence[Axis], spec: Sequence[int]) -> list[Axis]:
    """Names in the order of axes, from the order of ``dimension_numbers``."""
    return [names[spec.index(axis)] for axis in range(len(spec))]


def _window_of(node: Node, k: int, is_summed: bool) -> Window:
    """The window on spatial axis ``k`` of the image, of the result or of the kernel."""
    params, numbers = node.params, node.params["dimension_numbers"]
    lhs_shape, rhs_shape = node.in_shapes
    extent = rhs_shape[numbers.rhs_spec[k + 2]]
    stride, dilation = params["window_strides"][k], params["rhs_dilation"][k]
    if is_summed:
        extent = node.out_shapes[0][numbers.out_spec[k + 2]]
        stride, dilation = dilation, stride
    size, before = lhs_shape[numbers.lhs_spec[k + 2]], params["padding"][k][0]
    return windowed(size, extent, stride, before, params["lhs_dilation"][k], dilation)


def reduce_window(node: Node) -> Factors:
    """Poolings: axes whose window is not a single element have a halo."""
    params, shape = node.params, node.in_shapes[0]
    ones, axes = (1,) * len(shape), list[Axis](range(len(shape)))
    windows = zip(
        shape,
        params["window_dimensions"],
        params["window_strides"],
        params["padding"],
        params.get("base_dilation", ones),
        params.get("window_dilation", ones),
        strict=True,
    )
    for axis, (size, extent, stride, around, base, spread) in enumerate(windows):
        if (extent, stride, base, *around) != (1, 1, 1, 0, 0):
            window = windowed(size, extent, stride, around[0], base, spread)
            axes[axis] = Windowed(axis, window)

    def emitter(local: Local) -> Sequence[Any]:
        padding = tuple(local.holes.get((0, k), (0, 0)) for k in range(len(shape)))
        return bind(node, local.values, {**params, "padding": padding})

    # The last operands of `lax.reduce_window` are initial values.
    ins = [axes if operand == shape else [] for operand in node.in_shapes]
    outs = [range(len(shape))] * len(node.outs)
    each = math.prod(params["window_dimensions"])
    return Factors(node, ins, outs, emitter=emitter, cheap=False, each=each)


def select_and_scatter_add(node: Node) -> Factors:
    """The gradient of a pooling: axes that are not pooled pass."""
    windows = zip(node.params["window_dimensions"], *node.in_shapes, strict=True)
    passing = {
        axis
        for axis, (extent, count, size) in enumerate(windows)
        if extent == 1 and count == size
    }
    return taken_whole(node, POOLED, passing)


WINDOWED = [
    *(p.reduce_window_p, p.reduce_window_max_p, p.reduce_window_min_p),
    *(p.reduce_window_sum_p, p.select_and_gather_add_p),
]

RULES: dict[Any, RuleMaker] = {
    p.conv_general_dilated_p: conv,
    **dict.fromkeys(WINDOWED, reduce_window),
    p.select_and_scatter_p: functools.partial(taken_whole, reason=SELECTED),
    p.select_and_scatter_add_p: select_and_scatter_add,
}
