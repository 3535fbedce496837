"""`pjit` with the parameters that it had, under the meshes that it had."""

import jax
import numpy as np
import pytest

import shardmap as sm
from shardmap.compat.pjit import PartitionSpec as P
from shardmap.compat.pjit import pjit, with_sharding_constraint


@pytest.fixture
def mesh():
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))


@pytest.mark.filterwarnings("ignore:`with mesh.*:DeprecationWarning")
def test_specs_are_those_of_the_mesh_around_each_call(mesh):
    f = pjit(lambda x, w: x @ w, (P("x"), None), P("x", "y"))
    x, w = np.ones((8, 4), np.float32), np.ones((4, 8), np.float32)
    with mesh:
        assert sm.spec_of(f(x, w)).sharding == (sm.Chunked([4]), sm.Chunked([2]))
        assert "sdy.sharding" in f.lower(x, w).as_text()
    with jax.sharding.Mesh(mesh.devices.T, ("x", "y")):
        assert sm.spec_of(f(x, w)).sharding == (sm.Chunked([2]), sm.Chunked([4]))


@pytest.mark.filterwarnings("ignore:`with mesh.*:DeprecationWarning")
def test_none_is_replicated_and_positions_are_those_of_pjit(mesh):
    f = pjit(
        lambda x, n: with_sharding_constraint(x, P("x")) * n, None, None, (1,), (0,)
    )
    x = jax.device_put(np.arange(8.0), jax.sharding.NamedSharding(mesh, P()))
    with mesh:
        y = f(x, 2)
    np.testing.assert_array_equal(y, 2 * np.arange(8))
    assert y.is_fully_replicated
    assert x.is_deleted()


@pytest.mark.filterwarnings("ignore:`with mesh.*:DeprecationWarning")
def test_none_in_shardings_is_replicated_in_a_mesh(mesh):
    f = pjit(lambda x, w: (x - w, x), (P("x"), None), out_shardings=(None, P("x")))
    x = np.ones((8, 4), np.float32)
    with mesh:
        whole, cut = f(x, x)
        (again,) = pjit(lambda w: (w,), in_shardings=None, out_shardings=None)(whole)
    assert whole.is_fully_replicated
    assert again.is_fully_replicated
    assert cut.sharding.is_equivalent_to(jax.sharding.NamedSharding(mesh, P("x")), 2)


@pytest.mark.filterwarnings("ignore:`with mesh.*:DeprecationWarning")
def test_without_in_specs_arguments_keep_their_shardings(mesh):
    f = pjit(lambda x: 2 * x, out_shardings=P("x"))
    x = jax.device_put(np.arange(8.0), jax.sharding.NamedSharding(mesh, P("x")))
    with mesh:
        assert f(x).sharding.is_equivalent_to(x.sharding, 1)


def test_without_a_mesh_shardings_say_where(mesh):
    sharding = jax.sharding.NamedSharding(mesh, P("x"))
    f = pjit(lambda x: 2 * x, in_shardings=sharding, out_shardings=sharding)
    assert f(np.arange(8.0)).sharding == sharding
