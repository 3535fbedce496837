"""What `explain` finds worth changing, and what it leaves alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm
from tests.command_line import python

MIB = 1 << 20


def shape(*dimensions, **options):
    return jax.ShapeDtypeStruct(dimensions, np.float32, **options)


def remarks(fun, *args):
    return [remark.text for remark in sm.explain(fun)(*args).remarks]


# Copies


@pytest.mark.parametrize(("numbers", "number"), [(MIB // 4, 1), (MIB // 4 - 1, 0)])
def test_a_large_value_on_every_device(numbers, number):
    fun = sm.spmap(lambda x, w: x * w.sum(), in_axes=(0, None))
    texts = remarks(fun, shape(8), shape(numbers))
    assert len(texts) == number
    for text in texts:
        assert text == "w of 1.0 MiB is replicated on 8 devices: 8.0 MiB in all"


@pytest.mark.parametrize(("rows", "number"), [(45, 1), (55, 0)])
def test_what_takes_little_of_the_memory_is_no_remark(rows, number):
    fun = sm.spmap(lambda x, w: x * w.sum(), in_axes=(0, None))
    assert len(remarks(fun, shape(8, rows, MIB // 4), shape(MIB // 4))) == number


def test_small_values_that_are_large_together_are_one_remark():
    def loss(params, x):
        for layer in params:
            x = jnp.tanh(x @ layer["w"] + layer["b"][None])
        return x.mean()

    params = [{"w": shape(256, 256), "b": shape(256)}] * 5
    rows = NamedSharding(sm.make_mesh({"i": 8}), P("i"))
    report = sm.explain(jax.jit(jax.grad(loss), in_shardings=(None, rows)))
    those = report(params, shape(64, 256)).remarks
    # New weights are like the old ones, which are said to be replicated.
    assert [(each.text, each.source) for each in those] == [
        (
            "10 arrays of params, together 1.3 MiB, are replicated on 8 devices: "
            "10.0 MiB in all",
            "params",
        ),
    ]


def test_the_state_of_an_optimizer_is_to_be_sharded_like_its_weights():
    def step(state, x):
        slopes = jax.grad(lambda w: jnp.tanh(x @ w["w"] + w["b"][None]).mean())
        slopes = slopes(state["weights"])
        momentum = jax.tree.map(jnp.add, state["momentum"], slopes)
        weights = jax.tree.map(jnp.subtract, state["weights"], momentum)
        return {"weights": weights, "momentum": momentum}

    def weights(first, second):
        whole, cut = (NamedSharding(mesh, P(*name)) for name in (second, first))
        return {"w": shape(512, 1024, sharding=cut), "b": shape(1024, sharding=whole)}

    mesh = sm.make_mesh({"i": 8})
    state = {"weights": weights(["i"], ["i"]), "momentum": weights([], [])}
    report = sm.explain(jax.jit(step, donate_argnums=0))(state, shape(64, 512))
    (remark,) = [each for each in report.remarks if each.source == "state"]
    assert remark.text.startswith("2 arrays of state, together 2.0 MiB, are replicated")
    assert remark.advice.startswith("Most have the shapes of arrays that are sharded")


def test_gradients_that_are_asked_for_cut_do_not_come_back_whole():
    def loss(w, x):
        return jnp.tanh(x @ w).mean()

    mesh = sm.make_mesh({"i": 8})
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("i"))
    w, x = shape(512, 512), shape(64, 512)

    def found(out):
        jitted = jax.jit(jax.grad(loss), in_shardings=(rows, rows), out_shardings=out)
        return [text for text in remarks(jitted, w, x) if "given back whole" in text]

    assert found(whole) == [
        "result of 1.0 MiB is given back whole on 8 devices: 8.0 MiB in all"
    ]
    assert found(rows) == []


def test_a_large_value_that_is_cut_is_left_alone():
    assert remarks(sm.spmap(jnp.sum), shape(8, MIB)) == []


def test_a_large_constant():
    constant = np.ones(MIB // 4, np.float32)
    (text,) = remarks(sm.spmap(lambda x: x + constant), shape(8, MIB // 4))
    assert text == (
        f"a constant of 1.0 MiB and shape ({MIB // 4},) is part of the program, "
        "replicated on 8 devices"
    )


def test_a_large_value_that_an_inner_map_cuts_is_left_alone():
    mesh = sm.make_mesh({"data": 4, "model": 2})
    fun = sm.mesh_map(
        lambda x, w: lax.psum(x @ w, "model"),
        mesh,
        in_axes=({"data": 0, "model": 1}, {"model": 0}),
        out_axes={"data": 0},
    )
    assert remarks(fun, shape(8, 1024), shape(1024, 1024)) == []


# Axes


def test_a_short_axis():
    assert remarks(sm.spmap(jnp.sin, "i"), shape(3, 4)) == [
        "axis 'i' of 3 runs on 3 of 8 devices: 5 are idle"
    ]


def test_devices_that_are_left_out_are_the_cause_of_idle_ones():
    def advice(length, count):
        mapped = sm.spmap(jnp.sin, devices=jax.devices()[:count])
        return sm.explain(mapped)(shape(length, 4)).remarks[0].advice

    assert "on 8 devices, each would have 80 of the 640" in advice(640, 2)
    assert advice(3, 3).startswith("A longer axis")


@pytest.mark.deep
def test_one_device_is_said():
    program = """
import jax.numpy as jnp, shardmap as sm
(remark, *_) = sm.explain(sm.spmap(jnp.sin))(jnp.ones(8)).remarks
print(remark.text, remark.advice)
"""
    result = python("-c", program, JAX_NUM_CPU_DEVICES="1")
    assert result.stdout.startswith("JAX has 1 device"), result.stderr
    assert 'call jax.config.update("jax_num_cpu_devices", 8) before' in result.stdout


MESH = sm.make_mesh({"data": 4, "model": 2})


def step(weights, x):
    grads = jax.grad(lambda w: jnp.tanh(x @ w).sum())(weights)
    return weights - grads


@pytest.mark.parametrize("cut", [None, "model"])
def test_a_batch_that_is_not_cut_comes_first(cut):
    def struct(shape, *names):
        sharding = NamedSharding(MESH, P(*names))
        return jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)

    weights = struct((1024, 512), None, cut)
    report = sm.explain(jax.jit(step))(weights, struct((64, 1024)))
    first = report.remarks[0]
    assert first.source == "x"
    assert "nothing is sharded along mesh axis 'data'" in first.text
    assert "gives each 16 of 64" in first.advice
    assert "Change first: nothing is sharded along mesh axis 'data'" in str(report)
    assert remarks(jax.jit(step), weights, struct((64, 1024), "data"))[:1] != [
        first.text
    ]


def test_an_axis_that_does_not_divide():
    texts = remarks(sm.spmap(jnp.sin, "i"), shape(15, 4))
    assert texts == [
        "axis 'i' of 15 does not divide: 8 devices x 2 vectorised x 1 step have room "
        "for 1 more, which compute nothing of use, and its arrays are replicated on "
        "every device between calls"
    ]


def test_an_inner_axis_uses_the_idle_devices():
    fun = sm.spmap(sm.spmap(jnp.sin, "j"), "i")
    assert remarks(fun, shape(2, 4, 3)) == []


def test_an_axis_that_fits_is_left_alone():
    assert remarks(sm.spmap(jnp.sin, "i"), shape(16, 4)) == []
    assert remarks(jax.vmap(jnp.sin), shape(3, 4)) == []


# What is sent


def test_a_python_loop_of_products_can_be_one():
    def loop(x, y):
        return jnp.stack([jnp.tanh(u @ v) for u, v in zip(x, y, strict=True)])

    def layers(x, w):
        for _ in range(16):
            x = jnp.tanh(x @ w)
        return x

    def of_each_name(x, y):
        return jnp.tanh(x @ y), jnp.tanh(y @ x), jnp.tanh(y @ y)

    def filters(x, w):
        for _ in range(3):
            x = jax.checkpoint(lambda x: lax.conv(x, w, (1, 1), "SAME"))(x)
        return (x**2).sum()

    x = np.ones((16, 8, 8), np.float32)
    (remark,) = sm.explain(loop)(x, x).remarks
    assert remark.text == "16 equal products, one after another"
    assert remark.advice == "jax.vmap makes one operation of them."
    assert "test_remarks.py" in remark.source
    assert sm.explain(layers)(x[0], x[0]).remarks == ()
    assert sm.explain(loop)(x[:3], x[:3]).remarks[0].text.startswith("3 equal")
    assert sm.explain(loop)(x[:2], x[:2]).remarks == ()
    assert sm.explain(of_each_name)(x[0], x[0]).remarks == ()
    image = np.ones((2, 4, 8, 8), np.float32), np.ones((4, 4, 1, 1), np.float32)
    assert sm.explain(jax.grad(filters, (0, 1)))(*image).remarks == ()


def test_a_sum_that_is_sent_again():
    mesh = sm.make_mesh({"model": 8})

    def layer(x, w):
        # Each device has some hidden units: the second product is of parts.
        return x + jnp.sin(jnp.sin(x @ w["up"]) @ w["down"]), None

    def step(w, x):
        layers = jax.checkpoint(layer, prevent_cse=False)
        return jax.grad(lambda w: (lax.scan(layers, x, w)[0] ** 2).sum())(w)

    def weights(*names, shape):
        sharding = NamedSharding(mesh, P(*names))
        return jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)

    w = {
        "up": weights(None, None, "model", shape=(4, 512, 1024)),
        "down": weights(None, "model", shape=(4, 1024, 512)),
    }
    fun = jax.jit(step, out_shardings=jax.tree.map(lambda each: each.sharding, w))
    found = sm.explain(fun)(w, jax.ShapeDtypeStruct((256, 512), np.float32)).remarks
    (again,) = [each for each in found if "jax.checkpoint computes again" in each.text]
    # Twice 7/8 of the result of each of 4 layers.
    assert again.text.startswith("3.5 MiB a step are sent")
    assert "save_only_these_names" in again.advice
