"""`jax.vmap` with ``spmd_axis_name`` around maps: a batch along a mesh axis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardmap as sm
from tests.map_programs import LOWERINGS

MESH = sm.make_mesh({"x": 2, "y": 4})
X = np.arange(8, dtype=np.float32) / 8


def double(v):
    return v * 2


def centered(lowering, **options):
    return sm.spmap(
        lambda v: v - lax.pmean(v, "i"),
        "i",
        mesh=MESH,
        mesh_axes="x",
        lowering=lowering,
        **options,
    )


BATCH = np.arange(24, dtype=np.float32).reshape(4, 2, 3) / 24


@pytest.mark.few(1)
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_batch_lies_along_its_mesh_axis(lowering):
    mapped = centered(lowering)
    along = jax.vmap(mapped, spmd_axis_name="y")
    expected = BATCH - BATCH.mean(1, keepdims=True)
    for run in (along, jax.jit(along)):
        np.testing.assert_allclose(run(BATCH), expected, atol=1e-6)
        # Each device has its own part of the batch.
        assert run(BATCH).sharding.spec[:2] == ("y", "x")
        assert run(BATCH).sharding.shard_shape(BATCH.shape) == (1, 1, 3)
    gradient = jax.grad(lambda v: (along(v) ** 2).sum())(BATCH)
    np.testing.assert_allclose(gradient, 2 * expected, atol=1e-6)
    per_example = jax.vmap(
        jax.grad(lambda v: (mapped(v) ** 2).sum()), spmd_axis_name="y"
    )
    np.testing.assert_allclose(per_example(BATCH), 2 * expected, atol=1e-6)
    assert per_example(BATCH).sharding.spec[:2] == ("y", "x")
    assert along(BATCH).sharding == along(BATCH).sharding


@pytest.mark.few(1)
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_batches_elsewhere_and_of_any_length(lowering):
    mapped = centered(lowering)
    along = jax.vmap(mapped, in_axes=1, out_axes=2, spmd_axis_name="y")
    expected = BATCH - BATCH.mean(1, keepdims=True)
    np.testing.assert_allclose(
        along(BATCH.swapaxes(0, 1)), expected.transpose(1, 2, 0), atol=1e-6
    )
    six = np.concatenate([BATCH, BATCH[:2]])
    np.testing.assert_allclose(
        jax.vmap(mapped, spmd_axis_name="y")(six),
        np.concatenate([expected, expected[:2]]),
        atol=1e-6,
    )


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_names_and_shared_values_of_a_batch(lowering):
    def fun(v, w):
        return lax.psum(v, ("i", "b")) + lax.axis_index("b").astype(np.float32), w

    mapped = sm.spmap(
        fun,
        "i",
        in_axes=(0, None),
        out_axes=(0, None),
        mesh=MESH,
        mesh_axes="x",
        lowering=lowering,
    )
    along = jax.vmap(
        mapped,
        in_axes=(0, None),
        out_axes=(0, None),
        axis_name="b",
        spmd_axis_name="y",
    )
    sums, shared = along(BATCH, np.float32(2))
    index = np.arange(4, dtype=np.float32).reshape(4, 1, 1)
    expected = np.broadcast_to(BATCH.sum((0, 1)) + index, BATCH.shape)
    np.testing.assert_allclose(sums, expected, rtol=1e-6)
    assert float(shared) == 2


@pytest.mark.deep
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_batches_of_batches_and_of_blocks(lowering):
    cube = sm.make_mesh({"c": 2, "b": 2, "a": 2})
    mapped = sm.spmap(double, mesh=cube, mesh_axes="a", lowering=lowering)
    twice = jax.vmap(jax.vmap(mapped, spmd_axis_name="b"), spmd_axis_name="c")
    x = X.reshape(2, 2, 2)
    np.testing.assert_array_equal(twice(x), 2 * x)
    assert twice(x).sharding.spec == P("c", "b", "a")
    over_two = jax.vmap(mapped, spmd_axis_name=("c", "b"))(X.reshape(4, 2))
    assert over_two.sharding.spec == P(("c", "b"), "a")
    for axes, other in (({"x": 0}, "y"), ({"y": 0}, "x")):
        blocks = sm.mesh_map(jnp.sin, MESH, axes, axes, lowering=lowering)
        along = jax.vmap(blocks, spmd_axis_name=other)
        x = np.arange(32, dtype=np.float32).reshape(4, 8)
        np.testing.assert_allclose(along(x), np.sin(x), rtol=1e-6)
        assert along(x).sharding.spec == P(other, *axes)
        gradient = jax.vmap(
            jax.grad(lambda v, f=blocks: f(v).sum()), spmd_axis_name=other
        )
        np.testing.assert_allclose(gradient(x), np.cos(x), rtol=1e-5, atol=1e-6)


def test_mesh_axes_that_a_batch_cannot_have():
    with pytest.raises(
        ValueError, match="spmd_axis_name='z' of spmap of <lambda>: the map runs on a"
    ):
        jax.vmap(centered("manual"), spmd_axis_name="z")(BATCH)
    with pytest.raises(ValueError, match=r"the map of vmap\(.*\) around it walks 'x'"):
        jax.vmap(centered("manual"), spmd_axis_name="x")(BATCH)
    with pytest.raises(ValueError, match="Give spmap a mesh= that has 'j', and others"):
        jax.jit(jax.vmap(sm.spmap(double), spmd_axis_name="j"))(BATCH)
