"""Calls of compiled programs, and names in errors."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from shardmap._jax.errors import is_lost_connection
from shardmap._jax.stages import Mismatch, dispatcher, is_compile_only, trace_as

X = np.ones(3, np.float32)


@pytest.mark.parametrize(
    ("message", "is_lost"),
    [
        ("FAILED_PRECONDITION: Gloo all-reduce failed: Connection reset by peer", True),
        ("[external/gloo/gloo/transport/tcp/pair.cc:538] Read timeout", True),
        ("RESOURCE_EXHAUSTED: out of memory", False),
    ],
)
def test_errors_of_lost_connections_are_told_from_others(message, is_lost):
    assert is_lost_connection(RuntimeError(message)) is is_lost


def compiled_for(*args, fun=lambda x, y: x * y):
    return jax.jit(fun).trace(*args).lower().compile()


def dispatcher_for(*args, **options):
    trees = jax.tree.structure((args, {})), jax.tree.structure(0)
    return dispatcher(compiled_for(*args, **options), *trees)


def test_a_dispatcher_refuses_what_jit_would_trace_anew():
    call = dispatcher_for(X, 2.0)
    for _ in range(3):
        np.testing.assert_array_equal(call(X, 2.0), 2 * X)
    with pytest.raises(Mismatch, match="other weak types"):
        call(X, np.float32(2))
    with pytest.raises(Mismatch, match="another configuration of JAX"):
        with jax.default_matmul_precision("highest"):
            call(X, 2.0)
    for args in [(X[:2], 2.0), (X, 2), ((X, 2.0),), (X,)]:
        with pytest.raises(TypeError, match="compiled"):
            call(*args)
    np.testing.assert_array_equal(call(X, 3.0), 3 * X)


def test_a_dispatcher_refuses_other_shardings():
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    cut = jax.NamedSharding(mesh, jax.P("i"))
    x = jax.device_put(np.arange(8, dtype=np.float32), cut)
    call = dispatcher_for(x, fun=lambda x: x + 1)
    np.testing.assert_array_equal(call(x), x + 1)
    with pytest.raises(ValueError, match="input shardings"):
        call(jax.device_put(x, jax.NamedSharding(mesh, jax.P())))


def test_a_dispatcher_of_a_program_that_calls_the_host():
    def fun(x):
        jax.debug.callback(lambda x: None, x)
        return x + 1

    call = dispatcher_for(X, fun=fun)
    np.testing.assert_array_equal(call(X), X + 1)
    with pytest.raises(TypeError, match="compiled"):
        call(X[:2])
    jax.effects_barrier()


def test_jax_speaks_of_the_users_function_and_arguments():
    def named(x):
        return x

    def traced(*leaves):
        return leaves[0]

    trace_as(traced, "a test", named, ({"w": 0},), {})
    said = repr(jax.make_jaxpr(traced)(0).jaxpr.debug_info).replace("\\", "")
    assert "named" in said
    assert "x['w']" in said


# Devices


def test_devices_of_this_process_run():
    assert [is_compile_only(device) for device in jax.devices()] == [False] * 8


def test_devices_of_a_topology_only_compile():
    """As libtpu's and the CUDA compiler's are; there are none without their wheels."""
    client = SimpleNamespace(runtime_type="compile_only_runtime")
    assert is_compile_only(SimpleNamespace(client=client))
