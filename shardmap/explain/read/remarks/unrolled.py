"""Loops in Python, which a program has as the same operations again and again."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardmap._jax.types import Equation, Jaxpr, aval_of
from shardmap._jax.walk import jaxprs, jaxprs_in
from shardmap.explain.read.source import source_of
from shardmap.explain.report import Remark

LEAST_ROUNDS = 8
LEAST_OPERATIONS = 32
LONGEST_BLOCK = 2000
SMALLEST_PART = 10
"""Less than a tenth of all operations is no loop that counts."""


class Repetition(NamedTuple):
    """Operations that are there several times, one after another.

    Attributes:
      start: the number of the first.
      length: how many operations the block has.
      rounds: how often it is there.
    """

    start: int
    length: int
    rounds: int


def unrolled(jaxpr: Jaxpr) -> list[Remark]:
    """A remark for each loop in Python that a program has unrolled in it.

    One that is a small part of all operations is not worth it, such as those over the
    leaves of a tree.
    """
    found = []
    for scope in jaxprs(jaxpr):
        weights = [_operations_in(equation) for equation in scope.eqns]
        total = sum(weights)
        for block in blocks([_signature(each) for each in scope.eqns], weights):
            count = sum(weights[block.start : block.start + block.length])
            if count * block.rounds * SMALLEST_PART >= total:
                found.append(_remark(scope, block, count, total))
    return found


def _remark(scope: Jaxpr, block: Repetition, count: int, total: int) -> Remark:
    """Of a block of ``count`` operations, in a scope of ``total``."""
    operations = "operation" if count == 1 else f"{count:,} operations"
    return Remark(
        f"the same {operations} {block.rounds:,} times: a loop in Python, unrolled, "
        f"{block.rounds * count:,} of the {total:,} operations here; one program "
        "compiles them all, and runs them one after another",
        "Stack what the loop goes over: jax.vmap does all rounds as one, spmap lays "
        "them on devices; jax.lax.scan, if a round needs the one before, is compiled "
        "once.",
        _source(scope.eqns[block.start : block.start + block.length]),
    )


def _operations_in(equation: Equation) -> int:
    """How many operations it is: those of what it calls, or one."""
    inner = [each for jaxpr in jaxprs_in(equation.params) for each in jaxpr.eqns]
    return sum(map(_operations_in, inner)) or 1


def blocks(
    signatures: Sequence[Any], weights: Sequence[int] | None = None
) -> Iterator[Repetition]:
    """The repeated blocks of a list, the one that covers most first.

    Args:
      signatures: what each is, to compare.
      weights: how many operations each is. Default: one.

    >>> list(blocks("x" + "abcd" * 10 + "y"))
    [Repetition(start=1, length=4, rounds=10)]
    """
    numbers: dict[Any, int] = {}
    each = np.array([numbers.setdefault(s, len(numbers)) for s in signatures], int)
    before = np.cumsum([0, *(weights or [1] * len(signatures))])
    parts = [(0, each)]
    while parts:
        offset, part = parts.pop()
        block = _best(part, before[offset : offset + len(part) + 1])
        if block is None:
            continue
        end = block.start + block.length * block.rounds
        yield block._replace(start=offset + block.start)
        parts += [(offset + end, part[end:]), (offset, part[: block.start])]


def _best(part: np.ndarray, before: np.ndarray) -> Repetition | None:
    """The block that covers most operations, the shortest of those.

    Args:
      part: a number for each different equation.
      before: how many operations there are before each.
    """
    best, covered = None, LEAST_OPERATIONS - 1
    for length in range(1, min(LONGEST_BLOCK, len(part) // LEAST_ROUNDS) + 1):
        # The longest run in which each operation is that of a block before.
        differs = np.flatnonzero(part[length:] != part[:-length])
        ends = np.concatenate([[-1], differs, [len(part) - length]])
        longest = int(np.argmax(np.diff(ends)))
        rounds = (int(ends[longest + 1] - ends[longest]) - 1) // length + 1
        start = int(ends[longest]) + 1
        count = int(before[start + rounds * length] - before[start])
        if rounds >= LEAST_ROUNDS and count > covered:
            best, covered = Repetition(start, length, rounds), count
    return best


def _signature(equation: Equation) -> tuple[Any, ...]:
    """What the same line does again, to the same shapes."""
    made = [aval_of(var) for var in equation.outvars]
    kinds = tuple(str(aval) for aval in made)
    return equation.primitive, kinds, source_of(equation)


def _source(equations: Sequence[Equation]) -> str | None:
    """The line that most of them are of."""
    lines = [source_of(equation) for equation in equations]
    return max(lines, key=lines.count)
