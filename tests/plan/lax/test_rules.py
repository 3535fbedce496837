"""Every rule of the table, compared with the function that is not cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params, primitives

from shardmap.plan.lax.table import CALLS, TABLE, WHEN_CUT
from shardmap.plan.plan import plan
from tests.plan.plan_programs import SINGLE, X, conv, reals

SLOW = {  # To compile.
    *("igamma", "igammac", "polygamma", "regularized_incomplete_beta", "zeta"),
    *("random bits", "random bytes", "random split", "digamma", "lgamma"),
}
PUBLIC = [getattr(primitives, name) for name in dir(primitives) if name.endswith("_p")]
# Not in a program of SINGLE: refused or whole by name, only made by differentiation, in
# newer JAX, or in programs of their own in other tests.
ELSEWHERE = """
    after_all all_gather all_to_all axis_index call closed_call create_token custom_lin
    get pmax pmin ppermute psum ragged_all_to_all swap custom_vjp_call
    custom_linear_solve approx_top_k eig hessenberg householder_product schur
    tridiagonal tridiagonal_solve device_put sharding_constraint stop_gradient name copy
    eq_to le_to lt_to igamma_grad_a threefry2x32 add_any empty2 reduce_xor reduce_window
    reduce_window_min select_and_gather_add select_and_scatter select_and_scatter_add
    random_gamma rng_bit_generator rng_uniform log2 one_minus_square polynomial empty
    random_bits eval_jaxpr
""".split()


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation.primitive
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


@pytest.mark.parametrize("primitive", PUBLIC, ids=str)
def test_every_public_primitive_has_a_rule(primitive):
    assert (
        primitive in TABLE.makers
        or primitive in CALLS.jaxprs
        or primitive in CALLS.rewrites
    )


def test_every_rule_is_in_a_program():
    seen = set()
    for program in SINGLE.values():
        seen.update(equations(jax.make_jaxpr(program.fun)(*program.args)))
    ruled = {*TABLE.makers, *CALLS.jaxprs, *WHEN_CUT} & set(PUBLIC)
    missing = {q.name for q in ruled - seen} - set(ELSEWHERE)
    assert missing == set()


@st.composite
def cuts(draw, args):
    """A cut of some axes of some arguments, at least one."""
    axes = [(k, a) for k, x in enumerate(args) for a, n in enumerate(x.shape) if n > 1]
    chosen = draw(st.lists(st.sampled_from(axes), min_size=1, max_size=3, unique=True))
    found = [{} for _ in args]
    for k, axis in chosen:
        size = args[k].shape[axis]
        points = draw(st.sets(st.integers(1, size - 1), min_size=1, max_size=3))
        lengths = tuple(np.diff([0, *sorted(points), size]).tolist())
        found[k][axis] = draw(st.sampled_from([lengths, min(len(lengths), size)]))
    return tuple(found)


def assert_same(got, want, tolerance=2e-5):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(
            np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("name", SINGLE)
def test_any_cut_gives_the_same_result(name):
    program = SINGLE[name]
    want = jax.jit(program.fun)(*program.args)

    @settings(max_examples=1 if name in SLOW else 2)
    @given(cuts(program.args))
    def check(in_slices):
        made = plan(program.fun, *program.args, in_slices=in_slices)
        assert_same(made.run(*program.args), want, program.tolerance)
        # Refused cuts have a reason.
        assert made.num_shards > 1 or "ends at" in made.explain()

    check()


def test_most_cuts_of_single_primitives_are_carried_out():
    """The first axis of each argument is cut in two, and so is the last."""
    asked = done = 0
    for program in SINGLE.values():
        for axis in (0, -1):
            in_slices = tuple({axis: 2} if x.ndim else None for x in program.args)
            asked += 1
            made = plan(program.fun, *program.args, in_slices=in_slices)
            done += made.num_shards > 1
    assert done / asked > 0.75, (done, asked)


def test_integers_are_exact_in_parts():
    x = np.random.default_rng(0).integers(-(2**31), 2**31, (64,), np.int32)
    for fun in (jnp.sum, jnp.prod, jnp.max, jnp.argmin):
        made = plan(fun, x, in_slices=({0: 7},))
        assert made.run(x) == fun(x)
        assert made.num_shards > 1


def test_not_a_number_is_the_extremum():
    x = np.where(X > 1, np.nan, X)
    for fun in (jnp.max, jnp.argmax, jnp.argmin):
        np.testing.assert_array_equal(plan(fun, x, in_slices=({0: 4},)).run(x), fun(x))


@pytest.mark.parametrize(
    "fun",
    [
        lambda x, y: x.sum(0) / y,
        lambda x, y: x.sum(0) * y,
        lambda x, y: x.sum(0) @ y,
        lambda x, y: (x * y[None]).sum(0) / y.sum(),
        lambda x, y: x.sum(0) * np.inf,
        lambda x, y: x.sum(0) / 0,
    ],
)
def test_parts_do_not_meet_zeros_and_infinities(fun):
    """``1 / 0`` is infinite, ``3 / 0 - 2 / 0`` is no number."""
    x = np.eye(8, 6, dtype=np.float32) - 0.5 * np.eye(8, 6, -3, dtype=np.float32)
    y = np.array([0, np.inf, 1, -np.inf, 0, 2], np.float32)
    made = plan(fun, x, y, in_slices=({0: 4}, None))
    assert_same(made.run(x, y), jax.jit(fun)(x, y))
    assert made.num_shards > 1


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize(
    "fun",
    [
        lambda x, y: x @ y,
        lambda x, y: jnp.einsum("ij,jk->ki", x, y),
        lambda x, y: jax.lax.reduce_sum(x, (1,)),
        lambda x, y: conv(x[None, None], y[None, None], padding="VALID"),
        lambda x, y: jnp.dot(x, y, precision="highest"),
    ],
)
def test_sums_of_half_precision_are_rounded_once(fun, dtype):
    x = (reals(6, 96) * 30).astype(dtype)
    y = reals(96, 5, seed=9).astype(dtype)
    made = plan(fun, x, y, in_slices=({1: 32}, None))
    want = jax.jit(fun)(x.astype(np.float32), y.astype(np.float32))
    got = made.run(x, y)
    assert got.dtype == dtype
    spacing = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        got.astype(np.float32), np.asarray(want), rtol=spacing, atol=1e-4
    )
    assert made.num_shards > 32


def test_arrays_without_elements():
    x = np.zeros((0, 6), np.float32)

    def fun(x):
        taken = x[:, np.array([1, 5])]
        return x.reshape(3, 0, 2), x.sum(0), taken, jnp.cumsum(x, 1), jnp.pad(x, 1)

    made = plan(fun, x, in_slices=({1: 3},))
    assert_same(made.run(x), jax.jit(fun)(x))

    def edges(x):
        return jnp.pad(x[:, :0], ((2, 1), (0, 0)), mode="edge")

    made = plan(edges, X, in_slices=({0: 4},))
    assert_same(made.run(X), jax.jit(edges)(X))


@pytest.mark.parametrize(
    ("fun", "reason"),
    [
        (lambda x: jnp.sort(x, 0), "sorting may move an element anywhere"),
        (lambda x: jax.lax.top_k(x.T, 2), "the largest may stand anywhere"),
        (
            lambda x: jnp.zeros((8, 6)).at[jnp.arange(8)].set(x),
            "known only when it runs",
        ),
        (lambda x: x.T.reshape(48), "behind another one"),
        (lambda x: jnp.linalg.cholesky(x[:6]), "the whole of this axis"),
    ],
)
def test_what_is_whole_says_why(fun, reason):
    made = plan(fun, X, in_slices=({0: 2},))
    text = made.explain()
    assert reason in text
    assert "test_rules.py" in text


def test_custom_derivatives_and_linear_solves():
    @jax.custom_vjp
    def half(x):
        return x * 0.5

    half.defvjp(lambda x: (x * 0.5, None), lambda _, g: (g * 0.5,))

    def fun(x):
        solved = jax.scipy.sparse.linalg.cg(lambda v: v * 3, x)[0]
        return half(x) + solved, jax.grad(lambda y: half(y).sum())(x)

    made = plan(fun, X, in_slices=({0: 2},))
    assert_same(made.run(X), jax.jit(fun)(X))
    assert made.num_shards == 2


def test_gradients_of_pooling():
    from tests.plan.plan_programs import IMAGE, max_pool

    def tangent(x):
        return jax.jvp(max_pool, (x,), (x * 0.5,))

    def gradient(x):
        return jax.grad(lambda x: (max_pool(x) ** 2).sum())(x)

    for fun in (tangent, gradient):
        made = plan(fun, IMAGE, in_slices=({0: 2, 1: 2},))
        assert_same(made.run(IMAGE), jax.jit(fun)(IMAGE))
        assert made.num_shards > 1


def test_a_key_that_is_not_threefry_is_whole():
    key = jax.random.key(0, impl="rbg")

    def fun(key, x):
        return jax.random.uniform(key, (8, 6)) + x

    made = plan(fun, key, X, in_slices=(None, {0: 2}))
    assert_same(made.run(key, X), jax.jit(fun)(key, X))
