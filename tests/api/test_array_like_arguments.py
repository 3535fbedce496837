"""Values that are read: each device reads its own slice."""

import jax
import numpy as np
import pytest

from tests.map_programs import both_lowerings


class Counting:
    """An array-like that tells what was read of it."""

    def __init__(self, array):
        self._array = array
        self.shape, self.dtype = array.shape, array.dtype
        self.read = []

    def __getitem__(self, index):
        self.read.append(index)
        return self._array[index]


@both_lowerings
@pytest.mark.parametrize("keyword", [False, True])
def test_each_device_reads_its_own_slice(spmap, keyword):
    rows = np.arange(24, dtype=np.float32).reshape(8, 3)
    given = Counting(rows)
    mapped = spmap(lambda x: x.sum())
    result = mapped(x=given) if keyword else mapped(given)
    np.testing.assert_array_equal(result, rows.sum(1))
    read = sorted(rows[index].tolist() for index in given.read)
    assert read == [[row] for row in rows.tolist()]


@both_lowerings
def test_array_likes_under_jit_and_in_a_long_axis(spmap):
    rows = np.arange(48, dtype=np.float32).reshape(16, 3)
    mapped = spmap(lambda x: x.sum())
    np.testing.assert_array_equal(mapped(Counting(rows)), rows.sum(1))
    outside = Counting(rows)
    np.testing.assert_array_equal(jax.jit(lambda: mapped(outside))(), rows.sum(1))
