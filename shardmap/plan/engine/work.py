"""The cost of recomputing values, and of keeping them."""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from shardmap.plan.engine.keys import nbytes
from shardmap.plan.engine.nodes import Node, Operand, Value
from shardmap.plan.engine.rules import Rule

BYTE = 16
"""The operations that take as long as reading or writing a byte of a disk or store."""


class Choice(NamedTuple):
    """Whether a value is kept or recomputed, and the cost of each.

    Attributes:
      kept: whether it is kept.
      nbytes: its bytes, if it is kept.
      times: how often it is recomputed, if it is not kept.
      operations: the operations of each recomputation.
      reads: the bytes that each recomputation reads.
    """

    kept: bool
    nbytes: int
    times: int
    operations: int
    reads: int


def _numbers(bits: int) -> Iterator[int]:
    """The positions of the bits that are set."""
    text = f"{bits:b}"[::-1]
    place = text.find("1")
    while place >= 0:
        yield place
        place = text.find("1", place + 1)


def again(often: float) -> int:
    """How many times after the first, from an average of samples."""
    return max(math.floor(often + 0.25) - 1, 0)


def operations(rule: Rule) -> int:
    """The operations of a whole equation; 0 where it is cheap."""
    return 0 if rule.cheap else rule.elements() * rule.each


class Work:
    """The work of recomputing values, and the choice between that and keeping them.

    Args:
      keeps: whether to keep values at all.

    Attributes:
      choices: value -> the choice, for each value that was asked about.
    """

    def __init__(self, keeps: bool = True) -> None:
        self._keeps = keeps
        self.choices: dict[Value, Choice] = {}
        # Sets of numbers are bits of an int, as large graphs have many of them.
        self._computes: dict[Value, int] = {}
        self._reads: dict[Value, int] = {}
        self._operations: dict[int, int] = {}
        self._nbytes: dict[int, int] = {}

    def count(self, node: Node, rule: Rule, remade: Collection[Operand]) -> None:
        """Counts the work of a node; operands in ``remade`` are recomputed."""
        computes, reads = 0 if rule.cheap else 1 << node.number, 0
        self._operations[node.number] = operations(rule)
        for source in node.ins:
            if isinstance(source, Value):
                is_remade = source in remade and source in self._reads
                self._nbytes[source.number] = nbytes(source)
                reads |= self._reads[source] if is_remade else 1 << source.number
                computes |= self._computes[source] if is_remade else 0
        for out in node.outs:
            self._computes[out], self._reads[out] = computes, reads

    def worth_keeping(
        self, values: Collection[Value], times: int, share: float = 1
    ) -> bool:
        """Chooses whether to keep values or to recompute them ``times`` times.

        Args:
          values: one value, or several that are made of one.
          times: how often each is recomputed.
          share: the part of the work that each time takes.
        """
        own = {value: self.choice(value, times, share) for value in values}
        kept = self._is_cheaper(list(own.values()))
        for value, choice in own.items():
            earlier = self.choices.get(value)
            if earlier is None or not earlier.kept:
                self.choices[value] = choice._replace(kept=kept)
        return kept

    def choice(self, value: Value, times: int, share: float = 1) -> Choice:
        """Compares keeping a value with recomputing it; see `worth_keeping`."""
        done = sum(self._operations[k] for k in _numbers(self._computes[value]))
        reads = sum(self._nbytes[k] for k in _numbers(self._reads[value]))
        choice = Choice(False, nbytes(value), times, round(share * done), reads)
        return choice._replace(kept=self._is_cheaper([choice]))

    def _is_cheaper(self, choices: Sequence[Choice]) -> bool:
        """Whether to keep values costs less than to recompute all of them at once."""
        # If kept, it is written once, and read as often as it would be recomputed.
        times = choices[0].times
        keeping = BYTE * sum(choice.nbytes for choice in choices) * (times + 1)
        remaking = times * max(c.operations + BYTE * c.reads for c in choices)
        return self._keeps and remaking > keeping

    def bytes_read(self, values: Iterable[Value]) -> int:
        """The bytes that recomputing values reads; what several read counts once."""
        every = 0
        for v in values:
            every |= self._reads.get(v, 1 << v.number)
        return sum(self._nbytes.get(k, 0) for k in _numbers(every))
