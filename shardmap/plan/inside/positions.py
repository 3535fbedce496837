"""Where the shards of a loop read and write, as functions of the loop's counter.

The positions of shards that are alike follow a law: linear functions of where the
shards' pieces start. Functions that differ in their constant only are one row of
numbers, and a row with steps of one length is computed from the counter, so that a loop
has the same size for ten shards and for a million.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from shardmap.plan.engine.alike.classes import Alike
from shardmap.plan.run.buffers import start_dtype


class _Steps(NamedTuple):
    """Numbers that go up by ``step`` each ``inner`` shards, ``period`` times."""

    first: int
    step: int
    inner: int
    period: int

    def at(self, counter: Any) -> Any:
        number = counter if self.inner == 1 else counter // self.inner
        return self.first + number % self.period * self.step


def _steps(numbers: np.ndarray) -> _Steps | None:
    """The numbers as a function of the counter, None if they have no such form.

    >>> _steps(np.array([5, 5, 8, 8, 5, 5, 8, 8]))
    _Steps(first=5, step=3, inner=2, period=2)
    """
    changes = np.flatnonzero(np.diff(numbers))
    inner = int(changes[0]) + 1 if changes.size else len(numbers)
    outer = numbers[::inner]
    step = int(outer[1] - outer[0]) if len(outer) > 1 else 0
    back = np.flatnonzero(np.diff(outer) != step)
    period = int(back[0]) + 1 if back.size else len(outer)
    made = _Steps(int(numbers[0]), step, inner, period)
    return made if np.array_equal(made.at(np.arange(len(numbers))), numbers) else None


class ShardPlaces(NamedTuple):
    """Where one shard writes, per result; where it reads; and its other positions."""

    written: dict[int, list[Any]]
    reads: list[list[Any]]
    starts: list[Any]


class Positions:
    """The positions of shards that run the same steps.

    Attributes:
      count: how many shards there are.
      first: what the loop counts from.
      rows: what the loop runs over besides: positions that are looked up.
    """

    def __init__(self, members: Sequence[Alike]) -> None:
        boxes, recipe = members[0].pattern.boxes, members[0].pattern.recipe
        self._written = {k: len(box) for k, box in enumerate(boxes) if box is not None}
        self._reads = [len(box) for _, box in recipe.reads]
        # Of a box the law has starts and stops, of which only the starts are positions.
        ends = 2 * (sum(self._written.values()) + sum(self._reads))
        chosen = np.r_[0:ends:2, ends : ends + len(recipe.starts)].astype(int)
        laws = [
            (law.factors[chosen], law.const[chosen], law.divisor[chosen])
            for law in (member.pattern.law for member in members)
        ]
        # Where nothing is divided, a constant can be added afterwards.
        whole = np.all([divisor == 1 for _, _, divisor in laws], 0)
        shift = np.where(whole, laws[0][1], 0)
        table = [
            np.concatenate([factors, divisor[:, None], (const - shift)[:, None]], 1)
            for factors, const, divisor in laws
        ]
        kinds = np.unique(
            np.concatenate(table, 1), axis=0, return_index=True, return_inverse=True
        )
        self._kinds, self._shift = kinds[2].reshape(-1).tolist(), shift.tolist()
        turn = np.argsort(np.concatenate([member.numbers for member in members]))
        columns = [
            np.concatenate(
                [
                    (member.starts @ factors[k] + const[k] - shift[k]) // divisor[k]
                    for member, (factors, const, divisor) in zip(
                        members, laws, strict=True
                    )
                ]
            )[turn]
            for k in kinds[1]
        ]
        dtype = start_dtype(
            [
                bound + more
                for k, more in set(zip(self._kinds, self._shift, strict=True))
                for bound in (int(columns[k].min()), int(columns[k].max()))
            ]
        )
        self.count = len(turn)
        self._steps = list(map(_steps, columns))
        found = zip(columns, self._steps, strict=True)
        self.first = jnp.zeros((), dtype)
        self.rows = [column.astype(dtype) for column, steps in found if steps is None]

    def at(self, counter: Any, looked_up: Sequence[Any]) -> ShardPlaces:
        """The positions of one shard.

        Boxes have plain numbers where all shards have the same.
        """
        rest = iter(looked_up)
        found = [
            next(rest)
            if steps is None
            else steps.at(counter)
            if steps.step
            else steps.first
            for steps in self._steps
        ]
        keys = list(zip(self._kinds, self._shift, strict=True))
        moved = {
            (k, by): found[k] + by if by else found[k] for k, by in dict.fromkeys(keys)
        }
        numbers = (moved[key] for key in keys)

        def taken(count: int) -> list[Any]:
            return [next(numbers) for _ in range(count)]

        written = {k: taken(rank) for k, rank in self._written.items()}
        reads = [taken(rank) for rank in self._reads]
        starts = [jnp.asarray(number, self.first.dtype) for number in numbers]
        return ShardPlaces(written, reads, starts)
