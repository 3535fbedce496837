"""Every rule of the table, compared with the function that is not cut."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax.extend.core import jaxprs_in_params, primitives

from shardmap.map.collectives.table import COLLECTIVES
from shardmap.planning.lax.table import STAGES, TABLE
from shardmap.planning.notation import rules_of
from shardmap.planning.plan import plan
from tests.plan.checks import assert_same, cuts
from tests.plan.plan_programs import SINGLE, X
from tests.strategies import examples

PUBLIC = [getattr(primitives, name) for name in dir(primitives) if name.endswith("_p")]
# Not in a program of SINGLE: refused or whole by name, only made by differentiation, in
# newer JAX, or in programs of their own in other tests.
ELSEWHERE = """
    after_all call closed_call create_token custom_lin get swap custom_vjp_call
    custom_linear_solve approx_top_k eig hessenberg householder_product schur
    tridiagonal tridiagonal_solve device_put sharding_constraint stop_gradient name copy
    eq_to le_to lt_to igamma_grad_a threefry2x32 add_any empty2 reduce_xor reduce_window
    reduce_window_min select_and_gather_add select_and_scatter select_and_scatter_add
    random_gamma rng_bit_generator log2 one_minus_square polynomial empty
    random_bits eval_jaxpr rng_uniform
""".split()


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation.primitive
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def test_every_public_primitive_has_a_rule():
    ruled = {*TABLE.makers, *COLLECTIVES, *TABLE.jaxprs, *TABLE.rewrites}
    assert set(PUBLIC) - ruled == set()


def test_every_rule_is_in_a_program():
    seen = set()
    for program in SINGLE.values():
        seen.update(equations(jax.make_jaxpr(program.fun)(*program.args)))
    ruled = {*TABLE.makers, *TABLE.jaxprs, *STAGES} & set(PUBLIC)
    missing = {q.name for q in ruled - seen} - set(ELSEWHERE)
    assert missing == set()


@pytest.mark.few(30)
@pytest.mark.hypothesis
@pytest.mark.parametrize("name", SINGLE)
def test_any_cut_gives_the_same_result(name):
    program = SINGLE[name]
    want = jax.jit(program.fun)(*program.args)

    @examples(1)
    @given(cuts(program.args))
    def check(in_slices):
        shard_plan = plan(program.fun, *program.args, in_slices=in_slices)
        assert_same(shard_plan.run(*program.args), want, program.tolerance)
        # Refused cuts have a reason.
        assert shard_plan.num_shards > 1 or "stops at" in str(shard_plan.explain())

    check()
    for line in rules_of(program.fun, *program.args).splitlines():
        assert re.fullmatch(r"[\w\- ]+: (\(\w+\)|.* -> .*)", line), line


def test_most_cuts_of_single_primitives_are_carried_out():
    """The first axis of each argument is cut in two, and so is the last."""
    asked = done = 0
    for program in SINGLE.values():
        for axis in (0, -1):
            in_slices = tuple({axis: 2} if x.ndim else None for x in program.args)
            asked += 1
            shard_plan = plan(program.fun, *program.args, in_slices=in_slices)
            done += shard_plan.num_shards > 1
    assert done / asked > 0.75, (done, asked)


def test_arrays_without_elements():
    x = np.zeros((0, 6), np.float32)

    def fun(x):
        taken = x[:, np.array([1, 5])]
        return x.reshape(3, 0, 2), x.sum(0), taken, jnp.cumsum(x, 1), jnp.pad(x, 1)

    shard_plan = plan(fun, x, in_slices=({1: 3},))
    assert_same(shard_plan.run(x), jax.jit(fun)(x))

    def edges(x):
        return jnp.pad(x[:, :0], ((2, 1), (0, 0)), mode="edge")

    shard_plan = plan(edges, X, in_slices=({0: 4},))
    assert_same(shard_plan.run(X), jax.jit(edges)(X))


@pytest.mark.parametrize(
    ("fun", "reason"),
    [
        (lambda x: jnp.fft.fft(x, axis=0), "the whole of this axis"),
        (
            lambda x: jnp.zeros((8, 6)).at[jnp.argsort(x[:, 0])].set(x),
            "known only when it runs",
        ),
        (lambda x: x.T.reshape(48), "behind another one"),
        (lambda x: jnp.linalg.cholesky(x[:6]), "the whole of this axis"),
    ],
)
def test_what_is_whole_says_why(fun, reason):
    shard_plan = plan(fun, X, in_slices=({0: 2},))
    text = str(shard_plan.explain())
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

    shard_plan = plan(fun, X, in_slices=({0: 2},))
    assert_same(shard_plan.run(X), jax.jit(fun)(X))
    # The sum over the flattened array has shards of its own.
    assert shard_plan.num_shards == 6
