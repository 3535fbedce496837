"""Loops in Python, which a program has as the same operations again and again."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardmap._jax.types import Equation, Jaxpr, aval_of
from shardmap._jax.walk import jaxprs
from shardmap.explain.read.source import source_of
from shardmap.explain.report import Remark

LEAST_ROUNDS = 8
LEAST_OPERATIONS = 32
LONGEST_BLOCK = 2000


class Block(NamedTuple):
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
    """A remark for each loop in Python that a program has unrolled in it."""
    return [
        Remark(
            f"the same {_operations(block.length)} {block.rounds:,} times: a loop in "
            f"Python, unrolled, {block.rounds * block.length:,} of the "
            f"{len(scope.eqns):,} operations here; one program compiles them all, and "
            "runs them one after another",
            "Stack what the loop goes over: jax.vmap does all rounds as one, spmap "
            "lays them on devices; jax.lax.scan, if a round needs the one before, is "
            "compiled once.",
            _source(scope.eqns[block.start : block.start + block.length]),
        )
        for scope in jaxprs(jaxpr)
        for block in blocks([_signature(equation) for equation in scope.eqns])
    ]


def blocks(signatures: Sequence[Any]) -> Iterator[Block]:
    """The repeated blocks of a list, the one that covers most first.

    >>> list(blocks("x" + "abcd" * 10 + "y"))
    [Block(start=1, length=4, rounds=10)]
    """
    numbers: dict[Any, int] = {}
    each = np.array([numbers.setdefault(s, len(numbers)) for s in signatures], int)
    parts = [(0, each)]
    while parts:
        offset, part = parts.pop()
        block = _best(part)
        if block is None:
            continue
        end = block.start + block.length * block.rounds
        yield block._replace(start=offset + block.start)
        parts += [(offset + end, part[end:]), (offset, part[: block.start])]


def _best(part: np.ndarray) -> Block | None:
    """The block that covers most, the shortest of those."""
    best, covered = None, LEAST_OPERATIONS - 1
    for length in range(1, min(LONGEST_BLOCK, len(part) // LEAST_ROUNDS) + 1):
        # The longest run in which each operation is that of a block before.
        differs = np.flatnonzero(part[length:] != part[:-length])
        ends = np.concatenate([[-1], differs, [len(part) - length]])
        longest = int(np.argmax(np.diff(ends)))
        rounds = (int(ends[longest + 1] - ends[longest]) - 1) // length + 1
        if rounds >= LEAST_ROUNDS and rounds * length > covered:
            best = Block(int(ends[longest]) + 1, length, rounds)
            covered = rounds * length
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


def _operations(count: int) -> str:
    return "operation" if count == 1 else f"{count:,} operations"
