"""`explain` as a whole: what it takes, that it runs nothing, that its numbers are true.

The numbers are compared with what XLA says of the compiled program, and with the
buffers of arrays that a call made.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm
from shardmap.explain.interconnect import Interconnect

MESH = sm.make_mesh({"data": 4, "model": 2})


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def shapes_of(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def double(x):
    return x * 2


def center(x):
    return x - lax.pmean(x, "i")


def product(x, w):
    return lax.psum(x @ w, "model")


PROGRAMS = {
    "spmap": (sm.spmap(center, "i"), ones(8, 3)),
    "blocks": (sm.spmap(center, "i"), ones(24, 3)),
    "loop": (sm.spmap(double, batch_size=2), ones(32, 3)),
    "spmd": (sm.spmap(center, "i", lowering="spmd"), ones(16, 3)),
    "ragged": (sm.spmap(center, "i"), ones(11, 3)),
    "few": (sm.spmap(double), ones(3, 5)),
    "last axis": (sm.spmap(double, in_axes=1, out_axes=-1), ones(3, 8)),
    "one result": (
        sm.spmap(lambda x: lax.psum(x, "i"), "i", out_axes=None),
        ones(8, 3),
    ),
    "not mapped": (
        sm.spmap(lambda x, w: x @ w, in_axes=(0, None)),
        ones(8, 3),
        ones(3, 2),
    ),
    "pytrees": (
        sm.spmap(lambda x: {"a": x["a"] * 2, "b": (x["b"],)}),
        {"a": ones(8, 2), "b": ones(8, dtype=np.int8)},
    ),
    "nested": (
        sm.spmap(sm.spmap(lambda x: lax.psum(x, ("i", "j")), "j"), "i"),
        ones(2, 4, 3),
    ),
    "mesh_map": (
        sm.mesh_map(
            product,
            MESH,
            in_axes=({"data": 0, "model": 1}, {"model": 0}),
            out_axes={"data": 0},
        ),
        ones(8, 6),
        ones(6, 3),
    ),
    "shard_map": (
        jax.shard_map(
            lambda x: lax.psum(x, "data"),
            mesh=MESH,
            in_specs=P("data", "model"),
            out_specs=P(None, "model"),
        ),
        ones(8, 4),
    ),
    "pmap": (jax.pmap(center, "i"), ones(8, 3)),
    "vmap": (jax.vmap(double), ones(4, 3)),
    "map": (lambda xs: lax.map(jnp.sin, xs, batch_size=2), ones(5, 3)),
    "jit": (
        jax.jit(
            lambda x, w: jnp.sin(x @ w),
            in_shardings=(
                NamedSharding(MESH, P("data")),
                NamedSharding(MESH, P(None, "model")),
            ),
        ),
        ones(8, 4),
        ones(4, 6),
    ),
    "around": (jax.jit(lambda x: sm.spmap(center, "i")(x + 1).sum(0)), ones(8, 3)),
    "plain": (lambda x: jnp.sum(x), ones(8, 3)),
}
programs = pytest.mark.parametrize("name", PROGRAMS)


@pytest.fixture(scope="module")
def explained():
    """The explanation of each program, made once."""
    made = {}

    def explanation(name):
        if name not in made:
            fun, *args = PROGRAMS[name]
            made[name] = sm.explain(fun)(*shapes_of(args))
        return made[name]

    return explanation


def compiled_program(fun, args):
    """The program as a call would compile it."""
    if not hasattr(fun, "lower"):
        fun = jax.jit(fun)
    return fun.lower(*args).compile()


# Numbers are true


@programs
def test_cost_is_what_the_compiler_says(name, explained):
    fun, *args = PROGRAMS[name]
    compiled = compiled_program(fun, args)
    analysis = compiled.cost_analysis() or {}
    memory = compiled.memory_analysis()
    cost = explained(name).cost
    assert cost.flops == analysis.get("flops")
    assert cost.bytes_accessed == analysis.get("bytes accessed")
    assert cost.argument_bytes == memory.argument_size_in_bytes
    assert cost.output_bytes == memory.output_size_in_bytes
    assert cost.temporary_bytes == memory.temp_size_in_bytes
    assert cost.peak_bytes == (
        cost.argument_bytes + cost.output_bytes + cost.temporary_bytes
    )


def test_a_donated_argument_saves_memory():
    x = jax.ShapeDtypeStruct((8, 100), np.float32)
    kept = sm.explain(sm.spmap(double))(x).cost
    donated = sm.explain(sm.spmap(double, donate_argnums=0))(x).cost
    assert kept.peak_bytes - donated.peak_bytes == 400


@programs
def test_inputs_take_as_many_bytes_as_the_compiler_says(name, explained):
    """Of all inputs together, on one device."""
    inputs = explained(name).inputs
    total = sum(array.shard_bytes for array in inputs)
    assert explained(name).cost.argument_bytes == total


@programs
def test_outputs_have_the_counted_buffers(name, explained):
    fun, *args = PROGRAMS[name]
    results = jax.tree.leaves(fun(*args))
    outputs = explained(name).outputs
    assert len(outputs) == len(results)
    for array, result in zip(outputs, results, strict=True):
        buffers = [shard.data for shard in result.addressable_shards]
        assert array.shape == result.shape
        assert array.dtype == str(result.dtype)
        assert array.bytes == result.nbytes
        assert {array.shard_bytes} == {buffer.nbytes for buffer in buffers}
        assert {array.shard_shape} == {buffer.shape for buffer in buffers}
        assert array.num_devices == len(buffers)
        assert array.spec == sm.spec_of(result)


@programs
def test_inputs_lie_as_the_program_takes_them(name, explained):
    fun, *args = PROGRAMS[name]
    shardings = jax.tree.leaves(compiled_program(fun, args).input_shardings)
    for array, sharding, arg in zip(
        explained(name).inputs, shardings, jax.tree.leaves(args), strict=True
    ):
        placed = jax.device_put(arg, sharding)
        assert array.shard_bytes == placed.addressable_shards[0].data.nbytes
        assert array.num_devices == len(placed.addressable_shards)
        on_all = sum(shard.data.nbytes for shard in placed.addressable_shards)
        assert array.copies == on_all // placed.nbytes


@programs
def test_devices_are_those_of_the_results(name, explained):
    fun, *args = PROGRAMS[name]
    result = jax.tree.leaves(fun(*args))[0]
    assert explained(name).num_devices == len(result.sharding.device_set)
    assert explained(name).device_kind == "cpu"


# Nothing runs


def test_nothing_runs():
    called = []

    def note(x):
        called.append(1)
        return x

    @sm.spmap
    def tapped(x):
        sm.tap(note, x)
        jax.debug.callback(note, x)
        return jax.pure_callback(note, x, x)

    array = jnp.ones((8, 3), np.float32)
    sm.explain(tapped)(array)
    tapped.explain(array)
    jax.effects_barrier()
    assert called == []


def test_donated_arrays_stay():
    array = jnp.ones((8, 3))
    sm.spmap(double, donate_argnums=0).explain(array)
    sm.explain(jax.jit(double, donate_argnums=0))(array)
    assert not array.is_deleted()


def test_memory_of_any_size_can_be_explained():
    """An array of these shapes would not fit anywhere."""
    huge = jax.ShapeDtypeStruct((8, 1 << 40), np.float32)
    report = sm.spmap(double).explain(huge)
    assert report.inputs[0].shard_bytes == 4 << 40
    assert report.cost.argument_bytes == 4 << 40


# What it takes


def test_the_method_and_the_function_are_the_same():
    x = jax.ShapeDtypeStruct((8, 3), np.float32)
    mapped = sm.spmap(center, "i")
    assert mapped.explain(x) == sm.explain(mapped)(x)
    blocks = sm.mesh_map(double, MESH, ({"data": 0},), {"data": 0})
    assert blocks.explain(x) == sm.explain(blocks)(x)


def test_arrays_of_numpy_and_jax_wherever_they_lie():
    x = jax.ShapeDtypeStruct((8, 3), np.float32)
    elsewhere = jax.device_put(ones(8, 3), jax.devices()[5])
    for fun in (
        sm.spmap(double),
        sm.mesh_map(double, MESH, ({"data": 0},), {"data": 0}),
    ):
        assert sm.explain(fun)(ones(8, 3)) == sm.explain(fun)(x)
        assert sm.explain(fun)(elsewhere) == sm.explain(fun)(x)


def test_a_plain_function_follows_its_arguments():
    x = jax.device_put(ones(8, 3), NamedSharding(MESH, P("data")))
    report = sm.explain(lambda x: x * 2)(x)
    assert report.inputs[0].shard_shape == (2, 3)
    assert report.outputs[0].shard_shape == (2, 3)
    assert report.mesh == (("data", 4), ("model", 2))


def test_static_arguments_and_keywords():
    def scaled(x, factor, text, *, shift):
        return x * factor + len(text) + shift["y"]

    x, y = jax.ShapeDtypeStruct((8,), "f4"), jax.ShapeDtypeStruct((8,), "f4")
    mapped = sm.spmap(scaled, static_broadcasted_argnums=(1, 2))
    report = sm.explain(mapped)(x, 3, "abc", shift={"y": y})
    assert [array.path for array in report.inputs] == ["x", "shift['y']"]
    jitted = jax.jit(scaled, static_argnums=(1, 2))
    report = sm.explain(jitted)(x, 3, "abc", shift={"y": y})
    assert [array.path for array in report.inputs] == ["args[0]", "shift['y']"]


def test_numbers_as_arguments():
    report = sm.explain(lambda x, y: x + y)(ones(3), 2.0)
    assert [(array.path, array.shape) for array in report.inputs] == [
        ("x", (3,)),
        ("y", ()),
    ]


def test_an_argument_that_is_not_used():
    report = sm.explain(lambda x, y: x)(ones(3), ones(2))
    assert report.inputs[1].layout == "not used by the program"
    assert report.inputs[1].shard_bytes is None


def test_methods():
    class Model:
        def plain(self, x):
            return jax.vmap(double)(x)

    report = sm.explain(Model().plain)(ones(4, 3))
    assert report.name == "plain"
    assert [array.path for array in report.inputs] == ["x"]
    assert [str(axis) for axis in report.axes] == [
        "an axis of 4 = 1 device x 4 vectorised x 1 step"
    ]


def test_random_keys():
    keys = jax.random.split(jax.random.key(0), 8)
    report = sm.explain(sm.spmap(lambda k: jax.random.uniform(k, (3,))))(keys)
    assert report.inputs[0].dtype == "key<fry>"
    assert report.inputs[0].shard_bytes == report.cost.argument_bytes


def test_a_function_without_results_or_arguments():
    assert sm.explain(lambda: None)().arrays == ()


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="explain takes a function, got 3 of type int"):
        sm.explain(3)


def test_unknown_interconnects_are_refused():
    with pytest.raises(ValueError, match=r"no interconnect is called 'string'\. Known"):
        sm.explain(double, interconnect="string")


def test_errors_are_those_of_a_call():
    mapped = sm.spmap(jnp.add)
    with pytest.raises(ValueError, match="spmap got inconsistent sizes"):
        mapped(ones(8), ones(4))
    with pytest.raises(ValueError, match="spmap got inconsistent sizes"):
        sm.explain(mapped)(ones(8), ones(4))


# Meshes without devices


def abstract(**sizes):
    return AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )


def test_a_mesh_of_thousands_of_devices():
    mesh = abstract(i=4096)
    x = jax.ShapeDtypeStruct((8192, 1000), np.float32)
    mapped = sm.spmap(center, "i", mesh=mesh, mesh_axes="i")
    report = sm.explain(mapped, interconnect="tpu-v5p")(x)
    assert [str(axis) for axis in report.axes] == [
        "axis 'i' of 8,192 = 4,096 devices x 2 vectorised x 1 step"
    ]
    (reduction,) = report.collectives
    assert (reduction.group_size, reduction.bytes_in) == (4096, 4000)
    assert reduction.seconds == report.interconnect.time("all-reduce", 4000, 4096)
    assert reduction.in_compiled is None
    assert report.inputs[0].shard_shape == (2, 1000)
    assert report.cost is None
    assert report.device_kind is None
    assert report.notes[0].startswith("Nothing was compiled: the mesh is abstract")


def test_what_the_partitioner_would_do_is_not_claimed():
    mesh = abstract(i=64)
    mapped = sm.spmap(center, "i", mesh=mesh, mesh_axes="i", lowering="spmd")
    report = sm.explain(mapped)(jax.ShapeDtypeStruct((64, 3), np.float32))
    assert len(report.collectives) == 1
    assert "may do the collectives" in report.notes[1]


@pytest.mark.parametrize(
    "map_over",
    [
        lambda mesh: sm.spmap(center, "i", mesh=mesh, mesh_axes="i"),
        lambda mesh: sm.mesh_map(center, mesh, ({"i": 0},), {"i": 0}),
        lambda mesh: jax.jit(
            jax.shard_map(center, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
        ),
        lambda mesh: lambda x: sm.spmap(center, "i", mesh=mesh, mesh_axes="i")(x),
    ],
    ids=["spmap", "mesh_map", "shard_map", "inside"],
)
def test_an_abstract_mesh_gives_what_the_real_one_does(map_over):
    """All but what only the compiler knows."""
    x = jax.ShapeDtypeStruct((24, 3), np.float32)
    real = sm.explain(map_over(sm.make_mesh({"i": 8})))(x)
    imagined = sm.explain(map_over(abstract(i=8)))(x)
    assert imagined.arrays == real.arrays
    assert imagined.mesh == real.mesh
    assert imagined.num_devices == real.num_devices
    assert list(map(str, imagined.axes)) == list(map(str, real.axes))
    assert [
        (each.kind, each.group_size, each.bytes_in, each.bytes_out, each.link_bytes)
        for each in imagined.collectives
    ] == [
        (each.kind, each.group_size, each.bytes_in, each.bytes_out, each.link_bytes)
        for each in real.collectives
    ]


# The result


@programs
def test_to_dict_is_json(name, explained):
    report = explained(name)
    read = json.loads(json.dumps(report.to_dict()))
    assert read["num_devices"] == report.num_devices
    assert [axis["layout"] for axis in read["axes"]] == [
        axis.layout for axis in report.axes
    ]
    assert [array["shard_bytes"] for array in read["arrays"]] == [
        array.shard_bytes for array in report.arrays
    ]
    assert read["cost"]["intensity"] == report.cost.intensity


def test_specs_in_a_dict_are_code_that_builds_them(explained):
    for array in explained("mesh_map").to_dict()["arrays"]:
        spec = eval(array["spec"], vars(sm).copy())
        assert isinstance(spec, sm.ShardingSpec)


def test_times_for_an_interconnect_of_ones_own():
    wires = Interconnect(bandwidth=1000.0, latency=0.5, name="string")
    mapped = sm.spmap(lambda x: lax.all_gather(x, "i"), "i")
    report = sm.explain(mapped, interconnect=wires)(ones(8, 25))
    (gather,) = report.collectives
    # Seven messages of 100 bytes.
    assert gather.link_bytes == 700
    assert gather.seconds == pytest.approx(7 * 0.5 + 700 / 1000)
    assert report.to_dict()["interconnect"]["name"] == "string"


def test_intensity():
    cost = sm.explain(sm.spmap(double))(ones(8, 3)).cost
    assert cost.intensity == cost.flops / cost.bytes_accessed
