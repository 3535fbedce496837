"""Functions as the jaxprs that maps carry, and what their vectorisation makes of it."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardmap.map import tracing
from shardmap.map.tracing import Batch, Flattened, trace_body
from tests.map_programs import assert_same, both_lowerings, same_under_vmap, spread

ROWS = spread((4, 3))
X = jax.core.ShapedArray((3,), np.dtype(np.float32))


def test_constants_become_the_first_inputs():
    held = jnp.arange(3.0)
    body = trace_body(lambda x: {"sum": x + held}, [X], "i", 4)
    assert body.constants == (held,)
    assert len(body.jaxpr.invars) == 2
    assert not body.jaxpr.constvars
    assert body.out_tree == jax.tree.structure({"sum": 0})


def test_the_same_function_gives_the_same_jaxpr():
    def f(x):
        return x + 1

    one, other = (trace_body(f, [X], "i", 4) for _ in range(2))
    assert one.jaxpr is other.jaxpr


def test_inside_a_map_its_axis_and_facts_are_bound():
    seen = []
    fact = tracing.MeshAxisMarker("a")

    def f(x):
        names = ("i", "j", fact, tracing.MeshAxisMarker("b"))
        seen.append([tracing.inside_map(), *map(tracing.is_bound, names)])
        return x * lax.axis_size("i")

    trace_body(f, [X], "i", 4, facts=[fact])
    assert seen == [[True, True, False, True, False]]
    assert not tracing.inside_map()


def test_under_axis_gives_what_the_function_gives():
    assert tracing.under_axis(lambda: lax.axis_size("i"), "i", 5) == 5


@pytest.mark.deep
def test_what_is_kept_for_a_jaxpr_goes_with_it():
    made = []

    @tracing.per_jaxpr
    def size(jaxpr, factor):
        made.append(factor)
        return len(jaxpr.eqns) * factor

    body = trace_body(lambda x: x + 1, [X], "i", 4)
    assert [size(body.jaxpr, k) for k in (2, 2, 3)] == [2, 2, 3]
    assert made == [2, 3]
    gone = weakref.ref(body.jaxpr)
    del body
    jax.clear_caches()
    gc.collect()
    assert gone() is None


def test_which_results_are_batched():
    body = trace_body(lambda x, y: (x + 1, lax.psum(x, "b"), y, x * y), [X, X], "b", 2)
    batched = tracing.batched_results(body.jaxpr, Batch("b", 2), (0, None))
    assert batched == (True, False, False, True)


def test_users_classes_are_only_made_of_arrays():
    tree = jax.tree.structure([0, 0])
    flat = Flattened([X, X], tree)
    leaves, structure = jax.tree.flatten(flat)
    assert leaves == [X, X]
    assert jax.tree.unflatten(structure, leaves).tree == tree


@pytest.mark.few(1)
@both_lowerings
def test_closed_over_arrays(spmap):
    elsewhere = jax.device_put(jnp.arange(3.0), jax.devices()[5])
    host = np.arange(3, dtype=np.float32)
    expected = jnp.asarray(ROWS * host + host)
    mapped = spmap(lambda x: x * elsewhere + host)
    assert_same(mapped(ROWS), expected)
    assert_same(jax.jit(mapped)(ROWS), expected)
    assert_same(jax.vmap(mapped)(ROWS[None]), expected[None])


@pytest.mark.few(1)
@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.jacfwd])
def test_closed_over_tracers(transform):
    def build(map_):
        def fun(w):
            mapped = map_(lambda x: lax.psum(jnp.sin(x * w), "i") * x, axis_name="i")
            return (mapped(ROWS) ** 2).sum()

        return transform(fun)

    same_under_vmap(build, ROWS[0])


def test_closed_over_tracers_of_vmap_and_scan():
    def build(map_):
        def fun(w):
            mapped = map_(lambda x: lax.psum(jnp.sin(x * w), "i") * x, axis_name="i")
            return mapped(ROWS).mean(0)

        def looped(w):
            return lax.scan(lambda w, _: (fun(w), w), w, None, length=3)

        return lambda w: (jax.vmap(fun)(w), looped(w[0]))

    same_under_vmap(build, spread((2, 3)))


def test_closed_over_results_of_another_map():
    def build(map_):
        def fun(x, w):
            scaled = map_(lambda x: x * w)(x)
            again = map_(lambda y: y * lax.psum(scaled.sum() * y, "i"), axis_name="i")
            return again(x).sum()

        return jax.grad(fun, (0, 1))

    same_under_vmap(build, ROWS, ROWS[0])
