"""Values that are stacked have one structure, and equal shapes and dtypes."""

import jax
import numpy as np
import pytest

from shardmap.arrays.stacking_checks import (
    check_avals,
    check_structures,
    some_devices,
)

X = np.ones(3, np.float32)


def structures(*shards):
    check_structures(shards, list(map(jax.tree.structure, shards)))


def avals(*shards):
    check_avals(shards, list(map(jax.tree.leaves, shards)))


def test_what_is_alike_is_taken():
    structures({"a": X}, {"a": 2})
    avals({"a": X}, {"a": jax.ShapeDtypeStruct((3,), np.float32)})
    assert some_devices("f", jax.devices()) == tuple(jax.devices())


def test_paths_that_are_not_in_both_are_named():
    with pytest.raises(
        ValueError,
        match=r"shards\[0\]\['b'\] is not in shards\[1\]\n"
        r"  \* shards\[1\]\['c'\] is not in shards\[0\]",
    ):
        structures({"a": X, "b": X}, {"a": X, "c": X})


def test_all_that_differ_are_named():
    with pytest.raises(
        ValueError,
        match=r"\* shards\[1\]\['a'\] is float32\[2\], but in shards\[0\] it is "
        r"float32\[3\]\n  \* shards\[2\]\['b'\] is int32\[\], but in .* float32\[\]$",
    ):
        avals(
            {"a": X, "b": np.float32(1)},
            {"a": X[:2], "b": np.float32(1)},
            {"a": X, "b": np.int32(1)},
        )


def test_no_devices_are_refused():
    with pytest.raises(ValueError, match=r"device_put_sharded needs at least one dev"):
        some_devices("device_put_sharded", [])
