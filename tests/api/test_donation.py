"""One call: what becomes of donated arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.api.kinds import MESH, SHARDED, X, every_kind, mapped


@every_kind
def test_donated_arguments_give_their_memory_back(kind):
    f = mapped(kind, lambda x, y: x + y, donate_argnums=0)
    for _ in range(3):
        x, y = (jax.device_put(X, SHARDED) + k for k in range(2))
        np.testing.assert_array_equal(f(x, y), 2 * X + 1)
        assert x.is_deleted()
        assert not y.is_deleted()


@every_kind
def test_a_donated_array_elsewhere_is_moved(kind):
    f = mapped(kind, lambda x, y: x + y, donate_argnums=0)
    for where in (jax.devices()[2], NamedSharding(MESH, P())):
        np.testing.assert_array_equal(f(jax.device_put(X, where) + 0, X), 2 * X)
    np.testing.assert_array_equal(f(jnp.asarray(X) + 0, X), 2 * X)


@every_kind
def test_memory_that_is_gone_or_would_go_twice_is_refused(kind):
    f = mapped(kind, lambda x, y: x + y, donate_argnums=0)
    x, y = (jax.device_put(X, SHARDED) + k for k in range(2))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"x is donated, .* once, as x, y. Pass"):
            f(x, x)
    np.testing.assert_array_equal(f(x, y), 2 * X + 1)
    with pytest.raises(RuntimeError, match=rf"{kind} of .*: Array has been .*: x\."):
        f(x, y)
    np.testing.assert_array_equal(f(y, X), 2 * X + 1)


@pytest.mark.few(1)
@every_kind
def test_a_nan_of_donated_memory_is_told(kind):
    f = mapped(kind, lambda x: jnp.log(x - 2), donate_argnums=0)
    f(jax.device_put(X + 3, SHARDED))
    with jax.debug_nans(True):
        f(jax.device_put(X + 3, SHARDED))
        for _ in range(2):
            with pytest.raises(FloatingPointError, match="Leave donate_argnums out"):
                f(jax.device_put(X, SHARDED))
        with pytest.raises(FloatingPointError, match=r"\(nan\) encountered"):
            mapped(kind, f.__wrapped__)(X)


@every_kind
def test_arguments_that_are_no_numbers_or_not_there_are_refused(kind):
    with pytest.raises(TypeError, match="argument x is a NumPy array of dtype <U1"):
        mapped(kind, lambda x: x)(np.array(["a"] * 8))
    with pytest.raises(ValueError, match=r"\(1,\), but only accepts 1 positional"):
        mapped(kind, lambda x: x, donate_argnums=1)
