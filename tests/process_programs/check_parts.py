"""`sharded_jit` and `with_sharding_constraint` over the devices of all processes."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from world import (
    DEVICES,
    LOCAL,
    PROCESS,
    PROCESSES,
    equal,
    equal_global,
    numbers,
    on_all_devices,
    own,
    refused,
)

import shardmap as sm

WEIGHTS = np.arange(6, dtype=np.float32).reshape(2, 3)


def model(x, w):
    return jnp.tanh(x @ w) + x.sum()


def global_parts():
    return sm.sharded_jit(model, ((DEVICES, 1), None), (DEVICES, 1))


def own_parts(**options):
    return sm.sharded_jit(
        model,
        ((DEVICES, 1), None),
        (DEVICES, 1),
        local_in_parts=((LOCAL, 1), None),
        local_out_parts=(LOCAL, 1),
        **options,
    )


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


def check_parts_of_this_process():
    whole, mine = numbers(2 * LOCAL, 2)
    expected = own(np.asarray(model(whole, WEIGHTS)))
    split = own_parts(num_partitions=DEVICES, local_num_partitions=LOCAL)
    for x in (mine, jnp.asarray(mine), on_all_devices(whole), mine):
        y = split(x, WEIGHTS)
        assert y.is_fully_addressable
        equal(y, expected)
    equal(split.lower(mine, WEIGHTS).compile()(mine, WEIGHTS), expected)
    equal_global(
        jax.jit(split)(on_all_devices(whole), WEIGHTS),
        np.asarray(model(whole, WEIGHTS)),
    )


def check_parts_that_are_differentiated_and_vectorised():
    whole, mine = numbers(2 * LOCAL, 2)
    split = own_parts()

    def total(fun):
        return lambda x, w: fun(x, w).sum()

    by_x, by_w = jax.grad(total(model), (0, 1))(whole, WEIGHTS)
    mine_by_x, same_by_w = jax.grad(total(split), (0, 1))(mine, WEIGHTS)
    equal(mine_by_x, own(np.asarray(by_x)))
    equal(same_by_w, by_w)
    by_global = jax.grad(total(global_parts()))(whole, WEIGHTS)
    equal_global(by_global, np.asarray(by_x))
    stacked = jax.vmap(lambda x: split(x, WEIGHTS))(np.stack([mine, 2 * mine]))
    expected = [own(np.asarray(model(x, WEIGHTS))) for x in (whole, 2 * whole)]
    equal(stacked, np.stack(expected))


def check_parts_cut_two_dimensions_between_processes():
    if DEVICES % 4:
        return
    rows, columns = DEVICES // 2, 2
    held = min(LOCAL, columns)
    local = (LOCAL // held, held)
    whole = np.arange(4.0 * DEVICES, dtype=np.float32).reshape(2 * rows, 2 * columns)
    row, column = divmod(PROCESS * LOCAL, columns)
    piece = whole[2 * row : 2 * (row + local[0]), 2 * column : 2 * (column + local[1])]
    split = sm.sharded_jit(
        lambda x: x + x.sum(0, keepdims=True),
        (rows, columns),
        (rows, columns),
        local_in_parts=local,
        local_out_parts=local,
    )
    equal(
        split(piece),
        (piece + whole.sum(0, keepdims=True)[:, 2 * column : 2 * (column + local[1])]),
    )
    refused(
        ValueError,
        f"local_in_parts of x is {(9, 1)}, but of {(rows, columns)} partitions, "
        f"{DEVICES} in all, this process has {LOCAL}, which are {local}",
        sm.sharded_jit(lambda x: x, (rows, columns), None, local_in_parts=(9, 1)),
        piece,
    )


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


def check_wrong_counts_of_parts_are_refused():
    whole, mine = numbers(2 * LOCAL, 2)
    refused(
        ValueError,
        f"got local_num_partitions {DEVICES + 1}, but of the {DEVICES} partitions "
        f"{LOCAL} are on each process",
        own_parts(local_num_partitions=DEVICES + 1),
        mine,
        WEIGHTS,
    )
    many = 2 * DEVICES
    refused(
        ValueError,
        f"sharded_jit computation requires {many} devices, which are more than the "
        f"{LOCAL} of this process, and so equally many of each of {PROCESSES} "
        f"processes. They have {[LOCAL] * PROCESSES}. Ask for a multiple of "
        f"{PROCESSES} partitions, {DEVICES} at most",
        sm.sharded_jit(lambda x: x, (many, 1), None),
        whole,
    )
    refused(
        ValueError,
        f"x is float32[{2 * LOCAL + 1},2]: dimension 0 of size {2 * LOCAL + 1} is not "
        f"divisible by {LOCAL} parts"
        if LOCAL > 1
        else "local_in_parts of x is (9, 1)",
        own_parts()
        if LOCAL > 1
        else sm.sharded_jit(
            model, ((DEVICES, 1), None), None, local_in_parts=((9, 1), None)
        ),
        np.ones((2 * LOCAL + 1, 2), np.float32),
        WEIGHTS,
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
    by_x, by_n = jax.grad(
        lambda x, n: sm.spmap(lambda x, n: x * n.astype(x.dtype))(x, n).sum(),
        (0, 1),
        allow_int=True,
    )(mine, np.arange(LOCAL))
    equal(by_x, np.arange(LOCAL))
    assert by_n.dtype == jax.dtypes.float0


# Global arrays, step by step


def check_mesh_maps_that_are_differentiated_and_vectorised():
    whole, _ = numbers(LOCAL, 2)
    mesh = sm.make_mesh({"i": DEVICES}, jax.devices())
    squares = sm.mesh_map(lambda x: lax.psum((x * x).sum(), "i"), mesh, {"i": 0}, {})
    for x in (whole, on_all_devices(whole)):
        equal_global(jax.grad(squares)(x), 2 * whole)
    both = jax.vmap(squares)(np.stack([whole, 2 * whole]))
    equal(both, [(whole**2).sum(), 4 * (whole**2).sum()])
