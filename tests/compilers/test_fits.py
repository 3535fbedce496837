"""Whether a program fits: a report, and the command line."""

import os
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm
from shardmap.explaining.chips import GPUS, capacity_of
from tests.command_line import python

MACHINES = "v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1", "h100:4"


@sm.spmap(axis_name="i", in_axes=(0, None))
def layer(x, w):
    y = jnp.sin(x) @ w
    return y @ w.T, jax.lax.psum(jnp.cos(y), "i")


def arguments(rows, count=4):
    shape = jax.ShapeDtypeStruct
    return shape((count, rows, 1024), jnp.float32), shape((1024, 1024), jnp.float32)


@pytest.mark.parametrize("machine", MACHINES)
def test_a_program_that_is_too_large_is_told_so(machine):
    devices = sm.devices(machine)
    report = sm.explain(layer, devices=machine)(*arguments(2**26, len(devices)))
    assert report.fits is False
    assert report.cost.peak_bytes > 256 * 2**30
    # What the compiler says is there, to its last digit.
    assert abs(report.capacity - capacity_of(devices[0])) <= 0.011 * 2**30
    assert report.summary.startswith("does not fit: ")
    text = " ".join(str(report).split())
    assert "Does not fit: " in text
    if not machine.startswith("h100"):  # XLA for GPUs compiles it all the same.
        assert "Change first: the compiler refuses the program" in text
        # What it sums, and what it sums that to; the products are results.
        assert {each.bytes for each in report.largest[:2]} == {2**26 * 1024 * 4}
        assert "test_fits.py" in "".join(each.source or "" for each in report.largest)
        assert report.cost.peak_bytes >= 3 * 2**26 * 1024 * 4
        assert [each.operation for each in report.collectives] == ["psum"]
        assert "sends" not in report.summary


@pytest.mark.parametrize("given", ["arguments", "in_shardings"])
def test_a_program_that_is_too_large_keeps_its_mesh_and_shards(given):
    d = 98304
    mesh = sm.make_mesh({"data": 8, "model": 2}, devices=sm.devices("v5e:4x4"))
    specs = P("data", "model"), P("model", "data"), P("data")
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    asked = {"in_shardings": tuple(shardings)} if given == "in_shardings" else {}
    placed = shardings if given == "arguments" else [None] * 3
    shapes = (d, 4 * d), (4 * d, d), (64, d)
    args = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=each)
        for shape, each in zip(shapes, placed, strict=True)
    ]
    loss = jax.jit(jax.grad(lambda a, b, x: jnp.tanh(x @ a @ b).mean()), **asked)
    report = sm.explain(loss, devices="v5e:4x4")(*args)
    assert (report.fits, report.num_devices) == (False, 16)
    assert report.mesh == (("data", 8), ("model", 2))
    shards = (d // 8, 2 * d), (2 * d, d // 8), (8, d)
    assert [each.shard_shape for each in report.inputs] == [*shards]
    text = " ".join(str(report).split())
    assert "In parallel: 'data' over 8 devices, 'model' over 2 devices." in text
    assert "18.0 GiB of it for arguments" in text


@pytest.mark.parametrize("machine", MACHINES)
def test_a_program_that_fits_is_compiled_and_not_run(machine):
    devices = sm.devices(machine)
    report = sm.explain(layer, devices=machine)(*arguments(64, len(devices)))
    assert report.fits is True
    assert report.capacity == capacity_of(devices[0])
    assert report.machine.startswith(f"{devices[0].device_kind}, ")
    assert f"compiled for {report.machine}; not run" in " ".join(str(report).split())
    assert report.summary.startswith("fits: ")
    assert report.least_seconds > 0
    with pytest.raises(ValueError, match=r"of a plan or of devices that compile only"):
        report.measure(*arguments(64))


def test_a_machine_is_told_by_what_was_asked_for():
    small = arguments(64)
    assert sm.explain(layer, devices="v5e:4x4")(*small).machine == "TPU v5 lite, 4 x 4"
    name = GPUS["h100"].name
    assert sm.explain(layer, devices="h100:2x4")(*small).machine == (
        f"{name}, 2 hosts of 4"
    )


TRAIN = """
import jax, jax.numpy as jnp, shardmap as sm
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((jax.device_count(),), ("data",), (AxisType.Auto,))

@sm.spmap(axis_name="i", in_axes=(None, 0), out_axes=None)
def step(w, x):
    return jax.lax.pmean(jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(w), "i")

@jax.jit
def sharded(w, x):
    return x * jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P("data")))
"""


def explained(folder, *options):
    (folder / "train.py").write_text(TRAIN)
    path = os.pathsep.join(sys.path)
    command = ("-m", "shardmap", "explain", *options)
    return python(*command, cwd=folder, PYTHONPATH=path, JAX_PLATFORMS="cpu")


def test_the_command_line_says_first_whether_it_fits(tmp_path):
    arrays = "--arg", "f32[256,256]", "--arg", "f32[64,128,256]"
    result = explained(tmp_path, "train.py:step", *arrays, "--on", "v5e:4x4")
    text = " ".join(result.stdout.split())
    assert text.startswith("step: 16 TPU v5 lite devices, mesh 'i': 16; compiled")
    first = text.partition("In parallel: 'i' over 16 devices.")[2]
    assert first.startswith(" Fits: ")
    assert " of 15.75 GiB a chip; sends 480.0 KiB a step; at least " in first
    assert result.returncode == 0, result.stderr

    result = explained(tmp_path, "train.py:sharded", *arrays, "--on", "h100:2x4")
    assert "sharded: 8 NVIDIA H100 80GB HBM3 devices, mesh 'data': 8" in result.stdout


def test_several_machines_are_a_table(tmp_path):
    arrays = "--arg", "f32[1024,1024]", "--arg", "f32[64,1048576,1024]"
    machines = "--on", "v5e:4x4", "--on", "tpu7x:4x4x4"
    result = explained(tmp_path, "train.py:step", *arrays, *machines)
    title, header, *rows = result.stdout.splitlines()
    assert title == "step: on one device of each machine; not run"
    assert header.split()[:2] == ["Machine", "Fits"]
    assert [row.split()[:2] for row in rows] == [
        ["v5e:4x4", "no"],
        ["tpu7x:4x4x4", "yes"],
    ]
    assert result.returncode == 1, result.stderr
