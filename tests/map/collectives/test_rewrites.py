"""Collectives as XLA takes them best: tiled, of float32 on CPU, and summed once."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import shardmap as sm
from shardmap._jax.walk import equations
from shardmap.map.collectives.rewrites import (
    merge_sums,
    without_sums_of_shared,
)


def traced(fun, *shapes, dtype=np.float32):
    structs = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return jax.make_jaxpr(fun, axis_env=[("i", 4)])(*structs).jaxpr


def named(jaxpr, name):
    return [e for e in equations(jaxpr) if e.primitive.name.startswith(name)]


def test_a_sum_of_an_inner_map_s_sum_is_one():
    inner = sm.spmap(lambda x: lax.psum(x, "j"), "j", out_axes=None)
    jaxpr = traced(lambda x: lax.psum(inner(x), "i"), (2,))
    merged = merge_sums(jaxpr, "i")
    assert [e.params["axes"] for e in named(merged, "psum")] == [("j", "i")]


def test_a_sum_that_the_function_goes_on_with_stays():
    inner = sm.spmap(lambda x: lax.psum(x, "j"), "j", out_axes=None)

    def fun(x):
        summed = lax.psum(inner(x), "i")
        return summed, summed * 2

    assert merge_sums(jaxpr := traced(fun, (2,)), "i") is jaxpr


def test_sums_of_what_all_elements_have_alike_are_products():
    def fun(x, w):
        of_all = lax.psum(jnp.cos(w), "i") + lax.psum(w, ("i", "j"))
        index = lax.axis_index("i").astype(w.dtype)
        called = jax.jit(lambda w: (lax.psum(w, "i"), w * 2))(w)
        of_all += called[0] + lax.psum(called[1], "i")
        return of_all + lax.psum(x * w, "i") + lax.psum(index * w, "i")

    structs = [jax.ShapeDtypeStruct((2,), np.float32)] * 2
    jaxpr = jax.make_jaxpr(fun, axis_env=[("i", 4), ("j", 3)])(*structs).jaxpr
    changed = without_sums_of_shared(jaxpr, "i", 4, (0, None))
    assert [e.params["axes"] for e in named(changed, "psum")] == [
        ("j",),
        ("i",),
        ("i",),
    ]

    def mapped(jaxpr):
        inner = jax.vmap(
            lambda x, w: jax.core.eval_jaxpr(jaxpr, (), x, w)[0],
            (0, None),
            axis_name="i",
        )
        return jax.vmap(inner, axis_name="j")(
            np.arange(24, dtype=np.float32).reshape(3, 4, 2),
            np.arange(6, dtype=np.float32).reshape(3, 2),
        )

    np.testing.assert_allclose(mapped(changed), mapped(jaxpr), rtol=1e-6)


def test_sums_in_maps_are_products_where_all_elements_have_them_alike():
    def fun(w):
        inner = sm.spmap(
            lambda s, w: (lax.psum(s * w, ("i", "j")), lax.psum(w, "j")),
            "j",
            in_axes=(0, None),
            out_axes=None,
        )
        total, own = inner(jnp.arange(3, dtype=w.dtype), w)
        return total, lax.psum(own, "i")

    changed = without_sums_of_shared(traced(fun, (2,)), "i", 4, (None,))
    assert [e.params["axes"] for e in named(changed, "psum")] == [("j",), ("j",)]
    assert changed.effects == set()


def test_what_elements_sent_each_other_is_added_up():
    def fun(w):
        moved = lax.ppermute(w, "i", [(0, 1)])
        return lax.psum(moved, "i")

    changed = without_sums_of_shared(traced(fun, (2,)), "i", 4, (None,))
    assert [e.params["axes"] for e in named(changed, "psum")] == [("i",)]


def test_products_of_more_elements_than_half_precision_counts():
    jaxpr = jax.make_jaxpr(lambda w: lax.psum(w, "i"), axis_env=[("i", 100_000)])(
        jax.ShapeDtypeStruct((), np.float16)
    ).jaxpr
    changed = without_sums_of_shared(jaxpr, "i", 100_000, (None,))
    (product,) = jax.core.eval_jaxpr(changed, (), np.float16(1e-3))
    assert product.dtype == np.float16
    np.testing.assert_allclose(np.float32(product), 100, rtol=1e-3)
