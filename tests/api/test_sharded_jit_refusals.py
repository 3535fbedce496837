"""Numbers of parts that fit nothing, and what else is wrong with `sharded_jit`."""

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


@pytest.mark.parametrize(
    ("in_parts", "out_parts", "count", "message"),
    [
        ((2, 1), (2, 2), None, "out_parts has 4 total .* 2 are expected, as in_parts "),
        (
            None,
            [(2, 2), {"a": (2, 1)}],
            None,
            r"out_parts\[1\]\['a'\] has 2 total partitions but 4 are expected, as "
            r"out_parts\[0\] has",
        ),
        ((2, 1), None, 4, r"in_parts has 2 total .* 4 are expected, as num_partitions"),
    ],
)
def test_totals_that_differ(in_parts, out_parts, count, message):
    with pytest.raises(ValueError, match="sharded_jit: " + message):
        sharded_jit(lambda x: x, in_parts, out_parts, count)


@pytest.mark.parametrize(
    ("in_parts", "out_parts", "message"),
    [
        (
            ({"a": (2, 1), "b": None},),
            None,
            r"cut tree\['a'\], float32\[5,8\], into parts \(2, 1\)\. "
            r"Give a count for each",
        ),
        (
            {"a": None, "b": (2, 4)},
            None,
            r"tree\['b'\], float32\[4\], into parts \(2, 4\)\. Give",
        ),
        (
            None,
            [(1, 3), None],
            r"result\[0\], float32\[5,8\], into parts \(1, 3\)\. Give",
        ),
        (({"a": None},), None, r"in_parts must be a pytree prefix of the positional"),
        (None, [None], r"out_parts must be a pytree prefix of the"),
    ],
)
def test_parts_that_do_not_fit(in_parts, out_parts, message):
    def fun(tree):
        return [tree["a"], tree["b"]]

    tree = {"a": spread(5, 8), "b": spread(4)}
    in_parts = (in_parts,) if isinstance(in_parts, dict) else in_parts
    with pytest.raises(ValueError, match="sharded_jit of fun .*" + message):
        sharded_jit(fun, in_parts, out_parts)(tree)


def test_a_constraint_that_does_not_fit():
    with pytest.raises(ValueError, match=r"cannot cut x\['a'\], float32\[5\], into"):
        with_sharding_constraint({"a": spread(5)}, (2,))
    with pytest.raises(ValueError, match=r"cut x, float32\[5\], into .* which divides"):
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
