"""Where a function of one element is cut, to run elements one part after the other."""

import jax
import numpy as np
import pytest
from jax import lax

import shardmap as sm
from shardmap.map.collectives.loop_parts import loop_parts
from shardmap.map.collectives.split_axis import SplitAxis

AXIS = SplitAxis("i", 16, ("d",), 4, 4)
X = jax.ShapeDtypeStruct((3,), np.float32)


def cut(fun, *args, in_axes):
    closed = jax.make_jaxpr(fun, axis_env=[("i", 16)])(*args)
    return loop_parts(closed.jaxpr, AXIS, in_axes, 2)


def names(jaxpr):
    return [equation.primitive.name for equation in jaxpr.eqns]


def test_what_comes_before_and_after_a_sum():
    parts = cut(
        lambda x, w: (lax.psum(lax.sin(x), "i") * w, lax.cos(x)),
        X,
        X,
        in_axes=(0, None),
    )
    assert names(parts.before) == ["sin", "cos"]
    assert names(parts.after) == ["mul"]
    assert [len(parts.before.invars), len(parts.after.invars)] == [3, 2]
    assert len(parts.reductions) == 1
    assert parts.made_by == ["after", "before"]


def test_what_all_elements_have_alike_goes_with_a_sum():
    parts = cut(
        lambda x, w: (lax.psum(lax.sin(x), "i") * lax.exp(lax.cos(w)), x * lax.tan(w)),
        X,
        X,
        in_axes=(0, None),
    )
    assert names(parts.after) == ["cos", "exp", "mul"]
    assert "tan" in names(parts.before)


def test_a_map_is_cut_where_it_reduces_over_the_axis():
    def element(x, w):
        def each(v):
            total = lax.psum(lax.sin(v), ("j", "i"))
            return lax.cos(total) * w, lax.pmax(lax.tan(v), "i"), v

        return sm.spmap(each, "j", out_axes=(None, 0, 0))(x)

    parts = cut(element, X, X.update(shape=()), in_axes=(0, None))
    assert names(parts.before) == ["spmap"]
    assert names(parts.before.eqns[0].params["call_jaxpr"]) == ["sin", "tan", "psum"]
    assert [e.params["axes"] for e in parts.reductions] == [("i",), ("i",)]
    assert [e.invars[0].aval.shape for e in parts.reductions] == [(), (3,)]
    assert names(parts.after) == ["spmap"]
    assert names(parts.after.eqns[0].params["call_jaxpr"]) == ["cos", "mul"]
    assert parts.made_by == ["after", "after", "before"]


def test_what_calls_the_host_after_a_sum_is_for_each_element():
    def element(x, w):
        total = lax.psum(x, "i")
        seen = sm.tap(np.sin, total * w, result_shape=X)
        return lax.cos(seen), lax.exp(total), x

    parts = cut(element, X, X, in_axes=(0, None))
    assert names(parts.after) == ["mul", "exp"]
    assert names(parts.each_after) == ["tap", "cos"]
    assert parts.made_by == ["each_after", "after", "before"]


def test_an_element_s_index_is_an_argument():
    parts = cut(lambda x: x * lax.axis_index("i").astype(x.dtype), X, in_axes=(0,))
    assert "axis_index" not in names(parts.before)
    index = parts.before.invars[0]
    assert index.aval.dtype == np.int32
    assert any(index in equation.invars for equation in parts.before.eqns)


@pytest.mark.parametrize(
    ("fun", "collective"),
    [
        (lambda x: x - lax.pmax(x, "i"), "pmax"),
        (lambda x: lax.all_gather(x, "i"), "all_gather"),
        (lambda x: lax.psum(lax.psum(x, "i"), "i"), "psum"),
        (lambda x: lax.psum(x, "i", axis_index_groups=[[*range(16)]]), "psum"),
    ],
    ids=["in the middle", "no reduction", "of a sum", "in groups"],
)
def test_what_needs_all_elements_at_once_is_refused(fun, collective):
    with pytest.raises(
        ValueError,
        match=r"batch_size=2 is less than the 4 elements of axis 'i' on each device, "
        rf"but {collective}.* over that axis stands in the middle of the function: .*"
        r"Leave batch_size out, give at least 4, or make the collective the last step",
    ):
        cut(fun, X, in_axes=(0,))
