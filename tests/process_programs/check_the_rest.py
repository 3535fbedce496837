"""Global arrays, transformations, meshes, placement, taps, many calls."""

import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from world import (
    DEVICES,
    LOCAL,
    PROCESS,
    PROCESSES,
    centered,
    equal,
    equal_global,
    numbers,
    on_all_devices,
    own,
    refused,
)

import shardmap as sm

# Global arrays


def check_global_in_global_out():
    whole, _ = numbers(LOCAL, 3)
    mapped = sm.spmap(centered, "i")
    y = mapped(on_all_devices(whole))
    equal_global(y, whole - whole.mean(0))
    equal_global(mapped(y), whole - whole.mean(0))


def check_global_arrays_are_laid_out():
    whole, _ = numbers(LOCAL, DEVICES)
    y = sm.spmap(centered, "i")(on_all_devices(whole, None, "i"))
    equal_global(y, whole - whole.mean(0))


def check_process_local_and_global_arrays_in_one_call_are_refused():
    """As docs/processes.md shows."""
    page = (pathlib.Path(__file__).parents[2] / "docs/processes.md").read_text()
    shown, _, _ = page.partition("```text\nValueError: ")[2].partition("```")
    whole, mine = numbers(LOCAL, 3)

    def total(x, y):
        return lax.psum(x + y, "i")

    refused(
        ValueError,
        " ".join(shown.split()),
        sm.spmap(total, "i"),
        mine,
        on_all_devices(whole),
    )


def check_what_is_not_mapped_may_be_either():
    whole, mine = numbers(LOCAL, 3)
    w = np.arange(3, dtype=np.float32)
    mapped = sm.spmap(lambda x, w: centered(x) * w, "i", in_axes=(0, None))
    expected = (whole - whole.mean(0)) * w
    for weights in (w, jnp.asarray(w), on_all_devices(w, None)):
        equal(mapped(mine, weights), own(expected))
        equal_global(mapped(on_all_devices(whole), weights), expected)


def check_process_local_after_global_arrays():
    whole, mine = numbers(LOCAL, 3)
    mapped = sm.spmap(centered, "i")
    expected = whole - whole.mean(0)
    for _ in range(2):
        equal(mapped(mine), own(expected))
        equal_global(mapped(on_all_devices(whole)), expected)
    # As long as the global array, it is still process-local data.
    equal(mapped(jnp.asarray(whole)), whole - whole.mean(0))


def check_what_runs_step_by_step():
    whole, mine = numbers(LOCAL, 3)
    mapped = sm.spmap(centered, "i")
    with jax.disable_jit():
        equal(mapped(mine), own(whole - whole.mean(0)))
    with jax.debug_nans(True):
        equal(mapped(mine), own(whole - whole.mean(0)))


# Transformations


def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w)) + jnp.sum(lax.pmean(x, "i") * w[0])


def check_grad_outside():
    whole, mine = numbers(LOCAL, 3)
    w = np.ones((3, 3), np.float32)

    def total(mapped):
        return lambda w, x: mapped(w, x).sum()

    vmapped = jax.vmap(loss, (None, 0), axis_name="i")
    expected = jax.grad(total(vmapped), (0, 1))(w, whole)
    gradient = jax.grad(total(sm.spmap(loss, "i", in_axes=(None, 0))), (0, 1))
    x = on_all_devices(whole)
    by_w, by_x = jax.jit(gradient)(w, x)
    equal_global(by_w, expected[0])
    equal_global(by_x, expected[1])
    for transformed in (lambda x: gradient(w, x), jax.vmap(sm.spmap(centered, "i"))):
        for data in (mine, x):
            refused(ValueError, "transformed outside of jax.jit", transformed, data)


def check_nested_maps():
    whole, mine = numbers(1, LOCAL, 3)

    def inner(x):
        return x - lax.pmean(x, ("i", "j")) + lax.axis_index("j").astype(x.dtype)

    def nested(outer_map, inner_map):
        return outer_map(inner_map(inner, axis_name="j"), axis_name="i")

    expected = np.asarray(nested(jax.vmap, jax.vmap)(whole))
    y = nested(sm.spmap, sm.spmap)(mine)
    equal(y, own(expected))
    assert y.sharding.device_set == set(jax.local_devices())


# Meshes


def global_mesh():
    return sm.make_mesh({"data": PROCESSES, "model": LOCAL}, jax.devices())


def check_a_mesh_of_all_processes():
    whole, mine = numbers(2, LOCAL, 3)
    mesh = global_mesh()
    inner = sm.spmap(
        lambda x: x - lax.pmean(x, ("i", "j")), "j", mesh=mesh, mesh_axes="model"
    )
    y = sm.spmap(inner, "i", mesh=mesh, mesh_axes="data")(mine)
    equal(y, own(whole - whole.mean((0, 1))))
    if LOCAL == 2:
        refused(
            ValueError,
            f"3 elements on each of {PROCESSES} processes do not divide among the "
            f"{DEVICES} devices of the mesh",
            sm.spmap(centered, "i", mesh=mesh, mesh_axes=("data", "model")),
            np.ones(3),
        )


def check_mesh_map():
    mesh = global_mesh()
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2 * PROCESSES, 4 * LOCAL), np.float32)
    w = rng.standard_normal((4 * LOCAL, 3), np.float32)
    product = sm.mesh_map(
        lambda x, w: lax.psum(x @ w, "model"),
        mesh,
        in_axes=({"data": 0, "model": 1}, {"model": 0}),
        out_axes={"data": 0},
    )
    equal_global(product(x, w), x @ w)
    equal_global(
        product(jnp.asarray(x), jax.device_put(w, jax.local_devices()[0])), x @ w
    )
    sharded = jax.make_array_from_callback(
        x.shape, NamedSharding(mesh, P("data", "model")), lambda i: x[i]
    )
    equal_global(product(sharded, w), x @ w)
    equal_global(jax.jit(product)(sharded, w), x @ w)


# Placement


def check_copies_and_pieces():
    whole, mine = numbers(LOCAL, 3)
    y = sm.spmap(lambda x: x + 0)(mine)
    for k, piece in enumerate(sm.unstack(y)):
        equal(piece, mine[k])
        assert piece.device == jax.local_devices()[k]
    equal(sm.shard_of(y, LOCAL - 1), mine[-1])
    equal(sm.unreplicate(y), mine[0])
    z = sm.device_put_replicated({"w": mine[0]}, jax.local_devices())["w"]
    equal(z, np.stack([mine[0]] * LOCAL))
    g = sm.spmap(lambda x: x + 0)(on_all_devices(whole))
    equal(sm.shard_of(g, PROCESS * LOCAL), mine[0])
    refused(
        ValueError,
        "on a device of another process",
        sm.shard_of,
        g,
        (PROCESS + 1) % PROCESSES * LOCAL,
    )


def check_parts_of_several_devices():
    whole = np.arange(PROCESSES * LOCAL * 3, dtype=np.float32)
    whole = whole.reshape(PROCESSES, LOCAL, 3)
    mesh = sm.make_mesh({"i": PROCESSES, "j": LOCAL}, jax.devices())
    g = jax.make_array_from_callback(
        whole.shape, NamedSharding(mesh, P("i", "j")), lambda i: whole[i]
    )
    equal(sm.shard_of(g, (PROCESS, -1)), whole[PROCESS, -1])
    other = (PROCESS + 1) % PROCESSES
    there = f"its element {other} along axis 0 and its element 0 along axis 1"
    refused(ValueError, there, sm.shard_of, g, (other, 0))
    if LOCAL > 1:
        refused(ValueError, f"is on {LOCAL} devices", sm.shard_of, g, PROCESS)


def check_copies_on_all_devices():
    row = np.arange(3, dtype=np.float32)
    for value in (row, jnp.asarray(row)):
        z = sm.device_put_replicated(value, jax.devices())
        equal_global(z, np.stack([row] * DEVICES))
        equal(sm.unreplicate(z), row)
        y = sm.device_put_replicated(value, jax.devices(), axis=1)
        equal_global(y, np.stack([row] * DEVICES, 1))


# Taps


def check_each_process_hears_its_own_devices():
    heard = {}

    def note(value, device):
        heard[device] = float(value)

    def body(x):
        return lax.psum(sm.tap(note, x, with_device=True), "i")

    _, mine = numbers(LOCAL)
    sm.spmap(body, "i")(mine)
    sm.taps_barrier()
    assert heard == dict(zip(jax.local_devices(), map(float, mine), strict=True))


# Running


def check_many_queued_calls():
    whole, mine = numbers(LOCAL, 64)
    total = sm.spmap(lambda x: lax.psum(x, "i"), "i")
    results = [total(mine) for _ in range(200)]
    equal(results[-1][0], whole.sum(0))


def check_other_functions_are_told_apart():
    same = [lambda x: lax.psum(x, "i"), lambda x: lax.pmax(x, "i")]
    _, mine = numbers(LOCAL, 2)
    refused(
        RuntimeError,
        "the processes do not call the same function with equal shapes, in the same "
        "order:\n"
        "  * process 0: <lambda>, mesh {'i': ",
        sm.spmap(same[PROCESS % 2], "i"),
        mine,
    )


def check_other_shapes_are_told_apart():
    mapped = sm.spmap(centered, "i")
    equal(mapped(np.ones((LOCAL, 7))), np.zeros((LOCAL, 7)))
    refused(
        RuntimeError,
        "the processes do not call the same function with equal shapes, in the same",
        mapped,
        np.ones((LOCAL, 8 + PROCESS)),
    )
    equal(mapped(np.ones((LOCAL, 7))), np.zeros((LOCAL, 7)))


# Doors

LISTENS = "0A"
LOOPBACK = ("0100007F", "0000000000000000FFFF00000100007F")


def check_the_coordinator_listens_here_alone():
    port = int(os.environ["JAX_COORDINATOR_ADDRESS"].rpartition(":")[2])
    lines = [
        line.split()
        for kind in ("tcp", "tcp6")
        for line in pathlib.Path("/proc/self/net", kind).read_text().splitlines()[1:]
    ]
    addresses = [
        own.partition(":")[0]
        for _, own, _, state, *_ in lines
        if state == LISTENS and int(own.partition(":")[2], 16) == port
    ]
    assert addresses, "the coordinator does not listen"
    assert set(addresses) <= set(LOOPBACK), addresses


def check_what_runs_on_all_processes_is_explained():
    rows, _ = numbers(2 * LOCAL, 3)
    mapped = sm.spmap(centered, "i")
    # On one line, as the program's own line is in both.
    report, same = sm.explain(mapped)(own(rows)), mapped.explain(own(rows))
    assert str(report) == str(same)
    assert report.num_devices == DEVICES
    [axis] = report.axes
    assert (axis.size, axis.devices) == (len(rows), DEVICES)
    [collective] = report.collectives
    assert collective.kind == "all-reduce"
