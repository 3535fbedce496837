"""Programs as they are written, explained for other devices than they would run on.

Here the others are CPU devices too, which are last of all.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm

HERE, THERE = jax.devices()[:4], jax.devices()[4:]
IDS = tuple(device.id for device in THERE)
X = jax.ShapeDtypeStruct((16, 8), jnp.float32)
W = np.ones((8, 8), np.float32)


@sm.spmap(axis_name="i", in_axes=(None, 0), out_axes=None)
def mean(w, x):
    return jax.lax.pmean(x @ w, "i")


def devices_and_kinds(fun, *args):
    """The devices that hold a result, and the kinds of collectives."""
    report = sm.explain(fun, devices=THERE)(*args)
    assert report.device_kind == "cpu"
    kinds = [each.kind for each in report.collectives]
    return report.num_devices, report.outputs[0].devices, kinds


def test_maps_and_meshes_that_name_no_devices_are_on_these():
    step = jax.jit(lambda w, x: w - mean(w, x).sum())
    step(W, np.ones((16, 8), np.float32))  # JAX has this trace already.
    assert devices_and_kinds(mean, W, X) == (4, IDS, ["all-reduce"])
    assert devices_and_kinds(step, W, X) == (4, IDS, ["all-reduce"])
    assert sm.explain(step)(W, X).num_devices == 8
    assert sm.explain(step, devices=HERE)(W, X).outputs[0].devices == ()

    def with_mesh(w, x):
        mesh = sm.make_mesh({"data": 2, "model": 2})
        first = jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P("data")))
        total = sm.mesh_map(
            lambda x: jax.lax.psum(x, ("data", "model")), mesh, {"data": 0}, {}
        )
        return total(first)

    assert devices_and_kinds(with_mesh, W, X) == (4, IDS, ["all-reduce"])
    product = sm.sharded_jit(lambda w, x: x @ w, (None, (4, 1)), (4, 1))
    assert devices_and_kinds(product, W, X) == (4, IDS, [])
    assert devices_and_kinds(jax.jit(lambda w, x: product(w, x)), W, X) == (4, IDS, [])


def test_an_abstract_mesh_stands_for_these():
    def of(mesh):
        def inner(x):
            return jax.lax.psum(x, ("i", "j")), jax.lax.all_gather(x, "i")

        rows = sm.spmap(inner, "j", mesh=mesh, mesh_axes="model")
        grid = sm.spmap(rows, "i", mesh=mesh, mesh_axes="data")

        def step(x):
            total, gathered = grid(x)
            layout = NamedSharding(mesh, P("model"))
            return jax.lax.with_sharding_constraint(total * 2, layout), gathered

        x = jax.ShapeDtypeStruct(
            (8, 4, 3), np.float32, sharding=NamedSharding(mesh, P("data"))
        )
        return step, x

    mesh = sm.make_mesh({"data": 2, "model": 2}, devices=THERE)
    (step, x), (imagined, shape) = of(mesh), of(mesh.abstract_mesh)
    real, report = sm.explain(step)(x), sm.explain(imagined, devices=THERE)(shape)
    assert report.to_dict() == real.to_dict()
    assert len(report.collectives) > 1
    few = "mesh of 4 devices, {'data': 2, 'model': 2}, but explain is asked for 8"
    plain = jax.ShapeDtypeStruct(x.shape, x.dtype)
    with pytest.raises(ValueError, match=few):
        sm.explain(imagined, devices=jax.devices())(plain)
    with pytest.raises(ValueError, match="over an abstract mesh of 4 devices"):
        sm.explain(of(mesh.abstract_mesh)[0])(plain)


def test_a_program_on_one_device_is_on_the_first_of_these():
    assert devices_and_kinds(lambda w, x: x @ w, W, X) == (1, IDS[:1], [])
    assert devices_and_kinds(lambda: jnp.arange(3.0)) == (1, IDS[:1], [])
    placed = jax.device_put(W, jax.devices()[2])
    assert devices_and_kinds(jax.jit(lambda w: w * placed), placed) == (1, IDS[:1], [])


MESH = jax.sharding.Mesh(np.reshape(HERE, (2, 2)), ("data", "model"))
MANUAL = jax.sharding.Mesh(HERE, ("i",))
ROWS, WHOLE = NamedSharding(MESH, P("data")), NamedSharding(MESH, P())


@pytest.mark.parametrize(
    ("fun", "kinds"),
    [
        (jax.jit(lambda x: x.sum(0), in_shardings=ROWS, out_shardings=WHOLE), ["a"]),
        (lambda x: jax.lax.with_sharding_constraint(x, ROWS) * 2, []),
        (lambda x: x @ jax.device_put(W, WHOLE), []),
        (
            jax.shard_map(
                lambda x: jax.lax.psum(x, "i"),
                mesh=MANUAL,
                in_specs=P("i"),
                out_specs=P(),
            ),
            ["a"],
        ),
        (sm.spmap(lambda x: jax.lax.psum(x, "i"), "i", devices=HERE), ["a"]),
        (sm.spmap(lambda x: x, "i", mesh=MESH, mesh_axes=("data", "model")), []),
        (sm.mesh_map(lambda x: x, MESH, {"data": 0}, {"data": 0}), []),
    ],
    ids=["in_shardings", "constraint", "constant", "shard_map", "spmap", "mesh", "map"],
)
def test_meshes_of_as_many_other_devices_are_of_these(fun, kinds):
    if fun is not None:
        num_devices, devices, collectives = devices_and_kinds(fun, X)
        assert (num_devices, devices) == (4, IDS)
        assert len(collectives) == len(kinds)


def test_sharded_arguments_are_sharded_alike():
    x = jax.device_put(np.ones((16, 8), np.float32), ROWS)
    report = sm.explain(lambda x: x * 2, devices=THERE)(x)
    assert [each.devices for each in report.arrays] == [IDS, IDS]
    assert report.inputs[0].shard_shape == (8, 8)
    assert x.sharding == ROWS
    explicit = jax.make_mesh((4,), ("data",), (AxisType.Explicit,), devices=HERE)
    x = jax.device_put(np.ones((16, 8), np.float32), NamedSharding(explicit, P("data")))
    assert devices_and_kinds(lambda x: x * 2, x) == (4, IDS, [])


def test_other_numbers_of_devices_are_refused():
    x = jax.device_put(np.ones((16, 8), np.float32), ROWS)
    three = THERE[:3]
    with pytest.raises(ValueError, match=r"^x is sharded over 4 devices, .* for 3\."):
        sm.explain(lambda x: x * 2, devices=three)(x)
    fixed = sm.spmap(lambda x: x, "i", devices=HERE)
    with pytest.raises(ValueError, match=r"names a mesh of 4 devices, \{'i': 4\}, but"):
        sm.explain(fixed, devices=three)(X)
    with pytest.raises(ValueError, match=r"devices must not be empty: give the name"):
        sm.explain(mean, devices=[])
    with pytest.raises(TypeError, match=r"sequence of jax.Device, such as jax.devices"):
        sm.explain(mean, devices=4)
    with pytest.raises(ValueError, match=r"^devices knows no 'v5e'"):
        sm.explain(mean, devices="v5e")
    with (
        jax.set_mesh(MANUAL),
        pytest.raises(ValueError, match=r"set_mesh sets a mesh of 4 .* for 3\."),
    ):
        sm.explain(mean, devices=three)(W, X)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("is_placed", [False, True])
def test_a_mesh_that_is_set_stands_for_these(kind, is_placed):
    mesh = jax.sharding.Mesh(
        np.reshape(HERE, (2, 2)), ("data", "model"), axis_types=(kind,) * 2
    )
    placed = NamedSharding(mesh, P("data")) if is_placed else None
    x = jax.ShapeDtypeStruct((16, 8), np.float32, sharding=placed)

    def step(x):
        if kind == AxisType.Auto:
            return jax.lax.with_sharding_constraint(x @ W, P("data", "model")).sum()
        return jax.sharding.reshard(x @ W, P("data", "model")).sum()

    with jax.set_mesh(mesh):
        report = sm.explain(step, devices=THERE)(x)
        assert report.inputs[0].devices == IDS
        assert (report.mesh, report.num_devices) == ((("data", 2), ("model", 2)), 4)
        assert {each.kind for each in report.collectives} == {"all-reduce"}
        if kind == AxisType.Auto:
            assert sm.explain(mean, devices=THERE)(W, X).inputs[1].devices == IDS
