"""Random keys, told from other arrays and stored as bits."""

import jax
import jax.numpy as jnp
import pytest

from shardmap.plan.engine.keys import (
    IMPLEMENTATIONS,
    data_aval,
    is_key,
    itemsize,
    key_impl,
)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_key_is_stored_as_its_bits(name):
    keys = jax.random.split(jax.random.key(3, impl=name), 4)
    aval, data = jax.typeof(keys), jax.random.key_data(keys)
    assert is_key(aval)
    assert key_impl(aval) == name
    stored = data_aval(aval)
    assert (stored.shape, stored.dtype) == (data.shape, data.dtype)
    assert itemsize(aval) * 4 == data.nbytes


def test_numbers_are_stored_as_they_are():
    aval = jax.typeof(jnp.zeros((2, 3), jnp.int16))
    assert not is_key(aval)
    assert key_impl(aval) is None
    assert data_aval(aval) is aval
    assert itemsize(aval) == 2
