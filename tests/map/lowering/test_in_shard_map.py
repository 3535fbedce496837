"""Maps in the function of `jax.shard_map`: whose devices they run on."""

import re

import jax
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


def test_a_map_walks_axes_that_the_shard_map_leaves():
    f = in_shard_map(mesh=MESH, mesh_axes="b")
    np.testing.assert_array_equal(f(X), expected())
    assert f.lower(X).as_text().count("sdy.manual_computation") == 2


@pytest.mark.parametrize("options", [{"devices": jax.devices()}, {"backend": "cpu"}])
def test_devices_of_its_own_are_refused(options):
    match = re.escape(
        "spmap of <lambda> is inside jax.shard_map over ('a',), whose devices it runs "
        "on, but names [0, 1, 2, 3, 4, 5, 6, 7]. Leave out devices and backend, or walk"
    )
    with pytest.raises(ValueError, match=match):
        in_shard_map(**options)(X)


def test_another_mesh_is_refused():
    match = re.escape(
        "spmap of <lambda> is inside jax.shard_map over ('a',) of a mesh {'a': 2, "
        "'b': 4}, but names the mesh {'c': 8}. Leave out mesh and mesh_axes, or name"
    )
    with pytest.raises(ValueError, match=match):
        in_shard_map(mesh=sm.make_mesh({"c": 8}), mesh_axes="c")(X)


def test_an_axis_that_the_shard_map_walks_is_refused():
    match = re.escape(
        "spmap of <lambda> is inside jax.shard_map over ('a', 'b'), which walks 'b' "
        "already, and so does the map with mesh_axes=('b',). Leave out mesh and"
    )
    with pytest.raises(ValueError, match=match):
        in_shard_map(("a", "b"), mesh=MESH, mesh_axes="b")(X)


@pytest.mark.parametrize("wrap", [jax.jit, jax.grad])
def test_types_that_say_where_values_differ_are_refused(wrap):
    match = re.escape(
        "spmap of <lambda> is inside a jax.shard_map that checks along which axes "
        "values differ, and is given arrays that differ along ['a']: no value in a map "
    )

    def total(x, check_vma):
        mapped = jax.shard_map(
            sm.spmap(lambda v: 2 * v),
            mesh=MESH,
            in_specs=P("a"),
            out_specs=P("a"),
            check_vma=check_vma,
        )
        return mapped(x).sum()

    with pytest.raises(ValueError, match=match):
        wrap(lambda x: total(x, True))(X)
    np.testing.assert_array_equal(jax.grad(lambda x: total(x, False))(X), np.full(8, 2))


def test_collectives_of_what_does_not_differ_are_refused():
    summed = sm.spmap(lambda v: lax.psum(v, "i"), "i")
    whole = jax.shard_map(summed, mesh=MESH, in_specs=P(), out_specs=P())
    text = re.escape("Around a map, jax.shard_map needs check_vma=False.")
    with pytest.raises(ValueError, match=text):
        jax.jit(whole)(X)
