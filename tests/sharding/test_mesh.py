"""Meshes: making one, slices of one, and the part on this process."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import shardmap as sm
from shardmap import Mesh, local_mesh, make_mesh, submesh
from tests.command_line import python

DEVICES = jax.devices()


class FakeDevice:
    """A device of a given process."""

    def __init__(self, process_index):
        self.process_index = process_index


TOO_FEW = """
import jax
import numpy as np
import shardmap as sm

x = np.ones((8, 4), np.float32)
spec = sm.ShardingSpec((sm.Chunked(8), None), (sm.ShardedAxis(0),))
for wrong in (
    lambda: sm.spmap(abs, devices=8),
    lambda: sm.spmap(abs, devices=jax.devices() * 8),
    lambda: sm.make_mesh({"x": 4, "y": 2}),
    lambda: spec.named_sharding(jax.devices()),
    lambda: sm.pmap_sharding(x.shape),
    lambda: sm.device_put_sharded(list(x), jax.devices()),
    lambda: sm.device_put_replicated(x, jax.devices() * 8),
    lambda: sm.sharded_jit(lambda x: x, (8, 1), (8, 1))(x),
    lambda: sm.with_sharding_constraint(x, (8, 1)),
    lambda: sm.compat.replicate(x, 8, 8),
):
    try:
        wrong()
    except (TypeError, ValueError) as error:
        print(error)
"""


def test_with_one_device_every_error_says_how_to_have_eight():
    result = python("-c", TOO_FEW, JAX_PLATFORMS="cpu")
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert len(lines) == 10
    for line in lines:
        assert line.endswith(
            ". There is 1 device here; for 8 virtual ones on CPU, call "
            'jax.config.update("jax_num_cpu_devices", 8) before any other use of JAX.'
        )


def fake_mesh(processes, names):
    make = np.vectorize(FakeDevice, otypes=[object])
    return Mesh(make(np.array(processes)), names)


def test_make_mesh_keeps_the_order_of_axes_and_devices():
    mesh = make_mesh({"data": 4, "model": 2})
    assert mesh.axis_names == ("data", "model")
    assert mesh.devices.shape == (4, 2)
    assert list(mesh.devices.flat) == jax.local_devices()
    assert mesh == Mesh(np.array(DEVICES).reshape(4, 2), ("data", "model"))


def test_make_mesh_takes_keywords_and_a_rest():
    mesh = make_mesh({"data": 4, "model": 2})
    assert make_mesh(data=4, model=2) == mesh
    assert make_mesh({"data": -1, "model": 2}) == mesh
    assert make_mesh(data=4, model=-1) == mesh
    assert make_mesh({"data": -1}, DEVICES[:3]).shape == {"data": 3}


def test_make_mesh_takes_the_first_devices():
    assert list(make_mesh({"x": 3}).devices) == DEVICES[:3]
    backwards = DEVICES[::-1]
    for devices in (backwards, np.array(backwards).reshape(2, 4)):
        mesh = make_mesh({"x": 2, "y": 3}, devices)
        assert list(mesh.devices.flat) == backwards[:6]


def test_make_mesh_refuses_too_few_devices():
    text = (
        r"a mesh of {'x': 4, 'y': 3} needs 12 devices, but got 8. There are 8 devices "
        r'here; .* call jax.config.update\("jax_num_cpu_devices", 12\) before'
    )
    with pytest.raises(ValueError, match=text):
        make_mesh({"x": 4, "y": 3})
    with pytest.raises(ValueError, match=r"needs 4 devices, but got 3\.$"):
        make_mesh({"x": 4}, DEVICES[:3])


@pytest.mark.parametrize("name", ["\u03bb", "", "a'b", "a\\b"])
def test_names_that_xla_cannot_read_are_refused(name):
    message = rf"XLA cannot read the name of the mesh axis {re.escape(repr(name))}"
    with pytest.raises(ValueError, match=f"make_mesh: {message}"):
        make_mesh({"x": 2, name: 2})
    mesh = Mesh(np.asarray(DEVICES[:2]), (name,))
    with pytest.raises(ValueError, match=f"spmap: {message}"):
        sm.spmap(abs, mesh=mesh, mesh_axes=name)
    with pytest.raises(ValueError, match=f"mesh_map: {message}"):
        sm.mesh_map(abs, mesh, {}, {})


def test_make_mesh_refuses_sizes_that_are_none():
    with pytest.raises(
        ValueError, match="size of mesh axis 'x' must be at least 1, got 0"
    ):
        make_mesh({"x": 0})
    with pytest.raises(TypeError, match="size of mesh axis 'y' must be an integer"):
        make_mesh({"x": 2, "y": 2.0})


@pytest.mark.parametrize(
    ("names", "ids"),
    [
        (("x",), [0, 4]),
        (("y",), [0, 2]),
        (("z",), [0, 1]),
        ("z", [0, 1]),
        (("x", "z"), [[0, 1], [4, 5]]),
        (("z", "x"), [[0, 4], [1, 5]]),
        (["y", "x"], [[0, 4], [2, 6]]),
        (("z", "x", "y"), [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]),
        ((), 0),
    ],
)
def test_submesh_is_the_slice_at_index_0_in_the_order_asked(names, ids):
    mesh = make_mesh({"x": 2, "y": 2, "z": 2})
    part = submesh(mesh, names)
    assert part.axis_names == tuple(names)
    assert part.device_ids.tolist() == ids


def test_submesh_keeps_the_axis_types():
    types = (AxisType.Auto, AxisType.Explicit)
    mesh = Mesh(np.array(DEVICES).reshape(4, 2), ("x", "y"), axis_types=types)
    assert submesh(mesh, ("y", "x")).axis_types == types[::-1]
    assert local_mesh(mesh).axis_types == types


@pytest.mark.parametrize("names", [("z",), ("x", "x"), "yx"])
def test_submesh_refuses_other_names(names):
    mesh = make_mesh({"x": 2, "y": 2})
    with pytest.raises(ValueError, match=r"different axes of \('x', 'y'\), got"):
        submesh(mesh, names)


def test_local_mesh_of_one_process_is_the_mesh():
    mesh = make_mesh({"x": 4, "y": 2})
    assert local_mesh(mesh) == mesh
    scalar = submesh(mesh, ())
    assert local_mesh(scalar) == scalar


@pytest.mark.parametrize(
    ("processes", "rows", "columns"),
    [
        ([[1, 0], [1, 0]], [0, 1], [1]),
        ([[1, 1, 2], [0, 0, 2], [0, 0, 2]], [1, 2], [0, 1]),
        ([[1, 1], [1, 0]], [1], [1]),
    ],
)
def test_local_mesh_is_the_box_of_this_process(processes, rows, columns):
    mesh = fake_mesh(processes, ("x", "y"))
    part = local_mesh(mesh)
    assert part.axis_names == ("x", "y")
    assert part.devices.tolist() == mesh.devices[np.ix_(rows, columns)].tolist()


@pytest.mark.parametrize("processes", [[[0, 1], [1, 0]], [[0, 0], [0, 1]], [[0, 1, 0]]])
def test_local_mesh_refuses_devices_that_form_no_box(processes):
    with pytest.raises(ValueError, match="single host must form a contiguous subcube"):
        local_mesh(fake_mesh(processes, ("x", "y")))


def test_local_mesh_refuses_a_mesh_of_other_processes():
    with pytest.raises(
        ValueError, match="none of the 2 devices of the mesh is on this"
    ):
        local_mesh(fake_mesh([1, 2], ("x",)))
