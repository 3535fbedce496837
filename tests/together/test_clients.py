"""What programs written for jax.pmap look at, one test for each habit seen."""

import functools
import unittest.mock

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardmap as sm

EIGHT = np.arange(8, dtype=np.float32)


def test_results_have_a_named_sharding_whose_spec_names_the_axis():
    """kfac-jax's get_first asserts the class, then reads spec[0] and shard 0."""
    result = sm.spmap(lambda x: x + 1, "kfac")(EIGHT)
    assert isinstance(result.sharding, NamedSharding)
    assert result.sharding.spec[0] == "kfac"
    assert float(result.addressable_shards[0].data[0]) == 1.0


def test_a_shard_keeps_the_mapped_axis_with_length_1():
    """flax's unreplicate squeezes axis 0 of the first shard."""
    result = sm.spmap(lambda x: x * 2)(np.ones((8, 3), np.float32))
    first = result.addressable_shards[0].data
    assert not result.sharding.is_fully_replicated
    assert first.shape == (1, 3)
    np.testing.assert_array_equal(first.squeeze(0), np.full(3, 2.0))
    assert first.squeeze(0).devices() == {jax.devices()[0]}


@pytest.mark.parametrize("name", ["_device_put_sharded", "x"])
def test_inputs_on_a_mesh_of_another_name_are_not_copied(name):
    """flax, chex and the migration guide place inputs on meshes of their own."""
    mesh = Mesh(np.array(jax.devices()), (name,))
    # Computed, as NumPy's own memory cannot be donated.
    x = jax.device_put(EIGHT, NamedSharding(mesh, PartitionSpec(name))) + 0
    before = {s.data.unsafe_buffer_pointer() for s in x.addressable_shards}
    result = sm.spmap(lambda x: x + 1, donate_argnums=0)(x)
    assert before == {s.data.unsafe_buffer_pointer() for s in result.addressable_shards}


def test_the_axis_name_is_bound_while_tracing():
    """kfac-jax asks whether it is inside a map of some axis name."""

    def inside(name):
        try:
            lax.axis_index(name)
        except NameError:
            return False
        return True

    seen = []
    sm.spmap(lambda x: seen.append((inside("i"), inside("j"))) or x, "i")(EIGHT)
    assert seen == [(True, False)]
    assert not inside("i")


def test_it_can_stand_in_for_jax_pmap_by_mocking():
    """chex mocks the attribute jax.pmap and wraps it with functools.wraps."""
    with unittest.mock.patch.object(jax, "pmap", functools.wraps(jax.pmap)(sm.spmap)):
        result = jax.pmap(lambda x: lax.pmean(x, "i"), axis_name="i")(EIGHT)
    np.testing.assert_array_equal(result, np.full(8, 3.5))


def test_out_axes_may_be_a_tuple_of_trees():
    """nnx passes out_axes=(tree, tree) prefixes, devices, backend and axis_size."""
    mapped = sm.spmap(
        lambda state, x: ({"w": state["w"] + 1, "n": state["n"]}, x * 2),
        axis_name="i",
        in_axes=({"w": 0, "n": None}, 1),
        out_axes=({"w": 1, "n": None}, 0),
        devices=jax.devices()[:4],
        axis_size=4,
        donate_argnums=(),
    )
    state, doubled = mapped(
        {"w": np.ones((4, 3), np.float32), "n": np.float32(7)}, np.ones((2, 4))
    )
    assert state["w"].shape == (3, 4)
    assert state["n"].shape == ()
    np.testing.assert_array_equal(doubled, np.full((4, 2), 2.0))


def test_training_step_replicated_over_devices():
    """The loop that flax and brax programs have: replicate, step, take the first."""

    @functools.partial(sm.spmap, axis_name="batch", donate_argnums=0)
    def step(weights, x, y):
        def loss(w):
            return ((x @ w - y) ** 2).mean()

        value, gradient = jax.value_and_grad(loss)(weights)
        gradient = lax.pmean(gradient, "batch")
        return weights - 0.1 * gradient, lax.pmean(value, "batch")

    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 16, 3)).astype(np.float32)
    y = x @ np.array([1.0, -2.0, 0.5], np.float32)
    weights = np.zeros((8, 3), np.float32)
    for _ in range(60):
        weights, value = step(weights, x, y)
    assert value.sharding.spec == PartitionSpec("batch")
    np.testing.assert_allclose(weights, [[1.0, -2.0, 0.5]] * 8, atol=1e-2)
