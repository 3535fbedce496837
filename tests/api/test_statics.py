"""Compile-time constants: which of them share a program."""

import collections

import jax
import numpy as np
import pytest

import shardmap as sm

X = np.arange(8, dtype=np.int32)
Point = collections.namedtuple("Point", ["x", "y"])

# Equal, with equal hashes, all of them.
LOOKALIKES = [1, True, 1.0]
# How such a value stands in a static argument, and how it is found there.
WRAPPED = {
    "itself": (lambda k: k, lambda k: k),
    "tuple": (lambda k: ("a", (k,)), lambda k: k[1][0]),
    "namedtuple": (lambda k: Point(0, k), lambda k: k.y),
    "frozenset": (lambda k: frozenset([k]), lambda k: next(iter(k))),
    "set of tuples": (lambda k: frozenset([("a", k)]), lambda k: next(iter(k))[1]),
}


def maps(find):
    def fun(a, k):
        return (a - 1) * np.array(isinstance(find(k), bool), type(find(k)))

    def expected(k):
        return (X - 1) * np.array(isinstance(k, bool), type(k))

    return {
        "spmap": sm.spmap(fun, static_broadcasted_argnums=1),
        "spmd": sm.spmap(fun, static_broadcasted_argnums=1, lowering="spmd"),
        "sharded_jit": sm.sharded_jit(fun, (2,), (2,), static_argnums=1),
    }, expected


CALLED = {
    "eagerly": lambda f, k: f(X, k),
    "jit": lambda f, k: jax.jit(lambda x: f(x, k))(X),
    "vmap": lambda f, k: jax.vmap(lambda x: f(x, k))(X[None])[0],
    "lower": lambda f, k: f.lower(X, k).compile()(X),
    "trace": lambda f, k: f.trace(X, k).lower().compile()(X),
    "disable_jit": lambda f, k: without_jit(f, k),
}


def without_jit(f, k):
    with jax.disable_jit():
        return f(X, k)


@pytest.mark.few(1)
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("called", "wrapped"),
    [(called, "tuple") for called in CALLED] + [("eagerly", how) for how in WRAPPED],
)
@pytest.mark.parametrize("kind", ["spmap", "spmd", "sharded_jit"])
def test_equal_constants_of_other_types_are_others(kind, wrapped, called):
    wrap, find = WRAPPED[wrapped]
    mapped, expected = maps(find)
    with jax.numpy_dtype_promotion("standard"):
        for value in [*LOOKALIKES, 1]:
            got, want = CALLED[called](mapped[kind], wrap(value)), expected(value)
            np.testing.assert_array_equal(got, want)
            assert got.dtype == jax.numpy.asarray(want).dtype, value


def test_constants_of_one_type_share_a_program():
    traced = []

    def fun(x, k):
        traced.append(k)
        return x * x.dtype.type(k[0])

    mapped = sm.spmap(fun, static_broadcasted_argnums=1)
    split = sm.sharded_jit(fun, None, None, 2, static_argnums=1)
    for k in ((2, "a"), (3, "a"), (2.0, "a")):
        for f in (mapped, split):
            f(X, k)
            del traced[:]
            for _ in range(3):
                np.testing.assert_array_equal(f(X, (k[0], "a")), X * int(k[0]))
            assert not traced


def test_names_of_axes_that_are_equal_but_of_other_types():
    def fun(x):
        return x + 1

    for name in (1.0, ("a", 1), ("a", True), ("a", 1.0)):
        mapped = sm.spmap(fun, name)
        assert mapped.trace(X).jaxpr.eqns[0].params["axis_name"] is name
        np.testing.assert_array_equal(mapped(X), X + 1)


def test_what_has_no_hash_is_named_every_time():
    mapped = sm.spmap(lambda x, k: x * k, static_broadcasted_argnums=1)
    mapped(X, 2)
    for _ in range(2):
        with pytest.raises(
            ValueError,
            match=r"static.* argument 1 of type <class 'list'>.* a tuple.*partial",
        ):
            mapped(X, [2])
    with pytest.raises(ValueError, match=r"Non-hashable static"):
        sm.sharded_jit(lambda x, k: x, None, None, 2, static_argnums=1)(X, [2])
