"""`sharded_jit` and `with_sharding_constraint` over the devices of all processes."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from world import (
    DEVICES,
    LOCAL,
    PROCESS,
    equal,
    equal_global,
    numbers,
    on_all_devices,
    refused,
)

import shardmap as sm

WEIGHTS = np.arange(6, dtype=np.float32).reshape(2, 3)


def model(x, w):
    return jnp.tanh(x @ w) + x.sum()


def global_parts():
    return sm.sharded_jit(model, ((DEVICES, 1), None), (DEVICES, 1))


def check_parts_of_global_arrays():
    whole, _ = numbers(2 * LOCAL, 2)
    expected = model(whole, WEIGHTS)
    split = global_parts()
    y = split(on_all_devices(whole), WEIGHTS)
    equal_global(y, np.asarray(expected))
    assert sm.spec_of(y).sharding[0] == sm.Chunked(DEVICES)
    # What is equal on all processes will do.
    equal_global(split(whole, jnp.asarray(WEIGHTS)), np.asarray(expected))
    equal_global(jax.jit(split)(on_all_devices(whole), WEIGHTS), np.asarray(expected))
    lowered = split.lower(whole, WEIGHTS)
    assert str(lowered.in_specs[0]) == (
        f"ShardingSpec((Chunked(({DEVICES},)), None), (ShardedAxis(0),))"
    )
    equal_global(lowered.compile()(whole, WEIGHTS), np.asarray(expected))


def check_parts_that_are_differentiated():
    whole, _ = numbers(2 * LOCAL, 2)

    def total(fun):
        return lambda x, w: fun(x, w).sum()

    by_x = jax.grad(total(model))(whole, WEIGHTS)
    equal_global(jax.grad(total(global_parts()))(whole, WEIGHTS), np.asarray(by_x))


def check_parts_on_this_process_alone():
    _, mine = numbers(LOCAL, 2)
    split = sm.sharded_jit(lambda x: x - x.sum(), (LOCAL, 1), (LOCAL, 1))
    if PROCESS == 0:
        equal(split(mine), mine - mine.sum())
        equal(jax.jit(split)(mine), mine - mine.sum())


def check_constraints_over_all_processes():
    whole, _ = numbers(2 * LOCAL, 2)
    equal_global(sm.with_sharding_constraint(whole, (DEVICES, 1)), whole)

    @jax.jit
    def double(x):
        return sm.with_sharding_constraint(2 * x, (DEVICES, 1))

    equal_global(double(on_all_devices(whole)), 2 * whole)


def check_too_many_partitions_are_refused():
    many = 2 * DEVICES
    refused(
        ValueError,
        f"sharded_jit computation requires {many} devices, but only {DEVICES} devices "
        "are available. Ask for fewer parts",
        sm.sharded_jit(lambda x: x, (many, 1), None),
        np.ones((many, 1), np.float32),
    )


# Tangents of integers


def check_tangents_of_integers():
    _, mine = numbers(LOCAL)
    none = np.zeros(LOCAL, jax.dtypes.float0)
    first, second = sm.spmap(lambda x, n: (x + 1, n), "i")(mine, none)
    equal(first, mine + 1)
    assert (second.shape, second.dtype) == (none.shape, none.dtype)
    whole, nothing = numbers(LOCAL)[0], np.zeros(DEVICES, jax.dtypes.float0)
    mesh = sm.make_mesh({"i": DEVICES}, jax.devices())
    for mapped in (
        sm.mesh_map(lambda x, n: x + 1, mesh, {"i": 0}, {"i": 0}),
        sm.sharded_jit(lambda x, n: x + 1, (DEVICES,), (DEVICES,)),
    ):
        equal_global(mapped(whole, nothing), whole + 1)


# Global arrays, step by step


def check_mesh_maps_that_are_differentiated_and_vectorised():
    whole, _ = numbers(LOCAL, 2)
    mesh = sm.make_mesh({"i": DEVICES}, jax.devices())
    squares = sm.mesh_map(lambda x: lax.psum((x * x).sum(), "i"), mesh, {"i": 0}, {})
    for x in (whole, on_all_devices(whole)):
        equal_global(jax.grad(squares)(x), 2 * whole)
    both = jax.vmap(squares)(np.stack([whole, 2 * whole]))
    equal(both, [(whole**2).sum(), 4 * (whole**2).sum()])
