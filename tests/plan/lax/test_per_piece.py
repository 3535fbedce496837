"""Functions of NumPy per piece: as `jax.pure_callback`, and cut as they say."""

import jax
import numpy as np
import pytest

import shardmap as sm
from tests.plan.checks import check
from tests.plan.plan_programs import X


def centered(rows):
    return np.asarray(rows, np.float64) - np.median(rows, 1, keepdims=True)


def as_complex(x):
    return x + np.complex64(0)


def by_rows(x):
    y = sm.per_piece(centered, x, x, axes="i * -> i *")
    return y * 2 + y.mean(1, keepdims=True)


def anywhere(x):
    like = jax.ShapeDtypeStruct(x.shape[:-1], x.dtype)
    return sm.per_piece(lambda a: np.median(a, -1), like, x, axes="... * -> ...")


@pytest.mark.parametrize(
    "way",
    [
        lambda x: by_rows(x),
        lambda x: jax.jit(by_rows)(x),
        lambda x: jax.vmap(lambda row: by_rows(row[None])[0])(x),
        lambda x: sm.spmap(lambda row: by_rows(row[None])[0])(x),
        lambda x: sm.chunked(by_rows, in_slices={0: 4})(x),
        lambda x: jax.jit(sm.chunked(by_rows, in_slices={0: 4}))(x),
        lambda x: sm.plan(by_rows, x, memory="200 B").run(x),
    ],
)
def test_it_is_a_function_of_jax(way):
    y = centered(X)
    want = y * 2 + y.mean(1, keepdims=True)
    np.testing.assert_allclose(way(X), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("fun", "x", "in_slices"),
    [
        (by_rows, X, {0: 4, 1: 2}),
        (anywhere, X, {0: 4, 1: 2}),
        (jax.vmap(anywhere), X.reshape(4, 2, 6), {0: 2, 1: 2, 2: 3}),
        (jax.vmap(lambda row: by_rows(row[None])[0]), X, {0: 4}),
    ],
)
def test_axes_with_a_name_are_cut(fun, x, in_slices):
    check(fun, x, in_slices=in_slices, shards=4)


def test_parts_of_a_result_are_combined():
    def fun(x):
        like = jax.ShapeDtypeStruct((4,), np.int32)
        return sm.per_piece(
            lambda each: np.histogram(each["x"], 4, (-2, 2))[0],
            like,
            {"x": x},
            axes="i j -> *; i add; j add",
        )

    made = check(fun, X, in_slices={0: 4, 1: 2}, shards=8)
    assert made.shards[0].combiner == "add"
    assert sm.extend.rules_of(fun, X) == "pure_callback: a b -> *; a add; b add"


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: sm.per_piece(3, X, X, axes="i j -> i j"),
            TypeError,
            "per_piece takes a function, got 3",
        ),
        (
            lambda: sm.per_piece(np.sin, X, X, axes="i j"),
            ValueError,
            "a rule has the form 'i j -> i; j add', got 'i j'",
        ),
        (
            lambda: sm.per_piece(np.sin, X, X, axes="i -> i"),
            ValueError,
            r"the rule 'i -> i' of per_piece does not fit the shape \(8, 6\)",
        ),
        (
            lambda: sm.per_piece(np.add, X, X, X, axes="i j -> i j"),
            ValueError,
            "of per_piece has 1 operands, the equation 2",
        ),
        (
            lambda: sm.per_piece(np.sin, X, X.T, axes="i j -> i j"),
            ValueError,
            "does not fit: axis 'i' has the sizes 8 and 6",
        ),
        (
            lambda: sm.per_piece(lambda x: (x, x), X, X, axes="i j -> i j"),
            jax.errors.JaxRuntimeError,
            r"per_piece: .*<lambda> returned PyTreeDef\(\(\*, \*\)\), and result= says "
            r"PyTreeDef\(\*\): return arrays with this structure",
        ),
        (
            lambda: sm.per_piece(as_complex, X, X, axes="i j -> i j"),
            jax.errors.JaxRuntimeError,
            "per_piece: as_complex returned complex64, and result= says float32",
        ),
        (
            lambda: jax.grad(lambda x: by_rows(x).sum())(X),
            ValueError,
            "Pure callbacks do not support JVP",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_a_shard_that_only_calls_a_function_gives_it_what_it_read():
    rows, seen = np.arange(48, dtype=np.float32).reshape(8, 6), []

    def doubled(x):
        seen.append((np.shares_memory(x, rows), x.flags.writeable))
        return x * 2

    def fun(x):
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return sm.per_piece(doubled, like, x, axes="i j -> i j")

    shard_plan = sm.plan(fun, rows, in_slices={0: 2})
    np.testing.assert_array_equal(shard_plan.run(rows), rows * 2)
    assert seen == [(True, False)] * 2
