"""Types of arrays of Explicit meshes: taken off, and kept along the axes of a batch."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from shardmap.map.primitives.typed import BatchType, untyped

MESH = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
X = np.arange(16, dtype=np.float32).reshape(8, 2)


def typed(*entries):
    return jax.device_put(X, jax.NamedSharding(MESH, P(*entries)))


def test_a_type_is_taken_off_and_the_values_stay():
    specs = []

    @jax.jit
    def fun(x):
        specs.append(jax.typeof(x).sharding.spec)
        plain = untyped(x)
        specs.append(jax.typeof(plain).sharding.spec)
        return plain * 2

    with jax.set_mesh(MESH):
        np.testing.assert_array_equal(fun(typed("x")), 2 * X)
    assert specs == [P("x", None), P(None, None)]


def test_what_has_no_type_is_left():
    assert untyped(X) is X
    x = jnp.asarray(X)
    assert untyped(x) is x


def test_a_gradient_has_the_type_of_what_it_is_of():
    with jax.set_mesh(MESH):
        found = jax.jit(jax.grad(lambda x: (untyped(x) ** 2).sum()))(typed("x", "y"))
    assert found.sharding.spec == P("x", "y")
    np.testing.assert_array_equal(found, 2 * X)


def test_a_batch_knows_the_axes_that_it_is_along():
    x = typed("x", "y")
    assert BatchType.of([X, x], [0, None]) is None
    assert BatchType.of([X, x], [0, 1]) == (MESH.abstract_mesh, "y")
    assert BatchType.of([typed(None, "y")], [0]) is None
    with jax.set_mesh(MESH):
        mapped = jax.vmap(untyped)(x)
    # It goes on: JAX wants the batches of all that is mapped alike.
    assert jax.typeof(mapped).sharding.spec[0] == "x"
