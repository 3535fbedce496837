"""Arrays on several devices are read from the devices that hold each part."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm
from tests.arrays.test_running import assert_runs_to_its_end

X = np.arange(48 * 8, dtype=np.float32).reshape(48, 8) / 100
KINDS = [AxisType.Auto, AxisType.Explicit]


def place(value, spec, kind=AxisType.Auto):
    mesh = jax.make_mesh((4, 2), ("i", "j"), axis_types=(kind,) * 2)
    return jax.device_put(value, NamedSharding(mesh, spec))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", [P("i"), P("j", "i"), P(None, "i"), P()])
def test_a_shard_reads_what_it_needs_and_runs_on_one_device(spec, kind):
    weights = place(X[:8], P(None, "j"))

    def fun(x):
        return jnp.tanh(x @ weights.T).sum(0)

    made = sm.plan(fun, X, in_slices={0: 5})
    expected = np.asarray(jax.jit(fun)(X))
    x = place(X, spec, kind)
    for shard in made.shards:
        assert all(len(getattr(part, "devices", set)()) <= 1 for part in shard.args(x))
    with ThreadPoolExecutor(2) as pool:
        for executor in (None, pool):
            result = made.run(x, executor=executor)
            np.testing.assert_allclose(result, expected, rtol=1e-5)


def test_keys_on_several_devices():
    keys = jax.random.split(jax.random.key(0), 8)
    draw = jax.vmap(jax.random.uniform)
    made = sm.plan(draw, keys, in_slices={0: 3})
    np.testing.assert_array_equal(made.run(place(keys, P("i"))), draw(keys))


@pytest.mark.deep
def test_many_threads_do_not_hang():
    """If slices were programs on all devices, they would."""
    assert_runs_to_its_end(
        """
        from concurrent.futures import ThreadPoolExecutor
        import jax, jax.numpy as jnp, numpy as np, shardmap as sm

        mesh = jax.sharding.Mesh(jax.devices(), "i")
        cut = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))
        x = jax.device_put(np.ones((640, 32), np.float32) / 8, cut)
        made = sm.plan(lambda x: jnp.tanh(x @ x.T).sum(0), x, in_slices={0: 64})
        with ThreadPoolExecutor(16) as pool:
            for _ in range(5):
                made.run(x, executor=pool)
        print("ran to the end")
        """,
        timeout=120,
    )
