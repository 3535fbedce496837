"""The cost of computing values again, and the loops that divide it.

A shard computes what it needs. The loops that a value depends on divide its work; every
piece of any other loop repeats it.
"""

import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import NamedTuple

from shardmap.plan.engine.keys import nbytes
from shardmap.plan.engine.nodes import Node, Operand, Value
from shardmap.plan.engine.rules import Cut, Link, Rule
from shardmap.plan.engine.slices import Window

WORTH_KEEPING = 2**24
"""A value is computed once if shards would touch at least so many elements again."""

BYTE = 16
"""The operations that take as long as reading or writing a byte of a disk or store."""


class Choice(NamedTuple):
    """Whether a value is kept, or computed again, and what is known of both.

    Attributes:
      kept: which.
      nbytes: what is kept if it is.
      times: how often it is computed again if it is not.
      operations: what that takes each time.
      reads: the bytes that are read for it each time.
    """

    kept: bool
    nbytes: int
    times: int
    operations: int
    reads: int


def _numbers(bits: int) -> Iterator[int]:
    """The places of the bits that are set."""
    text = f"{bits:b}"[::-1]
    place = text.find("1")
    while place >= 0:
        yield place
        place = text.find("1", place + 1)


AxisKey = tuple[int, int]
"""An axis of a value: the value's number, and the axis."""


Loops = frozenset[tuple[AxisKey, int]]
"""Loops, and how often each."""


def _loops(counted: Counter[AxisKey]) -> Loops:
    return frozenset((+counted).items())


class Unions:
    """Which axes are one and the same loop.

    Attributes:
      united: how often two that were not have become one.
    """

    def __init__(self) -> None:
        self._parent: dict[AxisKey, AxisKey] = {}
        self.united = 0

    def find(self, key: AxisKey) -> AxisKey:
        root = key
        while (parent := self._parent.get(root, root)) != root:
            root = parent
        while key != root:
            self._parent[key], key = root, self._parent.get(key, key)
        return root

    def unite(self, a: AxisKey, b: AxisKey) -> None:
        # The smaller one becomes the root, so that two runs name loops alike.
        a, b = sorted((self.find(a), self.find(b)))
        if a != b:
            self._parent[b] = a
            self.united += 1


class Work:
    """The work of values.

    Attributes:
      shares: value -> the elements that are touched to compute it again from what is
        kept, by the loops that divide them among their pieces: of pairwise
        distances, the products are divided by both loops, squares of rows by one.
      halos: value -> by how much windows make the pieces of these loops longer.
      choices: value -> whether it is kept, where both could be.
    """

    def __init__(self, classes: Unions, keeps: bool = True) -> None:
        self._classes = classes
        self._keeps = keeps
        self.choices: dict[Value, Choice] = {}
        # Sets of numbers as bits, as large graphs have many.
        self._computes: dict[Value, int] = {}
        self._reads: dict[Value, int] = {}
        self._operations: dict[int, int] = {}
        self._nbytes: dict[int, int] = {}
        self.shares: dict[Value, dict[Loops, int]] = {}
        self.halos: dict[Value, Counter[AxisKey]] = {}

    def count(self, node: Node, rule: Rule, again: Sequence[int]) -> None:
        """Counts the work of a node and of operands that are computed again."""
        own = 0 if rule.cheap else rule.elements()
        taken = {
            number: v
            for number in again
            if isinstance(v := node.ins[number], Value) and self.shares.get(v)
        }
        computes, reads = 0 if rule.cheap else 1 << node.number, 0
        self._operations[node.number] = own * rule.each
        for number, source in enumerate(node.ins):
            if isinstance(source, Value):
                is_again = number in again and source in self._reads
                self._nbytes[source.number] = nbytes(source)
                reads |= self._reads[source] if is_again else 1 << source.number
                computes |= self._computes[source] if is_again else 0
        for out in node.outs:
            self._computes[out], self._reads[out] = computes, reads
        if not own and not taken:
            return
        linked = {
            link
            for group in rule.links()
            if any(link.side == "in" for link in group)
            for link in group
        }
        linked |= {by for _, _, by in rule.windows()}
        for number, out in enumerate(node.outs):
            loops = Counter(
                self._classes.find((out.number, axis))
                for axis in range(len(out.shape))
                if Link("out", number, axis) in linked
            )
            halos = self._halos(node, rule, None)
            shares = Counter({_loops(loops): own})
            for v in dict.fromkeys(taken.values()):
                for share, elements in self.shares[v].items():
                    left = loops
                    for k in (k for k, other in taken.items() if other is v):
                        left = left & self._divided(node, rule, k, share)
                    shares[_loops(left)] += elements
            for k in taken:
                halos |= self._halos(node, rule, k)
            self.shares[out] = dict(+shares)
            self.halos[out] = halos

    def worth_keeping(self, value: Value, times: int) -> bool:
        """Whether a value is kept that would be computed again so many times."""
        choice = self.choice(value, times)
        earlier = self.choices.get(value)
        if earlier is None or not earlier.kept:
            self.choices[value] = choice
        return choice.kept

    def choice(self, value: Value, times: int) -> Choice:
        """What costs less of a value that would be computed again so many times."""
        operations = sum(self._operations[k] for k in _numbers(self._computes[value]))
        reads = sum(self._nbytes[k] for k in _numbers(self._reads[value]))
        choice = Choice(False, nbytes(value), times, operations, reads)
        # It is written once, and read as often as it would be computed again.
        keeping = BYTE * choice.nbytes * (times + 1)
        again = times * (choice.operations + BYTE * choice.reads)
        return choice._replace(kept=self._keeps and again > keeping)

    def bytes_read(self, values: Iterable[Value]) -> int:
        """The bytes of what is read to compute values again, each once."""
        every = 0
        for v in values:
            every |= self._reads.get(v, 1 << v.number)
        return sum(self._nbytes.get(k, 0) for k in _numbers(every))

    def _views(
        self, node: Node, rule: Rule, number: int
    ) -> Iterator[tuple[AxisKey, Window, AxisKey]]:
        """The windows of an operand: its loop, the window, the result's loop."""
        for seen, through, by in rule.windows():
            v = node.ins[seen.number]
            if seen.number == number and isinstance(v, Value):
                yield (
                    self._classes.find((v.number, seen.axis)),
                    through,
                    self._classes.find((node.outs[by.number].number, by.axis)),
                )

    def _divided(
        self, node: Node, rule: Rule, number: int, share: Loops
    ) -> Counter[AxisKey]:
        """The loops of a node that divide a share of the work of an operand."""
        found = Counter(dict(share))
        views = list(self._views(node, rule, number))
        through = Counter(source for source, _, _ in views) & found
        for source, _, by in views:
            if through[source] > 0:
                through[source] -= 1
                found[source] -= 1
                found[by] += 1
        return +found

    def _halos(self, node: Node, rule: Rule, number: int | None) -> Counter[AxisKey]:
        """What the pieces of a node's loops repeat of an operand, None for its own."""
        v = None if number is None else node.ins[number]
        found = Counter(self.halos[v]) if isinstance(v, Value) else Counter()
        for k in range(len(node.ins)) if number is None else [number]:
            for source, window, by in self._views(node, rule, k):
                own = found[source] * window.dilation if v is not None else 0
                more = own + window.extent - window.stride
                found[by] = max(found[by], -(-more // window.stride), 0)
        return found

    def repeated(
        self,
        node: Node,
        rule: Rule,
        outs: Sequence[Sequence[Cut]],
        kept: Container[Operand],
        pending: Container[Operand],
    ) -> set[int]:
        """The operands to keep that every shard of another loop would compute again.

        Args:
          node: the node.
          rule: its rule.
          outs: the cuts of its results.
          kept: what is kept by now.
          pending: what is not complete, which is not computed again.
        """
        loops: Counter[AxisKey] = Counter()
        pieces: dict[AxisKey, int] = {}
        sizes: dict[AxisKey, int] = {}
        for out, cuts in zip(node.outs, outs, strict=True):
            own: Counter[AxisKey] = Counter()
            for axis, cut in enumerate(cuts):
                if cut.at:
                    key = self._classes.find((out.number, axis))
                    own[key] += 1
                    pieces[key] = len(cut.at) + 1
                    sizes[key] = out.shape[axis]
            loops |= own
        found = set()
        for number, v in enumerate(node.ins):
            if not isinstance(v, Value) or v in pending or number in rule.shared_out:
                continue
            again = 0
            for share, elements in self.shares.get(v, {}).items():
                others = loops - self._divided(node, rule, number, share)
                for key, halo in self._halos(node, rule, number).items():
                    # A window divides too, unless a piece is mostly its neighbours'.
                    if halo * pieces.get(key, 0) > sizes.get(key, 0):
                        others[key] = max(others[key], 1)
                times = math.prod(pieces[key] for key in others.elements()) - 1
                again += elements * times
            if again >= WORTH_KEEPING:
                # On average, as some of the elements may be divided by more loops.
                often = -(-again // sum(self.shares[v].values()))
                if v in kept or self.worth_keeping(v, often):
                    found.add(number)
        return found
