"""The type of arrays and the mesh of ``with mesh:``, on both ends of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardmap._jax.arrays import ArrayType, current_mesh


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
