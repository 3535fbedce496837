"""Types of arrays of Explicit meshes: taken off where maps take arrays."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from shardmap.map.primitives.explicit_sharding import drop_sharding

MESH = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
X = np.arange(16, dtype=np.float32).reshape(8, 2)


def typed(*entries):
    return jax.device_put(X, jax.NamedSharding(MESH, P(*entries)))


def test_a_type_is_taken_off_and_the_values_stay():
    specs = []

    @jax.jit
    def fun(x):
        specs.append(jax.typeof(x).sharding.spec)
        plain = drop_sharding(x)
        specs.append(jax.typeof(plain).sharding.spec)
        return plain * 2

    with jax.set_mesh(MESH):
        np.testing.assert_array_equal(fun(typed("x")), 2 * X)
    assert specs == [P("x", None), P(None, None)]


def test_what_has_no_type_is_left():
    assert drop_sharding(X) is X
    x = jnp.asarray(X)
    assert drop_sharding(x) is x


def test_a_gradient_has_the_type_of_what_it_is_of():
    with jax.set_mesh(MESH):
        gradient = jax.grad(lambda x: (drop_sharding(x) ** 2).sum())
        found = jax.jit(gradient)(typed("x", "y"))
    assert found.sharding.spec == P("x", "y")
    np.testing.assert_array_equal(found, 2 * X)
