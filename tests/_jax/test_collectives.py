"""Collectives whose primitives have no public name."""

import pytest

from shardmap._jax import collectives


def test_a_collective_that_jax_does_not_have_is_said_at_once():
    with pytest.raises(ImportError, match=r"primitive no_such, .* 0 primitives of"):
        collectives._registered("no_such")
