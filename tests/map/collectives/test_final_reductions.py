"""Loops of ``batch_size`` over elements that hold maps: reductions over both axes."""

import collections
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardmap as sm
from tests.map.map_checks import array, assert_close
from tests.map_programs import assert_same, float_index

SHAPE = (12, 4, 3)
X = array(*SHAPE) / 100
W = array(3) / 10


def ends(inner):
    """Functions of an element of the outer map, each with a map in it."""

    def doubly(axes, out_axes=0):
        return lambda w, x: inner(
            lambda w, v: lax.psum(jnp.sin(v * w), axes), out_axes=out_axes
        )(w, x)

    def several(w, x):
        def each(w, v):
            total, scale = lax.psum(v * w, ("j", "i")), jnp.exp(w)
            highest = lax.pmax(v.sum() * float_index("j"), "i")
            return total * scale, v * scale, highest

        total, own, highest = inner(each, out_axes=(None, 1, 0))(w, x)
        return total + highest.sum(), own

    def of_three(w, x):
        def middle(w, v):
            return sm.spmap(
                lambda w, u: lax.pmean(u * w, ("k", "i")) * float_index("j"),
                "k",
                in_axes=(None, 0),
                out_axes=None,
            )(w.sum(), v)

        return inner(middle)(w, x)

    def indices(w, x):
        def each(w, v):
            ones = jnp.ones(())
            index = lax.cond(v[0] > 0.1, lambda: float_index("i"), lambda: -ones)
            return lax.psum(v * w * index, "i") * float_index("j") / 40

        return inner(each)(w, x)

    return {
        "both axes": doubly(("i", "j"), None),
        "both axes, mapped": doubly(("j", "i")),
        "the outer axis": doubly("i"),
        "the outer axis, mapped last": doubly("i", 1),
        "in calls": jax.jit(jax.checkpoint(doubly(("i", "j"), None))),
        "a mean": lambda w, x: jnp.exp(
            inner(lambda w, v: lax.pmean(v @ w, ("i", "j")))(w, x) / 100
        ),
        "largest": lambda w, x: inner(lambda w, v: lax.pmax(v * w, ("i", "j")))(w, x),
        "several": several,
        "of three": of_three,
        "indices": indices,
    }


def spmapped(**options):
    def inner(fun, out_axes=0):
        return sm.spmap(fun, "j", in_axes=(None, 0), out_axes=out_axes, **options)

    return inner


def vmapped(fun, out_axes=0):
    return jax.vmap(fun, in_axes=(None, 0), out_axes=out_axes, axis_name="j")


MESH = sm.make_mesh({"a": 2, "b": 4})
PLACES = {
    "default": ({"batch_size": 1}, {}),
    "a loop in a loop": ({"batch_size": 1}, {"batch_size": 3}),
    "two axes of a mesh": (
        {"mesh": MESH, "mesh_axes": "a", "batch_size": 4},
        {"mesh": MESH, "mesh_axes": "b"},
    ),
    "one device": ({"devices": jax.devices()[:1], "batch_size": 5}, {}),
    "an inner one by the partitioner": ({"batch_size": 1}, {"lowering": "spmd"}),
}
CHANGES = {
    "called": lambda fun: fun,
    "jit": jax.jit,
    "vmap": lambda fun: lambda w, x: jax.vmap(fun, (0, None))(jnp.stack([w, -w]), x),
}


@pytest.mark.few(1)
@pytest.mark.one_in(3)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ends(vmapped))
def test_reductions_in_maps_under_batch_size(name, place, change):
    outer, inner = PLACES[place]
    mapped = sm.spmap(ends(spmapped(**inner))[name], "i", in_axes=(None, 0), **outer)
    expected = jax.vmap(ends(vmapped)[name], in_axes=(None, 0), axis_name="i")
    change = CHANGES[change]
    assert_close(change(mapped)(W, X), change(expected)(W, X))


DIFFERENTIATED = [
    (name, place)
    for name in ends(vmapped)
    for place in PLACES
    if name not in ("largest", "several")
    # What is mapped has a cotangent for each element, which are added up first.
    and (place != "a loop in a loop" or name not in ("both axes, mapped", "a mean"))
]


@pytest.mark.few(1)
@pytest.mark.one_in(3)
@pytest.mark.parametrize("change", ["grad", "hessian", "jvp"])
@pytest.mark.parametrize(("name", "place"), DIFFERENTIATED)
def test_derivatives_of_reductions_in_maps_under_batch_size(name, place, change):
    outer, inner = PLACES[place]

    def derivatives(fun):
        def loss(w, x):
            return (jnp.sin(fun(w, x)) ** 2).sum()

        if change == "jvp":
            return jax.jvp(loss, (W, X), (jnp.cos(W), jnp.cos(X)))
        if change == "hessian":
            return jax.jit(jax.hessian(loss))(W, X)
        return jax.grad(loss, (0, 1))(W, X)

    mapped = sm.spmap(
        ends(spmapped(**inner))[name],
        "i",
        in_axes=(None, 0),
        out_axes=None,
        **outer,
    )
    expected = jax.vmap(
        ends(vmapped)[name], in_axes=(None, 0), out_axes=None, axis_name="i"
    )
    assert_same(derivatives(mapped), derivatives(expected), 1e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("place", PLACES)
def test_a_weight_that_nested_maps_share_has_a_gradient_under_batch_size(place):
    outer, inner = PLACES[place]

    def loss(map_, outer, inner):
        nested = map_(
            map_(
                lambda w, v: jnp.tanh(v @ w), axis_name="j", in_axes=(None, 0), **inner
            ),
            axis_name="i",
            in_axes=(None, 0),
            **outer,
        )
        return lambda w: nested(w, X).sum()

    given = jax.grad(loss(sm.spmap, outer, inner))(W)
    assert_close(given, jax.grad(loss(jax.vmap, {}, {}))(W))


@pytest.mark.parametrize(
    "element",
    [
        lambda v: v - lax.psum(v, ("i", "j")),
        lambda v: lax.psum(v, "i") * float_index("i"),
        lambda v: lax.psum(lax.psum(v, "i"), ("j", "i")),
        lambda v: lax.all_gather(v, "i"),
        lambda v: lax.psum(v, ("i", "j"), axis_index_groups=[[*range(48)]]),
    ],
)
def test_what_needs_all_elements_in_a_map_is_refused(element):
    text = (
        r"batch_size=1 is less than the 2 elements of axis 'i' on each device, but "
        r"(psum|all_gather) over that axis stands in the middle of the function: .* "
        r"Leave batch_size out, give at least 2, or make the collective the last step"
    )
    with pytest.raises(ValueError, match=text):
        sm.spmap(sm.spmap(element, "j"), "i", batch_size=1)(X)


@pytest.mark.few(1)
@pytest.mark.parametrize("batch_size", [1, 2, None])
@pytest.mark.parametrize("size", [3, 12, 19])
def test_what_is_tapped_after_a_reduction_is_by_each_element(size, batch_size):
    seen, lock = collections.Counter(), threading.Lock()

    def note(value):
        with lock:
            seen[float(value)] += 1
        return value + 1

    def element(v):
        total = lax.psum(v, "i")
        more = sm.tap(note, total, result_shape=total)
        inner = sm.spmap(lambda u: sm.tap(note, lax.psum(u, "i") - 1), "j")
        return total * 2, more * total, inner(jnp.stack([v, 2 * v]))

    x = np.arange(size, dtype=np.float32)
    total = x.sum()
    mapped = sm.spmap(
        element,
        "i",
        out_axes=(None, 0, 0),
        batch_size=batch_size,
        devices=jax.devices()[:2],
    )
    same, more, inner = mapped(x)
    sm.taps_barrier()
    assert_close(same, total * 2)
    assert_close(more, np.full(size, (total + 1) * total))
    assert_close(inner, np.full((size, 2), [total - 1, 2 * total - 1]))
    assert seen == {total: size, total - 1: size, 2 * total - 1: size}
