"""Rules as data: which axes of operands and results are one factor.

`Factors` is the rule of most primitives. Each axis of each operand and result names a
factor, a loop that the equation runs over. The rule of a dot product,

    i k, k j -> i j; k add

says that a cut of ``i`` or ``j`` reaches the result, and that a cut of ``k`` gives
partial results that are added. ``*`` marks an axis that is needed whole, ``1`` one of
size 1 that is broadcast, ``~`` one that follows its factor through a `Window`.
"""

import math
from collections.abc import (
    Callable,
    Collection,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import jax

from shardmap._jax.types import Equation, Params
from shardmap.planning.engine.monoids import Combiner, Monoid, Part
from shardmap.planning.engine.nodes import Node
from shardmap.planning.engine.rules import (
    MANY,
    UNCUT,
    Axis,
    Contraction,
    Cut,
    Factor,
    Forward,
    Lost,
    Names,
    Need,
    Passes,
    Reason,
    Rule,
    Windowed,
    meet,
    nothing_passes,
)
from shardmap.planning.engine.slices import Box, Interval, join


class Local(NamedTuple):
    """What an emitter gets of one equation and one shard.

    Attributes:
      values: the operands' boxes, traced.
      sizes: factor -> its size in this shard.
      holes: (operand, axis) -> the second result of `Window.reads`, usually the holes
        before and after, for axes with a window.
      starts: factor -> its start, a traced scalar, for those in `Factors.starts`.
    """

    values: Sequence[Any]
    sizes: Mapping[Factor, int]
    holes: Mapping[tuple[int, int], tuple[int, ...]]
    starts: Mapping[Factor, jax.Array]


def bind(node: Node | Equation, values: Sequence[Any], params: Params) -> Sequence[Any]:
    """Applies the primitive of a node with these parameters."""
    params = node.primitive.get_bind_params(dict(params))
    outs = node.primitive.bind(*values, **params)
    return outs if node.primitive.multiple_results else [outs]


ALWAYS_WHOLE = Reason("its result depends on the whole axis")
OTHERWISE = Reason("a result of it is partial already, and combines in another way")
BESIDE = Reason("every cut lies beside what is taken of this axis", "cut it elsewhere")


Parts: TypeAlias = str | Monoid | Mapping[int, Combiner]
"""How all results combine that are partial if a factor is cut, or how each of some."""


@dataclass(eq=False)
class Factors(Rule):
    """A rule made of data. See the module.

    Attributes:
      ins: per operand and axis, a factor, `Windowed`, or None.
      outs: per result and axis, a factor or None.
      contracted: factors without a result axis, and how their parts combine.
      wholes: factors that are never cut, and why.
      starts: factors whose start `emitter` needs.
      emitter: computes the results, with the local sizes of the factors; by default the
        primitive.
      passes, cheap, complete, each: see `Rule`; ``each`` is 1, as in a product.
    """

    node: Node
    ins: Sequence[Sequence[Axis]]
    outs: Sequence[Sequence[Factor | None]]
    contracted: Mapping[Factor, Parts] = field(default_factory=dict)
    wholes: Mapping[Factor, Reason] = field(default_factory=dict)
    starts: Sequence[Factor] = ()
    emitter: Callable[[Local], Sequence[Any]] | None = None
    passes: Passes = nothing_passes
    cheap: bool = True
    complete: frozenset[int] = frozenset()
    each: int = 1

    def __post_init__(self) -> None:
        self.sizes: dict[Factor, int] = {}
        sides = (
            (self.outs, self.node.out_shapes),
            (self.ins, self.node.in_shapes),
        )
        for names, shapes in sides:
            for axes, shape in zip(names, shapes, strict=True):
                for axis, size in zip(axes, shape, strict=True):
                    if axis is not None and not isinstance(axis, Windowed):
                        self.sizes.setdefault(axis, size)
                        assert self.sizes[axis] == size, (self.node.name, axis)
        self._on_outs = {f for axes in self.outs for f in axes}
        # No box of a result bounds these; ``loops`` may bound contracted ones.
        self._fixed: dict[Factor, Interval] = {
            factor: (0, size)
            for factor, size in self.sizes.items()
            if factor in self.wholes or factor not in self._on_outs
        }

    def operations(self) -> int:
        """Counts every pair that a contraction combines, not only its operands."""
        if self.cheap:
            return 0
        operands = {_factor(axis) for axes in self.ins for axis in axes} - {None}
        pairs = math.prod(self.sizes[f] for f in operands)
        return max(super().operations(), pairs * self.each)

    def forward(self, cuts: Sequence[Sequence[Cut]]) -> Forward:
        cuts_of: dict[Factor, list[Cut]] = {}
        lost = []
        for k, axes in enumerate(self.ins):
            for axis, cut in zip(axes, cuts[k], strict=True):
                if not cut.at:
                    continue
                factor = _factor(axis)
                if factor in self.wholes:
                    lost.append(Lost(cut.origins, self.wholes[factor]))
                elif factor not in self._on_outs and factor not in self.contracted:
                    lost.append(Lost(cut.origins, ALWAYS_WHOLE))
                elif isinstance(axis, Windowed) and not axis.window.same_loop:
                    # Soft: other windows on the same axis would put it elsewhere.
                    moved = axis.window.moves(cut.at, self.sizes[factor])
                    if not moved:
                        lost.append(Lost(cut.origins, BESIDE))
                    cuts_of.setdefault(factor, []).append(Cut(moved, True, cut.origins))
                else:
                    cuts_of.setdefault(factor, []).append(cut)
        met = {factor: meet(points) for factor, points in cuts_of.items()}
        contracted = []
        combined: dict[int, Combiner] = {}
        for factor in filter(met.get, self.contracted):
            parts = self._parts(factor)
            if any(combined.get(k, how) != how for k, how in parts.items()):
                lost.append(Lost(met.pop(factor).origins, OTHERWISE))
            elif parts and met[factor].at:
                combined |= parts
                place = factor, self.sizes[factor], *self._axis_of(factor)
                contracted.append(Contraction(*place, met[factor], parts))
        outs = [[met.get(factor, UNCUT) for factor in axes] for axes in self.outs]
        return Forward(outs, contracted, lost)

    def _parts(self, factor: Factor) -> Mapping[int, Combiner]:
        """The results that are partial if a factor is cut, and how each combines."""
        how = self.contracted[factor]
        if isinstance(how, Mapping):
            return how
        results = range(len(self.outs))
        return {k: Part(how, k) if isinstance(how, Monoid) else how for k in results}

    def _axis_of(self, factor: Factor) -> tuple[int, int]:
        """The first operand that has the factor, and its axis."""
        rows = enumerate(self.ins)
        return next((k, list(axes).index(factor)) for k, axes in rows if factor in axes)

    def links(self) -> tuple[Names, Names]:
        def loop(axis: Axis) -> Factor | None:
            factor = _factor(axis)
            seen = isinstance(axis, Windowed) and not axis.window.same_loop
            return None if seen or factor in self.wholes else factor

        ins, outs = ([list(map(loop, row)) for row in x] for x in (self.ins, self.outs))
        return ins, outs

    def whole_axes(self, number: int) -> set[int]:
        factors = enumerate(self.outs[number])
        return {axis for axis, factor in factors if factor in self.wholes}

    def backward(
        self, boxes: Sequence[Box | None], loops: Mapping[Factor, Interval]
    ) -> Need:
        run: dict[Factor, Interval] = {**self._fixed, **loops}
        for axes, box in zip(self.outs, boxes, strict=True):
            if box is not None:
                for factor, interval in zip(axes, box, strict=True):
                    if factor is not None and factor not in self._fixed:
                        known = run.get(factor)
                        # Results may be wanted in different boxes: all get the hull.
                        run[factor] = join(known, interval) if known else interval
        # Factors that only unwanted results have do not run.
        for factor in self.sizes:
            run.setdefault(factor, (0, 0))
        holes: dict[tuple[int, int], tuple[int, ...]] = {}
        needed: list[Box | None] = []
        shapes = self.node.in_shapes
        for k, (axes, shape) in enumerate(zip(self.ins, shapes, strict=True)):
            part: list[Interval] = []
            for number, (axis, size) in enumerate(zip(axes, shape, strict=True)):
                if axis is None:
                    part.append((0, size))
                elif isinstance(axis, Windowed):
                    interval, around = axis.window.reads(run[axis.factor])
                    part.append(interval)
                    holes[k, number] = around
                else:
                    part.append(run[axis])
            needed.append(tuple(part))
        computed = [
            tuple((0, 1) if f is None else run[f] for f in o) for o in self.outs
        ]
        starts = tuple(run[factor][0] for factor in self.starts)
        sizes = tuple(run[f][1] - run[f][0] for f in self.sizes)
        return Need(tuple(needed), (sizes, tuple(holes.items())), starts, computed)

    def emit(
        self,
        values: Sequence[Any],
        static: Any,
        starts: Sequence[jax.Array],
    ) -> Sequence[Any]:
        if self.emitter is None:
            return bind(self.node, values, self.node.params)
        sizes = dict(zip(self.sizes, static[0], strict=True))
        beginning = dict(zip(self.starts, starts, strict=True))
        return self.emitter(Local(values, sizes, dict(static[1]), beginning))

    def __str__(self) -> str:
        """The rule in the notation of the module; ``~`` marks a `Window`."""
        letters: dict[Factor, str] = {}

        def named(axis: Axis) -> str:
            factor = _factor(axis)
            lonely = factor not in self._on_outs and factor not in self.contracted
            if factor is None or factor in self.wholes or lonely:
                return "1" if factor is None else "*"
            letter = letters.setdefault(factor, chr(ord("a") + len(letters)))
            return letter + "~" * isinstance(axis, Windowed)

        sides = [
            ", ".join(" ".join(map(named, axes)) for axes in side)
            for side in (self.ins, self.outs)
        ]
        combined = [
            f"; {named(k)} {how.name if isinstance(how, Monoid) else how}"
            for k, how in self.contracted.items()
        ]
        return " -> ".join(sides) + "".join(combined)


def _factor(axis: Axis) -> Factor | None:
    return axis.factor if isinstance(axis, Windowed) else axis


def taken_whole(node: Node, reason: Reason, passing: Collection[int] = ()) -> Factors:
    """The rule of an equation that is cut along these axes of all arrays only."""
    wholes: dict[Factor, Reason] = {}

    def axes(side: str, shapes: Sequence[tuple[int, ...]]) -> list[list[Factor]]:
        named: list[list[Factor]] = [
            [k if k in passing else (side, number, k) for k in range(len(shape))]
            for number, shape in enumerate(shapes)
        ]
        wholes.update((f, reason) for row in named for f in row if f not in passing)
        return named

    return Factors(
        node,
        axes("in", node.in_shapes),
        axes("out", node.out_shapes),
        wholes=wholes,
        cheap=False,
        each=MANY,
    )


def out_size(local: Local, axes: Sequence[Factor | None]) -> tuple[int, ...]:
    return tuple(1 if axis is None else local.sizes[axis] for axis in axes)
