"""Rules of the primitives that slide a window: pass factors with a halo."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import primitives as p

from shardmap.plan.engine.factors import Factors, Local, out_size
from shardmap.plan.engine.nodes import Node
from shardmap.plan.engine.rules import Axis, Factor, Reason, RuleMaker, Windowed
from shardmap.plan.engine.slices import Window

KERNEL = Reason("every window needs the whole kernel", "cut its output features")
GROUPED = Reason(
    "features are in groups", "cut the batch axis or a spatial axis instead"
)
SCATTERED = Reason(
    "windows overlap here, and what they select is added up",
    "cut an axis with a window of 1",
)


def windowed(
    size: int, extent: int, stride: int, pad: int, base: int, dilation: int
) -> Window:
    reach = (extent - 1) * dilation + 1
    return Window(size, stride=stride, pad=pad, extent=reach, dilation=base)


def conv(node: Node) -> Factors:
    params = node.params
    numbers = params["dimension_numbers"]
    lhs_shape, rhs_shape = node.in_shapes
    spatial = range(len(lhs_shape) - 2)
    lhs: list[Axis] = [None] * len(lhs_shape)
    rhs: list[Axis] = [None] * len(rhs_shape)
    out: list[Factor] = [None] * len(lhs_shape)
    wholes: dict[Factor, Reason] = {}
    contracted: dict[Factor, str] = {}
    features, batches = params["feature_group_count"], params["batch_group_count"]
    out_batch, out_feature, *out_spatial = numbers.out_spec
    lhs_batch, lhs_feature, *lhs_spatial = numbers.lhs_spec
    rhs_feature, rhs_inner, *rhs_spatial = numbers.rhs_spec
    lhs[lhs_batch] = out[out_batch] = "n"
    rhs[rhs_feature] = out[out_feature] = "o"
    lhs[lhs_feature] = rhs[rhs_inner] = "c"
    contracted["c"] = "add"
    if features > 1:
        lhs[lhs_feature], rhs[rhs_inner] = "groups", "inner"
        wholes |= dict.fromkeys(["o", "groups", "inner"], GROUPED)
        del contracted["c"]
    if batches > 1:
        lhs[lhs_batch] = "batches"
        wholes |= dict.fromkeys(["n", "o", "batches"], GROUPED)
    for k in spatial:
        rhs[rhs_spatial[k]] = f"k{k}"
        wholes[f"k{k}"] = KERNEL
        out[out_spatial[k]] = f"s{k}"
        window = windowed(
            lhs_shape[lhs_spatial[k]],
            rhs_shape[rhs_spatial[k]],
            params["window_strides"][k],
            params["padding"][k][0],
            params["lhs_dilation"][k],
            params["rhs_dilation"][k],
        )
        lhs[lhs_spatial[k]] = Windowed(f"s{k}", window)

    def emitter(local: Local) -> Sequence[Any]:
        if 0 in local.values[0].shape:
            return [lax.full(out_size(local, out), 0, node.outs[0].aval.dtype)]
        padding = tuple(local.holes[0, axis] for axis in lhs_spatial)
        return [_convolve({**node.params, "padding": padding}, *local.values)]

    return Factors(
        node,
        [lhs, rhs],
        [out],
        contracted=contracted,
        wholes=wholes,
        emitter=emitter,
        cheap=False,
    )


def _convolve(params: Mapping[str, Any], lhs: Any, rhs: Any) -> Any:
    """A convolution, on CPU with its features on the last axes.

    XLA for CPU has a fast kernel for that layout alone. Others it brings into it, but
    not in the body of a loop, where they take five to ten times as long.
    """
    if jax.default_backend() != "cpu":
        return p.conv_general_dilated_p.bind(lhs, rhs, **params)
    numbers = params["dimension_numbers"]
    count = len(numbers.lhs_spec) - 2
    images = (0, count + 1, *range(1, count + 1))
    last = lax.ConvDimensionNumbers(images, (count + 1, count, *range(count)), images)
    out = p.conv_general_dilated_p.bind(
        _moved(lhs, numbers.lhs_spec, last.lhs_spec),
        _moved(rhs, numbers.rhs_spec, last.rhs_spec),
        **{**params, "dimension_numbers": last},
    )
    return _moved(out, last.out_spec, numbers.out_spec)


def _moved(value: Any, source: Sequence[int], target: Sequence[int]) -> Any:
    """An array whose axes ``source`` go to the places ``target``."""
    moves = dict(zip(target, source, strict=True))
    return lax.transpose(value, [moves[axis] for axis in range(len(moves))])


def _bind(node: Node, values: Sequence[Any], params: Mapping[str, Any]) -> Any:
    outs = node.primitive.bind(*values, **{**node.params, **params})
    return outs if node.primitive.multiple_results else [outs]


def reduce_window(node: Node) -> Factors:
    """Poolings: all axes have windows, most of them of size 1."""
    params = node.params
    dims = params["window_dimensions"]
    count = len(node.outs)
    shape = node.in_shapes[0]
    operands = len(node.ins)
    if node.primitive is p.reduce_window_p:
        operands = count
    dilations = params.get("base_dilation", (1,) * len(dims))
    spreads = params.get("window_dilation", (1,) * len(dims))
    axes: list[Axis] = []
    for axis, size in enumerate(shape):
        trivial = (dims[axis], params["window_strides"][axis], dilations[axis])
        if trivial == (1, 1, 1) and tuple(params["padding"][axis]) == (0, 0):
            axes.append(axis)
            continue
        window = windowed(
            size,
            dims[axis],
            params["window_strides"][axis],
            params["padding"][axis][0],
            dilations[axis],
            spreads[axis],
        )
        axes.append(Windowed(axis, window))
    ins: list[Any] = [axes] * operands + [[]] * (len(node.ins) - operands)

    def emitter(local: Local) -> Sequence[Any]:
        padding = tuple(
            local.holes.get((0, axis), (0, 0)) for axis in range(len(shape))
        )
        return _bind(node, local.values, {"padding": padding})

    def passes(combiner: str, pending: frozenset[int]) -> str | None:
        own = {
            p.reduce_window_sum_p: "add",
            p.reduce_window_max_p: "max",
            p.reduce_window_min_p: "min",
        }.get(node.primitive)
        return combiner if own == combiner else None

    outs = [range(len(shape))] * count
    return Factors(
        node,
        ins,
        outs,
        emitter=emitter,
        commutes=passes,
        cheap=False,
        each=math.prod(dims),
    )


def select_and_scatter(node: Node) -> Factors:
    """The gradient of a pooling: cut only where the window is a single element."""
    params = node.params
    is_add = node.primitive is p.select_and_scatter_add_p
    operand = 1 if is_add else 0
    shape = node.in_shapes[operand]
    source: list[Factor] = []
    wholes: dict[Factor, Reason] = {}
    for axis in range(len(shape)):
        trivial = params["window_dimensions"][axis], params["window_strides"][axis]
        if trivial == (1, 1) and tuple(params["padding"][axis]) == (0, 0):
            source.append(axis)
        else:
            source.append(("window", axis))
            wholes |= {axis: SCATTERED, ("window", axis): SCATTERED}
    axes = range(len(shape))
    rest: list[Any] = [[] for _ in node.ins[2:]]
    ins = [source, axes] if is_add else [axes, source]
    return Factors(node, [*ins, *rest], [axes], wholes=wholes, cheap=False)


WINDOWED = [
    *(p.reduce_window_p, p.reduce_window_max_p, p.reduce_window_min_p),
    *(p.reduce_window_sum_p, p.select_and_gather_add_p),
]

RULES: dict[Any, RuleMaker] = {
    p.conv_general_dilated_p: conv,
    **dict.fromkeys(WINDOWED, reduce_window),
    p.select_and_scatter_p: select_and_scatter,
    p.select_and_scatter_add_p: select_and_scatter,
}
