"""Where results are put together, and how boxes are read."""

import functools

import jax
import numpy as np
import pytest

from shardmap.arrays.combining import COMBINE_IN_NUMPY, identity
from shardmap.planning.engine.nodes import Value
from shardmap.planning.run.buffers import (
    ARITY,
    Fold,
    holds,
    put,
    read_box,
)

BOX = ((1, 3), (0, 2))


def value(*shape, dtype=np.float32):
    return Value(0, jax.core.ShapedArray(shape, dtype))


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int4"])
def test_largest_and_smallest_of_types_that_numpy_does_not_know(name):
    x = np.array([-3, -2], np.dtype(name))
    for combiner, want in (("max", x[1]), ("min", x[0])):
        start = identity(combiner, x.dtype)
        assert start.dtype == x.dtype
        found = start
        for each in x:
            found = COMBINE_IN_NUMPY[combiner](found, each)
        assert found == want


def tree(parts):
    """The sum of parts as a tree, by recursion from its definition."""
    while len(parts) > ARITY:
        groups = [parts[k : k + ARITY] for k in range(0, len(parts), ARITY)]
        parts = [functools.reduce(np.add, group) for group in groups]
    return functools.reduce(np.add, parts, np.float32(0) * parts[0])


@pytest.mark.parametrize(
    ("count", "shape"), [(1, ()), (16, (3,)), (17, ()), (257, ()), (4097, (3,))]
)
def test_partial_results_are_put_together_as_a_tree(count, shape):
    rng = np.random.default_rng(0)
    parts = [np.asarray(rng.normal(size=shape), np.float32) for _ in range(count)]
    before = [part.copy() for part in parts]
    buffer, fold = np.zeros(shape, np.float32), Fold("add", count)
    for part in parts:
        made = fold.add([part])
        if made is not None:
            put([buffer], [tuple((0, n) for n in shape)], "add", made)
    assert buffer.tobytes() == tree(parts).tobytes()
    assert all((a == b).all() for a, b in zip(parts, before, strict=True))


def test_what_is_put_together_so_far_is_not_lost():
    buffer, fold = np.zeros((), np.int32), Fold("add", 300)
    for number in range(300):
        made = [fold.add([np.asarray(number, np.int32)])]
        if number % 50 == 20:
            made.append(fold.rest())
        for node in made:
            if node is not None:
                put([buffer], [()], "add", node)
        if number % 50 == 20:
            assert buffer == sum(range(number + 1))
    assert buffer == sum(range(300))


def test_a_number_is_put_where_there_is_no_axis():
    class Number:
        """An array-like without axes, as zarr has them: its index is ``()``."""

        content = np.float32(3)

        def __getitem__(self, index):
            assert index == ()
            return self.content

        def __setitem__(self, index, part):
            assert index == ()
            self.content = part

    for buffer in (np.full((), 3, np.float32), Number()):
        put([buffer], [()], "add", [np.float32(4)])
        assert buffer[()] == 7


def test_an_array_that_is_read_in_whole_is_not_copied():
    x = np.zeros((4, 3), np.float32)
    assert read_box(x, ((0, 4), (0, 3)), value(4, 3).aval) is x


@pytest.mark.parametrize(
    ("array", "dtype", "held"),
    [
        (np.zeros(2), np.float32, True),
        (np.zeros(2, np.int32), np.float32, False),
        (2, np.float32, True),
        (2.5, np.int32, False),
        (True, np.int32, True),
    ],
)
def test_types_that_jax_would_see(array, dtype, held):
    assert holds(array, np.dtype(dtype)) is held


@pytest.mark.parametrize("combiner", ["add", "mul"])
def test_infinite_parts_combine_without_a_word(combiner):
    buffer = np.array([np.inf, 3e38, 0], np.float32)
    part = np.array([-np.inf, 3e38, np.inf], np.float32)
    put([buffer], [((0, 3),)], combiner, [part])
    assert not np.isfinite(buffer).any()


class Reader:
    """An array-like that gives something else than it was asked for."""

    shape, dtype, nbytes = (4, 3), np.dtype(np.float32), 48

    def __init__(self, given):
        self.given = given

    def __getitem__(self, index):
        return self.given


def test_another_shape_than_asked_for_is_told():
    with pytest.raises(ValueError, match=r"has the shape \(2, 2\), .*gave \(4, 3\)"):
        read_box(Reader(np.zeros((4, 3), np.float32)), BOX, value(4, 3).aval)

    for given in (np.zeros((2, 2, 1), np.float32), np.zeros(2, np.float32)):
        with pytest.raises(ValueError, match=r"has the shape \(2, 2\), .*gave \(2,"):
            read_box(Reader(given), BOX, value(4, 3).aval)
