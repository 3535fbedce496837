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
from shardmap.planning.engine.nodes import Node, Refused, Value, flatten, itemsize
from shardmap.planning.engine.recipe import StaticRecipe
from shardmap.planning.engine.stages import Stage
from shardmap.planning.lax.primitives import OPTIMIZATION_BARRIER
from shardmap.planning.lax.reduce import COMBINERS
from shardmap.planning.lax.table import TABLE

ALIASES = frozenset({p.copy_p, p.reshape_p, p.squeeze_p, OPTIMIZATION_BARRIER})
"""Primitives whose result is the memory of their operand."""

Name: TypeAlias = Hashable
"""Stands for a value of a program."""


class Part(NamedTuple):
    """A value, or a piece of it."""

    value: Value
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        if not hasattr(self.value.aval, "dtype"):
            return 0  # Such as a token.
        return math.prod(self.shape) * itemsize(self.value.aval)

    @property
    def is_whole(self) -> bool:
        """Whether it is not cut."""
        return self.shape == self.value.shape


class Peak(NamedTuple):
    """The most that a shard holds at once.

    Attributes:
      bytes: all of it.
      whole: the bytes of it in values of which no piece is shorter than the value.
      largest: the largest part that is held then.
    """

    bytes: int
    whole: int = 0
    largest: Part | None = None


class _Line(NamedTuple):
    """An equation: its node, what it reads and makes, and what it holds inside."""

    node: Node
    is_cheap: bool
    ins: Sequence[Name]
    outs: Sequence[Name]
    inside: int
    is_whole: bool

    @property
    def fuses(self) -> bool:
        """Whether XLA computes its operands in it."""
        return self.is_cheap or self.node.primitive in COMBINERS


def _peak(
    lines: Sequence[_Line], ends: Collection[Name], parts: Mapping[Name, Part]
) -> Peak:
    """The most that is held at once.

    Args:
      lines: the equations.
      ends: the values that are returned, whose memory is not counted.
      parts: the values that the equations make.
    """
    last, free = _lifetimes(lines, ends, parts)
    ending: dict[int, list[Name]] = {}
    for name, number in last.items():
        ending.setdefault(number, []).append(name)
    live: dict[Name, Part] = {}
    held = whole = 0
    most = Peak(0)
    for number, line in enumerate(lines):
        gone = [live[name] for name in ending.get(number, ()) if name in live]
        overwritten = [part.bytes for part in gone if line.is_cheap]
        now = line.inside
        for name in line.outs:
            if name in parts and name not in free:
                live[name] = part = parts[name]
                held += part.bytes
                whole += part.bytes * part.is_whole
                if part.bytes in overwritten:
                    overwritten.remove(part.bytes)
                    now -= part.bytes
        now += held
        if now > most.bytes:
            uncut = min(whole + line.inside * line.is_whole, now)
            largest = max(live.values(), key=lambda each: each.bytes, default=None)
            most = Peak(now, uncut, largest)
        for name in ending.get(number, ()):
            if name in live:
                part = live.pop(name)
                held -= part.bytes
                whole -= part.bytes * part.is_whole
    return most


def _lifetimes(
    lines: Sequence[_Line], ends: Collection[Name], parts: Mapping[Name, Part]
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
        dying = [name for name in line.ins if name not in last and name in parts]
        for name in line.ins:
            last[name] = max(last.get(name, 0), until)
        if line.is_cheap and len(line.outs) == 1 and line.outs[0] in given:
            size = parts[line.outs[0]].bytes
            given.update([name for name in dying if parts[name].bytes == size][:1])
    return last, free | given


def _is_fused(line: _Line, users: Sequence[_Line]) -> bool:
    """Whether the one result of an equation takes no memory."""
    if len(line.outs) > 1 or not line.is_cheap:
        return False
    if line.node.primitive in ALIASES:
        return True
    return len(users) == 1 and users[0].fuses


def shard_peak(stage: Stage, static: StaticRecipe) -> Peak:
    """About what a shard holds besides what it reads and returns."""
    ends = {ref.slot for ref in static.outs if ref is not None}
    parts: dict[Name, Part] = {}
    lines = []
    for step in static.steps:
        node, outs = step.node, []
        results = zip(node.outs, step.shapes, strict=True)
        for slot, (value, shape) in enumerate(results, step.first):
            if shape is not None:
                outs.append(slot)
                parts[slot] = Part(value, shape)
        ins = [ref.slot for ref in step.ins if ref is not None]
        made = parts[outs[0]]
        share = math.prod(made.shape) / max(math.prod(made.value.shape), 1)
        inside = math.ceil(_inside(node) * share)
        is_cheap = stage.analysis.rules[node].cheap
        lines.append(_Line(node, is_cheap, ins, outs, inside, made.is_whole))
    return _peak(lines, ends, parts)


def _inside(node: Node) -> int:
    """About what the bodies of a loop or the branches of a node hold."""
    return max((_body(jaxpr) for jaxpr in jaxprs_in(node.params)), default=0)


@functools.lru_cache(maxsize=256)
def _body(jaxpr: Any) -> int:
    """About what a jaxpr holds at once besides its arguments and results."""
    try:
        graph = flatten(jaxpr, TABLE)
    except Refused:
        return 0
    ends = {v for v in graph.outputs if isinstance(v, Value)}
    lines = [
        _Line(node, TABLE.rule(node).cheap, node.ins, node.outs, _inside(node), False)
        for node in graph.nodes
    ]
    parts: dict[Name, Part] = {
        v: Part(v, getattr(v.aval, "shape", ()))
        for node in graph.nodes
        for v in node.outs
    }
    return _peak(lines, ends, parts).bytes
