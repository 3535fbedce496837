"""Symbolic positions: integers that are linear functions of where pieces start.

A shard's recipe depends on the starts and the lengths of its pieces. `Affine` is an
integer that records how it was computed from the starts: it has its value for one
shard, and the linear function of the starts that gives this value. Code that computes
with it makes decisions, by ``<``, ``max``, ``//`` and so on, which `Guards` record. For
all starts that satisfy the guards, the code decides in the same way. Its result holds
for them too, with other numbers in place of the affine ones.

>>> guards = Guards()
>>> start = variables(guards, [8])[0]
>>> position = max(start - 1, 0) * 2
>>> position.value, position.factors, position.const
(14, (2,), -2)
>>> guards.bounds  # 1 <= start
{(1,): (1, inf)}
>>> start + 4 - start
4
"""

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, SupportsIndex

import numpy as np


def _direction(factors: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """A function in lowest terms, its first factor positive, and what divides it."""
    step = math.gcd(*factors)
    if next(factor for factor in factors if factor) < 0:
        step = -step
    return tuple(factor // step for factor in factors), step


class Guards:
    """Conditions on starts: bounds and residues of linear functions of them."""

    def __init__(self) -> None:
        # By `_direction`, so that one function is one key.
        self.bounds: dict[tuple[int, ...], tuple[float, float]] = {}
        self.residues: dict[tuple[tuple[int, ...], int], int] = {}

    def at_least(self, factors: tuple[int, ...], const: int) -> None:
        """Adds the condition ``factors @ starts + const >= 0``."""
        direction, step = _direction(factors)
        low, high = self.bounds.get(direction, (-math.inf, math.inf))
        if step > 0:
            self.bounds[direction] = max(low, -(const // step)), high
        else:
            self.bounds[direction] = low, min(high, const // -step)

    def divides(self, factors: tuple[int, ...], const: int, divisor: int) -> None:
        """Adds the condition ``(factors @ starts + const) % divisor == 0``."""
        self.residues[factors, divisor] = -const % divisor

    def match(self, starts: Sequence[Any] | np.ndarray) -> Any:
        """Whether these starts, or arrays with those of many shards, satisfy all."""
        holds: Any = True
        for direction, (low, high) in self.bounds.items():
            value = sum(map(operator.mul, direction, starts))
            holds = holds & (low <= value) & (value <= high)
        for (factors, divisor), residue in self.residues.items():
            value = sum(map(operator.mul, factors, starts))
            holds = holds & (value % divisor == residue)
        return holds


class Affine:
    """``(factors @ starts + const) / divisor``, which is an integer.

    Arithmetic returns `Affine` numbers, or ints where the starts cancel out. Whatever
    is not linear, such as a product of two or an index into a list, takes the value of
    the number and adds the guard that it keeps this value.
    """

    __slots__ = ("const", "divisor", "factors", "guards", "value")

    # NumPy's numbers leave the arithmetic to this class.
    __array_ufunc__ = None

    def __init__(
        self,
        guards: Guards,
        factors: tuple[int, ...],
        const: int,
        divisor: int,
        value: int,
    ) -> None:
        self.guards = guards
        self.factors, self.const, self.divisor = factors, const, divisor
        self.value = value

    def _scaled(self, by: int) -> Any:
        factors = tuple(factor * by for factor in self.factors)
        return _made(
            self.guards, factors, self.const * by, self.divisor, self.value * by
        )

    def _plus(self, other: Any, sign: int) -> Any:
        """``self + sign * other``; the sign is 1 or -1."""
        if not isinstance(other, Affine):
            number = _number(other)
            if number is None:
                return NotImplemented
            number *= sign
            const = self.const + number * self.divisor
            value = self.value + number
            return Affine(self.guards, self.factors, const, self.divisor, value)
        value = self.value + sign * other.value
        if sign < 0 and self.factors == other.factors and self.divisor == other.divisor:
            return value
        a, b = other.divisor, self.divisor
        if a == b:
            a, b = 1, 1
        b *= sign
        pairs = zip(self.factors, other.factors, strict=True)
        return _made(
            self.guards,
            tuple([a * x + b * y for x, y in pairs]),
            a * self.const + b * other.const,
            a * self.divisor,
            value,
        )

    def __add__(self, other: Any) -> Any:
        return self._plus(other, 1)

    __radd__ = __add__

    def __neg__(self) -> Any:
        return self._scaled(-1)

    def __sub__(self, other: Any) -> Any:
        return self._plus(other, -1)

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def __mul__(self, other: Any) -> Any:
        number = int(other) if isinstance(other, Affine) else _number(other)
        return NotImplemented if number is None else self._scaled(number)

    __rmul__ = __mul__

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        by = operator.index(other)
        divisor = self.divisor * by
        if divisor <= 0:
            return divmod(int(self), by)
        quotient, rest = divmod(self.value, by)
        const = self.const - rest * self.divisor
        if any(factor % divisor for factor in self.factors):
            self.guards.divides(self.factors, const, divisor)
        return _made(self.guards, self.factors, const, divisor, quotient), rest

    def __floordiv__(self, other: Any) -> Any:
        return divmod(self, other)[0]

    def __mod__(self, other: Any) -> Any:
        return divmod(self, other)[1]

    def _is_at_least(self, other: Any, more: int) -> bool:
        """Compares with ``other + more``, and adds the answer to the guards."""
        gap = self - other
        if not isinstance(gap, Affine):
            return bool(gap >= more)
        # The gap is an integer, so its numerator moves in steps of the divisor.
        const = gap.const - more * gap.divisor
        if gap.value >= more:
            gap.guards.at_least(gap.factors, const)
            return True
        opposite = tuple(-factor for factor in gap.factors)
        gap.guards.at_least(opposite, -const - gap.divisor)
        return False

    def __ge__(self, other: Any) -> bool:
        return self._is_at_least(other, 0)

    def __gt__(self, other: Any) -> bool:
        return self._is_at_least(other, 1)

    def __lt__(self, other: Any) -> bool:
        return not self._is_at_least(other, 0)

    def __le__(self, other: Any) -> bool:
        return not self._is_at_least(other, 1)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Affine) and _number(other) is None:
            return NotImplemented
        gap = self - other
        if not isinstance(gap, Affine):
            return bool(gap == 0)
        return gap >= 0 and not gap >= 1

    def __bool__(self) -> bool:
        return self != 0

    def __index__(self) -> int:
        """Returns the value, and adds the guard that the number keeps it."""
        _ = self == self.value
        return self.value

    def __hash__(self) -> int:
        return hash(int(self))

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(int(self), dtype)


def _number(value: Any) -> int | None:
    if type(value) is int:
        return value
    return operator.index(value) if isinstance(value, SupportsIndex) else None


def _made(
    guards: Guards, factors: tuple[int, ...], const: int, divisor: int, value: int
) -> Any:
    """An `Affine` in lowest terms, or an int where the starts cancel out."""
    if not any(factors):
        return value
    if divisor != 1:
        common = math.gcd(const, divisor, *factors)
        factors = tuple(factor // common for factor in factors)
        const, divisor = const // common, divisor // common
    return Affine(guards, factors, const, divisor, value)


def variables(guards: Guards, values: Sequence[int]) -> list[Any]:
    """The starts as `Affine` numbers with these values."""
    count = len(values)
    return [
        Affine(guards, tuple(int(j == k) for j in range(count)), 0, 1, value)
        for k, value in enumerate(values)
    ]


def is_known(number: Any) -> bool:
    """Returns True if a number is the same for all starts that satisfy the guards."""
    if not isinstance(number, Affine):
        return True
    direction, _ = _direction(number.factors)
    low, high = number.guards.bounds.get(direction, (0, 1))
    return low == high


def concrete(tree: Any) -> Any:
    """Replaces affine numbers in nested tuples by ints.

    Adds guards that they keep their values.
    """
    if isinstance(tree, Affine):
        return int(tree)
    if isinstance(tree, tuple):
        # Most parts are ints, of which there are very many.
        parts = [part if type(part) is int else concrete(part) for part in tree]
        return type(tree)._make(parts) if hasattr(tree, "_make") else tuple(parts)
    return tree


class AffineMap:
    """Integers as functions of the starts; some may be constant."""

    def __init__(self, numbers: Iterable[Any], count: int) -> None:
        rows = [
            (*n.factors, n.const, n.divisor)
            if isinstance(n, Affine)
            else (*(0,) * count, int(n), 1)
            for n in numbers
        ]
        table = np.asarray(rows, np.int64).reshape(-1, count + 2)
        self.factors, self.const = table[:, :count], table[:, count]
        self.divisor = table[:, count + 1]

    def at(self, starts: Sequence[int]) -> Iterator[int]:
        """The numbers for these starts."""
        point = np.asarray(starts, np.int64)
        numbers = (self.factors @ point + self.const) // self.divisor
        return iter(numbers.tolist())
