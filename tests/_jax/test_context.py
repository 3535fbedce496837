"""What is traced, and what a program is lowered for, on both ends of JAX."""

import functools
import threading

import jax
import jax.extend.core as jex_core
import numpy as np
import pytest
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardmap._jax import context
from shardmap._jax.effects import CALLBACK_JAXPR

X = np.ones(8, np.float32)
MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
CALLS = []

look_p = jex_core.Primitive("look_at_lowering")
look_p.def_abstract_eval(lambda aval: aval)


def _lowering(ctx, x):
    CALLS.append(
        (
            context.module_of(ctx),
            context.mesh_around(ctx),
            context.manual_axes(ctx),
            context.device_count(ctx),
        )
    )
    return context.lower_inside(ctx, lambda x: [x * 2], ctx.avals_in, [x])


mlir.register_lowering(look_p, _lowering)


@pytest.fixture(autouse=True)
def _no_calls():
    CALLS.clear()


def test_nothing_is_traced_outside_of_traces_only():
    seen = []

    def look(x):
        seen.append(context.nothing_is_traced())
        return x

    assert context.nothing_is_traced()
    jax.make_jaxpr(look)(X)
    jax.vmap(look)(X)
    jax.grad(lambda x: look(x).sum())(X)
    assert seen == [False] * 3
    assert context.nothing_is_traced()
    thread = threading.Thread(target=look, args=(X,))
    thread.start()
    thread.join()
    assert seen[-1]


def test_a_lowering_outside_of_shard_map_has_no_mesh():
    np.testing.assert_array_equal(jax.jit(look_p.bind)(X), X * 2)
    [(_, mesh, manual, count)] = CALLS
    assert (mesh, manual, count) == (None, frozenset(), 1)


def test_the_devices_of_a_program():
    seen = []
    probe = jex_core.Primitive("look_at_devices")
    probe.def_abstract_eval(lambda aval, **_: aval)

    def lowering(ctx, x, **_):
        seen.append((context.device_count(ctx), tuple(context.devices_of(ctx))))
        return [x]

    mlir.register_lowering(probe, lowering)
    everywhere = jax.sharding.NamedSharding(MESH, PartitionSpec())
    # For a program without callbacks JAX does not say.
    bind = functools.partial(probe.bind, callback=CALLBACK_JAXPR)
    jax.jit(bind, in_shardings=everywhere)(X)
    assert seen == [(8, tuple(jax.devices()))]


def test_a_lowering_inside_of_shard_map_knows_its_mesh():
    spec = PartitionSpec(("a", "b"))
    mapped = jax.shard_map(look_p.bind, mesh=MESH, in_specs=spec, out_specs=spec)
    np.testing.assert_array_equal(jax.jit(mapped)(X), X * 2)
    [(_, mesh, manual, _)] = CALLS
    assert mesh.axis_names == ("a", "b")
    assert manual == {"a", "b"}


def test_one_program_is_one_object():
    jax.jit(lambda x: (look_p.bind(x), look_p.bind(x[:4])))(X)
    jax.jit(lambda x: look_p.bind(x - 1))(X)
    one, same, other = (program for program, *_ in CALLS)
    assert one is same
    assert one is not other


def test_an_equation_is_put_under_another_mesh_and_keeps_the_rest():
    with jax.threefry_partitionable(False):
        [equation] = jax.make_jaxpr(jax.lax.neg)(X).jaxpr.eqns
    mesh = AbstractMesh((2,), ("i",), axis_types=(AxisType.Auto,))
    changed = context.equation_context(equation.ctx, mesh)
    assert changed != equation.ctx
    assert changed.threefry_partitionable is False
    with changed.manager:
        assert jax.sharding.get_abstract_mesh() == mesh


def test_the_configuration_tells_precisions_apart():
    found = []
    for precision in "float32", "bfloat16":
        with jax.default_matmul_precision(precision):
            found.append(context.configuration())
    assert found[0] != found[1]


def test_a_replicated_sharding_has_no_mesh():
    sharding = context.replicated_without_mesh(jax.devices())
    assert sharding.is_fully_replicated
    assert not isinstance(sharding, NamedSharding)
