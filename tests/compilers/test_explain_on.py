"""Programs as they are written, explained for TPUs and GPUs that are not here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm

F32 = jnp.float32
X = jax.ShapeDtypeStruct((64, 8, 128), F32)
W = np.ones((128, 128), np.float32)


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


@sm.spmap(axis_name="i", in_axes=(None, 0), out_axes=None)
def gradient(w, x):
    return jax.lax.pmean(jax.grad(loss)(w, x), "i")


@jax.jit
def step(w, x):
    return w - 0.1 * gradient(w, x)


def facts(report):
    sent = [(each.kind, each.bytes_in) for each in report.collectives]
    return report.num_devices, report.device_kind, sent


@pytest.mark.parametrize(
    ("machine", "count", "kind"),
    [("v5e:4x4", 16, "TPU v5 lite"), ("h100:2x4", 8, "NVIDIA H100 80GB HBM3")],
)
def test_a_training_step_as_it_is_written(machine, count, kind):
    step(W, np.ones((8, 8, 128), np.float32))
    expected = count, kind, [("all-reduce", W.nbytes)]
    assert facts(sm.explain(step, devices=machine)(W, X)) == expected
    assert facts(sm.explain(gradient, devices=sm.devices(machine))(W, X)) == expected


def attention(q, k):
    return jax.nn.softmax(q @ k.T) @ k


def test_memory_is_that_of_the_machine():
    """XLA for TPUs keeps no weights of attention, XLA for CPU does."""
    x = jax.ShapeDtypeStruct((64, 128, 1), F32)
    elements = sm.spmap(attention, batch_size=sm.AUTO, memory="150 KB")
    for machine, steps in ("v5e:2x4", 1), (None, 4):
        (axis,) = sm.explain(lambda x: elements(x, x), devices=machine)(x).axes
        assert axis.steps == steps
    mapped = functools.partial(sm.spmap, devices=sm.devices("v5e:2x4"))
    elements = mapped(attention, batch_size=sm.AUTO, memory="150 KB")
    (equation,) = elements.trace(x, x).jaxpr.eqns
    assert equation.params["batch_size"] is None

    cuts = {0: sm.AUTO}, {0: sm.AUTO}
    pieces = sm.chunked(jax.vmap(attention), cuts, memory="150 KB")
    there, here = (
        sm.explain(lambda x: pieces(x, x), devices=machine)(x)
        for machine in ("v5e:2x4", None)
    )
    assert 1 < there.axes[0].steps < here.axes[0].steps


def test_meshes_of_this_process_are_moved():
    mesh = jax.make_mesh(
        (4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    rows, columns = (
        NamedSharding(mesh, P("data")),
        NamedSharding(mesh, P(None, "model")),
    )
    product = jax.jit(lambda x, w: jnp.sum(x @ w), in_shardings=(rows, columns))
    report = sm.explain(product, devices="v5e:2x4")(X, W)
    assert (report.num_devices, report.device_kind) == (8, "TPU v5 lite")
    assert [each.shard_shape for each in report.inputs] == [(16, 8, 128), (128, 64)]


def test_a_program_on_one_device():
    report = sm.explain(loss, devices="v6e:2x4")(W, X)
    assert (report.num_devices, report.device_kind) == (1, "TPU v6 lite")


@pytest.mark.parametrize("machine", ["v5e:2x4", "h100:2x4"])
def test_few_elements_are_on_the_first_devices(machine):
    devices = sm.devices(machine)
    total = sm.spmap(lambda x: jax.lax.psum(x, "i"), "i", devices=devices)
    compiled = total.lower(jax.ShapeDtypeStruct((4, 128), F32)).compile()
    (sharding,) = jax.tree.leaves(compiled.input_shardings)
    assert list(sharding.mesh.devices.flat) == devices[:4]


def test_a_map_that_is_called_says_what_to_do():
    devices = sm.devices("v5e:2x4")
    x = np.ones((8, 128), np.float32)
    double = sm.spmap(lambda x: 2 * x, "i", devices=devices)
    advice = (
        r"its 8 devices of kind 'TPU v5 lite' compile only: use its lower or explain"
    )
    for call in (double, jax.grad(lambda x: double(x).sum())):
        with pytest.raises(ValueError, match=advice):
            call(x)
    mesh = sm.make_mesh({"data": 8}, devices)
    with pytest.raises(ValueError, match=advice):
        sm.mesh_map(lambda x: x, mesh, {"data": 0}, {"data": 0})(x)
