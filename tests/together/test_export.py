"""Programs with maps as bytes of `jax.export`, called elsewhere; symbols as sizes."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import shardmap as sm
from tests.map_programs import LOWERINGS, assert_same, both_lowerings, spread

MESH = sm.make_mesh({"a": 8})
X = spread((16,))


def weighted(spmap):
    """Two maps beside each other, and the gradient of one."""

    def fun(x):
        mapped = spmap(lambda v: lax.psum(jnp.sin(v), "i") * v, "i")
        gradient = jax.grad(lambda x: mapped(x).sum())(x)
        return mapped(x), gradient, spmap(lambda v: 2 * v)(x[:3])

    return fun


def on_all_devices(x):
    return jax.device_put(x, NamedSharding(MESH, PartitionSpec()))


def exported(fun, *shapes):
    """By way of its bytes, with its derivative."""
    structs = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    data = jax.export.export(jax.jit(fun))(*structs).serialize(vjp_order=1)
    return jax.export.deserialize(data)


@pytest.mark.few(1)
@both_lowerings
def test_a_program_with_maps_is_exported(spmap):
    fun = weighted(spmap)
    again = exported(fun, X.shape)
    assert again.nr_devices == 8
    expected = fun(X)
    result = jax.jit(again.call)(on_all_devices(X))
    assert_same(result, expected)
    _, back = jax.vjp(lambda x: again.call(x)[0], on_all_devices(X))
    assert_same(back(on_all_devices(np.ones(16, np.float32)))[0], expected[1])


CALL = """
import sys
import jax
import jax.export
import numpy as np
again = jax.export.deserialize(sys.stdin.buffer.read())
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("any",))
layout = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
x = jax.device_put(np.arange(16, dtype=np.float32), layout)
print(float(jax.jit(again.call)(x).sum()), "shardmap" in sys.modules)
"""


def test_it_runs_in_a_process_that_does_not_have_shardmap():
    total = sm.spmap(lambda v: lax.psum(v, "i"), "i")
    struct = jax.ShapeDtypeStruct((16,), np.float32)
    data = jax.export.export(jax.jit(total))(struct).serialize()
    run = subprocess.run(
        [sys.executable, "-c", CALL], input=bytes(data), capture_output=True, check=True
    )
    assert run.stdout.decode().split() == ["1920.0", "False"]


def twice(v):
    return 2 * v


# From maps to functions, and the shapes of their arguments as text.
WITH_SYMBOLS = {
    "a row": (lambda map_: map_(twice), "8, b"),
    "rows in places": (lambda map_: map_(twice), "17, b"),
    "a batch of maps": (lambda map_: jax.vmap(map_(twice)), "b, 8"),
    "a gradient": (
        lambda map_: jax.grad(lambda x: map_(lambda v: v @ v)(x).sum()),
        "16, b",
    ),
}


@pytest.mark.few(1)
@both_lowerings
@pytest.mark.parametrize("name", WITH_SYMBOLS)
def test_sizes_that_are_not_mapped_may_be_symbols(spmap, name):
    make, text = WITH_SYMBOLS[name]
    shape = jax.export.symbolic_shape(text)
    assert str(exported(make(spmap), shape).out_avals[0].shape) == str(shape)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", WITH_SYMBOLS)
def test_symbols_get_their_sizes_in_a_call(name):
    """JAX gives none to what it writes per device, as the other lowering does."""
    make, text = WITH_SYMBOLS[name]
    by_partitioner = functools.partial(sm.spmap, lowering="spmd")
    again = exported(make(by_partitioner), jax.export.symbolic_shape(text))
    x = spread(tuple(map(int, text.replace("b", "3").split(","))))
    assert_same(jax.jit(again.call)(on_all_devices(x)), make(jax.vmap)(x))


@pytest.mark.few(2)
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("text", ["8 * b, 2", "8, b"])
def test_blocks_may_have_symbols(lowering, text):
    doubled = sm.mesh_map(twice, MESH, {"a": 0}, {"a": 0}, lowering=lowering)
    shape = jax.export.symbolic_shape(text)
    again = exported(doubled, shape)
    assert str(again.out_avals[0].shape) == str(shape)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_an_axis_of_a_symbolic_size_cannot_be_mapped(lowering):
    shape = jax.export.symbolic_shape("b, 2")
    text = "spmap maps v along an axis of the symbolic size b, but the number of elem"
    with pytest.raises(ValueError, match=text):
        exported(sm.spmap(twice, lowering=lowering), shape)
