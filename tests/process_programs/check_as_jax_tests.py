"""What JAX's own tests of several processes ask of `jax.pmap` and `jax.shard_map`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from world import DEVICES, LOCAL, PROCESS, PROCESSES, equal, own

import shardmap as sm

DTYPES = [np.int32, jnp.float32, jnp.float16, jnp.bfloat16]


def integers(*shape):
    """Small enough for sums of them to be exact in every dtype."""
    return np.random.default_rng(0).integers(-3, 4, (PROCESSES, LOCAL, *shape))


def same(one, other):
    np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def check_stacked_shards_of_a_process():
    values = [np.arange(k, k + 4) + PROCESS * 4 for k in range(LOCAL)]
    whole = sum(
        np.arange(k, k + 4) + p * 4 for p in range(PROCESSES) for k in range(LOCAL)
    )
    x = sm.device_put_sharded(values, jax.local_devices())
    y = sm.spmap(lambda x: lax.psum(x, "i"), axis_name="i")(x)
    assert isinstance(y, jax.Array)
    assert isinstance(y.sharding, jax.sharding.NamedSharding)
    same(y, np.stack([whole] * LOCAL))


def check_collectives_in_every_dtype():
    for dtype in DTYPES:
        x = jnp.asarray(integers(16), dtype)
        y = sm.spmap(lambda x: lax.psum(x, "i"), axis_name="i")(x[PROCESS])
        assert y.dtype == dtype
        same(y, np.stack([np.asarray(x, np.float32).sum((0, 1))] * LOCAL).astype(dtype))
        x = jnp.asarray(integers(DEVICES, 16), dtype)
        y = sm.spmap(
            lambda x: lax.all_to_all(x, "i", split_axis=0, concat_axis=0), axis_name="i"
        )(x[PROCESS])
        for k in range(LOCAL):
            same(y[k], x[:, :, PROCESS * LOCAL + k].reshape(DEVICES, 16))


def check_groups_over_processes():
    groups = [list(range(DEVICES))[0::2], list(range(DEVICES))[1::2]]
    x = integers(5)
    y = sm.spmap(lambda x: lax.psum(x, "i", axis_index_groups=groups), axis_name="i")(
        x[PROCESS]
    )
    flat = x.reshape(DEVICES, 5)
    for k in range(LOCAL):
        same(y[k], flat[(PROCESS * LOCAL + k) % 2 :: 2].sum(0))


def check_gather_along_a_mesh():
    mesh = sm.make_mesh({"x": PROCESSES, "y": LOCAL}, jax.devices())

    def gather(x):
        rows = lax.all_gather(x, "x", axis=0, tiled=True)
        return lax.all_gather(rows, "y", axis=1, tiled=True)

    for dtype in DTYPES:
        whole = jnp.arange(DEVICES, dtype=dtype).reshape(PROCESSES, LOCAL)
        for lowering in ("manual", "spmd"):
            out = sm.mesh_map(gather, mesh, {"x": 0, "y": 1}, {}, lowering=lowering)(
                whole
            )
            for shard in out.addressable_shards:
                same(shard.data, whole[shard.index])


def check_a_traced_map_is_evaluated():
    gather = sm.spmap(lambda x: lax.all_gather(x, "i"), axis_name="i")
    for count in (LOCAL, 1):  # Of one element, one process has the device.
        x = jnp.ones(count)
        jaxpr = jax.make_jaxpr(gather)(x)
        evaluated = functools.partial(jax.core.eval_jaxpr, jaxpr.jaxpr, jaxpr.consts)
        (y,) = jax.jit(evaluated)(x)
        assert y.shape == (count, count)


def check_callbacks_of_this_process():
    called = []

    def host(index, x, total):
        called.append((int(index), np.asarray(x), np.asarray(total)))
        return x * 3 + total

    def body(x):
        total = lax.psum(x, "d")
        return jax.pure_callback(host, x, lax.axis_index("d"), x, total)

    x = integers(2).astype(np.int32)
    y = sm.spmap(body, axis_name="d", devices=jax.devices())(x[PROCESS])
    same(y, x[PROCESS] * 3 + x.sum((0, 1)))
    jax.effects_barrier()
    called.sort(key=lambda each: each[0])
    assert [index for index, *_ in called] == [
        PROCESS * LOCAL + k for k in range(LOCAL)
    ]
    for (_, value, total), expected in zip(called, x[PROCESS], strict=True):
        same(value, expected)
        same(total, x.sum((0, 1)))


def check_global_results_through_a_jit_and_back():
    """As with a jit after a pmap: one's results are the other's arguments."""
    whole = integers(3).astype(np.float32).reshape(DEVICES, 3)
    mine = own(whole)
    mapped = sm.spmap(lambda x: x - lax.pmean(x, "i"), axis_name="i")
    y = mapped(mine)
    equal(jax.jit(lambda y: y * 2)(y), 2 * own(whole - whole.mean(0)))
    equal(mapped(jax.jit(lambda y: y * 2)(y)), 2 * own(whole - whole.mean(0)))
