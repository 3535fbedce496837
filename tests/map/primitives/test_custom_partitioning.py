"""Functions with a partitioning of their own, inside maps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning

import shardmap as sm


@custom_partitioning
def double_sine(x, y):
    return {"a": 2 * jnp.sin(x) + y, "b": y}


def _partition(mesh, arg_shapes, result_shape):
    shardings = tuple(shape.sharding for shape in arg_shapes)
    return mesh, double_sine.fun, dict(zip("ab", shardings, strict=True)), shardings


double_sine.def_partition(_partition, sharding_rule="i, i -> i, i")

X = np.arange(24, dtype=np.float32).reshape(8, 3)
MESH = sm.make_mesh({"a": 4, "b": 2})


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lowering": "spmd"},
        {"devices": jax.devices()[:2]},
        {"devices": jax.devices()[:3]},
        {"devices": jax.devices()[:2], "batch_size": 2},
        {"mesh": MESH, "mesh_axes": "a"},
        {"mesh": MESH, "mesh_axes": ("b", "a"), "lowering": "spmd"},
    ],
    ids=str,
)
def test_in_a_map(options):
    def f(x):
        first = double_sine(x, x + 1)

        def step(carry, _):
            return double_sine(carry, first["b"])["a"], None

        return lax.scan(step, first["a"], None, 2)[0]

    expected = 2 * np.sin(X) + X + 1
    for _ in range(2):
        expected = 2 * np.sin(expected) + X + 1
    result = jax.jit(sm.spmap(f, "i", **options))(X)
    np.testing.assert_allclose(result, expected, rtol=1e-5)


@pytest.mark.few(3)
@pytest.mark.parametrize("shape", [(2, 4, 3), (4, 2, 3), (1, 8, 3)])
@pytest.mark.parametrize("lowering", ["manual", "spmd"])
def test_in_nested_maps(shape, lowering):
    f = sm.spmap(sm.spmap(lambda x: double_sine(x, x)["a"]), lowering=lowering)
    x = X.reshape(shape)
    np.testing.assert_allclose(f(x), 2 * np.sin(x) + x, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"lowering": "spmd"}, {"batch_size": 1}])
def test_a_composite_of_several_elements_on_a_device(options):
    f = lax.composite(lambda x: lax.psum(x * 2, "i"), "doubled")
    x = np.arange(12, dtype=np.float32)
    result = sm.spmap(f, "i", devices=jax.devices()[:4], **options)(x)
    np.testing.assert_array_equal(result, np.full(12, 2 * x.sum()))


@pytest.mark.parametrize("lowering", ["manual", "spmd"])
def test_in_a_mesh_map(lowering):
    f = sm.mesh_map(
        lambda x: double_sine(x, x)["a"], MESH, {"a": 0}, {"a": 0}, lowering=lowering
    )
    x = X[:, 0]
    np.testing.assert_allclose(f(x), 2 * np.sin(x) + x, rtol=1e-5)
