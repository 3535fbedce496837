"""What grad, jvp and checkpoint make of a map, and what they leave as it is."""

import functools

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardmap as sm
from tests.map_programs import (
    assert_same,
    both_lowerings,
    collectives_of,
    maps_in,
    same_under_vmap,
    spread,
)

X = spread((4, 3))


@both_lowerings
def test_a_gradient_is_one_map_forward_and_one_backward(spmap):
    fun = spmap(lambda x, w: jnp.sin(x * w), in_axes=(0, None))
    equations = maps_in(jax.grad(lambda x, w: fun(x, w).sum(), (0, 1)), X, X[0])
    assert len(equations) == 2
    forward, backward = equations
    assert forward.params["in_axes"] == (0, None)
    # The cotangents lie as the operands do.
    assert backward.params["out_axes"] == (0, None)


@pytest.mark.few(4)
@both_lowerings
@pytest.mark.parametrize(
    ("transform", "count"),
    [
        (lambda fun: lambda x: jax.jvp(fun, (x,), (x,)), 2),
        (lambda fun: jax.jacrev(lambda x: fun(x).sum()), 2),
        (lambda fun: jax.grad(jax.checkpoint(lambda x: fun(x).sum())), 3),
        (lambda fun: jax.hessian(lambda x: fun(x).sum()), 4),
        (lambda fun: jax.vmap(fun, in_axes=1), 1),
        (jax.jit, 1),
    ],
    ids=["jvp", "jacrev", "checkpoint", "hessian", "vmap", "jit"],
)
def test_how_many_maps_a_transformation_makes(spmap, transform, count):
    fun = spmap(lambda x: jnp.sin(x) * lax.psum(x, "i"), "i")
    equations = maps_in(transform(fun), X)
    assert len(equations) == count


@both_lowerings
def test_residuals_stay_mapped_and_are_not_copied(spmap):
    fun = spmap(
        lambda x, w: jnp.exp(x) * w + jnp.sin(x) * 2.0,
        in_axes=(1, None),
        out_axes=1,
    )
    jaxpr = jax.make_jaxpr(lambda x, w: jax.linearize(fun, x, w)[1](x, w))(X.T, X[0])
    forward, tangent = (e for e in jaxpr.jaxpr.eqns if e.primitive is sm.spmap_p)
    operands = forward.invars
    # w is a residual: the tangent map takes the operand itself, unmapped.
    (place,) = [k for k, var in enumerate(tangent.invars[:-2]) if var is operands[1]]
    assert tangent.params["in_axes"][place] is None
    computed = len(forward.outvars) - 1
    assert forward.params["out_axes"] == (1, *[0] * computed)
    inner = forward.params["call_jaxpr"]
    made = [var for var in inner.outvars if isinstance(var, jex_core.Var)]
    assert len(set(made)) == len(made)
    assert not set(inner.outvars[1:]) & set(inner.invars)


@both_lowerings
def test_a_result_that_is_a_residual_is_not_given_twice(spmap):
    equations = maps_in(
        lambda x: jax.linearize(spmap(jnp.exp), x)[1](x), jnp.asarray(X)
    )
    assert len(equations[0].outvars) == 1
    assert equations[1].invars[0] is equations[0].outvars[0]


@pytest.mark.few(1)
@pytest.mark.parametrize("out_axes", [0, 1, (1, None)])
def test_a_result_that_is_a_residual_lies_as_the_result_does(out_axes):
    def build(map_):
        mapped = map_(
            lambda x: (jnp.exp(x), jnp.tanh(lax.psum(x, "i"))),
            axis_name="i",
            out_axes=out_axes,
        )
        return jax.grad(lambda x: (mapped(x)[0] ** 2).sum() + mapped(x)[1].sum())

    same_under_vmap(build, X)


@both_lowerings
def test_residuals_do_not_move_between_devices(spmap):
    devices = jax.devices()[:4]

    def loss(x):
        fun = spmap(lambda x: jnp.sin(x) * jnp.cos(x * x), devices=devices)
        return (fun(x) ** 2).sum()

    lying = jax.device_put(X, sm.pmap_sharding(X.shape, devices=devices))
    assert collectives_of(jax.grad(loss), lying) == {}


@both_lowerings
def test_integers_make_no_tangents(spmap):
    fun = spmap(lambda x, n, k: (x * n.astype(x.dtype), n + 1, k))
    n, keys = np.arange(4), jax.random.split(jax.random.key(0), 4)
    tangent = maps_in(lambda x: jax.jvp(lambda x: fun(x, n, keys)[0], (x,), (x,)), X)[1]
    assert all(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in tangent.outvars)


@both_lowerings
def test_nothing_active_makes_no_tangent_map(spmap):
    fun = spmap(lambda x, w: x)
    assert len(maps_in(jax.grad(lambda w: (fun(X, X) + w).sum()), 1.0)) == 1


@pytest.mark.few(1)
@both_lowerings
def test_all_to_all_that_moves_a_dimension_has_a_gradient(spmap):
    # JAX's own rule gives a cotangent of the wrong shape.
    mapped = spmap(lambda x: lax.all_to_all(x, "i", 0, 1), "i")
    weights = spread((4, 3, 4), 1.0)
    gradient = jax.grad(lambda x: (mapped(x) * weights).sum())(spread((4, 4, 3)))
    assert_same(gradient, jnp.asarray(weights.transpose(2, 0, 1)))


@jax.custom_vjp
def unit(x):
    """Its backward function gives no 0 for 0."""
    return x


unit.defvjp(lambda x: (x, None), lambda _, ct: (ct / jnp.linalg.norm(ct) + 1,))


@jax.custom_vjp
def total(x):
    return lax.psum(x, "i")


total.defvjp(lambda x: (total(x), None), lambda _, ct: (ct,))


def doubled(x):
    kept = jax.new_ref(x * x)
    kept[...] = unit(kept[...] * 2)
    return kept[...]


def scanned(w, x):
    def step(carry, _):
        shared, own = carry
        own = own * unit(shared) + lax.pmean(own, "i")
        return (unit(shared * 2), own), None

    return lax.scan(step, (w, x), length=2)[0]


SHARED = {
    "an argument and its sum": lambda w, x: w + lax.psum(w, "i"),
    "a sum and its sum": lambda w, x: (
        lambda s: s * w + lax.psum(s * x * s, "i") + lax.psum(s, "i")
    )(lax.psum(w * x, "i")),
    "selected": lambda w, x: (
        lax.psum(jnp.where(w > 0, x, w), "i") + jnp.where(w > 0, lax.pmean(w, "i"), w)
    ),
    "a reference": lambda w, x: lax.psum(w * doubled(x), "i"),
    "a backward function of a gather": lambda w, x: (
        unit(lax.all_gather(x * w, "i")).sum(0) + unit(w)
    ),
    "one in a loop": lambda w, x: lax.psum(scanned(w, x)[1], "i"),
    "one in a branch": lambda w, x: lax.psum(
        lax.cond(w[0] > 0, lambda w: unit(w) + lax.psum(x * w, "i"), unit, w), "i"
    ),
    "one in a checkpoint": lambda w, x: jax.checkpoint(
        lambda w, x: lax.psum(x * unit(w), "i") + unit(w)
    )(w, x),
    "one of a sum of its own": lambda w, x: total(x * w) * jnp.sin(w),
    "one of a sum in a loop": lambda w, x: lax.scan(
        lambda carry, _: (total(jnp.sin(carry * x)), None), w, length=2
    )[0],
    "one of a result": lambda w, x: unit(lax.psum(jnp.sin(x * w), "i")) * w,
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", SHARED)
def test_gradients_of_what_elements_share(name):
    def build(map_):
        options = {"axis_name": "i", "in_axes": (None, 0), "out_axes": None}
        mapped = map_(SHARED[name], **options)
        return jax.grad(lambda w, x: jnp.sin(mapped(w, x)).sum(), (0, 1))

    same_under_vmap(build, X[0], X)


def test_custom_vjp_with_static_and_integer_arguments():
    def build(map_):
        @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
        def scaled(n, x, k):
            return x * n * k

        scaled.defvjp(
            lambda n, x, k: (scaled(n, x, k), (x, k)),
            lambda n, residuals, ct: (7 * n * ct * residuals[0], None),
        )
        mapped = map_(lambda x: scaled(3, x, 2) * lax.psum(x, "i"), axis_name="i")
        return jax.grad(lambda x: mapped(x).sum())

    same_under_vmap(build, X)


@pytest.mark.few(1)
@both_lowerings
def test_custom_vjp_sees_the_cotangent_of_its_own_element(spmap):
    # As under jax.pmap. jax.vmap adds the cotangents of what no element owns.
    weights = jnp.arange(4.0)
    mapped = spmap(lambda x, k: total(x) * k, "i")
    gradient = jax.grad(lambda x: mapped(x, weights).sum())(jnp.ones(4))
    assert gradient.tolist() == [0, 1, 2, 3]


@pytest.mark.deep
def test_custom_jvp_that_closes_over_a_tracer():
    def build(map_):
        def fun(w, x):
            @jax.custom_jvp
            def scaled(x):
                return x * w

            scaled.defjvp(lambda p, t: (p[0] * w, 3 * t[0] * w))
            return map_(lambda x: scaled(x))(x).sum()

        return jax.grad(fun, 1)

    same_under_vmap(build, X[0], X)


@pytest.mark.few(1)
@both_lowerings
def test_a_while_loop_has_forward_derivatives_only(spmap):
    def fun(x):
        def step(state):
            return state[0] + 1, jnp.sin(state[1]) + lax.psum(state[1], "i")

        return lax.while_loop(lambda state: state[0] < 3, step, (0, x))[1]

    def build(map_):
        mapped = map_(fun, axis_name="i")
        return lambda x: jax.jvp(mapped, (x,), (x + 1,))

    same_under_vmap(build, X)
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jax.grad(lambda x: spmap(fun, "i")(x).sum())(X)


def test_the_gradient_of_a_map_without_mapped_axes_is_exact():
    """It is not divided by the number of elements and multiplied again."""
    axes: dict = {"in_axes": None, "out_axes": None}
    small = np.float16(6e-8)
    [got] = jax.vjp(sm.spmap(lambda x: x * 1, "i", axis_size=8, **axes), small)[1](
        small
    )
    assert got == small
    gradient = jax.grad(sm.spmap(lambda x: x * x, "i", axis_size=7, **axes))(3.0)
    assert (gradient, gradient.weak_type) == (6, True)


@jax.custom_vjp
def sine(x):
    return jnp.sin(x)


sine.defvjp(
    lambda x: (jnp.sin(x), jnp.cos(x)), lambda c, g: (c * g,), optimize_remat=True
)


@both_lowerings
def test_a_custom_vjp_without_its_residuals(spmap):
    x = spread((16,))
    result = spmap(lambda x: jax.jit(lambda x: jax.vjp(sine, x)[0])(x))(x)
    assert_same(result, np.sin(x))
    twice = spmap(jax.checkpoint(lambda x: sine(sine(x))))
    slopes = jax.grad(lambda x: twice(x).sum())(x)
    assert_same(slopes, np.cos(np.sin(x)) * np.cos(x))
