"""About what a program holds at once, from its equations alone.

A value is held from the equation that makes it to the last one that uses it. What is
cheap to compute, and used once by an equation that XLA fuses with, is not held. This
ranks cuts and gives the first number of pieces. What XLA says of compiled shards
decides, see `compiled`.
"""

import functools
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from jax.extend.core import primitives as p

from shardmap._jax.walk import jaxprs_in
from shardmap.planning.engine.keys import nbytes
from shardmap.planning.engine.nodes import Graph, Node, Refused, Value, flatten
from shardmap.planning.engine.rules import Rule
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
        *(p.scatter_max_p, p.scatter_min_p, p.while_p),
    }
)
"""Primitives, besides cheap ones, whose results may overwrite operands."""

Name: TypeAlias = Hashable
"""Stands for a value of a program."""


class Peak(NamedTuple):
    """The most that a program holds at once.

    Attributes:
      bytes: all of it.
      largest: the bytes of the largest value that is held then.
      shape: that value, as jaxprs print it.
      source: where it is made; empty if it is read.
      is_kept: whether it is kept for later stages.
    """

    bytes: int
    largest: int = 0
    shape: str = ""
    source: str = ""
    is_kept: bool = False

    def plus(self, nbytes: int) -> "Peak":
        """The peak with more bytes."""
        return self._replace(bytes=self.bytes + nbytes)


class Line(NamedTuple):
    """An equation of a program: its node, what it reads and what it makes."""

    node: Node
    is_cheap: bool
    ins: Sequence[Name]
    outs: Sequence[Name]

    @property
    def fuses(self) -> bool:
        """Whether XLA computes its operands in it."""
        return self.is_cheap or self.node.primitive in COMBINERS


class Lines:
    """The equations of a program, and when its values are held.

    Args:
      lines: the equations.
      ends: the values that are held to the end.
    """

    def __init__(self, lines: Sequence[Line], ends: Collection[Name]) -> None:
        self._lines = lines
        users: dict[Name, list[Line]] = {}
        for line in lines:
            for name in dict.fromkeys(line.ins):
                users.setdefault(name, []).append(line)
        self._last: dict[Name, int] = dict.fromkeys(ends, len(lines))
        # What uses these values reads the operands of what makes them.
        self._fused: set[Name] = set()
        for number in reversed(range(len(lines))):
            line, until = lines[number], number
            for name in line.outs:
                if name not in ends and _is_fused(line, users.get(name, ())):
                    self._fused.add(name)
                    until = max(until, self._last.get(name, number))
            for name in line.ins:
                self._last[name] = max(self._last.get(name, 0), until)

    def most(
        self,
        size_of: Callable[[Name], float],
        inside: Callable[[Line], float],
    ) -> tuple[float, Name]:
        """The most bytes that are held at once, and the largest value then.

        Args:
          size_of: the bytes of a value; 0 where it is not counted.
          inside: the bytes that an equation holds inside.
        """
        ending: dict[int, list[Name]] = {}
        for name, number in self._last.items():
            ending.setdefault(number, []).append(name)
        live: dict[Name, float] = {}
        held, most, largest = 0.0, 0.0, None
        for number, line in enumerate(self._lines):
            gone = [name for name in ending.get(number, ()) if name in live]
            is_in_place = line.is_cheap or line.node.primitive in IN_PLACE
            left = [live[name] for name in gone] if is_in_place else []
            spared = 0.0
            for name in line.outs:
                if name in self._last and name not in self._fused:
                    live[name] = size = size_of(name)
                    held += size
                    if size in left:
                        left.remove(size)
                        spared += size
            now = held - spared + inside(line)
            if now > most:
                most = now
                largest = max(live, key=live.__getitem__, default=None)
            for name in gone:
                held -= live.pop(name)
        return most, largest


def _is_fused(line: Line, users: Sequence[Line]) -> bool:
    """Whether the one result of an equation takes no memory."""
    if len(line.outs) > 1 or not line.is_cheap:
        return False
    if line.node.primitive in ALIASES:
        return True
    once = len(users) == 1 or line.node.primitive in REPEATED
    return once and all(user.fuses for user in users)


def lines_of(graph: Graph, rules: Mapping[int, Rule]) -> Lines:
    """The equations of a whole graph; its values are their own names."""
    lines = [
        Line(node, rules[node.number].cheap, _values(node.ins), node.outs)
        for node in graph.nodes
    ]
    return Lines(lines, _values(graph.outputs))


def _values(operands: Sequence[Any]) -> list[Value]:
    return [operand for operand in operands if isinstance(operand, Value)]


def inside(node: Node) -> int:
    """About what the bodies of a loop or the branches of a node hold."""
    return max((_body(jaxpr) for jaxpr in jaxprs_in(node.params)), default=0)


@functools.lru_cache(maxsize=256)
def _body(jaxpr: Any) -> int:
    return peak_of(jaxpr).bytes


def peak_of(jaxpr: Any) -> Peak:
    """About what a jaxpr holds at once besides its arguments and results."""
    try:
        graph = flatten(jaxpr, CALLS)
    except Refused:
        return Peak(0)
    rules = {node.number: TABLE.rule(node) for node in graph.nodes}
    given = {*graph.inputs, *graph.constants, *_values(graph.outputs)}

    def size_of(value: Any) -> float:
        return 0 if value in given else nbytes(value)

    most, largest = lines_of(graph, rules).most(size_of, lambda line: inside(line.node))
    return described(most, largest)


def described(most: float, value: Any, shape: tuple[int, ...] | None = None) -> Peak:
    """A peak, with the largest value of a graph that is held then."""
    if value is None:
        return Peak(math.ceil(most))
    shape = value.shape if shape is None else shape
    source = value.producer.source if value.producer else ""
    aval = value.aval.update(shape=shape)
    size = nbytes(value) * math.prod(shape) // max(math.prod(value.shape), 1)
    return Peak(math.ceil(most), size, aval.str_short(), source)
