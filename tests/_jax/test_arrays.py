"""The type of arrays and the mesh of ``with mesh:``, on both ends of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardmap._jax.context import ArrayType, current_mesh, varying_like


def test_arrays_are_of_this_type():
    assert type(jnp.ones(3)) is ArrayType
    assert type(jax.jit(jnp.sin)(1.0)) is ArrayType


@pytest.mark.filterwarnings("ignore:`with mesh.*:DeprecationWarning")
def test_the_mesh_around():
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    assert current_mesh().empty
    with mesh:
        assert current_mesh() is mesh
    with jax.set_mesh(mesh):
        assert current_mesh() == mesh
        assert jax.make_jaxpr(lambda x: x * current_mesh().size)(1).eqns
    assert current_mesh().empty


def test_a_value_differs_where_another_does():
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    part = jax.sharding.PartitionSpec("i")

    def fun(x):
        made = varying_like(jnp.zeros(()), jax.typeof(x))
        assert jax.typeof(made).str_short() == "float32[]{V:i}"
        assert varying_like(x, jax.typeof(jnp.zeros(()))) is x
        return x + made

    mapped = jax.shard_map(fun, mesh=mesh, in_specs=part, out_specs=part)
    np.testing.assert_array_equal(mapped(jnp.ones(4)), 1)
