"""What tests of maps share: numbers, meshes, nests, and what is close."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType


def array(*shape, dtype=np.float32):
    values = np.random.default_rng(len(shape)).permutation(int(np.prod(shape)))
    return (values.reshape(shape) % 97 - 40).astype(dtype)


def assert_close(actual, expected, message=""):
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(
            a, e, rtol=1e-5, atol=1e-5, err_msg=message
        ),
        actual,
        expected,
    )


def mesh_of(shape, names, axis_type=AxisType.Auto):
    return jax.make_mesh(
        shape,
        names,
        axis_types=(axis_type,) * len(names),
        devices=jax.devices()[: int(np.prod(shape))],
    )


def nest(map_, fun):
    """`fun(row, w)` over the two leading axes of its first argument."""
    inner = map_(fun, axis_name="j", in_axes=(0, None))
    return map_(inner, axis_name="i", in_axes=(0, None))


def step(y, w):
    summed = lax.psum(jnp.sin(y * w), ("i", "j"))
    return summed * y + lax.pmean(y, "j") + lax.psum(y, "i")
