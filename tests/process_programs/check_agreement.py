"""Processes that are about to run different programs are told so, however they run."""

import jax
import numpy as np
from jax import lax
from world import DEVICES, LOCAL, PROCESS, equal, equal_global, on_all_devices, refused

import shardmap as sm

DIFFERENT = (
    "the processes do not call the same function with equal shapes, in the same "
    "order:\n"
)
# Named so that only what they do tells them apart.
SUMS = [lambda x: lax.psum(x, "i"), lambda x: lax.pmax(x, "i")]
OURS = SUMS[PROCESS % 2]


def mesh():
    return sm.make_mesh({"i": DEVICES}, jax.devices())


def blocks(fun):
    return sm.mesh_map(fun, mesh(), {"i": 0}, {})


def parts(fun, **options):
    return sm.sharded_jit(fun, (DEVICES, 1), (DEVICES, 1), **options)


def ones(*shape):
    return np.ones((DEVICES, *shape), np.float32)


def check_mesh_maps_are_told_apart():
    refused(
        RuntimeError,
        f"mesh_map of <lambda>: {DIFFERENT}"
        f"  * process 0: <lambda>, mesh {{'i': {DEVICES}}}",
        blocks(OURS),
        ones(3),
    )
    equal(blocks(SUMS[1])(ones(3)), np.ones((1, 3)))


def check_maps_in_a_jit_are_told_apart():
    x = on_all_devices(ones(3))
    refused(RuntimeError, DIFFERENT, jax.jit(sm.spmap(OURS, "i")), x)
    in_a_loop = jax.jit(
        lambda x: lax.fori_loop(0, 2, lambda _, x: sm.spmap(OURS, "i")(x) * 2, x)
    )
    refused(RuntimeError, DIFFERENT, in_a_loop, x)
    equal_global(jax.jit(sm.spmap(SUMS[1], "i"))(x), ones(3))


def check_gradients_are_told_apart():
    powers = [lambda x: lax.psum(x, "i") ** 2, lambda x: lax.psum(x, "i") ** 3]
    mapped = sm.spmap(powers[PROCESS % 2], "i")
    refused(
        RuntimeError,
        DIFFERENT,
        jax.jit(jax.grad(lambda x: mapped(x).sum())),
        on_all_devices(ones(4)),
    )


def check_names_of_collectives_are_told_apart():
    names = ["i", "j"][PROCESS % 2]
    grid = sm.make_mesh({"i": DEVICES, "j": 1}, jax.devices())
    mapped = sm.mesh_map(
        lambda x: lax.psum(x, names), grid, {"i": 0, "j": 0}, {"i": 0, "j": 0}
    )
    refused(RuntimeError, DIFFERENT, mapped, ones(3))


def check_partitions_are_told_apart():
    functions = [lambda x: x * x.sum(), lambda x: x + x.max()]
    refused(
        RuntimeError,
        f"sharded_jit of <lambda>: {DIFFERENT}  * process 0: <lambda>, mesh "
        f"{{'_partitions0': {DEVICES}}}, arguments (float32[{DEVICES},3]), in_specs",
        parts(functions[PROCESS % 2]),
        ones(3),
    )
    equal_global(parts(functions[1])(ones(3)), ones(3) * 2)


def check_one_process_may_lower_alone():
    mapped = {
        "elements": (sm.spmap(SUMS[0], "i"), np.ones((LOCAL, 6), np.float32)),
        "blocks": (blocks(SUMS[0]), on_all_devices(ones(6))),
        "parts": (parts(lambda x: x * x.sum()), on_all_devices(ones(6))),
    }
    whole = on_all_devices(ones(6))
    for fun, x in mapped.values():
        if PROCESS == 0:
            assert fun.lower(x).compile().as_text()
        first = jax.tree.leaves(fun(x))[0]
        compiled = fun.lower(x).compile()
        again = jax.tree.leaves(compiled(whole))[0]
        equal(again.addressable_data(0), first.addressable_data(0))


def check_what_one_process_has_lowered_is_agreed_on_with_the_others_calls():
    x = on_all_devices(ones(9))
    jitted = jax.jit(sm.spmap(lambda x: lax.pmin(x, "i"), "i"))
    if PROCESS == 0:
        assert "all_reduce" in jitted.lower(x).as_text()
    equal_global(jitted(x), ones(9))
