"""`jax.shard_map` in the function of a map, against the same under `jax.vmap`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm
from tests.map_programs import (
    LOWERINGS,
    assert_same,
    both_lowerings,
    collectives_of,
    float_index,
    spread,
)

MESH = sm.make_mesh({"data": 4, "model": 2})
ROW = sm.make_mesh({"row": 8})
FEW = sm.make_mesh({"few": 2})
X = spread((8, 8, 2))


def over(mesh, name, fun, **options):
    """`fun` of blocks of rows, cut along a mesh axis."""
    spec = P(name)
    return jax.shard_map(
        fun, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={name}, **options
    )


def block(x):
    return jax.nn.relu(x) * lax.psum(jnp.sin(x).sum(), "data") + float_index("data")


def looped(x):
    step = jax.jit(lambda x: jnp.sin(x) + lax.pmean(x, "data"))
    return lax.scan(lambda x, _: (step(x), x.sum()), x, None, length=3)[0]


def across(x):
    return x * lax.psum(jnp.sin(x), ("i", "data")) + float_index("i")


def on_other_axes(map_, fun=block, mesh=MESH, **options):
    options = {} if map_ is jax.vmap else {"mesh": MESH, "mesh_axes": "model"}
    # JAX's check refuses a psum over a mesh axis together with one of a vmap.
    inner = over(mesh, "data", fun, check_vma=fun is not across)
    return map_(inner, axis_name="i", **options)


TRANSFORMATIONS = {
    "call": lambda fun: fun,
    "jit": jax.jit,
    "grad": lambda fun: jax.jit(jax.grad(lambda x: (fun(x) ** 2).sum())),
    "vmap": lambda fun: jax.vmap(fun, in_axes=2, out_axes=1),
}


@pytest.mark.few(1)
@pytest.mark.one_in(3)
@both_lowerings
@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
@pytest.mark.parametrize("size", [2, 8, 5])
def test_over_mesh_axes_that_the_map_leaves(spmap, transformation, size):
    transform = TRANSFORMATIONS[transformation]
    x = X[:size] if transformation != "vmap" else np.stack([X[:size], -X[:size]], 2)
    got = transform(on_other_axes(spmap))(x)
    assert_same(got, transform(on_other_axes(jax.vmap))(x), 1e-4)


@pytest.mark.few(1)
@pytest.mark.one_in(2)
@both_lowerings
@pytest.mark.parametrize("fun", [looped, across])
@pytest.mark.parametrize("size", [2, 8])
def test_loops_and_collectives_over_both_axes(spmap, fun, size):
    got = jax.jit(on_other_axes(spmap, fun))(X[:size])
    assert_same(got, jax.jit(on_other_axes(jax.vmap, fun))(X[:size]), 1e-4)


def constrained(x):
    return lax.with_sharding_constraint(x, NamedSharding(MESH, P("data")))


@pytest.mark.few(1)
@pytest.mark.parametrize("cut", [over(MESH, "data", block), constrained])
def test_beside_a_branch(cut):
    def fun(x):
        return lax.cond(x.sum() > 0, jnp.sin, jnp.cos, cut(x))

    mapped = sm.spmap(fun, mesh=MESH, mesh_axes="model")
    assert_same(mapped(X), jax.vmap(fun)(X), 1e-4)


@pytest.mark.few(1)
@both_lowerings
def test_over_an_abstract_mesh(spmap):
    got = on_other_axes(spmap, mesh=MESH.abstract_mesh)(X)
    assert_same(got, on_other_axes(jax.vmap)(X), 1e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_inside_mesh_map(lowering):
    # The manual one is a shard_map, in which another takes the mesh around.
    mapped = sm.mesh_map(
        over(None if lowering == "manual" else MESH, "data", block),
        MESH,
        {"model": 1},
        {"model": 1},
        axis_names={"model"},
        lowering=lowering,
    )
    expected = [over(MESH, "data", block)(half) for half in np.split(X[0], 2, axis=1)]
    assert_same(mapped(X[0]), jnp.concatenate(expected, 1), 1e-5)


def test_the_program_has_the_collectives_of_the_shard_map_and_no_others():
    mapped = on_other_axes(sm.spmap, lambda x: x + lax.psum(jnp.cos(x), "data"))
    sharding = jax.sharding.NamedSharding(MESH, P("model", "data"))
    lying = jax.device_put(X, sharding)
    assert collectives_of(jax.jit(mapped), lying) == {"all-reduce": 1}


@pytest.mark.few(1)
@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
def test_the_partitioner_takes_any_mesh_of_the_same_devices(transformation):
    transform = TRANSFORMATIONS[transformation]
    inner = over(ROW, "row", lambda x: x * lax.psum(jnp.sin(x), "row"))
    x = X if transformation != "vmap" else np.stack([X, -X], axis=2)
    got = transform(sm.spmap(inner, "i", lowering="spmd"))(x)
    assert_same(got, transform(jax.vmap(inner))(x), 1e-4)


# What cannot be one program


def refused(match, inner, name, **options):
    mapped = sm.spmap(over(inner, name, lambda x: x + float_index(name)), **options)
    for call in (mapped, jax.jit(mapped), mapped.lower, jax.grad(lambda x: mapped(x))):
        with pytest.raises(ValueError, match=match):
            call(X)


def test_an_axis_that_both_use():
    refused(
        r"the jax.shard_map inside it cannot be one program: both use mesh axes "
        r"\['data'\]. Give spmap the same mesh= and mesh_axes= which shard_map's "
        r"axis_names= leave out, or give spmap lowering='spmd', or put "
        r"shardmap.spmap in place",
        MESH,
        "data",
        mesh=MESH,
        mesh_axes=("data", "model"),
    )


def test_beside_a_call_of_the_host():
    def fun(x):
        jax.debug.callback(lambda x: None, x.sum())
        return over(MESH, "data", block)(x)

    on_mesh = functools.partial(sm.spmap, fun, mesh=MESH, mesh_axes="model")
    with pytest.raises(
        NotImplementedError,
        match=r"is written per device along mesh axes \['data', 'model'\], as it calls "
        r"the host, but has a jax.shard_map over \['data'\] inside. Give spmap low",
    ):
        on_mesh()(X)
    expected = jax.vmap(over(MESH, "data", block))(X)
    assert_same(on_mesh(lowering="spmd")(X), expected, 1e-4)


def test_an_equation_along_the_axis_of_one_inside():
    element = jax.make_jaxpr(over(MESH, "data", lambda x: x))(X[0]).jaxpr
    params = {"axis_name": "i", "axis_size": 8, "in_axes": (0,), "out_axes": (0,)}
    with pytest.raises(
        NotImplementedError,
        match=r"written per device along mesh axes \['data'\], but has a jax.shard_map",
    ):
        sm.spmap_p.bind(X, call_jaxpr=element, mesh=MESH, mesh_axes=("data",), **params)


@pytest.mark.parametrize("axis_name", [None, "j"])
def test_pmap_is_refused_by_its_name(axis_name):
    mapped = sm.spmap(jax.pmap(lambda x: x + 1, axis_name=axis_name))
    for call in (mapped, jax.jit(mapped), mapped.lower):
        with pytest.raises(
            ValueError,
            match=r"the jax.pmap inside it cannot be one program, .* Put "
            r"shardmap.spmap in place of jax.pmap",
        ):
            call(np.ones((4, 2), np.float32))


def test_an_axis_that_a_map_between_is_over():
    inner = sm.spmap(
        over(MESH, "data", lambda x: x * 2), "j", mesh=MESH, mesh_axes="data"
    )
    mapped = sm.spmap(inner, "i", mesh=MESH, mesh_axes="model")
    with pytest.raises(ValueError, match=r"both use mesh axes \['data'\]"):
        mapped(np.ones((2, 4, 8)))


def test_another_mesh_of_the_same_devices():
    refused(
        r"spmap of \S+ over an axis and the jax.shard_map inside it cannot be "
        r"one program: the map runs on Mesh\('axis0': 8.*\), the shard_map on "
        r"Mesh\('row': 8.*\)\. Give spmap .* or give spmap lowering='spmd'",
        ROW,
        "row",
    )


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_other_devices(lowering):
    refused(
        r"the map runs on Mesh\('axis0': 8.*\), the shard_map on Mesh\('few': 2.*\)\. "
        r"Give spmap the same mesh= and mesh_axes= which shard_map's axis_names= leave "
        r"out, or put shardmap.spmap in place of jax.shard_map\.",
        FEW,
        "few",
        lowering=lowering,
    )


def test_an_abstract_mesh_of_another_shape():
    refused(
        r"the shard_map on AbstractMesh\('few': 2",
        FEW.abstract_mesh,
        "few",
        lowering="spmd",
    )
