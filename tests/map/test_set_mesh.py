"""Maps under `jax.set_mesh` and inside `jax.shard_map`."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm
from tests.map.lowering.test_register import mesh_of, nest, step
from tests.map_programs import assert_same, both_lowerings, float_index, spread

AROUND = {
    "auto": mesh_of((4, 2), ("a", "b")),
    "explicit": mesh_of((4, 2), ("a", "b"), AxisType.Explicit),
    "same names": mesh_of((8,), ("i",)),
}


@pytest.mark.few(1)
@both_lowerings
@pytest.mark.parametrize("mesh", AROUND.values(), ids=AROUND)
def test_nests_under_a_mesh_that_is_set(spmap, mesh):
    x, w = spread((4, 2, 3)), spread((3,))
    expected = nest(jax.vmap, step)(x, w)
    with jax.set_mesh(mesh):
        assert_same(nest(spmap, step)(x, w), expected)
        assert_same(jax.jit(nest(spmap, step))(x, w), expected)


@pytest.mark.few(1)
@both_lowerings
@pytest.mark.parametrize("names", [{"a"}, {"a", "b"}])
def test_inside_shard_map(spmap, names):
    x = spread((8, 3))

    def fun(x):
        both = lax.psum(jnp.sin(x), ("i", "a")) * (1 + float_index("a"))
        return both * x + float_index("i")

    def around(map_):
        return jax.shard_map(
            map_(fun, axis_name="i"),
            mesh=AROUND["auto"],
            in_specs=P("a"),
            out_specs=P("a"),
            axis_names=names,
            check_vma=False,
        )

    def gradient(map_):
        return jax.jit(jax.grad(lambda x: around(map_)(x).sum()))

    assert_same(jax.jit(around(spmap))(x), jax.jit(around(jax.vmap))(x))
    assert_same(gradient(spmap)(x), gradient(jax.vmap)(x))


# Arguments on meshes that cut the devices otherwise than the maps do


def test_arguments_cut_otherwise_under_a_mesh_are_refused():
    mesh = AROUND["auto"]
    given = jax.device_put(spread((2, 4)), NamedSharding(mesh, P("b", "a")))
    with jax.set_mesh(mesh):
        with pytest.raises(
            NotImplementedError,
            match=r"an argument of the same program on 4 x 2 devices: .* meshes with "
            r"axes of sizes \(2, 2, 2\)",
        ):
            sm.spmap(sm.spmap(jnp.sin))(given)
    assert_same(sm.spmap(sm.spmap(jnp.sin))(given), jnp.sin(given))


@both_lowerings
def test_devices_in_another_order_under_a_mesh(spmap):
    x = spread((8, 3))
    backwards = Mesh(jax.devices()[::-1], "i")
    given = jax.device_put(x, NamedSharding(backwards, P("i")))
    with jax.set_mesh(AROUND["auto"]):
        assert_same(spmap(jnp.sin)(given), jnp.sin(x))
