"""Loops that run until all of their rows are done: each shard runs its own."""

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.interpreters import batching, mlir

from shardmap.planning.chunked import chunked
from shardmap.planning.plan import plan
from tests.plan.checks import assert_same, check_cut

A = np.linspace(0.5, 40, 24, dtype=np.float32)


def goes_on(x, a):
    return jnp.abs(x * x - a) > 1e-3 * a


def root(x, a):
    return 0.5 * (x + a / x)


def by_hand(a):
    return lax.while_loop(
        lambda x: goes_on(x, a).any(),
        lambda x: jnp.where(goes_on(x, a), root(x, a), x),
        a,
    )


def where_done(a):
    return lax.while_loop(
        lambda x: goes_on(x, a).any(),
        lambda x: jnp.where(~goes_on(x, a), x, root(x, a)),
        a,
    )


def with_a_count(a):
    def step(state):
        x, count = state
        return jnp.where(goes_on(x, a), root(x, a), x), count + 1

    return lax.while_loop(lambda s: (s[1] < 5) & goes_on(s[0], a).any(), step, (a, 0))[
        0
    ]


def counts_of_rows(a):
    def step(state):
        x, count = state
        on = goes_on(x, a)
        return jnp.where(on, root(x, a), x), jnp.where(on, count + 1, count)

    start = a, jnp.zeros(a.shape, int)
    return lax.while_loop(lambda s: goes_on(s[0], a).any(), step, start)


def until_all_are_done(a):
    def step(state):
        x, done = state
        new = root(x, a)
        return jnp.where(done, x, new), done | ~goes_on(new, a)

    start = a, jnp.zeros(a.shape, bool)
    return lax.while_loop(lambda s: ~s[1].all(), step, start)[0]


def flagged(a):
    def step(state):
        x, on = state
        new = root(x, a)
        return jnp.where(on, new, x), on & goes_on(new, a)

    def go(state):
        return goes_on(state[0], a).any()

    return lax.while_loop(go, step, (a, goes_on(a, a)))[0]


def rows_of_two_axes(a):
    def on(x):
        return goes_on(x, a[:, None]).any(1)

    start = a[:, None] * jnp.arange(1.0, 4)[None]
    return lax.while_loop(
        lambda x: on(x).any(),
        lambda x: jnp.where(on(x)[:, None], root(x, a[:, None]), x),
        start,
    )


ROWS = [
    *(by_hand, where_done, with_a_count, counts_of_rows, until_all_are_done),
    rows_of_two_axes,
]


@pytest.mark.few(4)
@pytest.mark.parametrize("fun", ROWS)
def test_rows_that_stay_when_they_are_done_are_cut(fun):
    shard_plan = check_cut(fun, A, in_slices={0: (5, 7, 3, 9)})
    assert shard_plan.num_shards == 4
    assert_same(chunked(fun, {0: (5, 7, 3, 9)})(A), jax.jit(fun)(A))


def test_rows_of_a_loop_in_a_loop():
    def fun(a):
        return lax.fori_loop(0, 3, lambda _, x: by_hand(x + a), a)

    check_cut(fun, A, in_slices={0: 4})


def stepped(step, go=goes_on, result=lambda x, count: x):
    """A loop that leaves its rows as they are nearly, or stops for another reason."""

    def fun(a):
        def body(state):
            x, count = state
            return step(x, a, count), count + 1

        def on(state):
            return go(state[0], a).any() & (state[1] < 9)

        return result(*lax.while_loop(on, body, (a, 0)))

    return fun


def frozen(x, a, _):
    return jnp.where(goes_on(x, a), root(x, a), x)


NOT_ROWS = {
    "not frozen": stepped(lambda x, a, _: root(x, a)),
    "another mask": stepped(
        lambda x, a, _: jnp.where(goes_on(x, 2 * a), root(x, a), x)
    ),
    "the mask of a neighbour": stepped(
        lambda x, a, _: jnp.where(jnp.roll(goes_on(x, a), 1), root(x, a), x)
    ),
    "goes on again": stepped(
        lambda x, a, n: jnp.where(goes_on(x, a) | (n % 4 == 3), root(x, a), x)
    ),
    "rows that are mixed": stepped(
        lambda x, a, _: jnp.where(goes_on(x, a), root(x, a) + 0 * x.sum(), x)
    ),
    "the count is a result": stepped(frozen, result=lambda x, count: (x, count)),
    "a flag that the condition does not look at": flagged,
}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", NOT_ROWS)
def test_what_only_looks_like_rows_is_whole(name):
    fun = NOT_ROWS[name]
    with pytest.warns(UserWarning, match="runs as a whole"):
        shard_plan = plan(fun, A, in_slices={0: 4})
    assert "map over the elements with spmap(batch_size=)" in str(shard_plan.explain())
    assert_same(shard_plan.run(A), jax.jit(fun)(A))


def any_of_a_batch(x):
    return ANY_P.bind(x)


ANY_P = jex_core.Primitive("any_of_a_batch")
ANY_P.def_impl(lambda x: jnp.any(x))
ANY_P.def_abstract_eval(lambda x: jax.core.ShapedArray((), np.dtype(bool)))
mlir.register_lowering(ANY_P, mlir.lower_fun(jnp.any, multiple_results=False))
batching.primitive_batchers[ANY_P] = lambda xs, axes: (ANY_P.bind(*xs), None)


def test_a_primitive_of_another_library_is_what_it_does():
    def fun(a):
        return lax.while_loop(
            lambda x: any_of_a_batch(goes_on(x, a)), lambda x: frozen(x, a, 0), a
        )

    shard_plan = check_cut(jax.vmap(fun), A, in_slices={0: 4})
    assert shard_plan.num_shards == 4


@pytest.mark.parametrize("kind", ["lax", "checkpointed", "bounded"])
def test_loops_of_equinox(kind):
    internal = pytest.importorskip("equinox.internal", reason="needs equinox")

    @jax.vmap
    def fun(a):
        return internal.while_loop(
            lambda x: goes_on(x, a), lambda x: root(x, a), a, max_steps=16, kind=kind
        )

    shard_plan = check_cut(fun, A, in_slices={0: (5, 7, 3, 9)})
    assert shard_plan.num_shards == 4
    assert_same(chunked(fun, {0: 4})(A), jax.jit(fun)(A))


@pytest.mark.few(1)
@pytest.mark.parametrize("is_adaptive", [True, False])
@pytest.mark.parametrize("is_saved", [True, False])
def test_solvers_of_diffrax(is_adaptive, is_saved):
    diffrax = pytest.importorskip("diffrax", reason="needs diffrax")

    @jax.vmap
    def fun(rate):
        steps = diffrax.ConstantStepSize()
        if is_adaptive:
            steps = diffrax.PIDController(rtol=1e-4, atol=1e-6)
        times = jnp.linspace(0.0, 1.0, 5) if is_saved else None
        return diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, args: jnp.sin(t) - rate * y),
            diffrax.Tsit5(),
            *(0.0, 1.0, 0.1, jnp.ones(2)),
            stepsize_controller=steps,
            saveat=diffrax.SaveAt(ts=times, t1=not is_saved),
            max_steps=256,
            throw=False,
        ).ys

    shard_plan = check_cut(fun, A[:12] / 8, in_slices={0: (5, 4, 3)})
    assert shard_plan.num_shards == 3


def test_a_loop_of_equinox_of_many_bounded_steps_is_whole():
    internal = pytest.importorskip("equinox.internal", reason="needs equinox")

    @jax.vmap
    def fun(a):
        return internal.while_loop(
            lambda x: goes_on(x, a),
            lambda x: root(x, a),
            a,
            max_steps=999,
            kind="bounded",
        )

    with pytest.warns(UserWarning, match="runs as a whole"):
        shard_plan = plan(fun, A, in_slices={0: 4})
    assert "map over the elements with spmap(batch_size=)" in str(shard_plan)
    assert_same(shard_plan.run(A), jax.jit(fun)(A))
