"""Parts along several axes, and of what several devices hold: nothing is sent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardmap as sm
from shardmap import shard_of, unreplicate, unstack
from tests.strategies import specs

GRID = np.arange(2 * 4 * 3, dtype=np.float32).reshape(2, 4, 3)


def over(pspec, **sizes):
    devices = np.array(jax.devices())[: np.prod(list(sizes.values()))]
    return NamedSharding(Mesh(devices.reshape(*sizes.values()), tuple(sizes)), pspec)


def nested(value=GRID, **options):
    inner = sm.spmap(lambda x: x + 1, "j", **options)
    return sm.spmap(inner, "i", **options)(value)


def check(part, value, devices):
    """The part has this value, and each device has its piece of it."""
    assert part.shape == value.shape
    assert part.dtype == value.dtype
    assert [shard.device for shard in part.addressable_shards] == devices
    for shard in part.addressable_shards:
        np.testing.assert_array_equal(shard.data, value[shard.index])


# Maps in maps


@pytest.mark.parametrize("lowering", ["manual", "spmd"])
def test_an_element_of_a_map_in_a_map(lowering):
    n = nested(lowering=lowering)
    for i, j in np.ndindex(2, 4):
        for index in [(i, j), (i - 2, np.int64(j))]:
            piece = shard_of(n, index)
            check(piece, GRID[i, j] + 1, [jax.devices()[4 * i + j]])
            assert not piece.committed


def test_no_other_device_is_read():
    n = nested()
    # Without its first shard JAX takes the whole array for deleted.
    for k in set(range(8)) - {0, 6}:
        n.addressable_data(k).delete()
    check(shard_of(n, (1, 2)), GRID[1, 2] + 1, [jax.devices()[6]])
    with pytest.raises(RuntimeError, match="deleted"):
        shard_of(n, (1, 3))


def test_all_elements_of_a_map_in_a_map():
    n = nested()
    for axes, value in [((0, 1), GRID), ((1, 0), GRID.swapaxes(0, 1))]:
        pieces = unstack(n, axis=axes)
        assert [len(row) for row in pieces] == [value.shape[1]] * value.shape[0]
        for i, j in np.ndindex(value.shape[:2]):
            k = 4 * i + j if axes == (0, 1) else 4 * j + i
            check(pieces[i][j], value[i, j] + 1, [jax.devices()[k]])


def test_of_copies_the_first():
    value = np.arange(4 * 3, dtype=np.int32).reshape(4, 3)
    y = jax.device_put(value, over(P("i"), i=4, replicas=2))
    for k in range(4):
        check(shard_of(y, k), value[k], [jax.devices()[2 * k]])
        check(unstack(y)[k], value[k], [jax.devices()[2 * k]])
    z = jax.device_put(GRID, over(P("i", "j"), i=2, r=2, j=2))
    check(shard_of(z, (1, 2)), GRID[1, 2], jax.devices()[5:6])


@given(data=st.data())
def test_any_part_of_any_layout(data):
    spec = data.draw(specs(max_devices=8, max_ndim=3, unstacked=False))
    rank = len(spec.sharding)
    if rank == 0:
        return
    devices = data.draw(st.permutations(jax.devices()))[: spec.num_shards]
    value = np.arange(24**rank, dtype=np.float32).reshape((24,) * rank)
    array = jax.device_put(value, spec.named_sharding(devices))
    axis = data.draw(st.integers(0, rank - 1))
    count = data.draw(st.integers(1, rank - axis))
    index = tuple(data.draw(st.integers(-24, 23)) for _ in range(count))
    expected = value[(slice(None),) * axis + index]
    held = array.sharding.shard_shape(value.shape)
    if any(held[d] < 24 for d in range(rank) if not axis <= d < axis + count):
        with pytest.raises(ValueError, match=r"x of shape .* cut along axis \d too"):
            shard_of(array, index, axis=axis)
        return
    part = shard_of(array, index, axis=axis)
    check(part, expected, [part.device])
    [there] = [s for s in array.addressable_shards if s.device == part.device]
    assert set(np.ravel(expected)) <= set(np.ravel(value[there.index]))


# Trees, keys, transformations


def test_trees_of_different_layouts():
    tree = {
        "n": nested(),
        "one": jax.device_put(GRID, jax.devices()[5]),
        "host": GRID,
        "columns": jax.device_put(GRID, over(P(None, "j"), j=4)),
    }
    part = shard_of(tree, (1, 2))
    check(part["n"], GRID[1, 2] + 1, [jax.devices()[6]])
    check(part["one"], GRID[1, 2], [jax.devices()[5]])
    assert isinstance(part["host"], np.ndarray)
    np.testing.assert_array_equal(part["host"], GRID[1, 2])
    check(part["columns"], GRID[1, 2], [jax.devices()[2]])
    for i, row in enumerate(unstack(tree, axis=(0, 1))):
        assert len(row) == 4
        np.testing.assert_array_equal(row[2]["host"], GRID[i, 2])
        check(row[2]["n"], GRID[i, 2] + 1, [jax.devices()[4 * i + 2]])
        check(row[2]["columns"], GRID[i, 2], [jax.devices()[2]])


def test_keys():
    keys = jax.random.split(jax.random.key(0), (2, 8))
    array = jax.device_put(keys, over(P("i", "j"), i=2, j=4))
    data = jax.random.key_data(keys)
    for part in shard_of(array, (1, 3)), unstack(array, axis=(0, 1))[1][3]:
        assert part.dtype == keys.dtype
        np.testing.assert_array_equal(jax.random.key_data(part), data[1, 3])


def test_inside_of_transformations_it_is_plain_indexing():
    n = nested()
    index = (1, 3)
    np.testing.assert_array_equal(
        jax.jit(lambda x: shard_of(x, index))(n), GRID[index] + 1
    )
    rows = jax.jit(lambda x: unstack(x, axis=(0, 1)))(n)
    np.testing.assert_array_equal(rows[1][3], GRID[1, 3] + 1)

    def loss(x):
        return (shard_of(x, index) ** 2).sum()

    expected = np.zeros_like(GRID)
    expected[index] = 2 * (GRID[index] + 1)
    np.testing.assert_array_equal(jax.grad(loss)(n), expected)
    np.testing.assert_array_equal(
        jax.vmap(lambda x: shard_of(x, (1, 0)))(jnp.asarray(GRID)), GRID[:, 1, 0]
    )
    mapped = sm.spmap(lambda x: shard_of(x, (2, 0)))
    np.testing.assert_array_equal(mapped(GRID), GRID[:, 2, 0])


# Errors


def test_an_element_on_several_devices_is_refused():
    text = (
        r"x\['n'\] of shape \(2, 4, 3\) is cut along axis 1 too, and each element is "
        r"on 4 devices: index that axis as well, or use x\[i\] or jax\.device_get\(x\)"
    )
    for take in (lambda x: shard_of(x, 1)), unstack, unreplicate:
        with pytest.raises(ValueError, match=text):
            take({"n": nested()})


def test_indices_of_another_kind_are_refused():
    y = nested()
    with pytest.raises(TypeError, match=r"index the array itself, as x\[2:4\]"):
        shard_of(y, (1, slice(0, 2)))
    with pytest.raises(TypeError, match=r"as i, but got 1\.0 of type float"):
        shard_of(y, (0, 1.0))
    with pytest.raises(TypeError, match="as i, but got Ellipsis of"):
        shard_of(y, (..., 1))
    with pytest.raises(ValueError, match=r"x of shape \(2, 4, 3\) has no axis 3"):
        shard_of(y, (0, 0), axis=2)
    with pytest.raises(
        IndexError, match="size 4 along axis 1: index 4 is out of range"
    ):
        shard_of(y, (0, 4))
    with pytest.raises(ValueError, match=r"has one axis twice in axis=\(0, -3\)"):
        unstack(y, axis=(0, -3))
    with pytest.raises(IndexError, match="size 0 along axis 0: index 0 is out"):
        unreplicate(np.zeros((0, 2)))


def test_lengths_that_differ_along_one_of_two_axes():
    message = r"along axis \(0, 1\): x\[0\] has 2 x 4, x\[1\] has 2 x 3$"
    with pytest.raises(ValueError, match=message):
        unstack([GRID, GRID[:, :3]], axis=(0, 1))
