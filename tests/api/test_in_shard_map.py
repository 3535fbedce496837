"""Maps in the function of `jax.shard_map`: whose devices they run on."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardmap as sm

MESH = sm.make_mesh({"a": 2, "b": 4})
X = np.arange(8, dtype=np.float32)


def in_shard_map(names=("a",), **options):
    mapped = sm.spmap(lambda v: v + lax.psum(v, "i"), "i", **options)
    specs = P("a")
    return jax.jit(
        jax.shard_map(
            mapped,
            mesh=MESH,
            in_specs=specs,
            out_specs=specs,
            axis_names=set(names),
            check_vma=False,
        )
    )


def expected():
    return np.concatenate([half + half.sum() for half in (X[:4], X[4:])])


def test_each_device_runs_all_elements_of_its_block():
    f = in_shard_map()
    np.testing.assert_array_equal(f(X), expected())
    assert f.lower(X).as_text().count("sdy.manual_computation") == 1


def test_a_map_over_axes_that_the_shard_map_leaves():
    f = in_shard_map(mesh=MESH, mesh_axes="b")
    np.testing.assert_array_equal(f(X), expected())
    assert f.lower(X).as_text().count("sdy.manual_computation") == 2


@pytest.mark.parametrize("options", [{"devices": jax.devices()}, {"backend": "cpu"}])
def test_devices_of_its_own_are_refused(options):
    match = re.escape(
        "spmap of <lambda> is inside jax.shard_map over ('a',) of a mesh {'a': 2, "
        "'b': 4}, but names the devices [0, 1, 2, 3, 4, 5, 6, 7]. Leave that out, or"
    )
    with pytest.raises(ValueError, match=match):
        in_shard_map(**options)(X)


def test_another_mesh_is_refused():
    match = re.escape(
        "spmap of <lambda> is inside jax.shard_map over ('a',) of a mesh {'a': 2, "
        "'b': 4}, but names mesh_axes=('c',) of {'c': 8}. Leave that out, or name"
    )
    with pytest.raises(ValueError, match=match):
        in_shard_map(mesh=sm.make_mesh({"c": 8}), mesh_axes="c")(X)


def test_an_axis_that_the_shard_map_is_over_is_refused():
    match = re.escape(
        "spmap of <lambda> is inside jax.shard_map over ('a', 'b') of a mesh {'a': 2, "
        "'b': 4}, but names mesh_axes=('b',) of {'a': 2, 'b': 4}. Leave that out, or"
    )
    with pytest.raises(ValueError, match=match):
        in_shard_map(("a", "b"), mesh=MESH, mesh_axes="b")(X)


@pytest.mark.parametrize("lowering", ["manual", "spmd"])
def test_a_map_where_types_are_checked_is_refused(lowering):
    weight = jnp.float32(2)
    spmapped = sm.spmap(lambda v: v * weight, lowering=lowering)
    pieces = sm.chunked(spmapped, {0: 2})
    for fun in (spmapped, pieces, jax.grad(lambda x: spmapped(x).sum())):
        checked = jax.shard_map(fun, mesh=MESH, in_specs=P("a"), out_specs=P("a"))
        for wrap in (lambda f: f, jax.jit):
            with pytest.raises(
                ValueError, match=r"Pass check_vma=False to that jax\.shard_map"
            ):
                wrap(checked)(X)


def test_blocks_where_types_are_checked():
    cut = {"b": 0}

    def block(x):
        return x * lax.psum(x, "b")

    def checked(blocks):
        return jax.shard_map(
            blocks, mesh=MESH, in_specs=P("a"), out_specs=P("a"), axis_names={"a"}
        )

    blocks = sm.mesh_map(block, MESH, (cut,), cut)
    rows = X.reshape(2, 4)
    expected = (rows * rows.sum(1, keepdims=True)).reshape(8)
    np.testing.assert_allclose(jax.jit(checked(blocks))(X), expected, rtol=1e-6)
    blocks = sm.mesh_map(block, MESH, (cut,), cut, lowering="spmd")
    with pytest.raises(ValueError, match="Pass check_vma=False to that"):
        jax.jit(checked(blocks))(X)


def test_taps_in_a_map():
    seen = []

    def element(v):
        return lax.psum(sm.tap(lambda v: seen.append(float(v)), v), "i")

    mapped = jax.shard_map(
        sm.spmap(element, "i"),
        mesh=MESH,
        in_specs=P(("a", "b")),
        out_specs=P(("a", "b")),
        check_vma=False,
    )
    jax.block_until_ready(jax.jit(mapped)(X))
    sm.taps_barrier()
    assert sorted(seen) == X.tolist()
