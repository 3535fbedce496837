"""The map primitive: its equation, and everything that can flow through a map."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import source_info_util

import shardmap as sm
from tests.command_line import python
from tests.map_programs import (
    assert_same,
    both_lowerings,
    mixed,
    same_under_vmap,
    spread,
)

X = spread((4, 3))
RING = [(k, (k + 1) % 4) for k in range(4)]


# The equation


def one_map(fun, *args):
    """The only equation of a function's jaxpr."""
    (equation,) = jax.make_jaxpr(fun)(*args).jaxpr.eqns
    assert equation.primitive is sm.spmap_p
    return equation


@both_lowerings
def test_parameters(spmap):
    fun = spmap(
        lambda x, w: (x * w, lax.psum(x, "i")), "i", in_axes=(1, None), out_axes=(1, 0)
    )
    params = one_map(fun, X.T, X[0]).params
    assert params["axis_name"] == "i"
    assert params["axis_size"] == 4
    assert params["in_axes"] == (1, None)
    assert params["out_axes"] == (1, 0)
    inner = params["call_jaxpr"]
    assert [v.aval.shape for v in inner.invars] == [(3,), (3,)]
    assert [e.primitive.name for e in inner.eqns] == ["mul", "psum"]
    assert params["mesh"].devices.ravel().tolist() == jax.devices()
    assert params["mesh_axes"] == ("i",)


@both_lowerings
def test_the_text_of_a_jaxpr(spmap):
    def times_two(x):
        return x * 2.0

    text = str(jax.make_jaxpr(spmap(times_two, "rows"))(X))
    for part in ("spmap[", "axis_name=rows", "axis_size=4", "in_axes=(0,)"):
        assert part in text
    assert "name=times_two" in text


@both_lowerings
def test_jax_names_the_line_of_the_user_s(spmap):
    """In jaxprs, compiled programs and errors, and no line of this package."""

    def here(x):
        return spmap(lambda x: x * 2)(x)

    (equation,) = jax.make_jaxpr(here)(X).eqns
    line = here.__code__.co_firstlineno + 1
    assert source_info_util.summarize(equation.source_info).startswith(
        f"{__file__}:{line}:"
    )


@both_lowerings
def test_the_axis_name_does_not_leave_the_map(spmap):
    jaxpr = jax.make_jaxpr(spmap(lambda x: lax.psum(x, "i"), "i"))(X)
    assert not jaxpr.effects


@both_lowerings
def test_a_name_of_an_axis_around_leaves_the_map(spmap):
    fun = spmap(lambda x: lax.psum(x, ("i", "outer")), "i")
    jaxpr = jax.make_jaxpr(fun, axis_env=[("outer", 2)])(X)
    assert {effect.name for effect in jaxpr.effects} == {"outer"}


@pytest.mark.few(1)
@both_lowerings
def test_bind(spmap):
    params = one_map(spmap(mixed), X, X).params
    results = sm.spmap_p.bind(X, X, **params)
    assert_same(results, [mixed(jnp.asarray(X), X)])


def own_map(x):
    """A map bound by hand, with the parameters that every map has."""
    element = jax.make_jaxpr(lambda x: x * lax.psum(x, "i"), axis_env=[("i", len(x))])(
        x[0]
    )
    (result,) = sm.spmap_p.bind(
        x,
        axis_name="i",
        axis_size=len(x),
        in_axes=(0,),
        out_axes=(0,),
        call_jaxpr=element.jaxpr,
    )
    return result


def test_bind_with_the_parameters_that_every_map_has():
    expected = X * X.sum(0)
    np.testing.assert_allclose(own_map(X), expected, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(own_map)(X), expected, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(own_map, 1, 1)(X), expected, rtol=1e-6)
    gradient = jax.grad(lambda x: own_map(x).sum())(X)
    np.testing.assert_allclose(gradient, np.stack([2 * X.sum(0)] * 4), rtol=1e-6)
    inside = sm.spmap(own_map)(np.stack([X] * 8))
    np.testing.assert_allclose(inside, np.stack([expected] * 8), rtol=1e-6)


def test_the_rules_come_with_the_primitive():
    program = """
import jax, numpy as np, shardmap as sm
element = jax.make_jaxpr(lambda x: x * x)(0.0).jaxpr
def square(x):
    return sm.spmap_p.bind(x, axis_name="i", axis_size=2, in_axes=(0,), out_axes=(0,),
                           call_jaxpr=element)[0]
x = np.ones(2, np.float32)
print(square(x), jax.jit(square)(x), jax.grad(lambda x: square(x).sum())(x))
"""
    run = python("-c", program, JAX_PLATFORMS="cpu")
    assert run.stdout == "[1. 1.] [1. 1.] [2. 2.]\n", run.stderr


# Values


DTYPES = "bool uint8 complex64 bfloat16 float8_e4m3fn".split()


def test_dtypes_in_through_and_out():
    x = jnp.asarray(np.arange(8).reshape(4, 2) % 3)

    def build(map_):
        def fun(x):
            moved = lax.all_gather(x, "i"), lax.ppermute(x, "i", RING)
            return x, moved, jnp.abs(x).astype(jnp.float32) * 2

        return map_(lambda xs: jax.tree.map(fun, xs), axis_name="i")

    same_under_vmap(build, {dtype: x.astype(dtype) for dtype in DTYPES}, compiled=False)


@pytest.mark.few(1)
@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "complex64"])
@pytest.mark.parametrize("out_axes", [0, None])
def test_derivatives_of_dtypes(dtype, out_axes):
    x = jnp.asarray(spread((4, 2))).astype(dtype)

    def build(map_):
        mapped = map_(
            lambda x: lax.pmean(jnp.sin(x) * x, "i"), axis_name="i", out_axes=out_axes
        )
        return jax.grad(lambda x: jnp.abs(mapped(x)).sum().astype(jnp.float32))

    same_under_vmap(build, x)


@pytest.mark.deep
def test_double_precision():
    with jax.enable_x64(True):
        same_under_vmap(
            lambda map_: jax.grad(
                lambda x: map_(lambda x: mixed(x, lax.psum(x, "i")), axis_name="i")(
                    x
                ).sum()
            ),
            np.linspace(0, 1, 4),
        )


@pytest.mark.few(1)
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_keys_in_through_and_out(impl):
    keys = jax.random.split(jax.random.key(0, impl=impl), (4, 2))

    def fun(keys):
        moved = lax.all_gather(keys, "i")
        return keys, moved[1], jax.random.split(keys[0]), jax.random.key_data(keys)

    same_under_vmap(lambda map_: map_(fun, axis_name="i"), keys)


@pytest.mark.deep
def test_vmapped_random_keys():
    keys = jax.random.split(jax.random.key(0), (3, 4))
    same_under_vmap(
        lambda map_: jax.vmap(map_(lambda k: (k, jax.random.uniform(k, (2,))))), keys
    )


@pytest.mark.deep
def test_integers_have_float0_gradients():
    def build(map_):
        mapped = map_(lambda x, n: (x * n.astype(x.dtype), n + 1), in_axes=(0, 0))
        return jax.grad(lambda x, n: mapped(x, n)[0].sum(), (0, 1), allow_int=True)

    same_under_vmap(build, X, np.arange(12).reshape(4, 3))


@both_lowerings
def test_float0_tangents(spmap):
    n = np.arange(4)
    tangents = X, np.zeros(4, jax.dtypes.float0)
    fun = spmap(lambda x, n: (x * n.astype(x.dtype), n))
    values, (tangent, none) = jax.jvp(fun, (X, n), tangents)
    assert_same(values, (jnp.asarray(X * n[:, None]), jnp.asarray(n)))
    assert_same(tangent, jnp.asarray(X * n[:, None]))
    assert none.dtype == jax.dtypes.float0


def test_weak_types():
    same_under_vmap(lambda map_: map_(lambda x: (x.sum() * 0 + 1, 3.0, 1, True)), X)


@both_lowerings
def test_no_results(spmap):
    assert spmap(lambda x: None)(X) is None
    assert jax.jit(spmap(lambda x: {"a": ()}))(X) == {"a": ()}
    gradient = jax.grad(lambda x: (spmap(lambda x: ())(x), x.sum())[1])
    assert gradient(X).tolist() == np.ones((4, 3)).tolist()


@both_lowerings
def test_results_that_are_operands_or_constants(spmap):
    table = np.arange(3)
    mapped = spmap(lambda x, w: (x, w, x, table, 2.0), in_axes=(0, None))
    same, whole, again, rows, number = mapped(X, X[0])
    assert_same((same, again), (jnp.asarray(X), jnp.asarray(X)))
    assert_same(whole, jnp.asarray(np.stack([X[0]] * 4)))
    assert rows.tolist() == [[0, 1, 2]] * 4
    assert number.tolist() == [2.0] * 4


@pytest.mark.few(1)
@both_lowerings
def test_no_tracer_leaks(spmap):
    with jax.checking_leaks():
        mapped = spmap(lambda x: mixed(x, lax.psum(x, "i")), "i")
        gradient = jax.jit(jax.vmap(jax.grad(lambda x: mapped(x).sum())))
        assert gradient(X[None]).shape == (1, 4, 3)


# Effects


def test_custom_root_inside_is_differentiated():
    """Its derivative is made of what JAX lowers in two steps."""

    def root(a):
        def newton(f, x):
            return jax.lax.fori_loop(0, 20, lambda _, x: x - f(x) / (2 * x), x)

        return jax.lax.custom_root(
            lambda x: x * x - a, 1.0, newton, lambda g, y: y / g(1.0)
        )

    a = np.full(8, 4.0, np.float32)
    gradient = jax.grad(lambda a: sm.spmap(root)(a).sum())(a)
    np.testing.assert_allclose(gradient, np.full(8, 0.25), rtol=1e-6)
