"""Least times of programs against paper, and the order of meshes against textbooks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm


def shape(*sizes, dtype=np.float32, **options):
    return jax.ShapeDtypeStruct(sizes, dtype, **options)


FLOPS = 2 * 4096**3


@pytest.mark.parametrize(
    ("machine", "dtype", "precision", "rate"),
    [
        ("v5e:2x2", jnp.bfloat16, None, 197e12),
        ("v5e:2x2", jnp.float32, None, 197e12),
        # Six products of bfloat16.
        ("v5e:2x2", jnp.float32, "highest", 197e12 / 6),
        ("v5e:2x2", jnp.float32, "high", 197e12 / 3),
        ("v5e:2x2", jnp.int8, None, 394e12),
        ("v5p:2x2x1", jnp.int8, None, 918e12),
        ("h100:8", jnp.bfloat16, None, 989e12),
        ("h100:8", jnp.float8_e4m3fn, None, 1979e12),
        ("h100:8", jnp.int8, None, 1979e12),
        ("h100:8", jnp.float32, "highest", 67e12),
    ],
)
def test_a_product_has_the_peak_of_its_type(machine, dtype, precision, rate):
    total = jnp.int32 if dtype == jnp.int8 else jnp.float32

    def product(x, y):
        def step(_, x):
            z = lax.dot(x, y, precision=precision, preferred_element_type=total)
            return z.astype(dtype)

        return lax.fori_loop(0, 3, step, x)

    x = shape(4096, 4096, dtype=dtype)
    least = dict(sm.explain(product, devices=machine)(x, x).least_times)
    assert least["arithmetic"] == pytest.approx(3 * FLOPS / rate)


@pytest.mark.parametrize("machine", ["h100:8", "v5e:2x4"])
def test_an_embedding_is_read_where_it_is_looked_up(machine):
    table, index = shape(2**18, 1024), shape(128, dtype=np.int32)
    w = shape(1024, 1024)
    report = sm.explain(lambda t, k, w: t[k] @ w, devices=machine)(table, index, w)
    chip = {"h100:8": 3352.32e9, "v5e:2x4": 819e9}[machine]
    least = dict(report.least_times)["memory"]
    # The rows, the weights and the result; XLA for TPU keeps some on the chip.
    read = (2 * 128 * 1024 + 1024 * 1024) * 4
    assert 0.9 * read <= least * chip <= 1.01 * read


def collective(machine, axes, kind, rows):
    """A collective over axes of a mesh of 16 devices, of so many bytes on each."""
    names = "data", "model"
    mesh = jax.make_mesh(
        (4, 4), names, (AxisType.Auto,) * 2, devices=sm.devices(machine)
    )
    x = shape(16, rows, 1024, sharding=NamedSharding(mesh, P(("data", "model"))))

    def sent(x):
        if kind == "sum":
            return lax.psum(x, axes)
        return lax.all_to_all(x, axes, 1, 1, tiled=True)

    every = P(("data", "model"))
    fun = jax.shard_map(
        sent, mesh=mesh, in_specs=every, out_specs=every, check_vma=False
    )
    report = sm.explain(jax.jit(fun))(x)
    assert report.bound_by == "interconnect"
    return dict(report.least_times)["interconnect"]


@pytest.mark.parametrize(
    ("machine", "axes", "kind", "rate"),
    [
        ("v5e:4x4", ("data", "model"), "sum", 200e9 * 8 / 15),
        ("v5e:4x4", "model", "sum", 100e9 * 2 / 3),
        # 8 chips send half of their bytes over 2 x 4 links.
        ("v5e:4x4", ("data", "model"), "exchange", 50e9 * 2),
        ("v5e:4x4", "data", "exchange", 50e9 * 2),
        # Groups of 4 are on one host of 8 GPUs, or on both.
        ("h100:2x8", "model", "sum", 450e9 * 2 / 3),
        ("h100:2x8", "data", "sum", 100e9),
        ("h100:2x8", "data", "exchange", 100e9),
    ],
)
def test_a_collective_has_the_links_of_its_axes(machine, axes, kind, rate):
    assert collective(machine, axes, kind, 2**14) == pytest.approx(2**26 / rate)


def test_the_network_of_hosts_is_named_and_may_be_another():
    mesh = sm.make_mesh({"host": 2, "gpu": 8}, devices=sm.devices("h100:2x8"))
    x = shape(16, 2**20, sharding=NamedSharding(mesh, P(("host", "gpu"))))
    total = jax.shard_map(
        lambda x: lax.psum(x, "host"),
        mesh=mesh,
        in_specs=P(("host", "gpu")),
        out_specs=P("gpu"),
    )
    report, slow = (
        sm.explain(jax.jit(total), interconnect=name)(x)
        for name in (None, "ethernet-100g")
    )
    network = "400 Gb/s a GPU between hosts (infiniband-ndr)"
    assert report.summary.endswith(f"; {network}")
    assert f"; {network}" in " ".join(str(report).split("\n\n")[0].split())
    assert slow.least_seconds == pytest.approx(4 * report.least_seconds)


def train(layers, width, rows):
    """The program of some layers: their rows by "data", their width by "model"."""

    def program(mesh):
        def array(*sizes, spec):
            layout = NamedSharding(mesh, P(*spec))
            return shape(*sizes, dtype=jnp.bfloat16, sharding=layout)

        def layer(x, w):
            return x + jax.nn.relu(x @ w["in"]) @ w["out"], None

        def loss(w, x):
            return (lax.scan(jax.checkpoint(layer), x, w)[0] ** 2).mean()

        def step(state, x):
            w, momentum = state
            slopes = jax.grad(loss)(w, x)
            momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, slopes)
            return jax.tree.map(lambda w, m: w - 0.1 * m, w, momentum), momentum

        w = {
            "in": array(layers, width, 4 * width, spec=(None, None, "model")),
            "out": array(layers, 4 * width, width, spec=(None, "model")),
        }
        return jax.jit(step, donate_argnums=0), (
            (w, w),
            array(rows, width, spec=("data",)),
        )

    return program


def order(comparison):
    return [row.name for row in comparison.rows if row.fits]


def test_tensor_parallelism_comes_last_while_all_fits(capsys):
    comparison = sm.compare_meshes(train(4, 2048, 2**17), "v5e:2x4")
    assert order(comparison) == [f"data {8 // k}, model {k}" for k in (1, 2, 4, 8)]
    assert [row.is_quick for row in comparison.rows] == [False, False, False, True]
    assert "Best: data 8, model 1, which sends " in str(comparison)
    # Of 2 products forward and 4 backward, the checkpoint repeats the first.
    best = dict(comparison.best.report.least_times)
    flops = 4 * (2 + 4 + 1) * 2 * 2**17 * 4 * 2048**2 / 8
    assert best["arithmetic"] == pytest.approx(flops / 197e12, rel=0.02)


def test_weights_without_room_are_shared_by_as_few_as_can_be():
    comparison = sm.compare_meshes(train(6, 8192, 2**16), "v5e:2x4")
    # 6 x 8 x 8192 x 8192 weights, their momentum and slopes are 18 GiB.
    assert comparison.best.name == "data 4, model 2", str(comparison)
    *_, last = comparison.rows
    assert (last.name, last.fits) == ("data 8, model 1", False)
    assert last.report.mesh == (("data", 8), ("model", 1))
    assert "Without room: 1 of 4 meshes; data 8, model 1 needs" in comparison.reason


SLICE = 2**20 * 4
"""The bytes of a device."""


@pytest.mark.parametrize(
    ("axes", "sent"),
    [
        # Inside of a slice a sum is scattered first, and a device sends an eighth.
        (("slice", "data"), [(8, SLICE), (2, SLICE // 8), (8, SLICE // 8)]),
        ("slice", [(2, SLICE)]),
        ("data", [(8, SLICE)]),
    ],
)
def test_slices_have_a_network_between_them(axes, sent):
    machine = "2xv5e:2x4"
    mesh = sm.make_mesh({"slice": 2, "data": 8}, devices=sm.devices(machine))
    x = shape(16, 1024, 1024, sharding=NamedSharding(mesh, P(("slice", "data"))))
    total = jax.shard_map(
        lambda x: lax.psum(x, axes),
        mesh=mesh,
        in_specs=P(("slice", "data")),
        out_specs=P(*[name for name in ("slice", "data") if name not in axes][:1]),
    )
    report = sm.explain(jax.jit(total), devices=machine)(x)
    assert report.machine == "TPU v5 lite, 2 slices of 2 x 4"
    assert report.num_devices == 16
    found = [(each.group_size, each.bytes_in) for each in report.collectives]
    assert found == sent
    names = {8: ("data",), 2: ("slice",)}
    assert all(each.axes == names[each.group_size] for each in report.collectives)
    assert not [note for note in report.notes if "callbacks" in note]
    assert "25 Gb/s a chip between slices (dcn-v5e)" in report.summary
    between = [each for each in report.collectives if each.group_size == 2]
    for each in between:
        assert each.seconds == pytest.approx(each.bytes_in / (25e9 / 8))
