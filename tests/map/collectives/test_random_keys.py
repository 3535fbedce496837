"""Each element draws with its own key, also where several share a device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardmap as sm

LAYOUTS = {
    "devices": {},
    "batches on two devices": {"batch_size": 2, "devices": jax.devices()[:2]},
    "spmd": {"lowering": "spmd"},
}


def draws(key):
    first, second = jax.random.split(key)
    bits = jax.random.bits(jax.random.fold_in(second, 1), (3,))
    return bits, jax.random.key_data(first)


def draw_both(keys):
    return [draws(key) for key in keys]


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_element_draws_with_its_own_key(layout):
    keys = [
        jax.random.split(jax.random.key(3, impl=implementation), 11)
        for implementation in ("rbg", "unsafe_rbg")
    ]
    draw = jax.jit(draw_both)
    rows = [draw([each[k] for each in keys]) for k in range(11)]
    assert_equal(sm.spmap(draw_both, **LAYOUTS[layout])(keys), stacked(rows))


@pytest.mark.deep
def test_in_control_flow_and_nested_maps():
    keys = jax.random.split(jax.random.key(3, impl="rbg"), 12)
    rows = stacked(list(map(jax.jit(draws), keys)))
    expected = jax.tree.map(lambda rows: rows.reshape(3, 4, -1), rows)

    def twice(data):
        key = jax.random.wrap_key_data(data, impl="rbg")
        return lax.scan(lambda key, _: (key, draws(key)), key, length=2)[1]

    results = sm.spmap(sm.spmap(twice))(jax.random.key_data(keys).reshape(3, 4, -1))
    for k in range(2):
        assert_equal(jax.tree.map(lambda rows, k=k: rows[:, :, k], results), expected)
    assert_equal(jax.vmap(sm.spmap(draws))(keys.reshape(3, 4)), expected)
    # One key for all elements.
    shared = sm.spmap(lambda x, key: (x, draws(key)), in_axes=(0, None))
    one = stacked([draws(keys[0])] * 9)
    assert_equal(shared(jnp.zeros(9), keys[0])[1], one)


def test_the_generator_of_xla():
    keys = np.arange(44, dtype=np.uint32).reshape(11, 4)

    def bits(key):
        return lax.rng_bit_generator(key, (3,))

    assert_equal(sm.spmap(bits)(keys), stacked(list(map(jax.jit(bits), keys))))


def stacked(rows):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


def assert_equal(results, expected):
    jax.tree.map(np.testing.assert_array_equal, results, expected)
