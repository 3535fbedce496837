"""Integers that remember how they were computed, against plain ones."""

import operator

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardmap.planning.engine.affine import (
    AffineMap,
    Guards,
    variables,
)
from tests.strategies import examples

CHOICES = [
    lambda a, b, n: a + b,
    lambda a, b, n: a - b,
    lambda a, b, n: n - a,
    lambda a, b, n: a * n,
    lambda a, b, n: -a,
    lambda a, b, n: a // n,
    lambda a, b, n: a % n,
    lambda a, b, n: divmod(a + b, n)[0],
    lambda a, b, n: max(a, b),
    lambda a, b, n: min(a, n),
    lambda a, b, n: a if a < b else n,
    lambda a, b, n: b if a <= n else a,
    lambda a, b, n: 1 if a == b else a,
    lambda a, b, n: a if a != n else b,
    lambda a, b, n: b if a > 2 * b else a,
    lambda a, b, n: b if a >= n else -b,
    lambda a, b, n: a * b,
    lambda a, b, n: list(range(-200, 200))[200 + a % 50],
]


def computed(starts, steps):
    pool = list(starts)
    for choice, i, j, n in steps:
        pool.append(CHOICES[choice](pool[i % len(pool)], pool[j % len(pool)], n))
    return pool


STEPS = st.lists(
    st.tuples(
        st.integers(0, len(CHOICES) - 1),
        st.integers(0, 20),
        st.integers(0, 20),
        st.integers(1, 5),
    ),
    min_size=1,
    max_size=12,
)


@examples(50)
@given(STEPS, st.lists(st.integers(0, 30), min_size=2, max_size=2))
def test_what_the_guards_allow_is_computed_alike(steps, starts):
    guards = Guards()
    found = computed(variables(guards, starts), steps)
    affine_map = AffineMap(found, len(starts))
    assert guards.match(starts)
    rows = np.array([(a, b) for a in range(32) for b in range(32)])
    match = np.broadcast_to(guards.match(rows.T), len(rows))
    for row, allowed in zip(rows.tolist(), match.tolist(), strict=True):
        assert guards.match(row) == allowed
        if allowed:
            assert list(affine_map.at(row)) == computed(row, steps)


def test_equal_decisions_are_one_guard():
    guards = Guards()
    [a] = variables(guards, [4])
    assert a > 1
    assert 2 * a >= 3
    assert not 3 * a + 1 > 40
    assert guards.bounds == {(1,): (2, 13)}


def test_what_needs_the_number_is_for_this_one_only():
    for use in (int, hash, operator.index, np.asarray, lambda a: {4: 1}[a]):
        guards = Guards()
        [a] = variables(guards, [4])
        use(a)
        assert guards.match([np.arange(9)]).nonzero()[0].tolist() == [4]
