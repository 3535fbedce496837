"""About what one shard holds at once, from its equations alone.

A value is held from the equation that makes it to the last one that uses it. What is
cheap to compute, and used once by an equation that XLA fuses with, is not held. This
gives the number of pieces that is tried. What XLA says of compiled shards decides, see
`compiled`.
"""

import functools
import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from jax.extend.core import primitives as p

from shardmap._jax.walk import jaxprs_in
from shardmap.planning.engine.keys import nbytes
from shardmap.planning.engine.nodes import Node, Refused, Value, flatten
from shardmap.planning.engine.recipe import StaticRecipe
from shardmap.planning.engine.stages import Stage
from shardmap.planning.lax.control.rows import ROWS
from shardmap.planning.lax.primitives import OPTIMIZATION_BARRIER
from shardmap.planning.lax.reduce import COMBINERS
from shardmap.planning.lax.table import CALLS, TABLE

ALIASES = frozenset({p.copy_p, p.reshape_p, p.squeeze_p, OPTIMIZATION_BARRIER})
"""Primitives whose result is the memory of their operand."""

REPEATED = frozenset({p.broadcast_in_dim_p, p.iota_p})
"""Primitives that XLA computes again in each equation that uses the result."""

IN_PLACE = frozenset(
    {
        *(p.dynamic_update_slice_p, p.scan_p, p.scatter_p, p.scatter_add_p),
        *(p.scatter_max_p, p.scatter_min_p, p.while_p, ROWS),
    }
)
"""Primitives, besides cheap ones, whose results may overwrite operands."""

Name: TypeAlias = Hashable
"""Stands for a value of a program."""


class Peak(NamedTuple):
    """The most that a shard holds at once.

    Attributes:
      bytes: all of it.
      whole: the bytes of it in values of which no piece is shorter than the value.
      largest: the bytes of the largest value that is held then.
      shape: that value, as jaxprs print it.
      source: where it is made; empty if it is read.
      is_kept: whether it is kept for later stages.
    """

    bytes: int
    whole: int = 0
    largest: int = 0
    shape: str = ""
    source: str = ""
    is_kept: bool = False

    def plus(self, nbytes: int, whole: int = 0) -> "Peak":
        """The peak with more bytes, some of them in values that are not cut."""
        return self._replace(bytes=self.bytes + nbytes, whole=self.whole + whole)


class _Line(NamedTuple):
    """An equation: its node, what it reads and makes, and what it holds inside."""

    node: Node
    is_cheap: bool
    ins: Sequence[Name]
    outs: Sequence[Name]
    inside: "_Held"

    @property
    def fuses(self) -> bool:
        """Whether XLA computes its operands in it."""
        return self.is_cheap or self.node.primitive in COMBINERS


class _Held(NamedTuple):
    """Something that is counted: its bytes, and whether it is not cut."""

    bytes: float
    is_whole: bool


def _peak(
    lines: Sequence[_Line], ends: Collection[Name], sizes: Mapping[Name, _Held]
) -> tuple[float, float, Name]:
    """The most bytes at once, those of values that are not cut, and the largest value.

    Args:
      lines: the equations.
      ends: the values that are returned, whose memory is not counted.
      sizes: the values that the equations make.
    """
    last, free = _lifetimes(lines, ends, sizes)
    ending: dict[int, list[Name]] = {}
    for name, number in last.items():
        ending.setdefault(number, []).append(name)
    live: dict[Name, float] = {}
    held = whole = 0.0
    most: tuple[float, float, Name] = 0.0, 0.0, None
    for number, line in enumerate(lines):
        gone = [name for name in ending.get(number, ()) if name in live]
        is_in_place = line.is_cheap or line.node.primitive in IN_PLACE
        left = [live[name] for name in gone] if is_in_place else []
        spared = 0.0
        for name in line.outs:
            if name in sizes and name not in free:
                live[name] = size = sizes[name].bytes
                held += size
                whole += size * sizes[name].is_whole
                if size in left:
                    left.remove(size)
                    spared += size
        now = held - spared + line.inside.bytes
        if now > most[0]:
            uncut = min(whole + line.inside.bytes * line.inside.is_whole, now)
            most = now, uncut, max(live, key=live.__getitem__, default=None)
        for name in gone:
            size = live.pop(name)
            held -= size
            whole -= size * sizes[name].is_whole
    return most


def _lifetimes(
    lines: Sequence[_Line], ends: Collection[Name], sizes: Mapping[Name, _Held]
) -> tuple[dict[Name, int], set[Name]]:
    """The last equation that needs each value, and the values that take no memory.

    These are computed where they are used, or in the memory of a result.
    """
    users: dict[Name, list[_Line]] = {}
    for line in lines:
        for name in dict.fromkeys(line.ins):
            users.setdefault(name, []).append(line)
    last: dict[Name, int] = dict.fromkeys(ends, len(lines))
    given, free = {*ends}, set[Name]()
    for number in reversed(range(len(lines))):
        line, until = lines[number], number
        for name in line.outs:
            if name not in last:  # Nothing uses it.
                free.add(name)
            elif name not in ends and _is_fused(line, users[name]):
                free.add(name)
                # What uses it reads the operands of what makes it.
                until = max(until, last[name])
        dying = [name for name in line.ins if name not in last and name in sizes]
        for name in line.ins:
            last[name] = max(last.get(name, 0), until)
        if line.is_cheap and len(line.outs) == 1 and line.outs[0] in given:
            size = sizes[line.outs[0]].bytes
            given.update([name for name in dying if sizes[name].bytes == size][:1])
    return last, free | given


def _is_fused(line: _Line, users: Sequence[_Line]) -> bool:
    """Whether the one result of an equation takes no memory."""
    if len(line.outs) > 1 or not line.is_cheap:
        return False
    if line.node.primitive in ALIASES:
        return True
    once = len(users) == 1 or line.node.primitive in REPEATED
    return once and all(user.fuses for user in users)


def shard_peak(stage: Stage, static: StaticRecipe) -> Peak:
    """About what a shard holds besides what it reads and returns."""
    nodes = {node.number: node for node in stage.backwards}
    ends = {ref.slot for ref in static.outs if ref is not None}
    values: dict[Any, tuple[Value, tuple[int, ...]]] = {}
    sizes: dict[Name, _Held] = {}
    lines = []
    for step in static.steps:
        node, outs = nodes[step.node], []
        results = zip(node.outs, step.shapes, strict=True)
        for slot, (value, shape) in enumerate(results, step.first):
            if shape is not None:
                outs.append(slot)
                values[slot] = value, shape
                size = nbytes(value) * _share(value, shape)
                sizes[slot] = _Held(size, shape == value.shape)
        ins = [ref.slot for ref in step.ins if ref is not None]
        share = _share(*values[outs[0]])
        inner = _Held(_inside(node) * share, share == 1)
        is_cheap = stage.analysis.rules[step.node].cheap
        lines.append(_Line(node, is_cheap, ins, outs, inner))
    most, whole, largest = _peak(lines, ends, sizes)
    return described(most, whole, *values.get(largest, (None, ())))


def _share(value: Value, shape: tuple[int, ...]) -> float:
    return math.prod(shape) / max(math.prod(value.shape), 1)


def _inside(node: Node) -> int:
    """About what the bodies of a loop or the branches of a node hold."""
    return max((_body(jaxpr) for jaxpr in jaxprs_in(node.params)), default=0)


@functools.lru_cache(maxsize=256)
def _body(jaxpr: Any) -> int:
    """About what a jaxpr holds at once besides its arguments and results."""
    try:
        graph = flatten(jaxpr, CALLS)
    except Refused:
        return 0
    ends = {v for v in graph.outputs if isinstance(v, Value)}
    sizes: dict[Name, _Held] = {}
    lines = []
    for node in graph.nodes:
        sizes |= {v: _Held(nbytes(v), False) for v in node.outs}
        is_cheap = TABLE.rule(node).cheap
        inner = _Held(_inside(node), False)
        lines.append(_Line(node, is_cheap, node.ins, node.outs, inner))
    return math.ceil(_peak(lines, ends, sizes)[0])


def described(
    most: float, whole: float, value: Value | None, shape: tuple[int, ...]
) -> Peak:
    """A peak, with the part of a value that is the largest then."""
    if value is None:
        return Peak(math.ceil(most), int(whole))
    source = value.producer.source if value.producer else ""
    size = math.ceil(nbytes(value) * _share(value, shape))
    text = value.aval.update(shape=shape).str_short()
    return Peak(math.ceil(most), int(whole), size, text, source)
