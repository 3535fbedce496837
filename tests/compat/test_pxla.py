"""The old names: each is the new thing, and old programs that use them run."""

import jax
import numpy as np
import pytest
from jax.extend import linear_util

import shardmap as sm
from shardmap import compat

MAPS = {"pmap", "sharded_jit", "soft_pmap"}
MODULES = {"host_callback", "maps", "pjit", "pxla", "util"}
OF_MODULES = {
    *("SerialLoop", "xmap"),
    *("barrier_wait", "call", "id_print", "id_tap"),
    *("install", "uninstall", "uses"),
}
OWN = MODULES | OF_MODULES | {*compat.pxla.__all__}


@pytest.mark.parametrize("name", sorted(set(compat.__all__) - OWN - MAPS))
def test_names_are_aliases(name):
    assert getattr(compat, name) is getattr(sm, name)


def test_soft_pmap_is_spmap():
    assert compat.soft_pmap is sm.spmap


def test_default_pmap_sharding():
    sharding = compat.PmapSharding.default((4, 8), 1)
    assert sharding == sm.pmap_sharding((4, 8), 1)
    devices = jax.devices()[::-1]
    sharding = compat.PmapSharding.default((8, 2), sharded_dim=0, devices=devices)
    array = jax.device_put(np.ones((8, 2)), sharding)
    assert [s.device for s in array.addressable_shards] == devices
    assert isinstance(array.sharding, jax.sharding.NamedSharding)


def test_pmap_sharding_of_a_spec():
    spec = compat.ShardingSpec(
        sharding=(compat.NoSharding(), compat.Unstacked(4), compat.Chunked([2])),
        mesh_mapping=map(compat.ShardedAxis, (1, 0)),
    )
    sharding = compat.PmapSharding(np.array(jax.devices()), spec)
    assert sharding.shard_shape((3, 4, 6)) == (3, 1, 3)
    array = jax.device_put(np.ones((3, 4, 6)), sharding)
    assert sm.spec_of(array) == spec.stacked()


SPECS = {
    "a row each": (sm.Unstacked(8), None),
    "rows": (sm.Chunked([4]), sm.Unstacked(2)),
    "columns": (None, sm.Chunked([8])),
    "copies": (None, None),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("without_unstacked", [False, True])
def test_an_array_is_made_of_buffers(name, without_unstacked):
    shape = (8, 2) if name == "rows" else (8, 16)
    entries = SPECS[name]
    cut = [k for k, entry in enumerate(entries) if entry is not None]
    mapping = [sm.ShardedAxis(k) for k in range(len(cut))] or [sm.Replicated(8)]
    spec = sm.ShardingSpec(entries, mapping)
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    buffers = [
        jax.device_put(
            values[index] if without_unstacked else np.reshape(values[index], part),
            device,
        )
        for device, index, part in zip(
            jax.devices(),
            sm.spec_to_indices(shape, spec),
            [compat.PmapSharding(jax.devices(), spec).shard_shape(shape)] * 8,
            strict=True,
        )
    ]
    aval = jax.core.ShapedArray(shape, np.float32)
    array = compat.make_sharded_device_array(aval, spec, buffers)
    np.testing.assert_array_equal(array, values)
    assert sm.spec_of(array) == spec.stacked()
    assert [s.device for s in array.addressable_shards] == jax.devices()


def test_an_array_is_made_of_rows():
    rows = [jax.device_put(np.full(3, k), d) for k, d in enumerate(jax.devices())]
    aval = jax.core.ShapedArray((8, 3), rows[0].dtype)
    array = compat.make_sharded_device_array(aval, None, rows)
    np.testing.assert_array_equal(array, np.arange(8)[:, None].repeat(3, 1))
    text = (
        r"device_buffers\[0\] has shape \(3,\), but each of the 8 devices has \(1, 4\) "
        r"of an array of shape \(8, 4\)"
    )
    aval = jax.core.ShapedArray((8, 4), rows[0].dtype)
    with pytest.raises(ValueError, match=text):
        compat.make_sharded_device_array(aval, None, rows)


def test_an_array_is_made_by_its_class():
    rows = [jax.device_put(np.full(3, k), d) for k, d in enumerate(jax.devices())]
    aval = jax.core.ShapedArray((8, 3), rows[0].dtype)
    spec = sm.ShardingSpec((sm.Unstacked(8), None), (sm.ShardedAxis(0),))
    for array in (
        compat.ShardedDeviceArray(aval, rows),
        compat.ShardedDeviceArray(aval, spec, rows),
        compat.ShardedDeviceArray(aval, sharding_spec=spec, device_buffers=rows),
    ):
        assert isinstance(array, compat.ShardedDeviceArray)
        np.testing.assert_array_equal(array, np.arange(8)[:, None].repeat(3, 1))
        assert sm.spec_of(array) == spec.stacked()
    assert not isinstance(np.ones(3), compat.ShardedDeviceArray)


class Rows:
    """Eight rows that only its handler can read."""

    shape, dtype = (8, 2), np.dtype(np.float32)


ROWS = np.arange(16, dtype=np.float32).reshape(8, 2)


def old_handler(x, devices, indices):
    return [jax.device_put(ROWS[i], d) for d, i in zip(devices, indices, strict=True)]


@pytest.mark.parametrize("in_axes", [0, 1, None])
def test_an_old_shard_arg_handler_reads_each_part(in_axes):
    compat.shard_arg_handlers[Rows] = old_handler
    assert compat.shard_arg_handlers[Rows] is old_handler
    f = sm.spmap(lambda x: 2 * x, in_axes=in_axes, axis_size=Rows.shape[in_axes or 0])
    expected = jax.vmap(lambda x: 2 * x, in_axes, axis_size=Rows.shape[in_axes or 0])
    np.testing.assert_array_equal(f(Rows()), expected(ROWS))


def test_a_mapped_dimension_was_indexed_by_an_int():
    seen = []

    def handler(x, devices, indices):
        seen.extend(indices)
        return old_handler(x, devices, indices)

    compat.shard_arg_handlers[Rows] = handler
    sm.spmap(lambda x: x)(Rows())
    assert seen == [(k, slice(None)) for k in range(8)]


def test_a_handler_with_a_mode_is_told_what_changed():
    text = (
        r"the one for Rows takes \(x, devices, indices, mode\)\. Register a function "
        "of a value and a sharding"
    )
    with pytest.raises(TypeError, match=text):
        compat.shard_arg_handlers[Rows] = lambda x, devices, indices, mode: []


def test_specs_of_partitions():
    aval = jax.ShapeDtypeStruct((4, 6), np.float32)
    assert compat.partitioned_sharding_spec(1, None, aval) == sm.ShardingSpec(
        (None, None), ()
    )
    assert compat.partitioned_sharding_spec(3, None, aval) == sm.ShardingSpec(
        (None, None), (sm.Replicated(3),)
    )
    assert compat.partitioned_sharding_spec(6, (2, 3), aval) == sm.ShardingSpec(
        (sm.Chunked([2]), sm.Chunked([3])), (sm.ShardedAxis(0), sm.ShardedAxis(1))
    )


@pytest.mark.parametrize(
    ("nrep", "parts", "map_axis", "spec"),
    [
        (4, None, 0, ((sm.Unstacked(4), None, None), (sm.ShardedAxis(0),))),
        (
            8,
            None,
            1,
            ((None, sm.Unstacked(4), None), (sm.ShardedAxis(0), sm.Replicated(2))),
        ),
        (8, None, None, ((None, None), (sm.Replicated(4), sm.Replicated(2)))),
        (
            4,
            (2, 3),
            1,
            (
                (sm.Chunked([2]), sm.Unstacked(4), sm.Chunked([3])),
                (sm.ShardedAxis(1), sm.ShardedAxis(0), sm.ShardedAxis(2)),
            ),
        ),
    ],
)
def test_specs_of_maps(nrep, parts, map_axis, spec):
    aval = jax.ShapeDtypeStruct((4, 6), np.float32)
    npart = int(np.prod(parts)) if parts else 1
    result = compat._pmap_sharding_spec(nrep, 4, npart, parts, aval, map_axis)
    assert result == sm.ShardingSpec(*spec)


def test_a_map_needs_as_many_devices_for_each_element():
    aval = jax.ShapeDtypeStruct((4, 6), np.float32)
    with pytest.raises(ValueError, match="nrep 6 is not a multiple of axis_size 4"):
        compat._pmap_sharding_spec(6, 4, 1, None, aval, 0)


@pytest.mark.parametrize("in_axis", [0, 1, None])
def test_replicate(in_axis):
    value = np.arange(3, dtype=np.float32)
    array = compat.replicate(value, 8, 8, in_axis=in_axis)
    copied = value if in_axis is None else np.stack([value] * 8, in_axis)
    np.testing.assert_array_equal(array, copied)
    assert [s.device for s in array.addressable_shards] == jax.devices()
    devices = jax.devices()[:5:-1]
    array = compat.replicate(value, 2, 2, devices)
    assert [s.device for s in array.addressable_shards] == devices


def test_replicate_wants_so_many_devices():
    with pytest.raises(ValueError, match="axis_size is 4 and nrep is 8"):
        compat.replicate(1.0, 4, 8)
    with pytest.raises(ValueError, match="across 9 replicas because 8 devices are giv"):
        compat.replicate(1.0, 9, 9)
    with pytest.raises(ValueError, match="across 4 replicas because 2 devices are giv"):
        compat.replicate(1.0, 4, 4, jax.devices()[:2])


def test_device_put_makes_the_buffers_of_a_sharded_array():
    devices = jax.devices()[:4]
    rows = np.arange(12.0, dtype=np.float32).reshape(4, 3)
    buffers = compat.pxla.device_put(list(rows), devices)
    assert [next(iter(buffer.devices())) for buffer in buffers] == devices
    aval = jax.ShapeDtypeStruct((4, 3), np.float32)
    array = compat.ShardedDeviceArray(aval, buffers)
    np.testing.assert_array_equal(array, rows)
    copies = compat.pxla.device_put(rows[1], devices, replicate=True)
    np.testing.assert_array_equal(
        compat.ShardedDeviceArray(aval, copies), rows[[1] * 4]
    )
    with pytest.raises(ValueError, match="3 arrays for 4 devices"):
        compat.pxla.device_put(list(rows[:3]), devices)


def test_a_map_that_is_bound_runs_on_its_devices():
    rows = np.arange(12.0, dtype=np.float32).reshape(4, 3)
    devices = jax.devices()[4:]
    options = {"axis_name": "i", "axis_size": 4, "in_axes": (0,), "name": "share"}

    def share(x):
        return [x / jax.lax.psum(x + 1, "i")]

    expected = rows / (rows + 1).sum(0)
    info = jax.api_util.debug_info("share", share, (rows,), {})
    element = jax.make_jaxpr(share, axis_env=[("i", 4)])(rows[0]).jaxpr
    for bind in (compat.pxla.xla_pmap, compat.pxla.soft_pmap):
        for result in (
            bind(share, rows, out_axes=(0,), devices=devices, **options),
            bind(rows, out_axes=(0,), devices=devices, call_jaxpr=element, **options),
            bind(
                linear_util.wrap_init(share, debug_info=info),
                rows,
                out_axes_thunk=lambda: (0,),
                devices=devices,
                donated_invars=(False,),
                **options,
            ),
        ):
            np.testing.assert_allclose(result[0], expected, rtol=1e-6)
            assert result[0].devices() == set(devices)
        (result,) = bind(share, rows, out_axes=(1,), **options)
        assert result.devices() == set(jax.devices()[:4])
        np.testing.assert_allclose(result, expected.T, rtol=1e-6)
