"""What processes tell each other about a program: the same for the same, else not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardmap as sm
from shardmap._jax.walk import equations
from shardmap.map import agreement
from shardmap.map.agreement import description, operations
from shardmap.map.primitives.map_primitive import MapParams, spmap_p
from tests.shared_jaxprs import at_most, nested

X = np.zeros((8, 3), np.float32)


def text(fun, x=X, **options):
    jaxpr = jax.make_jaxpr(sm.spmap(fun, "i", **options))(x).jaxpr
    (params,) = [MapParams.of(e) for e in equations(jaxpr) if e.primitive is spmap_p]
    return description(params)


def test_equal_programs_have_one_text_though_they_are_other_objects():
    assert text(lambda x: x * lax.psum(x, "i")) == text(lambda y: y * lax.psum(y, "i"))


def test_a_text_says_what_is_mapped():
    said = text(jnp.sin, in_axes=1, out_axes=1)
    assert said.startswith(
        "sin, axis 'i' of 3, elements (float32[8]), in_axes (1,), out_axes "
        "(1,), operations "
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: x + 1, lambda x: x * 2),
        (lambda x: lax.psum(x, "i"), lambda x: lax.pmax(x, "i")),
        (
            lambda x: lax.ppermute(x, "i", [(0, 1)]),
            lambda x: lax.ppermute(x, "i", [(1, 0)]),
        ),
        (
            lambda x: lax.psum(x, "i", axis_index_groups=[[0, 1, 2, 3], [4, 5, 6, 7]]),
            lambda x: lax.psum(x, "i", axis_index_groups=[[0, 1, 2, 4], [3, 5, 6, 7]]),
        ),
        (
            lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
            lambda x: lax.cond(x[0] > 0, jnp.cos, jnp.sin, x),
        ),
    ],
    ids=["primitives", "collectives", "permutations", "groups", "branches"],
)
def test_what_differs_is_told_apart(one, other):
    texts = [text(fun) for fun in (one, other)]
    assert len({each.rpartition("operations ")[2] for each in texts}) == 2


def test_what_is_shared_is_read_once_and_told_as_if_it_were_not(monkeypatch):
    monkeypatch.setattr(agreement, "jaxprs_in", at_most(200, agreement.jaxprs_in))
    sines, cosines = (nested(30, leaf, X) for leaf in (jnp.sin, jnp.cos))
    assert operations(sines) != operations(cosines)
    shared = jax.jit(jnp.sin)
    apart = [jax.jit(lambda x: jnp.sin(x)) for _ in range(2)]
    one, other = (
        jax.make_jaxpr(lambda x, f=f, g=g: f(g(x)))(X).jaxpr
        for f, g in ((shared, shared), apart)
    )
    assert operations(one) == operations(other)


def test_objects_in_parameters_are_not_told():
    """The address of a callback is another in every process."""

    def calling():
        return jax.make_jaxpr(
            lambda x: jax.pure_callback(lambda x: x, jax.typeof(x), x)
        )(X).jaxpr

    assert operations(calling()) == operations(calling())
