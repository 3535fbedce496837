"""Rules of the primitives that slide a window: pass factors with a halo."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.extend.core import primitives as p

from shardmap.plan.engine.factors import Factors, Local, out_size, taken_whole
from shardmap.plan.engine.nodes import Node
from shardmap.plan.engine.rules import Axis, Factor, Reason, RuleMaker, Windowed
from shardmap.plan.engine.slices import Interval, Window

KERNEL = Reason("every window needs the whole kernel", "cut its output features")
PLACES = Reason(
    "each piece of so large a kernel is a part of all of it", "cut the kernel"
)
GROUPED = Reason(
    "features are in groups", "cut the batch axis or a spatial axis instead"
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
    if params["feature_group_count"] > 1:
        lhs[1], rhs[1] = "groups", "inner"
        wholes |= dict.fromkeys(["o", "groups", "inner"], GROUPED)
        del contracted["c"]
    if params["batch_group_count"] > 1:
        lhs[0] = "batches"
        wholes |= dict.fromkeys(["n", "o", "batches"], GROUPED)
    extents = [node.in_shapes[1][axis] for axis in numbers.rhs_spec[2:]]
    counts = [node.out_shapes[0][axis] for axis in numbers.out_spec[2:]]
    for k, (extent, count) in enumerate(zip(extents, counts, strict=True)):
        places, inner = f"s{k}", f"k{k}"
        # As in the gradient of a kernel: a sum over the larger of the two.
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
    made = _placed(out, numbers.out_spec)

    def emitter(local: Local) -> Sequence[Any]:
        if 0 in local.values[0].shape:
            return [lax.full(out_size(local, made), 0, node.outs[0].aval.dtype)]
        padding = tuple(local.holes[0, axis] for axis in numbers.lhs_spec[2:])
        return [_convolve({**params, "padding": padding}, *local.values)]

    return Factors(
        node,
        [_placed(lhs, numbers.lhs_spec), _placed(rhs, numbers.rhs_spec)],
        [made],
        contracted=contracted,
        wholes=wholes,
        emitter=emitter,
        cheap=False,
    )


def _placed(names: Sequence[Axis], spec: Sequence[int]) -> list[Axis]:
    """Names in the order of ``dimension_numbers``, each at the axis that it is of."""
    return [names[spec.index(axis)] for axis in range(len(spec))]


def _window_of(node: Node, k: int, is_summed: bool) -> Window:
    """What each place sees of the image, along its spatial axis ``k``.

    Args:
      node: a convolution.
      k: which of its spatial axes.
      is_summed: whether it is places of the kernel that see, and not of the result.
    """
    params, numbers = node.params, node.params["dimension_numbers"]
    lhs_shape, rhs_shape = node.in_shapes
    extent = rhs_shape[numbers.rhs_spec[k + 2]]
    stride, dilation = params["window_strides"][k], params["rhs_dilation"][k]
    if is_summed:
        extent = node.out_shapes[0][numbers.out_spec[k + 2]]
        stride, dilation = dilation, stride
    size, before = lhs_shape[numbers.lhs_spec[k + 2]], params["padding"][k][0]
    return windowed(size, extent, stride, before, params["lhs_dilation"][k], dilation)


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


@dataclass(frozen=True)
class _Pooled(Window):
    """What an element of a pooled axis gets its gradient from.

    The axis has ``size`` elements, of which windows of ``extent`` every ``stride`` take
    one each, the first of them ``pad`` before the axis.

    Attributes:
      count: how many windows there are.

    >>> _Sources(9, stride=2, pad=1, extent=3, count=5).reads((4, 6))
    ((2, 4), -1, -2)
    >>> _Operand(9, stride=2, pad=1, extent=3, count=5).reads((4, 6))
    ((3, 8), 0, 0)
    """

    count: int = 0

    def windows(self, result: Interval) -> Interval:
        """Those that take an element of this interval."""
        start, stop = result
        first = max(-((self.extent - 1 - start - self.pad) // self.stride), 0)
        last = min((stop - 1 + self.pad) // self.stride + 1, self.count)
        return (0, 0) if start == stop or first >= last else (first, last)

    def span(self, windows: Interval) -> tuple[Interval, int, int]:
        """The elements that they take, and the holes before and after."""
        start = windows[0] * self.stride - self.pad
        stop = (windows[1] - 1) * self.stride - self.pad + self.extent
        low, high = max(start, 0), min(stop, self.size)
        return (low, high), low - start, stop - high


class _Operand(_Pooled):
    """What windows look at."""

    def reads(self, result: Interval) -> tuple[Interval, int, int]:
        windows = self.windows(result)
        if windows[0] == windows[1]:
            return (0, 0), 0, 0
        return self.span(windows)

    def moves(self, points: Iterable[int], size: int) -> tuple[int, ...]:
        return tuple(points)


class _Sources(_Pooled):
    """What goes to what they select; the holes are what their span lacks of it."""

    def reads(self, result: Interval) -> tuple[Interval, int, int]:
        windows = self.windows(result)
        if windows[0] == windows[1]:
            return (0, 0), 0, 0
        (low, high), _, _ = self.span(windows)
        return windows, low - result[0], result[1] - high

    def moves(self, points: Iterable[int], size: int) -> tuple[int, ...]:
        middle = (self.extent - self.stride) // 2 - self.pad
        found = {point * self.stride + middle for point in points}
        return tuple(sorted(point for point in found if 0 < point < size))


def select_and_scatter_add(node: Node) -> Factors:
    """The gradient of a pooling: shards read the windows that take what is theirs."""
    params = node.params
    counts, shape = node.in_shapes
    axes = range(len(shape))
    source: list[Axis] = list(axes)
    operand: list[Axis] = list(axes)
    for axis, (size, count) in enumerate(zip(shape, counts, strict=True)):
        extent, stride = (
            params[f"window_{what}"][axis] for what in ("dimensions", "strides")
        )
        before = params["padding"][axis][0]
        if (extent, stride, before, size) != (1, 1, 0, count):
            given = (size, stride, before, extent)
            source[axis] = Windowed(axis, _Sources(*given, count=count))
            operand[axis] = Windowed(axis, _Operand(*given, count=count))

    def emitter(local: Local) -> Sequence[Any]:
        shape, dtype = out_size(local, axes), node.outs[0].aval.dtype
        if 0 in local.values[0].shape:
            return [lax.full(shape, 0, dtype)]
        lacks, padding = (
            [local.holes.get((number, axis), (0, 0)) for axis in axes]
            for number in (0, 1)
        )
        [made] = _bind(node, local.values, {"padding": tuple(padding)})
        config = [(before, after, 0) for before, after in lacks]
        return [lax.pad(made, lax.full((), 0, dtype), config)]

    return Factors(
        node,
        [source, operand],
        [axes],
        emitter=emitter,
        cheap=False,
        each=math.prod(params["window_dimensions"]),
    )


WINDOWED = [
    *(p.reduce_window_p, p.reduce_window_max_p, p.reduce_window_min_p),
    *(p.reduce_window_sum_p, p.select_and_gather_add_p),
]

RULES: dict[Any, RuleMaker] = {
    p.conv_general_dilated_p: conv,
    **dict.fromkeys(WINDOWED, reduce_window),
    p.select_and_scatter_p: lambda node: taken_whole(node, SELECTED),
    p.select_and_scatter_add_p: select_and_scatter_add,
}
