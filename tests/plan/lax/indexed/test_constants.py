"""Indices that depend on no argument have the values that JAX gives them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardmap as sm
from shardmap.planning.chunked import chunked
from shardmap.planning.plan import plan
from tests.plan.checks import assert_same, check_cut, iota

X = iota(64, dtype=np.float32)
PLACES = np.array([9, 1, 3])


def _added(mode):
    def indices():
        counts = jnp.zeros(8, jnp.int32).at[PLACES].add(jnp.array([1, 2, 3]), mode=mode)
        return jnp.cumsum(counts)

    return indices


def _selected():
    cases = [jnp.full(64, k % 64, jnp.int32) for k in range(70)]
    return lax.select_n(jnp.arange(64) % 70, *cases)


INDICES = {
    "added, clipped": _added("clip"),
    "added, dropped": _added("drop"),
    "multiplied": lambda: jnp.ones(8, jnp.int32).at[PLACES].mul(7, mode="clip"),
    "the largest": lambda: jnp.arange(8).at[PLACES].max(5, mode="clip"),
    "one of 70 cases": _selected,
    "sorted": lambda: jnp.argsort(jnp.arange(64) * 37 % 64),
    "drawn": lambda: jax.random.permutation(jax.random.key(0), 64),
    "of a loop": lambda: lax.fori_loop(0, 3, lambda _, y: (y * 5 + 1) % 64, PLACES),
    "shifted": lambda: jnp.arange(64, dtype=jnp.uint32) >> np.uint32(2),
    "of keys": lambda: jax.random.bits(jax.random.key(1), (8,)) % np.uint32(64),
    "a quotient": lambda: jnp.arange(64) // 3 - 5,
}


@pytest.mark.few(4)
@pytest.mark.filterwarnings("ignore:.*runs as a whole")
@pytest.mark.parametrize("name", INDICES)
def test_indices_have_the_values_that_jax_gives_them(name):
    def fun(x):
        indices = INDICES[name]()
        return (
            x[indices],
            x.at[indices].add(1.0),
            lax.dynamic_slice(x, indices[:1], (4,)),
        )

    got = plan(fun, X, in_slices={0: 4}).run(X)
    assert_same(got, jax.jit(fun)(X), 0)


def test_constants_in_the_body_of_a_loop_are_known():
    def step(_, x):
        rows = jnp.floor(jnp.arange(8, dtype=np.float32) * 2.5).astype(jnp.int32)
        return x.at[jnp.cumsum(jnp.ones(1, jnp.int32))].add(x[rows].sum(0))

    shard_plan = check_cut(
        *(lambda x: lax.fori_loop(0, 3, step, x), iota(32, 6, dtype=np.float32)),
        in_slices={1: 3},
    )
    assert shard_plan.num_shards == 3


def test_one_call_evaluates_all_that_a_graph_needs(monkeypatch):
    compiled, own = [], jax.stages.Lowered.compile
    monkeypatch.setattr(
        jax.stages.Lowered, "compile", lambda self: compiled.append(self) or own(self)
    )

    def fun(x):
        rows = jnp.cumsum(jnp.arange(6))
        return x[rows], x[rows * 2 + 1], x.at[rows[:2]].set(0.0)

    plan(fun, X, in_slices={0: 4})
    assert len(compiled) == 1


def test_places_in_a_map_around_are_no_constants():
    def fun(x):
        places = (lax.axis_index("i") + jnp.arange(4)) % 4
        return x[places] + x[lax.psum(1, "i") - 2 + jnp.arange(2)].sum()

    x = iota(2, 8, dtype=np.float32)
    mapped = sm.spmap(sm.chunked(fun, {0: 2}), "i")
    np.testing.assert_array_equal(mapped(x), jax.vmap(fun, axis_name="i")(x))


Z = np.full(16, -0.0, np.float32)
AT = np.array([3, 9], np.int32)
OF_ZEROS = {
    "a slice": lambda z, i: lax.dynamic_slice(z, (i[0],), (1,)),
    "a gather": lambda z, i: z[i],
    "a gather that fills": lambda z, i: jnp.take(z, i, mode="fill"),
    "complex numbers": lambda z, i: lax.complex(z, z)[i].imag,
    "updates": lambda z, i: z.at[i].add(-0.0),
    "short floats": lambda z, i: z.astype(jnp.bfloat16)[i],
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", OF_ZEROS)
def test_a_zero_keeps_its_sign(name):
    fun = OF_ZEROS[name]
    want = np.signbit(jax.jit(fun)(Z, AT))
    assert want.all()
    shard_plan = plan(fun, Z, AT, in_slices=({0: 4}, {0: 2}))
    assert shard_plan.num_shards > 1
    assert np.signbit(shard_plan.run(Z, AT)).all()
    assert np.signbit(chunked(fun, in_slices=({0: 4}, None))(Z, AT)).all()


def _draws(x):
    draw = lax.rng_uniform(0.0, 1.0, x.shape)
    return x + draw - lax.rng_uniform(0.0, 1.0, x.shape)


@pytest.mark.parametrize(
    "fun", [_draws, lambda x: lax.fori_loop(0, 2, lambda _, y: _draws(y), x)]
)
def test_draws_from_a_state_are_refused(fun):
    told = r"rng_uniform at .* changes state.*draw with jax.random.uniform and a key"
    with pytest.raises(ValueError, match=told):
        plan(fun, X, in_slices={0: 4})
    with pytest.raises(ValueError, match=told):
        chunked(fun, in_slices={0: 4})(X)
