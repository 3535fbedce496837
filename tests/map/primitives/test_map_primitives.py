"""Map primitives of one's own: bound, traced, and run by rules given to them."""

import functools

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.interpreters import ad, batching, mlir

import shardmap as sm

X = np.arange(8 * 3, dtype=np.float32).reshape(8, 3) / 8

soft_map_p = sm.MapPrimitive("soft_map")


def soft_map(fun, axis_name, in_axes=0, out_axes=0, chunk=4):
    """Maps over an axis in chunks, as soft_pmap did."""

    def mapped(*args):
        size = args[0].shape[in_axes]
        elements = [jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in args]
        closed = jax.make_jaxpr(fun, axis_env=[(axis_name, size)])(*elements)
        (result,) = soft_map_p.bind(
            *args,
            axis_name=axis_name,
            axis_size=size,
            in_axes=(in_axes,) * len(args),
            out_axes=(out_axes,),
            call_jaxpr=closed.jaxpr,
            chunk=chunk,
        )
        return result

    return mapped


def run(*args, axis_name, axis_size, in_axes, out_axes, call_jaxpr, chunk):
    def element(*args):
        return jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(call_jaxpr, ()))(*args)

    if call_jaxpr.effects:  # Its elements need each other.
        return jax.vmap(element, in_axes, list(out_axes), axis_name=axis_name)(*args)
    chunks = [a.reshape(axis_size // chunk, chunk, *a.shape[1:]) for a in args]
    results = lax.map(lambda parts: jax.vmap(element)(*parts), tuple(chunks))
    return [r.reshape(axis_size, *r.shape[2:]) for r in results]


def jvp_rule(primals, tangents, **params):
    tangents = [
        jnp.zeros_like(p) if isinstance(t, ad.Zero) else t
        for p, t in zip(primals, tangents, strict=True)
    ]
    return jax.jvp(lambda *a: run(*a, **params), primals, tuple(tangents))


def batch_rule(args, dims, **params):
    results = jax.vmap(lambda *a: run(*a, **params), dims)(*args)
    return results, [0] * len(results)


soft_map_p.def_impl(run)
ad.primitive_jvps[soft_map_p] = jvp_rule
batching.primitive_batchers[soft_map_p] = batch_rule
mlir.register_lowering(soft_map_p, mlir.lower_fun(run, multiple_results=True))


def centred(x):
    return jnp.sin(x) - lax.pmean(x, "i")


def plain(x):
    return jnp.sin(x) * 2


EXPECTED = {centred: np.sin(X) - X.mean(0, keepdims=True), plain: np.sin(X) * 2}


def one_equation(fun, *args):
    (equation,) = jax.make_jaxpr(fun)(*args).jaxpr.eqns
    return equation


@pytest.mark.parametrize("fun", [centred, plain])
def test_bound_eagerly_and_under_jit(fun):
    mapped = soft_map(fun, "i")
    for f in (mapped, jax.jit(mapped)):
        np.testing.assert_allclose(f(X), EXPECTED[fun], rtol=1e-6)


def test_seen_in_a_jaxpr():
    equation = one_equation(soft_map(centred, "i"), X)
    assert equation.primitive is soft_map_p
    assert set(equation.params) == {
        *("axis_name", "axis_size", "in_axes", "out_axes", "call_jaxpr", "chunk")
    }
    assert equation.params["call_jaxpr"].eqns[0].primitive.name == "sin"
    text = str(jax.make_jaxpr(soft_map(centred, "i"))(X))
    assert "soft_map[" in text
    assert "axis_size=8" in text


@pytest.mark.parametrize(
    ("out_axes", "shape"), [(0, (8, 3)), (1, (3, 8)), (None, (3,))]
)
def test_shapes_of_results(out_axes, shape):
    mapped = soft_map(lambda x: lax.psum(x, "i"), "i", out_axes=out_axes)
    result = jax.eval_shape(mapped, X)
    assert (result.shape, result.dtype) == (shape, jnp.float32)
    np.testing.assert_allclose(jax.jit(mapped)(X), mapped(X), rtol=1e-6)


def test_transformations_by_rules_of_ones_own():
    mapped = soft_map(plain, "i")
    grad = jax.grad(lambda x: mapped(x).sum())
    for f in (grad, jax.jit(grad)):
        np.testing.assert_allclose(f(jnp.asarray(X)), 2 * np.cos(X), rtol=1e-6)
    both = jax.vmap(mapped)(jnp.stack([X, X + 1]))
    np.testing.assert_allclose(both, 2 * np.sin([X, X + 1]), rtol=1e-6)


own_p = sm.MapPrimitive("own")


@own_p.def_impl
def run_own(*args, axis_name, axis_size, in_axes, out_axes, call_jaxpr, note):
    def element(*args):
        return jax.core.eval_jaxpr(call_jaxpr, (), *args)

    return jax.vmap(
        element, in_axes, list(out_axes), axis_name=axis_name, axis_size=axis_size
    )(*args)


def own(x, w):
    row = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    element = jax.make_jaxpr(lambda x, w: plain(x) * w)(row, w).jaxpr
    params = {"axis_name": "i", "axis_size": 8, "in_axes": (0, None), "out_axes": (1,)}
    return own_p.bind(x, w, call_jaxpr=element, note="kept", **params)[0]


W = np.float32([1, 2, 3])
TRANSFORMED = {
    "alone": lambda f: f(X, W),
    "jit": lambda f: jax.jit(f)(X, W),
    "vmap": lambda f: jax.vmap(f, (1, None), 1)(np.stack([X, X + 1], 1), W),
    "grad": lambda f: jax.grad(lambda x, w: f(x, w).sum(), (0, 1))(X, W),
    "jvp": lambda f: jax.jvp(lambda x: f(x, W), (X,), (X + 1,)),
    "linear_transpose": lambda f: jax.linear_transpose(lambda w: f(X, w), W)(X.T),
    "hessian": lambda f: jax.jit(jax.hessian(lambda w: (f(X, w) ** 2).sum()))(W),
    "in a map": lambda f: sm.spmap(f, in_axes=(0, None))(np.stack([X, X + 1]), W),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("use", TRANSFORMED.values(), ids=TRANSFORMED)
def test_every_map_primitive_has_rules(use):
    def expected(x, w):
        return jax.vmap(lambda x, w: plain(x) * w, (0, None), 1)(x, w)

    for result, right in zip(
        jax.tree.leaves(use(own)), jax.tree.leaves(use(expected)), strict=True
    ):
        np.testing.assert_allclose(result, right, rtol=1e-5, atol=1e-5)


def test_transformed_maps_are_of_the_same_primitive():
    jaxpr = jax.make_jaxpr(jax.vmap(own, (0, None)))(np.stack([X, X]), W)
    (equation,) = jaxpr.eqns
    assert equation.primitive is own_p
    assert equation.params["note"] == "kept"
    assert equation.params["in_axes"] == (1, None)


def test_in_a_map_and_around_one():
    inside = sm.spmap(soft_map(plain, "j", chunk=1))
    np.testing.assert_allclose(inside(X), EXPECTED[plain], rtol=1e-6)
    around = soft_map(lambda x: lax.psum(x, "i") + x, "i")
    total = X.sum(0, keepdims=True) + X
    np.testing.assert_allclose(jax.jit(around)(X), total, rtol=1e-6)
    doubled = soft_map(lambda x: sm.spmap(lambda y: 2 * y)(x), "i")
    np.testing.assert_allclose(jax.jit(doubled)(X), 2 * X, rtol=1e-6)


def test_in_loops():
    mapped = soft_map(plain, "i")

    def loop(x):
        return lax.scan(lambda c, _: (mapped(c), c.sum()), x, length=2)[0]

    expected = np.sin(np.sin(X) * 2) * 2
    np.testing.assert_allclose(jax.jit(loop)(X), expected, rtol=1e-5)
    either = lax.cond(True, mapped, lambda x: x, jnp.asarray(X))
    np.testing.assert_allclose(either, EXPECTED[plain], rtol=1e-6)


def test_effects_but_those_of_the_axis_leave_the_map():
    seen = []

    def noted(x):
        io_callback(lambda v: seen.append(float(v)), None, x.sum(), ordered=True)
        return lax.psum(x, "i")

    jaxpr = jax.make_jaxpr(soft_map(noted, "i"))(X)
    assert [type(e).__name__ for e in jaxpr.effects] == ["OrderedIOEffect"]
    assert not jax.make_jaxpr(soft_map(centred, "i"))(X).effects


def test_two_primitives_have_nothing_in_common():
    other_p = sm.MapPrimitive("other")
    assert str(other_p) == "other"
    params = one_equation(soft_map(plain, "i"), X).params
    (result,) = jax.eval_shape(functools.partial(other_p.bind, **params), X)
    assert result.shape == (8, 3)
    with pytest.raises(NotImplementedError, match="'other' not implemented"):
        other_p.bind(X, **params)


def test_a_closed_jaxpr_will_do():
    other_p = sm.MapPrimitive("other")
    closed = jax.make_jaxpr(lambda x: x.sum())(X[0])
    params = one_equation(soft_map(plain, "i"), X).params | {"call_jaxpr": closed}
    (result,) = jax.eval_shape(functools.partial(other_p.bind, **params), X)
    assert result.shape == (8,)


# Errors


def test_a_parameter_that_is_missing():
    params = dict(one_equation(soft_map(plain, "i"), X).params)
    del params["in_axes"], params["call_jaxpr"]
    with pytest.raises(
        TypeError,
        match="2 required keyword-only arguments: 'in_axes' and 'call_jaxpr'",
    ):
        soft_map_p.bind(X, **params)


def test_an_operand_that_does_not_fit():
    params = one_equation(soft_map(plain, "i"), X).params
    message = (
        r"soft_map: an operand of float32\[8,4\] mapped at 0 gives float32\[4\], b"
    )
    with pytest.raises(TypeError, match=message):
        jax.make_jaxpr(functools.partial(soft_map_p.bind, **params))(
            np.zeros((8, 4), np.float32)
        )
