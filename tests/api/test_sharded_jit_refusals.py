"""Numbers of parts that fit nothing, and what else is wrong with `sharded_jit`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shardmap import sharded_jit, with_sharding_constraint
from tests.api.partition_checks import spread

X = spread(8, 8)


def test_too_few_devices():
    with pytest.raises(
        ValueError,
        match="sharded_jit computation requires 9 devices, but only 8 devices are",
    ):
        sharded_jit(lambda x: x, P(9), None)(np.ones(9))
    with pytest.raises(
        ValueError,
        match="with_sharding_constraint computation requires 9 devices, but only 8",
    ):
        with_sharding_constraint(np.ones(9), (9,))


def constrained(parts):
    return lambda x: with_sharding_constraint(x, parts)


@pytest.mark.parametrize(
    ("sharded", "message"),
    [
        (
            sharded_jit(lambda x: x, (2, 1), (2, 2)),
            r"out_parts of result has 4 total partitions but 2 are expected, as "
            r"in_parts of x has",
        ),
        (
            sharded_jit(lambda x: [x, x], None, [(2, 2), (2, 1)]),
            r"out_parts of result\[1\] has 2 total partitions but 4 are expected, as "
            r"out_parts of result\[0\] has",
        ),
        (
            sharded_jit(constrained((1, 2)), (2, 2), (2, 2)),
            r"with_sharding_constraint has 2 total partitions but 4 are expected, as "
            r"in_parts of x has",
        ),
        (
            sharded_jit(lambda x: x, (2, 1), None, num_partitions=4),
            r"in_parts of x has 2 total partitions but 4 are expected, as "
            r"num_partitions",
        ),
        (
            sharded_jit(
                lambda x: constrained((8, 1))(constrained((2, 1))(x)), None, None
            ),
            r"with_sharding_constraint has 8 total partitions but 2 are expected",
        ),
    ],
)
def test_totals_that_differ(sharded, message):
    for fun in (sharded, jax.jit(sharded)):
        with pytest.raises(ValueError, match=message):
            fun(X)


@pytest.mark.parametrize(
    ("in_parts", "out_parts", "message"),
    [
        (
            ({"a": (2, 1), "b": None},),
            None,
            r"tree\['a'\] is float32\[5,8\]: dimension 0 of size 5 is not divisible by "
            r"2 parts",
        ),
        (
            (2, 4),
            None,
            r"tree\['a'\] .* dimension 0 of size 5 [^.]*tree\['b'\] is float32\[4\] "
            r"\(rank 1\), but parts \(2, 4\) are for rank 2",
        ),
        (
            None,
            [(1, 3), None],
            r"result\[0\] is float32\[5,8\]: dimension 1 of size 8 is not divisible by "
            r"3 parts",
        ),
        (({"a": None},), None, r"in_parts must be a pytree prefix of the positional"),
        (None, [None], r"out_parts must be a pytree prefix of the"),
    ],
)
def test_parts_that_do_not_fit(in_parts, out_parts, message):
    def fun(tree):
        return [tree["a"], tree["b"]]

    tree = {"a": spread(5, 8), "b": spread(4)}
    with pytest.raises(ValueError, match="(?s)sharded_jit of fun .*" + message):
        sharded_jit(fun, in_parts, out_parts)(tree)


def test_a_constraint_that_does_not_fit():
    with pytest.raises(ValueError, match=r"x\['a'\] is float32\[5\]: dimension 0 of"):
        with_sharding_constraint({"a": spread(5)}, (2,))
    with pytest.raises(ValueError, match=r"x is float32\[5\] \(rank 1\), but parts"):
        with_sharding_constraint(spread(5), (1, 2))


@pytest.mark.parametrize("parts", [2, "x", (2, "x"), (2.0,), P("x"), (True, 2)])
def test_parts_that_are_none(parts):
    for make in (
        lambda: sharded_jit(jnp.sin, parts, None),
        lambda: sharded_jit(jnp.sin, None, parts),
        lambda: with_sharding_constraint(X, parts),
    ):
        with pytest.raises(TypeError, match="must be a tuple of ints, None, or"):
            make()


def test_counts_below_one():
    with pytest.raises(ValueError, match=r"in_parts must be counts of at least 1"):
        sharded_jit(jnp.sin, (2, 0), None)
    with pytest.raises(ValueError, match=r"num_partitions must be counts of at least"):
        sharded_jit(jnp.sin, None, None, 0)


def test_an_axis_name_that_no_map_binds_is_explained():
    cut = sharded_jit(lambda x: jax.lax.psum(x, "i"), (8,), (8,))
    with pytest.raises(NameError, match=r"name: i. Give the map that is meant this"):
        cut(np.ones(8))
